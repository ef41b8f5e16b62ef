"""Drafting with a `DsparkModule`: one forward for a block, then its tokens from left to right.

Shape legend: T tokens, N rows that draft, S places of a block, E hidden size, R output rows,
K columns of a layer's keys and values, L layers, G key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.core.choices import DrawnChoices
from foredraft.core.proposal import NO_PROPOSAL, Proposal
from foredraft.core.tree import ROOT, TokenTree
from foredraft.drafters.base import BaseDrafter, DraftRequest, DraftRow, Observation
from foredraft.drafters.common.joining import Joined
from foredraft.drafters.common.llama_layer import LlamaLayer, rotary, rotate
from foredraft.drafters.common.output_rows import OutputRows
from foredraft.drafters.common.price import Worth
from foredraft.drafters.dspark.module import DsparkModule
from foredraft.models.base import HeadRow, HeadTarget, HeadWeights


class Injection:
    """Keys and values of all layers from what the backbone sees of the text: one product for all.

    Args:
        module: a trained head.
        target: whose kernel multiplies.
    """

    def __init__(self, module: DsparkModule, target: HeadTarget) -> None:
        self._shape = shape = module.shape
        num_queries = shape.num_attention_heads * shape.head_dim
        ones_E = torch.ones(shape.hidden_size)
        parts = []
        for layer in module.layers:
            weights = cast(LlamaLayer, layer).weights()
            # The norm's weights go into the matrix, so that all layers share what is left of it.
            parts.append(weights["qkv.weight"][num_queries:] * weights["attention_norm.weight"])
        both, eps = torch.cat(parts), shape.rms_norm_eps
        self._product = Joined(target, [ones_E.to(both.device)], both, eps)

    def __call__(self, context_TE: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Keys and values [L, G, T, D] of tokens at positions from ``start`` on."""
        shape, length = self._shape, len(context_TE)
        heads = (2, shape.num_key_value_heads, shape.head_dim)
        both = self._product([context_TE]).view(length, -1, *heads)
        keys, values = both.permute(2, 1, 3, 0, 4)
        positions_T = torch.arange(start, start + length, device=both.device)
        return rotate(keys, *rotary(shape, positions_T)), values


class DsparkDrafter(BaseDrafter):
    """See the module docstring.

    How long a draft gets is decided by price and confidence. Chosen tokens may be dropped after
    they are known. Of drawn ones each that was drawn stays: whether another is drawn depends on
    its confidence, which is known before it is.

    Args:
        module: a trained head.
        target: its target.
    """

    def __init__(self, module: DsparkModule, target: HeadTarget) -> None:
        self._parts = target.parts
        self._runner = target.head_runner(
            HeadWeights(
                [cast(LlamaLayer, layer).weights() for layer in module.layers],
                module.norm.weight.detach(),
                module.output.detach(),
                module.shape,
            )
        )
        self._inject = Injection(module, target)
        norms = [module.get_parameter(f"tap_norms.{i}.weight") for i in range(len(module.taps))]
        self._context = Joined(target, norms, module.fuse.weight, module.shape.rms_norm_eps)
        self._module = module.to(self._parts.device, self._parts.dtype).eval()
        self._rows = OutputRows(module.output_ids_R, target.vocab_size)
        self.taps, self.layers = module.taps, (self._runner.layers,)
        self.promise = module.promise
        self._requests: dict[int, DraftRequest] = {}
        self._ends: dict[int, int] = {}

    def begin(self, request: DraftRequest) -> None:
        self._requests[request.request_id] = request

    def end(self, request_id: int) -> None:
        self._requests.pop(request_id, None)
        self._ends.pop(request_id, None)

    @torch.no_grad()
    def observe(self, observations: Sequence[Observation]) -> None:
        for seen in observations:
            slot = self._requests[seen.request_id].slot
            context_TE = self._context([seen.hidden(tap) for tap in self.taps])
            keys, values = self._inject(context_TE, seen.start)
            for layer in range(self._module.num_layers):
                self._runner.layers.write(layer, slot, seen.start, keys[layer], values[layer])
            self._ends[seen.request_id] = seen.end

    @torch.no_grad()
    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        ready = [row for row in rows if row.budget and self._is_ready(row)]
        if not ready:
            return [NO_PROPOSAL] * len(rows)
        blocks = {
            row.request_id: block for row, block in zip(ready, self._blocks(ready), strict=True)
        }
        return [
            self._draft(row, *blocks[row.request_id]) if row.request_id in blocks else NO_PROPOSAL
            for row in rows
        ]

    def _is_ready(self, row: DraftRow) -> bool:
        return self._ends.get(row.request_id) == len(row.tokens) - 1

    def _blocks(self, rows: Sequence[DraftRow]) -> list[tuple[Tensor, Tensor]]:
        """For each row the states [S, E] of its block, normed, and its logits [S, R]."""
        size = self._module.block_size
        places = TokenTree.chain([0] * size)
        embedded_NE = self._parts.embed(torch.tensor([row.tokens[-1] for row in rows]))
        inputs_TE = self._module.block(embedded_NE).flatten(0, 1)
        reads = [
            HeadRow(
                *(self._requests[row.request_id].slot, len(row.tokens) - 1, 0, places),
                num_wanted=size,
                is_block=True,
            )
            for row in rows
        ]
        x_TE, logits_TR = self._runner.run(reads, inputs_TE)
        states_TE = self._module.norm(x_TE.to(self._module.output.dtype))
        return [*zip(torch.split(states_TE, size), torch.split(logits_TR, size), strict=True)]

    def _draft(self, row: DraftRow, states_SE: Tensor, logits_SR: Tensor) -> Proposal:
        if isinstance(row.choices, DrawnChoices):
            return self._drawn(row, states_SE, logits_SR)
        return self._chosen(row, states_SE, logits_SR)

    def _chosen(self, row: DraftRow, states_SE: Tensor, logits_SR: Tensor) -> Proposal:
        tokens, values, survival = list[int](), list[float](), 1.0
        for place in range(min(len(states_SE), row.budget)):
            before = tokens[-1] if tokens else row.tokens[-1]
            logits_R, confidence = self._place(place, before, states_SE, logits_SR)
            (found,) = self._rows.choices(row, logits_R[None], [tokens], 1)
            if not found:
                break
            # The noise knows better which token comes; without noise the confidence head does.
            is_greedy = row.params.temperature == 0.0 and confidence is not None
            survival *= confidence if is_greedy and confidence is not None else found[0].chance
            tokens = [*tokens, found[0].token]
            values.append(survival)
        size = Worth(row.price).best_num_nodes(values, 0)
        return Proposal.chosen(TokenTree.chain(tokens[:size]))

    def _drawn(self, row: DraftRow, states_SE: Tensor, logits_SR: Tensor) -> Proposal:
        draft, node, values, worth = row.draft(), ROOT, list[float](), Worth(row.price)
        for place in range(min(len(states_SE), row.budget)):
            before = draft.tokens[-1] if draft.tokens else row.tokens[-1]
            logits_R, confidence = self._place(place, before, states_SE, logits_SR)
            chance = float(logits_R.softmax(0).max()) if confidence is None else confidence
            values.append((values[-1] if values else 1.0) * chance)
            # Decided before the token is drawn, and kept to afterwards.
            if worth.best_num_nodes(values, 0) < len(values):
                break
            found = draft.extend(node, self._rows.spread(logits_R))
            if not found:
                break
            node = found[0]
        return draft.build()

    def _place(
        self, place: int, before: int, states_SE: Tensor, logits_SR: Tensor
    ) -> tuple[Tensor, float | None]:
        """Logits [R] of a place after the token before it, and how likely its token is taken."""
        module = self._module
        if not module.rank:
            return logits_SR[place], None
        before_1 = torch.tensor([before], device=states_SE.device)
        states_1K = module.markov_states(states_SE[place, None], before_1)
        bias_R = F.linear(states_1K[0, states_SE.shape[1] :], module.markov_output)
        confidence = module.confidence_logits(states_1K, place).sigmoid()
        return logits_SR[place] + bias_R.float(), float(confidence)
