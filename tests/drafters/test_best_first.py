"""Which nodes a tree by probabilities consists of."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from foredraft.core.errors import ConfigError
from foredraft.core.tree import ROOT
from foredraft.drafters.common.best_first import best_first
from foredraft.drafters.common.options import checked_cost, checked_count, checked_flag
from foredraft.drafters.common.step_cost import StepCost

Word = tuple[int, ...]


def always(*probs: float) -> object:
    """Token i follows everything with the i-th probability."""

    def successors(word: Word) -> Iterator[tuple[int, float, Word]]:
        for token, prob in enumerate(probs):
            yield token, prob, (*word, token)

    return successors


def paths(successors: object, budget: int, node_cost: float, branch: bool = True) -> list[Word]:
    cost = StepCost.linear(node_cost)
    tree = best_first((), successors, budget, cost, branch)  # type: ignore[arg-type]
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
    cost = StepCost(((1, 10.0), (5, 10.1), (6, 14.0), (9, 14.1)))
    tree = best_first((), always(0.5), 8, cost)  # type: ignore[arg-type]
    assert len(tree) == 4


def test_a_block_that_pays_as_a_whole_is_taken_as_a_whole() -> None:
    cost = StepCost(((1, 10.0), (2, 14.0), (5, 14.1)))
    tree = best_first((), always(0.9), 4, cost)  # type: ignore[arg-type]
    assert len(tree) == 4


def test_without_branches_the_likeliest_successor_is_followed() -> None:
    assert paths(always(0.6, 0.3), 3, 1e-9, branch=False) == [(0,), (0, 0), (0, 0, 0)]


def test_nothing_to_draft_and_nothing_allowed() -> None:
    assert best_first((), lambda word: (), 4).tokens == ()
    assert paths(always(1.0), 0, 0.1) == []


def test_parents_come_before_children() -> None:
    cost = StepCost.linear(1e-9)
    tree = best_first((), always(0.5, 0.4), 12, cost)  # type: ignore[arg-type]
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
