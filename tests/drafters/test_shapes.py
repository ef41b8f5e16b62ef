"""Tree shapes: which nodes a tree gets, and what a step's cost makes of it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch

from foredraft.core.cost import CostModel, price_of
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import Proposal
from foredraft.core.tree import ROOT, TokenTree
from foredraft.drafters.base import DraftRow
from foredraft.drafters.shapes import BestFirstShape, FixedShape, TreeShape, planned_parents
from foredraft.drafters.worth import Worth
from foredraft.models.base import ScoreRow
from foredraft.models.table import TableModel
from tests.drafters.prices import FREE_NODES

DRAWN = SamplingParams(temperature=1.0, coupling="drawn")


def row(budget: int, params: SamplingParams | None = None, seed: int = 0) -> DraftRow:
    return DraftRow.of(0, (0, 1), params or SamplingParams(), budget, seed, prices=FREE_NODES)


def grown(shape: TreeShape, model: TableModel, drafted: DraftRow) -> Proposal:
    """The draft of ``model`` in that shape, scored depth by depth."""
    growth, slot = shape.grow(drafted), model.cache.allocate()
    while growth.frontier:
        assert len(growth.tree) <= shape.max_scored(drafted.budget)
        (scores,) = model.score([ScoreRow(slot, drafted.tokens, growth.tree)])
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


# ------------------------------------------------------------------------------------- fixed


def test_children_by_depth() -> None:
    assert FixedShape((3, 2, 1)).parents(100) == (
        *(ROOT, ROOT, ROOT),
        *(0, 0, 1, 1, 2, 2),
        *(3, 4, 5, 6, 7, 8),
    )


@pytest.mark.parametrize("budget", range(16))
def test_a_small_budget_keeps_the_nodes_near_the_root(budget: int) -> None:
    shape = FixedShape((3, 2, 1))
    assert shape.parents(budget) == shape.parents(100)[:budget]


@pytest.mark.parametrize("children", [(), (0,), (2, 0, 1), (-1,)])
def test_a_shape_without_children_is_refused(children: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="no tree shape"):
        FixedShape(children)


def test_a_fixed_tree_takes_the_likeliest_children() -> None:
    model = TableModel.random(6, seed=4)
    tree = grown(FixedShape((2, 2)), model, row(6)).tree
    assert tree.parents == (ROOT, ROOT, 0, 0, 1, 1)
    for parent, nodes in tree.children.items():
        path = () if parent == ROOT else tree.paths[parent]
        probs = model.probs((0, 1, *(tree.tokens[node] for node in path)))
        best = sorted(range(6), key=lambda token: -probs[token])[:2]
        assert [tree.tokens[node] for node in nodes] == best


def test_a_drawn_fixed_tree_has_the_same_shape_and_no_twins() -> None:
    model = TableModel.random(6, seed=4)
    for seed in range(20):
        proposal = grown(FixedShape((3, 2)), model, row(9, DRAWN, seed))
        assert proposal.is_drawn
        assert not proposal.replacement
        tree = proposal.tree
        assert tree.parents == FixedShape((3, 2)).parents(9)
        for nodes in tree.children.values():
            assert len({tree.tokens[node] for node in nodes}) == len(nodes)


@pytest.mark.parametrize("params", [SamplingParams(), DRAWN])
def test_a_vocabulary_can_run_out(params: SamplingParams) -> None:
    tree = grown(FixedShape((3, 3)), TableModel.random(2, seed=1), row(12, params)).tree
    assert tree.parents == (ROOT, ROOT, 0, 0, 1, 1)


def test_a_greedy_draft_has_one_token_to_draw() -> None:
    greedy = SamplingParams(temperature=0.0, coupling="drawn")
    tree = grown(FixedShape((3, 3)), TableModel.random(5, seed=1), row(12, greedy)).tree
    assert tree.parents == (ROOT, 0)


# ----------------------------------------------------------------------------------- planned


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


def test_a_planned_tree_is_complete_when_there_are_no_more_nodes() -> None:
    assert planned_parents((0.5, 0.2), 100, 2) == (ROOT, ROOT, 0, 0, 1, 1)
    assert planned_parents((0.5,), 0, 3) == ()


# -------------------------------------------------------------------------------- best-first


def test_best_first_keeps_the_likeliest_nodes() -> None:
    """Wide and deep enough, it is the best tree of that size among all trees."""
    for seed in range(5):
        model = TableModel.random(4, seed=seed, sharpness=1.5)
        everything = grown(FixedShape((4, 4, 4)), model, row(84)).tree
        probs = sorted(path_probs(model, (0, 1), everything), reverse=True)
        for budget in (1, 2, 5, 9):
            shape = BestFirstShape(width=4, max_depth=3)
            tree = grown(shape, model, row(budget)).tree
            found = sorted(path_probs(model, (0, 1), tree), reverse=True)
            assert found[0] == pytest.approx(probs[0])
            assert len(tree) == budget
            if budget <= 2:  # expanding four nodes a depth cannot miss the best two
                assert found == pytest.approx(probs[:budget])
            assert sum(found) >= 0.95 * sum(probs[:budget])


def test_best_first_ends_at_its_depth_and_needs_no_forward_for_its_leaves() -> None:
    model = TableModel.random(5, seed=2)
    for max_depth in (1, 2, 3):
        tree = grown(BestFirstShape(width=3, max_depth=max_depth), model, row(30)).tree
        assert tree.max_depth == max_depth


def test_best_first_stops_when_nothing_below_can_come_in() -> None:
    """A flat draft: all first-level nodes are likelier than any second-level one."""
    flat = TableModel(8, lambda context: [1 / 8] * 8)
    growth = BestFirstShape(width=8, max_depth=5).grow(row(4))
    (scores,) = flat.score([ScoreRow(flat.cache.allocate(), (0, 1))])
    growth.extend(scores.logits_NV)
    # The last of the four could only be replaced by something likelier than itself.
    assert len(growth.frontier) == 3


def test_a_drawn_request_gets_the_planned_tree() -> None:
    model = TableModel.random(9, seed=2)
    shape = BestFirstShape(width=2, max_depth=3)
    proposal = grown(shape, model, row(6, DRAWN))
    assert proposal.is_drawn
    assert proposal.tree.parents == planned_parents((0.6, 0.15), 6, 3)


# -------------------------------------------------------------------------------------- cost


def test_where_nodes_are_free_every_one_is_kept() -> None:
    assert Worth(FREE_NODES).best_num_nodes([0.5, 0.2, 1e-9], num_forwards=3) == 3


def test_the_number_of_nodes_maximises_expected_tokens_per_time() -> None:
    generator = random.Random(1)
    price = CostModel(((1, 10.0), (2, 11.5), (8, 19.0), (16, 36.0))).prices([0], 16)
    for _ in range(50):
        values = sorted((generator.random() ** 3 for _ in range(12)), reverse=True)
        rates = [(1 + sum(values[:n])) / (price_of(price, n) + 2 * 0.07) for n in range(13)]
        assert rates[Worth(price, 0.07).best_num_nodes(values, 2)] == max(rates)


def test_a_node_that_costs_more_than_it_brings_is_left_out() -> None:
    model = TableModel.random(8, seed=6, sharpness=2.0)
    price = (1.0, 1.2)
    tree = grown(BestFirstShape(4, 4, prices=price), model, row(12)).tree
    probs = sorted(path_probs(model, (0, 1), tree), reverse=True)
    everything = grown(BestFirstShape(4, 4), model, row(12)).tree
    all_probs = sorted(path_probs(model, (0, 1), everything), reverse=True)
    assert 0 < len(tree) < 12
    assert probs == pytest.approx(all_probs[: len(tree)])
    rate = (1 + sum(probs)) / price_of(price, len(tree))
    for n in range(13):
        assert rate >= (1 + sum(all_probs[:n])) / price_of(price, n) - 1e-12


def test_a_hopeless_draft_is_not_proposed() -> None:
    flat = TableModel(100, lambda context: [0.01] * 100)
    proposal = grown(BestFirstShape(prices=(1.0, 1.2)), flat, row(8))
    assert len(proposal.tree) == 0


def test_a_forward_is_not_spent_on_depth_that_cannot_pay() -> None:
    worth = Worth(CostModel(((1, 10.0), (2, 11.0))).prices([0], 16), round_cost=0.5)
    assert worth.is_worth_a_forward([0.9, 0.1], 0.9, 1)
    assert not worth.is_worth_a_forward([0.3, 0.1], 0.2, 1)
    assert not Worth(FREE_NODES).is_worth_a_forward([0.3], 0.0, 1)


def test_values_are_probabilities_at_temperature_one() -> None:
    logits_FV = torch.tensor([[2.0, 1.0, 0.0]])
    growth = BestFirstShape(width=3, max_depth=1).grow(row(3, SamplingParams(temperature=0.0)))
    growth.extend(logits_FV)
    assert growth.build().tree.tokens == (0, 1, 2)
    # A one-hot reading of temperature 0 would leave nothing for the second and third token.
    price = (1.0, 1.1)
    growth = BestFirstShape(3, 1, prices=price).grow(row(3, SamplingParams(temperature=0.0)))
    growth.extend(logits_FV)
    probs = sorted(logits_FV.softmax(1)[0].tolist(), reverse=True)
    assert len(growth.build().tree) == Worth(price).best_num_nodes(probs, 1) == 2
