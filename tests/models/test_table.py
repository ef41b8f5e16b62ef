"""The table model and its cache of tokens: what the exactness tests stand on."""

from __future__ import annotations

import math

import pytest
import torch

from foredraft.core.errors import ConfigError
from foredraft.core.tree import ROOT, TokenTree
from foredraft.models.base import ScoreRow
from foredraft.models.table import TableModel

ORDER_1 = {
    (): (0.5, 0.25, 0.25),
    (0,): (0.1, 0.2, 0.7),
    (1,): (0.0, 1.0, 0.0),
    (2,): (0.3, 0.3, 0.4),
}


def test_scores_are_the_logs_of_the_table() -> None:
    model = TableModel.from_table(3, ORDER_1, order=1)
    tree = TokenTree((0, 1, 2), (ROOT, ROOT, 0))
    [scores] = model.score([ScoreRow(model.cache.allocate(), (2, 2), tree)])
    for node, last in enumerate((2, 0, 1, 2)):
        assert scores.logits_NV[node].exp().tolist() == pytest.approx(ORDER_1[(last,)])
    assert scores.logits_NV.dtype == torch.float64
    assert scores.logits_NV[2, 0] == -math.inf


def test_a_node_sees_its_ancestors_and_nothing_else() -> None:
    seen: list[tuple[int, ...]] = []

    def conditional(context: tuple[int, ...]) -> tuple[float, ...]:
        seen.append(context)
        return (0.2,) * 5

    model = TableModel(5, conditional)
    slot = model.cache.allocate()
    model.score([ScoreRow(slot, (0,))])
    model.cache.keep(slot, 1, ())
    model.score([ScoreRow(slot, (1,), TokenTree((2, 3, 4), (ROOT, ROOT, 1)))])
    assert seen == [(0,), (0, 1), (0, 1, 2), (0, 1, 3), (0, 1, 3, 4)]


def test_taps_tell_layer_token_position_and_predecessor() -> None:
    model = TableModel.random(9, seed=1)
    slot = model.cache.allocate()
    model.score([ScoreRow(slot, (5,))])
    model.cache.keep(slot, 1, ())
    row = ScoreRow(slot, (6, 7), TokenTree((2, 3, 4), (ROOT, ROOT, 1)))
    scores = model.score([ScoreRow(model.cache.allocate(), (8,), wants_logits=False), row], (1,))
    assert scores[0].logits_NV.shape == (0, 9)
    assert scores[0].taps[1].tolist() == [[1, 8, 0, -1]]
    assert scores[1].taps[1].tolist() == [
        [1, 6, 1, 5],
        [1, 7, 2, 6],
        [1, 2, 3, 7],
        [1, 3, 3, 7],
        [1, 4, 4, 3],
    ]
    with pytest.raises(ConfigError, match="layer 2 cannot be tapped"):
        model.score([row], taps=(2,))


def test_random_tables_are_distributions_fixed_by_their_seed() -> None:
    model, twin = TableModel.random(4, seed=3), TableModel.random(4, seed=3)
    assert sum(model.probs((1, 2, 3))) == pytest.approx(1.0)
    assert model.probs((1, 2, 3)) == twin.probs((0, 2, 3))  # order 2: older tokens do not count
    assert model.probs((1, 2, 3)) != TableModel.random(4, seed=4).probs((1, 2, 3))
    assert TableModel.random(4, seed=3, sharpness=0.0).probs(()) == pytest.approx([0.25] * 4)
