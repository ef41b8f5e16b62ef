"""Noise in the weights: as much as was asked for, in all of them, the same every time."""

from __future__ import annotations

import pytest
import torch

from benchmarks.noisy_model import add_noise
from benchmarks.random_model import Shape, random_config, random_weights
from foredraft.core.errors import ConfigError
from foredraft.models.native.target import NativeTarget


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> NativeTarget:
    tiny = Shape(64, 128, 2, 4, 2, 16, 1000, True)
    monkeypatch.setattr("benchmarks.random_model.shapes", lambda: {"tiny": tiny})
    config = random_config("tiny")
    return NativeTarget(config, random_weights(config, torch.float32, "cpu"))


def test_every_matrix_moves_by_the_share_of_its_spread(target: NativeTarget) -> None:
    before = [matrix.clone() for matrix in target.weights.matrices()]
    add_noise(target, 0.1)
    changes = []
    for old, new in zip(before, target.weights.matrices(), strict=True):
        changes.append((new - old).flatten()[:1000])
        assert float((new - old).std() / old.std()) == pytest.approx(0.1, rel=0.1)
    assert len({tuple(change.tolist()) for change in changes}) == len(changes)


def test_models_without_such_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match="native"):
        add_noise(None, 0.1)
