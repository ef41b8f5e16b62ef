"""A head's tree while it grows: a few nodes a round, each round weighed against its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from foredraft.core.choices import Choice
from foredraft.core.proposal import Proposal
from foredraft.core.tree import EMPTY_TREE, ROOT, TokenTree
from foredraft.drafters.base import DraftRow
from foredraft.drafters.guide import Guide
from foredraft.drafters.worth import Worth


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

    def hang(self, node: int, choices: Sequence[Choice], is_copy: bool = False) -> int:
        """Add the likeliest tokens below a node (or `ROOT`); the number of the first."""
        chance, first = 1.0, len(self._nodes)
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
        return first

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
        authors = tuple("copy" if node.is_copy else "head" for node in kept)
        return Proposal.chosen(tree, tuple(node.chance for node in kept), authors)

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
