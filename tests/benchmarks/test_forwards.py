"""Timing of forwards: what is run, and that nothing is left behind."""

from __future__ import annotations

import pytest
import torch

from benchmarks.floor import Machine
from benchmarks.forwards import DrafterStepper, Size, TargetStepper, text, time_steps
from benchmarks.random_model import random_config, random_weights
from foredraft.drafters import build_drafter
from foredraft.drafters.spec import DrafterContext
from foredraft.models.table import TableModel


def test_every_size_is_timed_as_often_as_asked() -> None:
    target = TableModel.random(1000, seed=1, order=1)
    stepper = TargetStepper("target", target, context=8, max_rows=2)
    sizes = [Size(1, 1), Size(2, 4), Size(3, 1)]
    figures = time_steps([stepper], sizes, rounds=3, advance=lambda: None)
    assert [figure.size for figure in figures] == sizes[:2]
    assert all(len(figure.samples) == 3 for figure in figures)
    assert all(figure.median_ms() >= 0.0 for figure in figures)
    stepper.close()
    assert target.cache.slots == []


def test_a_drafter_is_timed_alone() -> None:
    target = TableModel.random(1000, seed=1, order=1)
    drafter = build_drafter("ngram", DrafterContext(target))
    stepper = DrafterStepper("ngram", drafter, target, context=30)
    assert not stepper.fits(Size(1, 1))
    assert stepper.step(Size(1, 4))["total"] >= 0.0


def test_the_floor_is_memory_for_one_token_and_arithmetic_for_many() -> None:
    machine = Machine(bytes_per_s=1e9, flops_per_s=1e9)
    assert machine.floor_ms(10_000_000, 1_000_000, 1) == 10.0
    assert machine.floor_ms(10_000_000, 1_000_000, 50) == 100.0


@pytest.mark.parametrize(
    ("name", "millions"),
    [("smollm2-135m", 134.5), ("llama-1b", 1235.8), ("llama-8b", 8030.3), ("moe-1b", 913.3)],
)
def test_shapes_are_those_of_the_models_they_are_named_after(name: str, millions: float) -> None:
    config = random_config(name)
    weights = random_weights(config, torch.bfloat16, "meta")
    assert config.num_parameters == sum(tensor.numel() for tensor in weights.tensors().values())
    assert config.num_parameters / 1e6 == pytest.approx(millions, abs=0.05)


def test_the_text_repeats_and_stays_in_every_vocabulary() -> None:
    assert len(set(text(500))) < 100
    assert max(text(500)) < 100
