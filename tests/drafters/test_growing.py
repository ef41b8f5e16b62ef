"""Trees grown in rounds: the likeliest nodes stay; copies go on where the head was not asked."""

from __future__ import annotations

from collections.abc import Iterator

from foredraft.core.choices import Choice
from foredraft.core.params import SamplingParams
from foredraft.core.tree import ROOT
from foredraft.drafters.base import DraftRow
from foredraft.drafters.heads.growth import Growth, GrowthLimits
from tests.drafters.prices import FREE_NODES

TEXT = (1, 2, 3)
LIMITS = GrowthLimits(max_depth=3, width=2, branching=2, round_cost=0.0)


def row(budget: int) -> DraftRow:
    return DraftRow.of(0, TEXT, SamplingParams(temperature=0.0), budget, prices=FREE_NODES)


class Counting:
    """A guide for a text that counts up, with a given confidence; places are last tokens."""

    place = 3

    def __init__(self, chance: float) -> None:
        self._chance = chance

    def successors(self, place: int) -> Iterator[tuple[int, float, int]]:
        yield place + 1, self._chance, place + 1

    def advance(self, place: int, token: int) -> int:
        return token


def test_a_round_scores_the_likeliest_nodes_and_hangs_below_them() -> None:
    growth = Growth(row(8), LIMITS)
    growth.hang(ROOT, [Choice(10, 0.6), Choice(11, 0.3), Choice(12, 0.1)])
    nodes = growth.next_round()
    assert [growth.drafted(node) for node in nodes] == [(10,), (11,)]
    growth.hang(nodes[0], [Choice(20, 0.9), Choice(22, 0.06), Choice(23, 0.03)])
    growth.hang(nodes[1], [Choice(21, 0.1)])
    tree = growth.build().tree
    # Two below a node, so 23 was not hung; below the root three times as many.
    assert tree.tokens == (10, 20, 11, 12, 22, 21)
    assert tree.parents == (ROOT, 0, ROOT, ROOT, 0, 2)


def test_the_budget_keeps_the_likeliest() -> None:
    growth = Growth(row(2), LIMITS)
    growth.hang(ROOT, [Choice(10, 0.6), Choice(11, 0.3)])
    (node, _) = growth.next_round()
    growth.hang(node, [Choice(20, 0.9)])
    assert growth.build().tree.tokens == (10, 20)


def test_what_is_copied_surely_is_not_asked_for_and_goes_on_alone() -> None:
    growth = Growth(row(6), LIMITS, Counting(0.95))
    growth.hang(ROOT, [Choice(4, 0.95)])
    assert growth.next_round() == []
    assert growth.build().tree.tokens == (4, 5, 6, 7, 8, 9)


def test_a_weak_copy_leaves_the_word_to_the_head() -> None:
    growth = Growth(row(6), LIMITS, Counting(0.3))
    growth.hang(ROOT, [Choice(4, 0.9)])
    (node,) = growth.next_round()
    assert growth.copied(node) == [Choice(5, 0.3)]
