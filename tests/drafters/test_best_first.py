"""Which nodes a tree by probabilities consists of, at once and grown in rounds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from foredraft.core.choices import Choice
from foredraft.core.cost import CostModel, Prices
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.core.tree import ROOT, TokenTree
from foredraft.drafters.base import DraftRow
from foredraft.drafters.guide import best_first
from foredraft.drafters.heads import rows as module
from foredraft.drafters.heads.growth import Growth, GrowthLimits
from foredraft.drafters.heads.rows import LEAST_CHANCE, Candidates
from foredraft.drafters.spec import checked_cost, checked_count, checked_flag
from tests.drafters.prices import FREE_NODES

Word = tuple[int, ...]


def always(*probs: float) -> object:
    """Token i follows everything with the i-th probability."""

    def successors(word: Word) -> Iterator[tuple[int, float, Word]]:
        for token, prob in enumerate(probs):
            yield token, prob, (*word, token)

    return successors


def grown(
    successors: object, budget: int, price: Prices, branch: bool = True, **params: Any
) -> TokenTree:
    row = DraftRow.of(0, (5,), SamplingParams(**params), budget, prices=price)
    return best_first((), successors, row, branch)  # type: ignore[arg-type]


def paths(successors: object, budget: int, node_cost: float, branch: bool = True) -> list[Word]:
    tree = grown(successors, budget, (1.0, 1.0 + node_cost), branch)
    return [tuple(tree.tokens[node] for node in path) for path in tree.paths]


def test_likelier_paths_come_first_and_the_budget_ends_it() -> None:
    assert paths(always(0.6, 0.3), 5, 1e-9) == [(0,), (0, 0), (1,), (0, 0, 0), (0, 1)]


def test_a_node_that_costs_more_than_it_brings_is_left_out() -> None:
    """After one node: 1.6 tokens in 1.3 plain steps; the next brings 0.36 for 0.3, a worse rate."""
    assert paths(always(0.6, 0.3), 8, 0.3) == [(0,)]
    assert paths(always(0.29), 8, 0.3) == []
    assert len(paths(always(0.99), 16, 0.15)) == 16


def test_the_rate_is_the_best_of_all_sizes() -> None:
    def rate(size: int) -> float:
        return sum(0.8**depth for depth in range(size + 1)) / (1 + 0.2 * size)

    assert len(paths(always(0.8), 16, 0.2)) == max(range(17), key=rate)


def test_nodes_that_cost_nothing_are_taken_up_to_the_next_rise() -> None:
    """A forward takes tokens in blocks: five cost what two cost, the sixth costs a lot."""
    price = CostModel(((1, 10.0), (5, 10.1), (6, 14.0), (9, 14.1))).prices([0], 16)
    tree = grown(always(0.5), 8, price)
    assert len(tree) == 4


def test_a_block_that_pays_as_a_whole_is_taken_as_a_whole() -> None:
    price = CostModel(((1, 10.0), (2, 14.0), (5, 14.1))).prices([0], 16)
    tree = grown(always(0.9), 4, price)
    assert len(tree) == 4


def test_without_branches_the_likeliest_successor_is_followed() -> None:
    assert paths(always(0.6, 0.3), 3, 1e-9, branch=False) == [(0,), (0, 0), (0, 0, 0)]


def test_nothing_to_draft_and_nothing_allowed() -> None:
    assert grown(lambda word: (), 4, (1.0, 1.1)).tokens == ()
    assert paths(always(1.0), 0, 0.1) == []


def test_parents_come_before_children() -> None:
    tree = grown(always(0.5, 0.4), 12, (1.0, 1.0 + 1e-9))
    assert all(ROOT <= parent < node for node, parent in enumerate(tree.parents))


@pytest.mark.parametrize("value", [0, -1, "much", True, float("inf"), None])
def test_a_cost_must_be_a_number_above_zero(value: object) -> None:
    with pytest.raises(ConfigError, match="node_cost"):
        checked_cost("node_cost", value)


def test_option_values_from_the_command_line() -> None:
    assert checked_flag("shared", "true") is checked_flag("shared", 1) is True
    assert checked_flag("shared", "no") is False
    with pytest.raises(ConfigError, match="shared is 'maybe'"):
        checked_flag("shared", "maybe")
    with pytest.raises(ConfigError, match=r"min_match is 1\.5"):
        checked_count("min_match", 1.5)
    with pytest.raises(ConfigError, match="min_match is 0"):
        checked_count("min_match", 0)


def test_noise_that_rules_a_candidate_out_takes_it_out_of_the_draft() -> None:
    """At temperature 1 the noise of the position is known: of equal candidates one is likelier."""
    sizes = set()
    for text in range(40):
        row = DraftRow.of(0, (5,) * (text + 1), SamplingParams(temperature=1.0), 1)
        tree = best_first((), always(0.3, 0.3, 0.3), row)  # type: ignore[arg-type]
        sizes.add(tree.tokens)
    assert len(sizes) > 2
    drawn = SamplingParams(temperature=1.0, coupling="drawn")
    rows = [DraftRow.of(0, (5,) * n, drawn, 1) for n in range(1, 20)]
    assert {best_first((), always(0.4, 0.3), row).tokens for row in rows} == {(0,)}  # type: ignore[arg-type]


# ------------------------------------- candidates: the compiled pass and torch name the same tokens


def of(logits_NR: torch.Tensor, count: int, scale: float) -> tuple[list[list[Choice]], ...]:
    if module._library() is None:
        pytest.skip("no compiled kernel here")
    found = Candidates(torch.arange(logits_NR.shape[1]) * 3)
    return found.likeliest(logits_NR, count, scale), found._by_torch(logits_NR, count, scale)


@pytest.mark.parametrize("num_rows", [1, 7, 63, 64, 1000, 8192])
@pytest.mark.parametrize(("count", "scale"), [(4, 1.0), (64, 1.4), (64, 0.1), (1, 1.0)])
def test_both_ways_agree(num_rows: int, count: int, scale: float) -> None:
    torch.manual_seed(num_rows + count)
    compiled, by_torch = of(3.0 * torch.randn(5, num_rows), min(count, num_rows), scale)
    for ours, theirs in zip(compiled, by_torch, strict=True):
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        assert [chance for _, chance in ours] == pytest.approx([c for _, c in theirs], rel=1e-4)


def test_tokens_that_cannot_occur_are_not_named() -> None:
    compiled, by_torch = of(torch.tensor([[-math.inf, 1.0, -math.inf, 0.0, -30.0]]), 4, 1.0)
    assert [token for token, _ in compiled[0]] == [3, 9] == [token for token, _ in by_torch[0]]


def test_nothing_is_named_where_logits_are_broken() -> None:
    compiled, by_torch = of(torch.full((2, 40), math.nan), 4, 1.0)
    assert compiled == by_torch == [[], []]


def test_of_equal_logits_the_first_come_first() -> None:
    compiled, _ = of(torch.zeros(1, 200), 3, 1.0)
    assert compiled == [[Choice(token, pytest.approx(1 / 200)) for token in (0, 3, 6)]]
    assert LEAST_CHANCE < 1 / 200


# ---------------------------------------------------------------------------- trees grown in rounds


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
