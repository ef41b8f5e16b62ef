"""How drafts grow into trees, and how large a tree is worth its price.

`best_first` takes the likeliest node next, for drafters that know their probabilities at no cost.
`Growth` asks a head for a few nodes a round. `PlannedGrowth` fills a shape that is known before
anything is drafted, so its tokens may be drawn; `BestFirstGrowth` grows one depth at a time and is
cut afterwards, so its tokens are chosen.

A step with n nodes takes the row's price of n plain steps, and d draft forwards before it. It
commits one token plus the accepted ones. The best draft has the most expected committed tokens by
time (Sequoia, arXiv 2402.12374; OPT-Tree, arXiv 2406.17276); `Worth` weighs that.

Looking at a token before it is dropped is fine where drafts are chosen: they are accepted only
where the target draws the same (EAGLE-2, arXiv 2406.16858).

Shape legend: F frontier nodes, V vocabulary.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from torch import Tensor

from foredraft.core.choices import Choice
from foredraft.core.cost import Prices, price_of
from foredraft.core.errors import ConfigError
from foredraft.core.proposal import Proposal
from foredraft.core.tree import EMPTY_TREE, ROOT, TokenTree
from foredraft.drafters.base import DraftRow
from foredraft.drafters.spec import DrafterContext, checked_cost

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
        ...

    def build(self) -> Proposal:
        """The grown tree, as a proposal."""
        ...


class TreeShape(Protocol):
    """Begins a growth for each row."""

    def grow(self, row: DraftRow) -> DepthGrowth: ...

    def max_scored(self, budget: int) -> int:
        """The most nodes that `DepthGrowth.tree` may have."""
        ...


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


NODE_COST = MappingProxyType(
    {"node_cost": "time one more draft token adds to a step, in plain steps (measured)"}
)


def asked_prices(context: DrafterContext) -> Prices | None:
    """The prices that the option of `NODE_COST` asks for; None leaves them to the controller.

    Raises:
        ConfigError: the option is not a number above 0.
    """
    given = context.options.get("node_cost")
    return None if given is None else (1.0, 1.0 + checked_cost("node_cost", given))


@dataclass(frozen=True)
class Worth:
    """Weighs nodes and draft forwards against their time.

    Attributes:
        prices: of the row's nodes.
        round_cost: time of a draft forward, in plain steps.
    """

    prices: Prices
    round_cost: float = 0.0

    def best_num_nodes(self, values: Sequence[float], num_forwards: int) -> int:
        """The number of nodes to keep, given their values in descending order; may be 0.

        Args:
            values: the chance of each that it is accepted.
            num_forwards: draft forwards that have been spent.
        """
        rates = [
            expected / (price_of(self.prices, num_nodes) + num_forwards * self.round_cost)
            for num_nodes, expected in enumerate(accumulate(values, initial=1.0))
        ]
        return max(range(len(rates)), key=lambda num_nodes: (rates[num_nodes], num_nodes))

    def is_worth_a_forward(self, values: Sequence[float], bound: float, num_forwards: int) -> bool:
        """Whether one more draft forward can raise the rate.

        Args:
            values: of the nodes so far, in descending order.
            bound: the most accepted tokens that another depth can add.
            num_forwards: draft forwards spent so far.
        """
        size = self.best_num_nodes(values, num_forwards)
        expected = 1.0 + sum(values[:size])
        spent = price_of(self.prices, size) + num_forwards * self.round_cost
        return bound > 0.0 and (expected + bound) / (spent + self.round_cost) >= expected / spent


Place = TypeVar("Place")
Successors = Callable[[Place], Iterable[tuple[int, float, Place]]]
"""From a place: each token that may follow, its probability there, and the place it leads to."""


def best_first(
    start: Place,
    successors: Successors[Place],
    row: DraftRow,
    branch: bool = True,
    prices: Prices | None = None,
    num_drafted: int = 0,
    is_weighed: bool = False,
) -> TokenTree:
    """The tree with the most expected tokens per time, by the probabilities of `successors`.

    With P the expected number of accepted tokens and n nodes, a step commits 1 + P tokens in the
    time of n. Nodes come in falling order of their path's probability, and any number of them
    from the front is a tree: the number with the best ratio is taken.

    Args:
        start: cursor after the committed text and the tokens drafted already.
        row: its budget is the most nodes; its noise, if it has any, reweighs the successors.
        branch: whether nodes may have siblings; else the likeliest successor alone is followed.
        prices: of the nodes; the row's when None.
        num_drafted: tokens between the committed text and ``start``.
        is_weighed: whether the probabilities include the row's noise already.
    """
    prices = prices or row.prices
    tokens: list[int] = []
    parents: list[int] = []
    expected, best_rate, best_size = 1.0, 1.0 / prices[0], 0
    frontier: list[tuple[float, int, int, int, int, Place]] = []
    serial = 0  # breaks ties in the order of discovery, so that places are never compared
    place, path_prob, node, depth = start, 1.0, ROOT, num_drafted
    while len(tokens) < row.budget:
        is_over = node != ROOT and tokens[node] in row.stop_ids
        found = () if is_over else successors(place)
        for token, prob, following in found if is_weighed else _weighed(found, row, depth):
            heapq.heappush(frontier, (-path_prob * prob, serial, token, node, depth + 1, following))
            serial += 1
            if not branch:
                break
        if not frontier:
            break
        negated, _, token, parent, depth, place = heapq.heappop(frontier)
        path_prob, node = -negated, len(tokens)
        cost = price_of(prices, node + 1)
        if (expected + path_prob * (row.budget - node)) / cost <= best_rate:
            break  # not even if all that follow were as probable
        tokens.append(token)
        parents.append(parent)
        expected += path_prob
        if expected / cost > best_rate:
            best_rate, best_size = expected / cost, node + 1
    return TokenTree(tuple(tokens[:best_size]), tuple(parents[:best_size]))


def _weighed(
    found: Iterable[tuple[int, float, Place]], row: DraftRow, depth: int
) -> Iterable[tuple[int, float, Place]]:
    """Successors with their probabilities given the row's noise."""
    if row.params.temperature == 0.0 or row.params.coupling == "drawn":
        return found
    places = {token: (prob, place) for token, prob, place in found}
    weighed = row.weigh([Choice(token, prob) for token, (prob, _) in places.items()], depth)
    return [(token, chance, places[token][1]) for token, chance in weighed]


@dataclass(frozen=True)
class GrowthLimits:
    """How far a tree may grow.

    Attributes:
        max_depth: tokens from the root to a leaf.
        width: nodes that one round scores.
        branching: children per node. The root gets three times as many, because its logits are
            already known and need no further round.
        round_cost: time of a round, in plain steps.
    """

    max_depth: int = 6
    width: int = 4
    branching: int = 4
    round_cost: float = 0.1


SURE = 0.8
"""A copy with at least this probability is followed without a forward of the head."""
_LEAST = 0.04
"""Nodes below this probability are not expanded."""


class Guide(ABC):
    """An index of a request's text that knows successors of any place without a forward.

    Attributes:
        place: cursor at the end of the committed text; opaque.
    """

    place: Any

    @abstractmethod
    def successors(self, place: Any) -> Iterable[tuple[int, float, Any]]:
        """Tokens that may follow, likeliest first, each with its probability and its place."""

    @abstractmethod
    def advance(self, place: Any, token: int) -> Any:
        """The cursor after ``token`` at ``place``."""

    @abstractmethod
    def commit(self, token: int) -> None:
        """Append a committed token, after seeing whether it was foreseen."""

    def end(self) -> None:  # noqa: B027 - most keep nothing
        """End the request; a guide may store its text."""


@dataclass
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
        row: the row of the tree.
        limits: of its size.
        guide: copies from the text at nodes without a forward of the head; None: there is none.

    Attributes:
        scored: the tree of the nodes that have been scored, in the order of scoring.
        num_rounds: how many rounds have been run.
    """

    row: DraftRow
    limits: GrowthLimits
    guide: Guide | None = None
    scored: TokenTree = EMPTY_TREE
    num_rounds: int = 0
    _nodes: list[_Node] = field(default_factory=list)
    _open: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._worth = Worth(self.row.prices, self.limits.round_cost)

    def hang(self, node: int, choices: Sequence[Choice], is_copy: bool = False) -> None:
        """Add the likeliest tokens below a node (or `ROOT`)."""
        chance = 1.0
        drafted: tuple[int, ...] = ()
        if node != ROOT:
            chance, drafted = self._nodes[node].chance, self._nodes[node].drafted
        for choice in choices[: self.num_below(node)]:
            below = (*drafted, choice.token)
            if choice.token not in self.row.stop_ids:
                self._open.append(len(self._nodes))
            self._nodes.append(
                _Node(choice.token, node, chance * choice.chance, below, is_copy=is_copy)
            )

    def next_round(self) -> list[int]:
        """The nodes to score now, none if another round is not worth its time.

        They join `scored` in this order.
        """
        best = sorted(
            filter(self._needs_head, self._open),
            key=lambda n: -self._nodes[n].chance,
        )[: self.limits.width]
        bound = sum(self._nodes[n].chance for n in best)
        if not best or len(self.scored) + len(best) > self.row.budget:
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
        """The tokens from the root to a node."""
        return self._nodes[node].drafted

    def place(self, node: int) -> int:
        """The number of a node in `scored`; `ROOT` for `ROOT`."""
        return node if node == ROOT else self._nodes[node].place

    def parent(self, node: int) -> int:
        return self._nodes[node].parent

    def copied(self, node: int) -> list[Choice]:
        """The guide's successors of a node (or `ROOT`), before any noise."""
        if self.guide is None:
            return []
        if node == ROOT:
            return [
                Choice(token, prob) for token, prob, _ in self.guide.successors(self.guide.place)
            ]
        found = self._nodes[node]
        if found.copied is None:
            found.copied = [
                Choice(token, prob) for token, prob, _ in self.guide.successors(self._where(node))
            ]
        return found.copied

    def build(self) -> Proposal:
        """The nodes that are worth their time."""
        self._follow_guide()
        values = self._values()
        size = self._worth.best_num_nodes(values, self.num_rounds)
        # No child is likelier than its parent, and of equal ones the parent was there first.
        kept = sorted(range(len(self._nodes)), key=lambda n: -self._nodes[n].chance)[:size]
        grown = TokenTree(
            tuple(node.token for node in self._nodes), tuple(node.parent for node in self._nodes)
        )
        chances = tuple(self._nodes[n].chance for n in kept)
        authors = tuple("copy" if self._nodes[n].is_copy else "head" for n in kept)
        return Proposal.chosen(grown.subset(kept), chances, authors)

    def _follow_guide(self) -> None:
        """Add the guide's successors below the leaves, while they may be worth a node."""
        if self.guide is None:
            return
        for _ in range(self.row.budget):
            if not self._open:
                return
            best = max(self._open, key=lambda n: self._nodes[n].chance)
            values, chance = self._values(), self._nodes[best].chance
            if chance < _LEAST or (len(values) == self.row.budget and chance <= values[-1]):
                return
            self._open.remove(best)
            depth = len(self._nodes[best].drafted)
            self.hang(best, self.row.weigh(self.copied(best), depth)[:2], is_copy=True)

    def _needs_head(self, node: int) -> bool:
        """Whether the head has to score a node: it is not too deep, and no copy is sure."""
        found = self._nodes[node]
        if len(found.drafted) >= self.limits.max_depth or found.chance < _LEAST:
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

    def _values(self) -> list[float]:
        """Chances of the likeliest nodes, up to the budget."""
        return sorted((n.chance for n in self._nodes), reverse=True)[: self.row.budget]
