"""Timing of forwards: what is run, and that nothing is left behind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.floor import Machine
from benchmarks.forwards import DrafterStepper, Size, TargetStepper, time_steps
from benchmarks.priors import SeenReply, measure_priors
from benchmarks.random_model import random_config, random_weights
from foredraft.drafters import build_drafter
from foredraft.drafters.spec import DrafterContext
from foredraft.drafters.text.confidence import Priors, priors
from foredraft.models.native.weights import count_weights
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
    assert count_weights(config).all == sum(tensor.numel() for tensor in weights.tensors().values())
    assert count_weights(config).all / 1e6 == pytest.approx(millions, abs=0.05)


VOCAB_SIZE = 64


def cycle(tokens: Sequence[int], count: int) -> list[int]:
    return [tokens[i % len(tokens)] for i in range(count)]


def measured(*replies: SeenReply) -> Priors:
    # Holds the token after each one likeliest: right about 0, 1, 2, … and nothing else.
    rows = [[0.9 if j == (i + 1) % VOCAB_SIZE else 0.1 / 63 for j in range(64)] for i in range(64)]
    target = TableModel(VOCAB_SIZE, lambda text: rows[text[-1]])
    return measure_priors(target, replies, lambda _: None)


def test_a_text_that_goes_in_circles() -> None:
    found, known = measured(SeenReply([9, 9], cycle([1, 2, 3, 4, 5], 200))), priors()
    assert found.repeated_text[-1] > known.repeated_text[-1] or found.repeated_text[-1] > 0.99
    assert found.followed == pytest.approx(known.followed)
    assert found.other_text == pytest.approx(known.other_text)
    # 1 to 4 were followed by what the target held likeliest, 5 never was.
    assert 0.7 < found.ranks[3][0] < 0.9


def test_priors_are_written_as_the_package_reads_them(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "priors.json"
    options = ["--model", str(checkpoint), "--dtype", "float32", "--max-tokens", "4"]
    arguments = ["priors", *options, "--limit", "2"]
    printed = CliRunner().invoke(app, arguments)
    assert printed.exit_code == 0
    assert CliRunner().invoke(app, [*arguments, "--write", str(file)]).exit_code == 0
    text = file.read_text()
    assert printed.stdout.endswith(text)
    assert Priors.parse(text)
    assert "python -m benchmarks priors --max-tokens 4" in text
