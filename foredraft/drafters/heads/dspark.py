"""A block of draft tokens in one forward, fitted together by a Markov head.

DSpark (arXiv 2607.05147); DFlash (arXiv 2602.06036) is its special case without the Markov and the
confidence head. The backbone reads a block: the embedding of the last committed token, then as many
masks as further tokens are drafted. Each place attends to the whole block and to the text, of which
it sees features of the target alone: outputs of several layers, fused into one vector a token, and
from that keys and values for every layer of the backbone, made once.

The places of a block do not know what the others chose. The *Markov head* adds a bias by the token
before, ``W1[token] W2`` of low rank, so that a block can be chosen or drawn from left to right. The
*confidence head* says, from the same, how likely the next token is taken: before it is drawn.

Shape legend: B texts, L tokens (anchors), S places of a block, E hidden size, H query heads,
D head size, M rank of the Markov head, R output rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foredraft.core.choices import DrawnChoices
from foredraft.core.proposal import NOT_READY, Proposal
from foredraft.core.record import RowStep
from foredraft.core.traits import DrafterTraits
from foredraft.core.tree import ROOT, TokenTree
from foredraft.drafters.base import BaseDrafter, DraftRow
from foredraft.drafters.heads.base import (
    LARGEST_SIZE,
    TAPS,
    HeadModule,
    HeadOption,
)
from foredraft.drafters.heads.layers import (
    Joined,
    LlamaLayer,
    RMSNorm,
    head_weights,
    rotary,
    rotate,
)
from foredraft.drafters.heads.rows import OutputRows
from foredraft.drafters.spec import DrafterContext, DrafterSpec
from foredraft.drafters.trained import HEAD_OPTION, trained_head
from foredraft.drafters.worth import Worth
from foredraft.models.base import HeadRow, HeadTarget, ModelShape, offered


class DsparkModule(HeadModule):
    """See the module docstring.

    Args:
        taps: the target's layers that are fused.
        block_size: S, the most tokens of a draft.
        num_layers: of the backbone.
        rank: M; 0 leaves the Markov and the confidence head out (DFlash).
    """

    kind = "dspark"
    training_file = "foredraft.train.heads.dspark"

    confidence_scale_S: Tensor
    OPTIONS: ClassVar = {
        "taps": TAPS,
        "block_size": HeadOption("the most tokens of a draft (4)", 4),
        "num_layers": HeadOption("of the backbone (2)", 2),
        "rank": HeadOption(
            "of the Markov head; 0 leaves it and the confidence head out (64)",
            64,
            least=0,
            most=LARGEST_SIZE,
        ),
    }

    def __init__(
        self,
        shape: ModelShape,
        num_rows: int | None,
        taps: Sequence[int],
        block_size: int,
        num_layers: int,
        rank: int,
    ) -> None:
        counts = {"block_size": block_size, "num_layers": num_layers, "rank": rank}
        super().__init__(shape, taps, num_rows=num_rows, taps=[*taps], **counts)
        self.block_size, self.num_layers, self.rank = block_size, num_layers, rank
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.tap_norms = nn.ModuleList(RMSNorm(hidden, eps) for _ in self.taps)
        self.fuse = nn.Linear(len(self.taps) * hidden, hidden, bias=False)
        self.mask_E = nn.Parameter(torch.randn(hidden) * hidden**-0.5)
        self.layers = nn.ModuleList(LlamaLayer(shape) for _ in range(num_layers))
        self.norm = RMSNorm(hidden, eps)
        if rank:
            self.markov = nn.Embedding(shape.vocab_size, rank)
            self.markov_output = nn.Parameter(torch.zeros(len(self.output), rank))
            self.confidence = nn.Linear(hidden + rank, 1)
            self.register_buffer("confidence_scale_S", torch.ones(block_size))

    def context(self, taps: Sequence[Tensor]) -> Tensor:
        """Context of the backbone from tokens that the target has read; [..., E].

        Every layer computes keys and values from it, after its own norm.
        """
        dtype = self.output.dtype
        normed = [norm(x.to(dtype)) for norm, x in zip(self.tap_norms, taps, strict=True)]
        fused: Tensor = self.fuse(torch.cat(normed, -1))
        return fused

    def block(self, embeddings_NE: Tensor) -> Tensor:
        """The inputs of blocks [N, S, E] after committed tokens."""
        masks = self.mask_E.expand(len(embeddings_NE), self.block_size - 1, -1)
        return torch.cat((embeddings_NE.to(masks.dtype)[:, None], masks), 1)

    def markov_states(self, states: Tensor, before: Tensor) -> Tensor:
        """States with the columns of the Markov head; [..., E + M].

        Args:
            states: of the backbone, normed; [..., E].
            before: the token before each [...].
        """
        return torch.cat((states, self.markov(before)), -1) if self.rank else states

    @property
    def output_RK(self) -> Tensor:
        """The output rows with the columns of the Markov head; [R, E + M]."""
        return torch.cat((self.output, self.markov_output), -1) if self.rank else self.output

    def confidence_logits(self, states: Tensor, place: int) -> Tensor:
        """Log odds [...] that the token of a place (from 0) is taken; after `markov_states`."""
        logits: Tensor = self.confidence(states)[..., 0]
        return logits * self.confidence_scale_S[place]


class DsparkDrafter(BaseDrafter):
    """See the module docstring.

    How long a draft gets is decided by price and confidence. Chosen tokens may be dropped after
    they are known. Of drawn ones each that was drawn stays: whether another is drawn depends on
    its confidence, which is known before it is.
    """

    def __init__(self, module: DsparkModule, target: HeadTarget) -> None:
        self._parts = target.parts
        weights = head_weights(module.layers, module.norm, module.output, module.shape)
        self._runner = target.head_runner(weights)
        eps, num_queries = module.shape.rms_norm_eps, module.shape.num_attention_heads
        num_queries *= module.shape.head_dim
        parts = [cast(LlamaLayer, layer).weights() for layer in module.layers]
        # A layer's norm goes into its matrix, so that one product makes keys and values of all.
        injected = [w["qkv.weight"][num_queries:] * w["attention_norm.weight"] for w in parts]
        ones_E = torch.ones(module.shape.hidden_size).to(injected[0].device)
        self._product = Joined(target, [ones_E], torch.cat(injected), eps)
        norms = [norm.get_parameter("weight") for norm in module.tap_norms]
        self._context = Joined(target, norms, module.fuse.weight, eps)
        self._module = module.to(self._parts.device, self._parts.dtype).eval()
        self._rows = OutputRows(module.output_ids_R, target.vocab_size)
        self.taps, self.layers = module.taps, (self._runner.layers,)
        self.traits = DrafterTraits(promise=module.promise, skips_gaps=True)
        self._slots: dict[int, int] = {}
        self._ends: dict[int, int] = {}

    def begin(self, row: DraftRow) -> None:
        self._slots[row.request_id] = row.slot

    def end(self, request_id: int) -> None:
        self._slots.pop(request_id, None)
        self._ends.pop(request_id, None)

    @torch.no_grad()
    def observe(self, observations: Sequence[RowStep]) -> None:
        for seen in observations:
            slot, layers = self._slots[seen.request_id], self._runner.layers
            start = layers.next_start(slot, seen.context, seen.end - seen.context)
            if start >= seen.end:  # what is cached of the text has no entries here
                continue
            taps = [seen.hidden(tap)[start - seen.context :] for tap in self.taps]
            keys, values = self._inject(self._context(taps), start)
            for layer in range(self._module.num_layers):
                layers.write(layer, slot, start, keys[layer], values[layer])
            self._ends[seen.request_id] = seen.end

    def _inject(self, context_TE: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Keys and values [L, G, T, D] of tokens at positions from ``start`` on, in all layers."""
        shape, length = self._module.shape, len(context_TE)
        heads = (2, shape.num_key_value_heads, shape.head_dim)
        both = self._product([context_TE]).view(length, -1, *heads)
        keys, values = both.permute(2, 1, 3, 0, 4)
        positions_T = torch.arange(start, start + length, device=both.device)
        return rotate(keys, *rotary(shape, positions_T)), values

    @torch.no_grad()
    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        ready = [row for row in rows if row.budget and self._is_ready(row)]
        if not ready:
            return [NOT_READY] * len(rows)
        blocks = zip(ready, self._blocks(ready), strict=True)
        drafts = {row.request_id: self._draft(row, *block) for row, block in blocks}
        return [drafts.get(row.request_id, NOT_READY) for row in rows]

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
                *(row.slot, len(row.tokens) - 1, 0, places),
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
        size = Worth(row.prices).best_num_nodes(values, 0)
        return Proposal.chosen(TokenTree.chain(tokens[:size]))

    def _drawn(self, row: DraftRow, states_SE: Tensor, logits_SR: Tensor) -> Proposal:
        draft, node, values, worth = row.draft(), ROOT, list[float](), Worth(row.prices)
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


def _build(context: DrafterContext) -> DsparkDrafter:
    return DsparkDrafter(
        trained_head(context, DsparkModule), offered(context.target.capabilities.cache_layers)
    )


DRAFTER = DrafterSpec(
    build=_build,
    summary="a trained backbone drafts a block in one forward, fitted together by a Markov head",
    options={**HEAD_OPTION},
    num_draft_tokens=7,
    needs=("parts", "cache_layers"),
    trained=DsparkModule.kind,
    head=DsparkModule,
)
