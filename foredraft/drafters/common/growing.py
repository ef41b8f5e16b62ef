"""A tree grown round by round, for heads that score a few nodes at a time.

Each round scores the likeliest tokens that have no successors yet, all in one run of the head,
and hangs the likeliest tokens below them. Another round must be worth its time by the row's price;
in the end the nodes that are worth theirs stay. Looking at a token before it is dropped is fine
here: these drafts are chosen, and accepted only where the target draws the same (EAGLE-2, arXiv
2406.16858, grows level by level; here a round may mix depths).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from foredraft.core.choices import Choice
from foredraft.core.proposal import Proposal
from foredraft.core.tree import EMPTY_TREE, ROOT, TokenTree
from foredraft.drafters.base import DraftRow
from foredraft.drafters.common.price import Worth


@dataclass(frozen=True)
class GrowthLimits:
    """How far a tree may grow.

    Attributes:
        max_depth: tokens from the root to a leaf.
        width: nodes that one round scores.
        branching: tokens hung below one node.
        round_cost: time of a round, in plain steps.
    """

    max_depth: int = 6
    width: int = 4
    branching: int = 4
    round_cost: float = 0.06


@dataclass
class _Node:
    """A token of the growing tree.

    Attributes:
        parent: its number, or `ROOT`.
        chance: that all tokens up to this one are accepted.
        drafted: the tokens from the root to this one.
        place: its number among the scored nodes; -1 until it is scored.
    """

    token: int
    parent: int
    chance: float
    drafted: tuple[int, ...]
    place: int = -1


@dataclass
class Growth:
    """One row's tree while it grows.

    Args:
        row: what it is grown for.
        limits: how far.

    Attributes:
        scored: the tree of the nodes that have been scored, in the order of scoring.
        num_rounds: how many rounds have been run.
    """

    row: DraftRow
    limits: GrowthLimits
    scored: TokenTree = EMPTY_TREE
    num_rounds: int = 0
    _nodes: list[_Node] = field(default_factory=list)
    _open: list[int] = field(default_factory=list)

    def hang(self, node: int, choices: Sequence[Choice]) -> None:
        """Hang the likeliest tokens below a node (or `ROOT`)."""
        chance = 1.0
        drafted: tuple[int, ...] = ()
        if node != ROOT:
            chance, drafted = self._nodes[node].chance, self._nodes[node].drafted
        for choice in choices[: self.limits.branching]:
            below = (*drafted, choice.token)
            self._open.append(len(self._nodes))
            self._nodes.append(_Node(choice.token, node, chance * choice.chance, below))

    def next_round(self) -> list[int]:
        """The nodes to score now, none if another round is not worth its time.

        They join `scored` in this order.
        """
        best = sorted(
            (n for n in self._open if len(self._nodes[n].drafted) < self.limits.max_depth),
            key=lambda n: -self._nodes[n].chance,
        )[: self.limits.width]
        bound = sum(self._nodes[n].chance for n in best)
        if not best or len(self.scored) + len(best) > self.row.budget:
            return []
        if not self._worth().is_worth_a_forward(self._values(), bound, self.num_rounds):
            return []
        self._score(best)
        return best

    def drafted(self, node: int) -> tuple[int, ...]:
        """The tokens from the root to a node."""
        return self._nodes[node].drafted

    def place(self, node: int) -> int:
        """The number of a node in `scored`; `ROOT` stays what it is."""
        return node if node == ROOT else self._nodes[node].place

    def parent(self, node: int) -> int:
        return self._nodes[node].parent

    def build(self) -> Proposal:
        """The nodes that are worth their time."""
        values = self._values()
        size = self._worth().best_num_nodes(values, self.num_rounds)
        # No child is likelier than its parent, and of equal ones the parent was there first.
        kept = sorted(range(len(self._nodes)), key=lambda n: -self._nodes[n].chance)[:size]
        numbers = {ROOT: ROOT} | {node: number for number, node in enumerate(kept)}
        tokens = tuple(self._nodes[n].token for n in kept)
        parents = tuple(numbers[self._nodes[n].parent] for n in kept)
        return Proposal.chosen(TokenTree(tokens, parents))

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
        """The chances of the likeliest nodes, as many as may be drafted."""
        return sorted((n.chance for n in self._nodes), reverse=True)[: self.row.budget]

    def _worth(self) -> Worth:
        price = self.row.price
        return Worth(price, self.limits.round_cost * price.ms(0))
