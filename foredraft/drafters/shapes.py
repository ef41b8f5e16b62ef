"""Shapes of draft trees whose depths are drafted one after the other.

`PlannedGrowth` fills a shape that is known before anything is drafted, so its tokens may be drawn;
`BestFirstGrowth` is cut afterwards, so its tokens are chosen. Looking at a token before it is
dropped is fine where drafts are chosen: they are accepted only where the target draws the same
(EAGLE-2, arXiv 2406.16858).

Shape legend: F frontier nodes, V vocabulary.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from foredraft.core.cost import Prices
from foredraft.core.errors import ConfigError
from foredraft.core.proposal import Proposal
from foredraft.core.tree import ROOT, TokenTree
from foredraft.drafters.base import DraftRow
from foredraft.drafters.worth import Worth

RANK_ACCEPTANCE = (0.6, 0.15, 0.07, 0.04)
"""How often the target takes a draft model's first, second, … guess, for shapes that are planned
without knowing better. Only their ratios shape the tree."""


class DepthGrowth(Protocol):
    """A draft tree under construction.

    Attributes:
        tree: nodes to score now: at least the frontier and its ancestors.
        frontier: nodes of ``tree`` whose logits `extend` needs, ``(ROOT,)`` at first; empty when
            the draft is complete.
    """

    @property
    def tree(self) -> TokenTree: ...

    @property
    def frontier(self) -> Sequence[int]: ...

    def extend(self, logits_FV: Tensor) -> None:
        """Add one depth, given the logits after each frontier node."""

    def build(self) -> Proposal:
        """The grown tree, as a proposal."""


class TreeShape(Protocol):
    """Begins a growth for each row."""

    def grow(self, row: DraftRow) -> DepthGrowth: ...

    def max_scored(self, budget: int) -> int:
        """The most nodes that `DepthGrowth.tree` may have."""


# ------------------------------------------------------------------------------- fixed shapes


@dataclass(frozen=True)
class FixedShape:
    """The same number of children for every node of one depth.

    Where the budget ends inside the shape, nodes near the root come first.

    Attributes:
        children: how many children the root gets, then each of those, and so on.

    Raises:
        ConfigError: there is no depth, or one without children.
    """

    children: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.children or min(self.children) < 1:
            raise ConfigError(
                f"{list(self.children)} is no tree shape; write the number of children at each "
                "depth, such as '3,2,1'"
            )

    def grow(self, row: DraftRow) -> PlannedGrowth:
        return PlannedGrowth(row, self.parents(row.budget))

    def max_scored(self, budget: int) -> int:
        return budget

    def parents(self, num_nodes: int) -> tuple[int, ...]:
        """The parent array, depth by depth, of at most ``num_nodes`` nodes."""
        parents: list[int] = []
        level: Sequence[int] = [ROOT]
        for count in self.children:
            first = len(parents)
            parents += [parent for parent in level for _ in range(count)]
            level = range(first, min(len(parents), num_nodes))
        return tuple(parents[:num_nodes])


def planned_parents(
    rank_acceptance: Sequence[float], num_nodes: int, max_depth: int
) -> tuple[int, ...]:
    """The tree with the most expected accepted tokens when acceptance depends on rank alone.

    Sequoia (arXiv 2402.12374) finds it by dynamic programming over sizes. The value of a node, the
    product of the acceptances on its path, never exceeds its parent's or its earlier sibling's, so
    the ``num_nodes`` most valuable nodes are a tree by themselves, and the best one.

    Args:
        rank_acceptance: the chance that a node's first, second, … child is accepted, descending.
        num_nodes: how many nodes.
        max_depth: the most tokens on a path.

    Returns:
        A parent array, depth by depth.
    """
    # Nodes by their path of ranks, the most valuable first.
    heap: list[tuple[float, tuple[int, ...]]] = [(-rank_acceptance[0], (0,))]
    found: list[tuple[int, ...]] = []
    while heap and len(found) < num_nodes:
        value, path = heapq.heappop(heap)
        found.append(path)
        rank = path[-1]
        if rank + 1 < len(rank_acceptance):
            sibling = value / rank_acceptance[rank] * rank_acceptance[rank + 1]
            heapq.heappush(heap, (sibling, (*path[:-1], rank + 1)))
        if len(path) < max_depth:
            heapq.heappush(heap, (value * rank_acceptance[0], (*path, 0)))
    found.sort(key=lambda path: (len(path), path))
    index = {path: node for node, path in enumerate(found)}
    return tuple(index.get(path[:-1], ROOT) for path in found)


class PlannedGrowth:
    """A tree whose shape is known before its tokens.

    With coupling "drawn" tokens are drawn, siblings without replacement; else they are those that
    the target will likeliest draw.

    Args:
        row: the row that drafts.
        parents: a parent array, depth by depth.
    """

    def __init__(self, row: DraftRow, parents: Sequence[int]) -> None:
        self._draft = row.draft()
        self._planned: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            self._planned.setdefault(parent, []).append(node)
        self._level = [(ROOT, ROOT)] if parents else []  # nodes as planned and as built

    @property
    def tree(self) -> TokenTree:
        return self._draft.tree

    @property
    def frontier(self) -> Sequence[int]:
        return [node for _, node in self._level]

    def extend(self, logits_FV: Tensor) -> None:
        below: list[tuple[int, int]] = []
        for (planned, parent), logits_V in zip(self._level, logits_FV, strict=True):
            children = self._planned[planned]
            # A small vocabulary may run out of tokens; nodes below them are dropped.
            found = self._draft.extend(parent, logits_V, len(children))
            below += zip(children, found, strict=False)
        self._level = [(planned, node) for planned, node in below if planned in self._planned]

    def build(self) -> Proposal:
        return self._draft.build()


# ---------------------------------------------------------------------------------- best-first


@dataclass(frozen=True)
class BestFirstShape:
    """Expand the likeliest nodes at each depth, then keep the likeliest nodes of all.

    EAGLE-2 (arXiv 2406.16858): a node's value is the product of the chances on its path, which
    estimates its chance of being accepted. The tree is also cut where one more node, or one more
    depth, would cost more time than it brings tokens (OPT-Tree, arXiv 2406.17276). Drawn tokens
    may not be cut away, so with coupling "drawn" the planned tree of the same size takes its place.

    Attributes:
        width: nodes expanded at each depth, and children looked at for each.
        max_depth: the most tokens on a path.
        round_cost: time of a draft forward, in plain steps.
        prices: what nodes cost; the row's when None.
    """

    width: int = 4
    max_depth: int = 6
    round_cost: float = 0.0
    prices: Prices | None = None

    def grow(self, row: DraftRow) -> DepthGrowth:
        if row.params.coupling == "drawn":
            parents = planned_parents(RANK_ACCEPTANCE[: self.width], row.budget, self.max_depth)
            return PlannedGrowth(row, parents)
        return BestFirstGrowth(self, row)

    def max_scored(self, budget: int) -> int:
        return max(budget, self.width * (self.max_depth - 1))


@dataclass(frozen=True)
class _Candidate:
    """A node that may enter the tree; ``parent`` is its parent's candidate number."""

    log_prob: float
    token: int
    parent: int


class BestFirstGrowth:
    """One row's best-first tree (see `BestFirstShape`).

    Args:
        shape: how wide and how deep.
        row: the row that drafts; its budget is the most nodes to keep.
    """

    def __init__(self, shape: BestFirstShape, row: DraftRow) -> None:
        self._shape, self._row, self._budget = shape, row, row.budget
        self._worth = Worth(shape.prices or row.prices, shape.round_cost)
        self._candidates: list[_Candidate] = []
        self._expanded: list[int] = []  # candidates that are nodes of `tree`
        self._num_forwards = 0
        self.frontier: Sequence[int] = [ROOT] if row.budget else []

    @property
    def tree(self) -> TokenTree:
        node = {candidate: i for i, candidate in enumerate(self._expanded)}
        taken = [self._candidates[i] for i in self._expanded]
        return TokenTree(
            tuple(c.token for c in taken), tuple(node.get(c.parent, ROOT) for c in taken)
        )

    def extend(self, logits_FV: Tensor) -> None:
        first = len(self._candidates)
        for node, logits_V in zip(self.frontier, logits_FV, strict=True):
            parent = ROOT if node == ROOT else self._expanded[node]
            above = 0.0 if parent == ROOT else self._candidates[parent].log_prob
            found = self._row.choose(logits_V, self._path_tokens(parent), self._shape.width)
            self._candidates += [
                _Candidate(above + math.log(chance), token, parent)
                for token, chance in found
                if chance > 0.0
            ]
        self._num_forwards += 1
        chosen = self._worth_expanding(first)
        self.frontier = range(len(self._expanded), len(self._expanded) + len(chosen))
        self._expanded += chosen

    def _path_tokens(self, candidate: int) -> list[int]:
        tokens: list[int] = []
        while candidate != ROOT:
            tokens.insert(0, self._candidates[candidate].token)
            candidate = self._candidates[candidate].parent
        return tokens

    def _worth_expanding(self, first: int) -> list[int]:
        """Candidates of the last depth, from number ``first`` on, to look below."""
        if self._num_forwards >= self._shape.max_depth:
            return []
        # Values fall with depth, so no descendant of an excluded candidate can be included.
        best = self._best()
        room = best if len(best) < self._budget else best[:-1]
        likely = [i for i in room if i >= first][: self._shape.width]
        # For each depth, descendants of a node add at most that node's own value.
        bound = sum(self._values(likely))
        if not self._worth.is_worth_a_forward(self._values(best), bound, self._num_forwards):
            return []
        return sorted(likely)

    def _best(self) -> list[int]:
        """The best candidates within the budget, best first; no child before its parent."""
        by_value = sorted(  # stable, and parents have the smaller numbers
            range(len(self._candidates)), key=lambda i: -self._candidates[i].log_prob
        )
        return by_value[: self._budget]

    def _values(self, candidates: Sequence[int]) -> list[float]:
        return [math.exp(self._candidates[i].log_prob) for i in candidates]

    def build(self) -> Proposal:
        best = self._best()
        size = self._worth.best_num_nodes(self._values(best), self._num_forwards)
        tree = TokenTree(
            tuple(c.token for c in self._candidates), tuple(c.parent for c in self._candidates)
        )
        return Proposal.chosen(tree.subset(sorted(best[:size])))
