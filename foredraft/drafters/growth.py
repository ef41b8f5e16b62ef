"""A draft tree while it grows.

`Growth` expands the likeliest nodes, a few a round, and is cut where nodes stop paying. Dropping a
token that was seen is fine where drafts are chosen: they are accepted only where the target draws
the same (EAGLE-2, arXiv 2406.16858). Drawn tokens may not be dropped, so `PlannedGrowth` fills a
shape that is known before.

Shape legend: F frontier nodes, V vocabulary.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor

from foredraft.core.checks import checked_int, checked_real
from foredraft.core.choices import Choice
from foredraft.core.proposal import Proposal
from foredraft.core.tree import EMPTY_TREE, ROOT, TokenTree
from foredraft.drafters.base import DraftRow
from foredraft.drafters.guide import Guide
from foredraft.drafters.spec import DrafterContext
from foredraft.drafters.worth import Worth


@dataclass(frozen=True)
class GrowthLimits:
    """How far a tree may grow.

    Attributes:
        max_depth: tokens from the root to a leaf.
        width: nodes that one round scores.
        branching: children per node. The root gets three times as many, because its logits are
            already known and need no further round.
        round_cost: time of a round's forward, in plain steps.
    """

    max_depth: int = 6
    width: int = 4
    branching: int = 4
    round_cost: float = 0.1


GROWTH_OPTIONS = MappingProxyType(
    {
        "max_depth": "most tokens on a path (6)",
        "width": "nodes that are looked below at once (4)",
        "branching": "tokens below one node, below the root three times as many; 1: chains (4)",
        "round_cost": "time of one draft forward, in plain steps (a head: 0.1; a model: measured)",
    }
)
"""See `GrowthLimits`."""


def growth_limits(context: DrafterContext, usual: GrowthLimits = GrowthLimits()) -> GrowthLimits:
    """Limits from the user's `GROWTH_OPTIONS`, else the ``usual`` ones.

    Raises:
        ConfigError: an option does not fit.
    """
    options = context.options
    counts = {
        name: checked_int(name, options.get(name, getattr(usual, name)), 1)
        for name in ("max_depth", "width", "branching")
    }
    cost = checked_real("round_cost", options.get("round_cost", usual.round_cost), 0.0)
    return GrowthLimits(**counts, round_cost=cost)


SURE = 0.8
"""A copy with at least this probability is followed without a forward of the head."""
_LEAST = 0.04
"""Nodes of this chance or less are not expanded."""


@dataclass(slots=True)
class _Node:
    """A token of the growing tree.

    Attributes:
        parent: its number, or `ROOT`.
        chance: that all tokens up to this one are accepted.
        drafted: the tokens from the root to this one.
        place: its number among the scored nodes; -1 until it is scored.
        copied: the guide's successors; None until they are looked up.
        where: its cursor in the guide's text; None until it is looked up.
        is_copy: whether the guide alone proposed it.
    """

    token: int
    parent: int
    chance: float
    drafted: tuple[int, ...]
    place: int = -1
    copied: list[Choice] | None = None
    where: Any = None
    is_copy: bool = False


@dataclass
class Growth:
    """One row's tree while it grows.

    Args:
        guide: copies from the text at nodes without a forward of the head; None: there is none.
        room: the most nodes that may be scored; 0: as many as the row's budget.

    Attributes:
        scored: the tree of the nodes that have been scored, in the order of scoring.
        num_rounds: how many rounds have been run.
    """

    row: DraftRow
    limits: GrowthLimits
    guide: Guide | None = None
    room: int = 0
    scored: TokenTree = EMPTY_TREE
    num_rounds: int = 0
    _nodes: list[_Node] = field(default_factory=list)
    _open: list[int] = field(default_factory=list)
    _asked: Sequence[int] = (ROOT,)

    def __post_init__(self) -> None:
        self._worth = Worth(self.row.prices, self.limits.round_cost)

    @property
    def frontier(self) -> list[int]:
        """Nodes of `scored` whose logits `extend` needs, `ROOT` at first; empty at the end."""
        return [*map(self.place, self._asked)]

    def extend(self, logits_FV: Iterable[Tensor]) -> None:
        """Hang tokens below the frontier, given the logits after each of its nodes."""
        for node, logits_V in zip(self._asked, logits_FV, strict=True):
            self.hang(node, self.row.choose(logits_V, self.drafted(node), self.num_below(node)))
        self._asked = self.next_round()

    def hang(self, node: int, choices: Sequence[Choice], is_copy: bool = False) -> int:
        """Add the likeliest tokens below a node (or `ROOT`); the number of the first."""
        chance, first = 1.0 if node == ROOT else self._nodes[node].chance, len(self._nodes)
        for choice in choices[: self.num_below(node)]:
            below = (*self.drafted(node), choice.token)
            if choice.token not in self.row.stop_ids:
                self._open.append(len(self._nodes))
            self._nodes.append(
                _Node(choice.token, node, chance * choice.chance, below, is_copy=is_copy)
            )
        return first

    def next_round(self) -> list[int]:
        """The nodes to score now, none if another round is not worth its time.

        They join `scored` in this order.
        """
        least = self._least()
        open_ = [n for n in self._open if self._nodes[n].chance > least and self._needs_head(n)]
        best = sorted(open_, key=lambda n: -self._nodes[n].chance)[: self.limits.width]
        bound = sum(self._nodes[n].chance for n in best)
        if not best or len(self.scored) + len(best) > (self.room or self.row.budget):
            return []
        if not self._worth.is_worth_a_forward(self._values(), bound, self.num_rounds):
            return []
        self._score(best)
        return best

    def num_below(self, node: int) -> int:
        """The largest number of children of a node (or `ROOT`)."""
        branching = self.limits.branching
        return 3 * branching if node == ROOT and branching > 1 else branching

    def drafted(self, node: int) -> tuple[int, ...]:
        """The tokens from the root to a node (or `ROOT`)."""
        return () if node == ROOT else self._nodes[node].drafted

    def place(self, node: int) -> int:
        """The number of a node in `scored`; `ROOT` for `ROOT`."""
        return node if node == ROOT else self._nodes[node].place

    def parent(self, node: int) -> int:
        return self._nodes[node].parent

    def copied(self, node: int) -> list[Choice]:
        """The guide's successors of a node (or `ROOT`), before any noise."""
        if self.guide is None:
            return []
        known = None if node == ROOT else self._nodes[node].copied
        if known is None:
            found = self.guide.successors(self._where(node))
            known = [Choice(token, prob) for token, prob, _ in found]
            if node != ROOT:
                self._nodes[node].copied = known
        return known

    def build(self) -> Proposal:
        """The nodes that are worth their time."""
        self._follow_guide()
        # No child is likelier than its parent, and of equal ones the parent was there first.
        order = sorted(range(len(self._nodes)), key=lambda n: -self._nodes[n].chance)
        best = [self._nodes[n] for n in order[: self.row.budget]]
        kept = best[: self._worth.best_num_nodes([node.chance for node in best], self.num_rounds)]
        places = {n: place for place, n in enumerate(order[: len(kept)])}
        parents = tuple(places.get(node.parent, ROOT) for node in kept)
        tree = TokenTree(tuple(node.token for node in kept), parents)
        authors = tuple("copy" if node.is_copy else "head" for node in kept) if self.guide else None
        return Proposal.chosen(tree, tuple(node.chance for node in kept), authors)

    def _follow_guide(self) -> None:
        """Add the guide's successors below the leaves, while they may be worth a node."""
        if self.guide is None:
            return
        for _ in range(self.row.budget):
            if not self._open:
                return
            best = max(self._open, key=lambda n: self._nodes[n].chance)
            if self._nodes[best].chance <= self._least():
                return
            self._open.remove(best)
            depth = len(self._nodes[best].drafted)
            self.hang(best, self.row.weigh(self.copied(best), depth)[:2], is_copy=True)

    def _needs_head(self, node: int) -> bool:
        """Whether the head has to score a node: it is not too deep, and no copy is sure."""
        found = self._nodes[node]
        if len(found.drafted) >= self.limits.max_depth:
            return False
        copied = self.copied(node)
        return not copied or copied[0].chance < SURE

    def _where(self, node: int) -> Any:
        assert self.guide is not None
        if node == ROOT:
            return self.guide.place
        found = self._nodes[node]
        if found.where is None:
            found.where = self.guide.advance(self._where(found.parent), found.token)
        return found.where

    def _score(self, nodes: Sequence[int]) -> None:
        tokens, parents = [*self.scored.tokens], [*self.scored.parents]
        for node in nodes:
            self._open.remove(node)
            self._nodes[node].place = len(tokens)
            tokens.append(self._nodes[node].token)
            parents.append(self.place(self._nodes[node].parent))
        self.scored = TokenTree(tuple(tokens), tuple(parents))
        self.num_rounds += 1

    def _least(self) -> float:
        """The chance that a node must exceed, or no token below it can be worth a place."""
        last_kept = self._values()[self.row.budget - 1 :]
        return max([_LEAST, *last_kept])

    def _values(self) -> list[float]:
        """Chances of the likeliest nodes, up to the budget."""
        return sorted((n.chance for n in self._nodes), reverse=True)[: self.row.budget]


RANK_ACCEPTANCE = (0.6, 0.15, 0.07, 0.04)
"""How often the target takes a draft model's first, second, … guess. Only their ratios shape a
planned tree."""


def planned_parents(
    rank_acceptance: Sequence[float], num_nodes: int, max_depth: int
) -> tuple[int, ...]:
    """The tree with the most expected accepted tokens when acceptance depends on rank alone.

    Sequoia (arXiv 2402.12374) finds it by dynamic programming over sizes. The value of a node, the
    product of the acceptances on its path, never exceeds its parent's or its earlier sibling's, so
    the ``num_nodes`` most valuable nodes are a tree by themselves, and the best one.

    Args:
        rank_acceptance: the chance that a node's first, second, … child is accepted, descending.
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
        parents: a parent array, depth by depth.
    """

    def __init__(self, row: DraftRow, parents: Sequence[int]) -> None:
        self._draft = row.draft()
        self._planned: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            self._planned.setdefault(parent, []).append(node)
        self._level = [(ROOT, ROOT)] if parents else []  # nodes as planned and as built

    @property
    def scored(self) -> TokenTree:
        """See `Growth`; leaves are scored only if there is another depth."""
        return self._draft.tree

    @property
    def frontier(self) -> list[int]:
        """See `Growth`."""
        return [node for _, node in self._level]

    def extend(self, logits_FV: Iterable[Tensor]) -> None:
        below: list[tuple[int, int]] = []
        for (planned, parent), logits_V in zip(self._level, logits_FV, strict=True):
            children = self._planned[planned]
            # A small vocabulary may run out of tokens; nodes below them are dropped.
            found = self._draft.extend(parent, logits_V, len(children))
            below += zip(children, found, strict=False)
        self._level = [(planned, node) for planned, node in below if planned in self._planned]

    def build(self) -> Proposal:
        return self._draft.build()
