"""Drafting with an `EagleModule`: entries for the text as it is read, a tree grown behind it.

Shape legend: T tokens, E hidden size, R output rows, N scored nodes, K candidates of a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.core.choices import DrawnChoices
from foredraft.core.proposal import NO_PROPOSAL, Proposal
from foredraft.core.tree import ROOT
from foredraft.drafters.base import BaseDrafter, DraftRequest, DraftRow, Observation
from foredraft.drafters.common.growing import Growth, GrowthLimits
from foredraft.drafters.common.output_rows import OutputRows
from foredraft.drafters.eagle.module import EagleModule
from foredraft.models.base import HeadRow, HeadTarget, HeadWeights, TargetParts


class EagleRunner:
    """The module's weights where the target runs them.

    Args:
        module: a trained head.
        target: its target.
    """

    def __init__(self, module: EagleModule, target: HeadTarget) -> None:
        parts: TargetParts = target.parts
        self._parts, self._eps = parts, module.shape.rms_norm_eps
        self._taps = module.taps
        self._runner = target.head_runner(
            HeadWeights(
                [module.layer.weights()],
                module.norm.weight.detach(),
                module.output.weight.detach(),
                module.shape,
            )
        )
        self.layers = self._runner.layers

        def placed(tensor: Tensor) -> Tensor:
            return tensor.detach().to(parts.device, parts.dtype)

        embedding = module.join_embedding.weight
        self._join_taps = placed(torch.cat((module.join_taps.weight, embedding), 1))
        self._join_own = placed(torch.cat((module.join_own.weight, embedding), 1))
        norms = [module.get_parameter(f"tap_norms.{i}.weight") for i in range(len(module.taps))]
        self._tap_norms = placed(torch.stack([*norms, module.embedding_norm.weight]))
        self._own_norms = placed(
            torch.stack([module.own_norm.weight, module.embedding_norm.weight])
        )

    @torch.no_grad()
    def text_inputs(self, following: Sequence[int], taps: Sequence[Tensor]) -> Tensor:
        """Layer inputs [T, E] for tokens that the target has read, and those that follow them."""
        return self._join(self._tap_norms, self._join_taps, following, taps)

    @torch.no_grad()
    def own_inputs(self, tokens: Sequence[int], states_NE: Tensor) -> Tensor:
        """Layer inputs [N, E] for drafted tokens, ``states_NE`` of what each was drafted from."""
        return self._join(self._own_norms, self._join_own, tokens, [states_NE])

    def run(self, rows: Sequence[HeadRow], inputs_TE: Tensor) -> tuple[Tensor, Tensor]:
        return self._runner.run(rows, inputs_TE)

    def _join(
        self, norms: Tensor, matrix: Tensor, tokens: Sequence[int], states: Sequence[Tensor]
    ) -> Tensor:
        embedded = self._parts.embed(torch.tensor(tokens))
        x_TCE = torch.stack([*(s.to(embedded.dtype) for s in states), embedded], 1).float()
        scale = torch.rsqrt(x_TCE.square().mean(-1, keepdim=True) + self._eps)
        normed = (x_TCE * scale).to(norms.dtype) * norms
        return F.linear(normed.flatten(1), matrix)


@dataclass
class _Request:
    """Where a request stands: what the head says after its last token.

    Attributes:
        slot: in the target's cache.
        end: the text's entries in the head's layers.
        state_E: the head's own state at the last of them.
        logits_R: what it says comes next.
    """

    slot: int
    end: int = 0
    state_E: Tensor | None = None
    logits_R: Tensor | None = None


class EagleDrafter(BaseDrafter):
    """See the module docstring.

    Args:
        module: a trained head.
        target: its target.
        limits: how far a tree may grow.
    """

    look_ahead = 1  # an entry joins a token and the one that follows it

    def __init__(
        self, module: EagleModule, target: HeadTarget, limits: GrowthLimits | None = None
    ) -> None:
        self._runner = EagleRunner(module, target)
        self._rows = OutputRows(module.output_ids_R, target.vocab_size)
        self._limits = limits or GrowthLimits()
        self._branches = target.capabilities.tree_attention
        self.taps, self.layers = module.taps, (self._runner.layers,)
        self._requests: dict[int, _Request] = {}

    def begin(self, request: DraftRequest) -> None:
        self._requests[request.request_id] = _Request(request.slot)

    def end(self, request_id: int) -> None:
        del self._requests[request_id]

    def observe(self, observations: Sequence[Observation]) -> None:
        seen = [(o, o.tokens[o.start + 1 : o.end + 1]) for o in observations]
        seen = [(o, following) for o, following in seen if following]
        if not seen:
            return
        inputs = [
            self._runner.text_inputs(
                following, [o.hidden(tap)[: len(following)] for tap in self.taps]
            )
            for o, following in seen
        ]
        rows = [
            HeadRow(self._requests[o.request_id].slot, o.start, len(following))
            for o, following in seen
        ]
        states_TE, logits_NR = self._runner.run(rows, torch.cat(inputs))
        last = -1
        for (o, following), logits_R in zip(seen, logits_NR, strict=True):
            last += len(following)
            request = self._requests[o.request_id]
            request.end = o.start + len(following)
            request.state_E, request.logits_R = states_TE[last], logits_R

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        ready = [row for row in rows if row.budget and self._is_ready(row)]
        drawn = [row for row in ready if isinstance(row.choices, DrawnChoices)]
        done = {row.request_id: self._drawn(row) for row in drawn}
        done |= self._grown([row for row in ready if row.request_id not in done])
        return [done.get(row.request_id, NO_PROPOSAL) for row in rows]

    def _is_ready(self, row: DraftRow) -> bool:
        request = self._requests[row.request_id]
        return request.logits_R is not None and request.end == len(row.tokens) - 1

    def _grown(self, rows: Sequence[DraftRow]) -> dict[int, Proposal]:
        """Chosen trees, all rows sharing each run of the head."""
        limits = self._limits
        if not self._branches:
            limits = GrowthLimits(limits.max_depth, 1, 1, limits.round_cost)
        growths = [_Tree(self._requests[row.request_id], Growth(row, limits)) for row in rows]
        for tree in growths:
            assert tree.request.logits_R is not None
            tree.hang([ROOT], tree.request.logits_R[None], self._rows)
        while active := [(tree, nodes) for tree in growths if (nodes := tree.growth.next_round())]:
            self._score(active)
        return {tree.growth.row.request_id: tree.growth.build() for tree in growths}

    def _score(self, active: Sequence[tuple[_Tree, list[int]]]) -> None:
        """One run of the head over some nodes of each row."""
        tokens = [tree.growth.drafted(node)[-1] for tree, nodes in active for node in nodes]
        parents_NE = torch.stack(
            [tree.state(tree.growth.parent(node)) for tree, nodes in active for node in nodes]
        )
        rows = [tree.head_row(len(nodes)) for tree, nodes in active]
        states_NE, logits_NR = self._runner.run(rows, self._runner.own_inputs(tokens, parents_NE))
        first = 0
        for tree, nodes in active:
            mine = slice(first, first := first + len(nodes))
            tree.states.extend(states_NE[mine])
            tree.hang(nodes, logits_NR[mine], self._rows)

    def _drawn(self, row: DraftRow) -> Proposal:
        """A chain, each token drawn from the head's own distribution."""
        request, draft = self._requests[row.request_id], row.draft()
        assert request.logits_R is not None
        assert request.state_E is not None
        logits_R, state_E, node = request.logits_R, request.state_E, ROOT
        for depth in range(1, min(row.budget, self._limits.max_depth) + 1):
            found = draft.extend(node, self._rows.spread(logits_R))
            if not found or depth == min(row.budget, self._limits.max_depth):
                break
            node = found[0]
            inputs_NE = self._runner.own_inputs(draft.tokens[-1:], state_E[None])
            chain = HeadRow(request.slot, request.end - 1, 1, draft.tree, depth)
            states_NE, logits_NR = self._runner.run([chain], inputs_NE)
            state_E, logits_R = states_NE[0], logits_NR[0]
        return draft.build()


class _Tree:
    """A row's growing tree with the head's state at each scored node."""

    def __init__(self, request: _Request, growth: Growth) -> None:
        self.request, self.growth = request, growth
        self.states: list[Tensor] = []

    def state(self, node: int) -> Tensor:
        """[E]."""
        if node != ROOT:
            return self.states[self.growth.place(node)]
        assert self.request.state_E is not None
        return self.request.state_E

    def head_row(self, num_new: int) -> HeadRow:
        # The text's last entry stands before the tree, known like the nodes scored before.
        tree = self.growth.scored
        known = 1 + len(tree) - num_new
        return HeadRow(self.request.slot, self.request.end - 1, 1, tree, known, num_new)

    def hang(self, nodes: Sequence[int], logits_NR: Tensor, rows: OutputRows) -> None:
        growth = self.growth
        drafted = [growth.drafted(node) if node != ROOT else () for node in nodes]
        found = rows.choices(growth.row, logits_NR, drafted, growth.limits.branching)
        for node, choices in zip(nodes, found, strict=True):
            growth.hang(node, choices)
