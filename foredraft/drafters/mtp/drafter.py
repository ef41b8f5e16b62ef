"""Drafting with an `MtpModule`: its heads where the target runs them.

Head ``k`` (from 0) has an entry for each token that has ``k + 1`` others behind it: of what the
head before it made of that token (the first: of the target's state), and of the last of those
others. So a token of the text is read by all heads, by each at another place. A node of depth
``d`` is read by head ``d``, which says what comes next, and by those after it, for the entries that
deeper nodes look at; behind the last head's depth it goes on alone, with its own output.

Shape legend: T tokens, N nodes, E hidden size, R output rows, C states that go along with a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor

from foredraft.cache.base import CacheLayers
from foredraft.core.tree import ROOT, TokenTree
from foredraft.drafters.base import DraftRequest
from foredraft.drafters.common.growing import GrowthLimits
from foredraft.drafters.common.joining import Joined, JoinedTokens
from foredraft.drafters.common.steps import ModuleDrafter
from foredraft.drafters.mtp.module import MtpHead, MtpModule
from foredraft.models.base import HeadRow, HeadTarget, HeadWeights


class _Head:
    """One head where the target runs it.

    Args:
        head: its weights.
        output_RE: the output rows.
        target: its target.
    """

    def __init__(self, head: MtpHead, output_RE: Tensor, target: HeadTarget) -> None:
        self._head, shape = head, head.layer.shape
        token, state = head.join.weight.chunk(2, 1)
        token = token * head.embedding_norm.weight
        tokens = JoinedTokens(target.parts, token, shape.rms_norm_eps, target.vocab_size)
        self.inputs = Joined(target, [head.hidden_norm.weight], state, shape.rms_norm_eps, tokens)
        norm_E = head.norm.weight.detach()
        weights = HeadWeights([head.layer.weights()], norm_E, output_RE.detach(), shape)
        self._runner = target.head_runner(weights)
        self.layers = self._runner.layers

    @torch.no_grad()
    def run(self, rows: Sequence[HeadRow], inputs_TE: Tensor) -> tuple[Tensor, Tensor]:
        """What the next head reads [T, E], and logits [N, R]."""
        x_TE, logits_NR = self._runner.run(rows, inputs_TE)
        return self._head.next_state(x_TE, self._head.norm(x_TE)), logits_NR


@dataclass(frozen=True)
class _End:
    """How far a slot's text was read.

    Attributes:
        num_tokens: since the request began.
        states_CE: what goes along with the last of them.
    """

    num_tokens: int
    states_CE: Tensor


@dataclass(frozen=True)
class _Part:
    """What a head reads of a row's nodes.

    Attributes:
        row: in the head's own count of entries.
        nodes: the new ones, as the run counts them.
    """

    row: HeadRow
    nodes: Sequence[int]


class MtpRunner:
    """See `foredraft.drafters.common.steps.StepRunner`.

    Along with a token goes what its successors are read with: the states of all heads but the last,
    or of the only one.

    Args:
        module: trained heads.
        target: their target.
    """

    def __init__(self, module: MtpModule, target: HeadTarget) -> None:
        self._module = module.to(target.parts.device).eval()
        self._heads = [_Head(head, module.output, target) for head in module.each_head()]
        self._size, self._num_rows = module.shape.hidden_size, len(module.output)
        self._last = len(self._heads) - 1
        self._num_states = max(1, self._last)
        self._ends: dict[int, _End] = {}  # by slot

    @property
    def layers(self) -> CacheLayers:
        """Of the first head: no other has more entries."""
        return self.all_layers[0]

    @property
    def all_layers(self) -> tuple[CacheLayers, ...]:
        return tuple(head.layers for head in self._heads)

    def forget(self, slot: int) -> None:
        """Another request begins there."""
        self._ends.pop(slot, None)

    @torch.no_grad()
    def text_inputs(self, following: Sequence[int], taps: Sequence[Tensor]) -> Tensor:
        """What the first head reads, and the tokens, for the others; [T, E + 1]."""
        inputs_TE = self._heads[0].inputs([self._module.first_state(taps[0])], following)
        return _with_tokens(inputs_TE, following)

    @torch.no_grad()
    def own_inputs(self, tokens: Sequence[int], states_NE: Tensor) -> Tensor:
        """What came along with their parents, and the tokens; [N, C E + 1]."""
        return _with_tokens(states_NE, tokens)

    @torch.no_grad()
    def run(self, rows: Sequence[HeadRow], inputs_TE: Tensor) -> tuple[Tensor, Tensor]:
        """States are what goes along with each token; with a text's, the last alone. [T, C E]."""
        run = self._run_nodes if rows[0].tree else self._run_text
        return run(rows, inputs_TE[:, :-1], inputs_TE[:, -1].int().tolist())

    def _run_text(
        self, rows: Sequence[HeadRow], inputs_TE: Tensor, tokens: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        counts = [row.num_text for row in rows]
        stops = [*accumulate(counts)]
        texts = [tokens[stop - count : stop] for stop, count in zip(stops, counts, strict=True)]
        states_TE, logits_NR = self._heads[0].run(rows, inputs_TE)
        made = [[*torch.split(states_TE, counts)]]
        for k in range(1, len(self._heads)):
            made.append(self._follow(k, rows, texts, made[-1]))
        along_TCE = states_TE.new_zeros(len(tokens), self._num_states, self._size)
        for i, row in enumerate(rows):
            for k, states in enumerate(made[: self._num_states]):
                if len(states[i]):
                    along_TCE[stops[i] - 1, k] = states[i][-1]
            read = row.num_text + self._num_read(row)
            self._ends[row.slot] = _End(read, along_TCE[stops[i] - 1])
        return along_TCE.flatten(1), logits_NR

    def _follow(
        self,
        k: int,
        rows: Sequence[HeadRow],
        texts: Sequence[Sequence[int]],
        made: Sequence[Tensor],
    ) -> list[Tensor]:
        """What head ``k`` (from 0) makes [T, E] of what the one before it made of each text."""
        states, runs, tokens = list[Tensor](), list[HeadRow](), list[int]()
        for row, text, made_TE in zip(rows, texts, made, strict=True):
            states_TE = made_TE[:-1]
            if self._num_read(row) >= k:  # else it has no entries yet
                states_TE = torch.cat((self._ends[row.slot].states_CE[k - 1 : k], states_TE))
            states.append(states_TE)
            if count := len(states_TE):
                start = row.start - min(self._num_read(row), k)
                runs.append(HeadRow(row.slot, start, count, num_wanted=0))
                tokens += text[-count:]
        if not runs:
            return states
        inputs_TE = self._heads[k].inputs([torch.cat(states)], tokens)
        made_TE, _ = self._heads[k].run(runs, inputs_TE)
        return [*torch.split(made_TE, [*map(len, states)])]

    def _num_read(self, row: HeadRow) -> int:
        end = self._ends.get(row.slot)
        return 0 if end is None else end.num_tokens

    def _run_nodes(
        self, rows: Sequence[HeadRow], inputs_NE: Tensor, tokens: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        states_NCE = inputs_NE.reshape(len(tokens), self._num_states, self._size)
        along_NCE = torch.zeros_like(states_NCE)
        logits_NR = inputs_NE.new_empty(len(tokens), self._num_rows)
        # From the last on: of a node that several read, what the first of them says is what counts.
        for k in range(self._last, min(1, self._last) - 1, -1):
            parts = self._parts(rows, k)
            if not parts:
                continue
            nodes = [node for part in parts for node in part.nodes]
            said = [node for part in parts if part.row.num_wanted for node in part.nodes]
            states_NE = states_NCE[nodes, max(0, k - 1)]
            inputs = self._heads[k].inputs([states_NE], [tokens[node] for node in nodes])
            made_NE, said_NR = self._heads[k].run([part.row for part in parts], inputs)
            along_NCE[nodes, min(k, self._num_states - 1)] = made_NE
            logits_NR[said] = said_NR
        return along_NCE.flatten(1), logits_NR

    def _parts(self, rows: Sequence[HeadRow], k: int) -> list[_Part]:
        """What head ``k`` (from 0) reads of each row, if it reads any of its new nodes."""
        found, first = list[_Part](), 0
        for row in rows:
            part = _part(row, first, k, is_last=k == self._last)
            found += [part] if part.nodes else []
            first += row.num_text + len(row.tree) - row.num_known
        return found


def _part(row: HeadRow, first: int, k: int, is_last: bool) -> _Part:
    """What head ``k`` (from 0) reads of a row, whose first new node is the run's ``first``."""
    tree, known = row.tree, row.num_known - row.num_text
    num_text = row.start + row.num_text - k  # the head's entries for the text
    depths = range(max(1, 1 - num_text), (len(tree) if is_last else k) + 1)
    read = [node for node, depth in enumerate(tree.depths) if depth in depths]
    new = [node for node in read if node >= known]
    says = any(tree.depths[node] >= k for node in new)
    shown = min(1, max(0, num_text))
    mine = HeadRow(
        row.slot,
        max(0, num_text - 1),
        shown,
        _only(tree, read),
        num_known=shown + len(read) - len(new),
        num_wanted=len(new) if says else 0,
    )
    return _Part(mine, [first + node - known for node in new])


def _only(tree: TokenTree, nodes: Sequence[int]) -> TokenTree:
    """Some nodes of a tree; those whose parents are left out hang off the root."""
    if len(nodes) == len(tree):
        return tree
    places = {node: place for place, node in enumerate(nodes)}
    parents = tuple(places.get(tree.parents[node], ROOT) for node in nodes)
    return TokenTree(tuple(tree.tokens[node] for node in nodes), parents)


def _with_tokens(states_TE: Tensor, tokens: Sequence[int]) -> Tensor:
    """Tokens as a last column: their numbers are whole in float32."""
    ids_T = torch.tensor(tokens, dtype=states_TE.dtype, device=states_TE.device)
    return torch.cat((states_TE, ids_T[:, None]), 1)


class MtpDrafter(ModuleDrafter):
    """An `MtpModule` drafts trees, with a head for each depth, the last one used again."""

    runner = MtpRunner

    def __init__(
        self, module: MtpModule, target: HeadTarget, limits: GrowthLimits | None = None
    ) -> None:
        super().__init__(module, target, limits)
        self._heads = cast(MtpRunner, self._runner)
        self.layers = self._heads.all_layers
        self.look_ahead = len(self.layers)

    def begin(self, request: DraftRequest) -> None:
        self._heads.forget(request.slot)
        super().begin(request)
