"""Trees that grow: which nodes they get, and what a step's cost makes of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest

from foredraft.core.choices import Choice
from foredraft.core.cost import CostModel, price_of
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import Proposal
from foredraft.core.tree import ROOT, TokenTree
from foredraft.drafters.base import DraftRow
from foredraft.drafters.growth import Growth, GrowthLimits, PlannedGrowth, planned_parents
from foredraft.drafters.worth import Worth
from foredraft.models.base import ScoreRow
from foredraft.models.table import TableModel
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
    (node,) = growth.next_round()  # below 11 nothing can displace it
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


# ---------------------------------------------------------------------- from a model's logits

DRAWN = SamplingParams(temperature=1.0, coupling="drawn")


def drafting(
    budget: int, params: SamplingParams | None = None, prices: tuple[float, ...] = FREE_NODES
) -> DraftRow:
    return DraftRow.of(0, (0, 1), params or SamplingParams(), budget, prices=prices)


def of_limits(row: DraftRow, **limits: int) -> Growth:
    return Growth(row, GrowthLimits(**limits, round_cost=0.0), room=20, num_rounds=1)


def grown(growth: Growth | PlannedGrowth, model: TableModel) -> Proposal:
    """The draft of ``model``, scored round by round."""
    slot = model.cache.allocate()
    while growth.frontier:
        (scores,) = model.score([ScoreRow(slot, (0, 1), growth.scored)])
        growth.extend(scores.logits_NV[[node + 1 for node in growth.frontier]])
    return growth.build()


def path_probs(model: TableModel, context: tuple[int, ...], tree: TokenTree) -> list[float]:
    """The draft probability of each node's path."""
    probs = []
    for path in tree.paths:
        text, prob = context, 1.0
        for node in path:
            prob *= model.probs(text)[tree.tokens[node]]
            text = (*text, tree.tokens[node])
        probs.append(prob)
    return probs


def test_the_likeliest_nodes_of_all_are_found() -> None:
    """Wide and deep enough, it is the best tree of that size among all trees."""
    for seed in range(5):
        model = TableModel.random(4, seed=seed, sharpness=1.5)
        every = PlannedGrowth(drafting(84), planned_parents((0.25,) * 4, 84, 3))
        everything = grown(every, model).tree
        probs = sorted(path_probs(model, (0, 1), everything), reverse=True)
        for budget in (1, 2, 5, 9):
            tree = grown(of_limits(drafting(budget), max_depth=3), model).tree
            found = sorted(path_probs(model, (0, 1), tree), reverse=True)
            assert found[0] == pytest.approx(probs[0])
            assert len(tree) == budget
            if budget <= 2:  # expanding four nodes a round cannot miss the best two
                assert found == pytest.approx(probs[:budget])
            assert sum(found) >= 0.95 * sum(probs[:budget])


def test_it_stops_when_nothing_below_can_come_in() -> None:
    """A flat draft: all first-level nodes are likelier than any second-level one."""
    flat = TableModel(8, lambda context: [1 / 8] * 8)
    growth = of_limits(drafting(4), width=8)
    (scores,) = flat.score([ScoreRow(flat.cache.allocate(), (0, 1))])
    growth.extend(scores.logits_NV)
    assert growth.frontier == []


def test_a_node_that_costs_more_than_it_brings_is_left_out() -> None:
    model = TableModel.random(8, seed=6, sharpness=2.0)
    price = (1.0, 1.2)
    tree = grown(of_limits(drafting(12, prices=price)), model).tree
    probs = sorted(path_probs(model, (0, 1), tree), reverse=True)
    everything = grown(of_limits(drafting(12)), model).tree
    all_probs = sorted(path_probs(model, (0, 1), everything), reverse=True)
    assert 0 < len(tree) < 12
    assert probs == pytest.approx(all_probs[: len(tree)])
    rate = (1 + sum(probs)) / price_of(price, len(tree))
    for n in range(13):
        assert rate >= (1 + sum(all_probs[:n])) / price_of(price, n) - 1e-12


def test_chances_of_a_greedy_request_are_those_at_temperature_one() -> None:
    """A one-hot reading of temperature 0 would leave nothing for the second token."""
    greedy = SamplingParams(temperature=0.0)
    model = TableModel(3, lambda context: [0.67, 0.24, 0.09])
    assert grown(of_limits(drafting(3, greedy), max_depth=1), model).tree.tokens == (0, 1, 2)
    tree = grown(of_limits(drafting(3, greedy, (1.0, 1.1)), max_depth=1), model).tree
    assert len(tree) == Worth((1.0, 1.1)).best_num_nodes([0.67, 0.24, 0.09], 1) == 2


# ----------------------------------------------------------------------------------- planned


def test_a_planned_tree_takes_the_likeliest_children() -> None:
    model = TableModel.random(6, seed=4)
    tree = grown(PlannedGrowth(drafting(6), (ROOT, ROOT, 0, 0, 1, 1)), model).tree
    assert tree.parents == (ROOT, ROOT, 0, 0, 1, 1)
    for parent, nodes in tree.children.items():
        path = () if parent == ROOT else tree.paths[parent]
        probs = model.probs((0, 1, *(tree.tokens[node] for node in path)))
        best = sorted(range(6), key=lambda token: -probs[token])[:2]
        assert [tree.tokens[node] for node in nodes] == best


def test_a_drawn_tree_has_the_planned_shape_and_no_twins() -> None:
    model, parents = TableModel.random(6, seed=4), (ROOT, ROOT, ROOT, 0, 0, 1, 1, 2, 2)
    for seed in range(20):
        row = DraftRow.of(0, (0, 1), DRAWN, 9, seed)
        proposal = grown(PlannedGrowth(row, parents), model)
        assert proposal.is_drawn
        assert not proposal.replacement
        tree = proposal.tree
        assert tree.parents == parents
        for nodes in tree.children.values():
            assert len({tree.tokens[node] for node in nodes}) == len(nodes)


@pytest.mark.parametrize("params", [SamplingParams(), DRAWN])
def test_a_vocabulary_can_run_out(params: SamplingParams) -> None:
    parents = planned_parents((0.3, 0.2, 0.1), 12, 2)
    tree = grown(PlannedGrowth(drafting(12, params), parents), TableModel.random(2, seed=1)).tree
    assert tree.parents == (ROOT, ROOT, 0, 0, 1, 1)


def expected_accepted(parents: Sequence[int], acceptance: Sequence[float]) -> float:
    values: list[float] = []
    for node, parent in enumerate(parents):
        rank = list(parents[:node]).count(parent)
        above = 1.0 if parent == ROOT else values[parent]
        values.append(above * (acceptance[rank] if rank < len(acceptance) else 0.0))
    return sum(values)


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("max_depth", [1, 2, 5])
def test_no_tree_beats_the_planned_one(num_nodes: int, max_depth: int) -> None:
    """Against every tree of that many nodes."""
    generator = random.Random(num_nodes)
    for _ in range(10):
        acceptance = sorted((generator.random() for _ in range(3)), reverse=True)
        planned = planned_parents(acceptance, num_nodes, max_depth)
        best = max(
            expected_accepted(parents, acceptance)
            for parents in itertools.product(*(range(ROOT, node) for node in range(num_nodes)))
            if TokenTree((0,) * num_nodes, parents).max_depth <= max_depth
        )
        assert expected_accepted(planned, acceptance) == pytest.approx(best)
        assert TokenTree((0,) * len(planned), planned).max_depth <= max_depth


# -------------------------------------------------------------------------------------- cost


def test_the_number_of_nodes_maximises_expected_tokens_per_time() -> None:
    generator = random.Random(1)
    price = CostModel(((1, 10.0), (2, 11.5), (8, 19.0), (16, 36.0))).prices([0], 16)
    for _ in range(50):
        values = sorted((generator.random() ** 3 for _ in range(12)), reverse=True)
        rates = [(1 + sum(values[:n])) / (price_of(price, n) + 2 * 0.07) for n in range(13)]
        assert rates[Worth(price, 0.07).best_num_nodes(values, 2)] == max(rates)


def test_a_forward_is_not_spent_on_depth_that_cannot_pay() -> None:
    worth = Worth(CostModel(((1, 10.0), (2, 11.0))).prices([0], 16), round_cost=0.5)
    assert worth.is_worth_a_forward([0.9, 0.1], 0.9, 1)
    assert not worth.is_worth_a_forward([0.3, 0.1], 0.2, 1)
    assert not Worth(FREE_NODES).is_worth_a_forward([0.3], 0.0, 1)
