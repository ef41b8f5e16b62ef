"""Which nodes a tree by probabilities consists of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from foredraft.core.cost import CostModel, Prices
from foredraft.core.params import SamplingParams
from foredraft.core.tree import TokenTree
from foredraft.drafters.base import DraftRow
from foredraft.drafters.guide import best_first

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
