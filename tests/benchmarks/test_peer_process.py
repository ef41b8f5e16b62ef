"""Peers in processes of their own, and what a crash of one costs."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence

import pytest

from benchmarks.compare import run_trials
from benchmarks.contenders import Contender, ContenderRun
from benchmarks.forwards import Size, time_steps
from benchmarks.peer_process import PeerContender, PeerStepper
from benchmarks.prompts import time_reading
from benchmarks.timing import PeerFailed
from foredraft.bench.prompts import BenchPrompt
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams

CRASHED = "crashed (signal 11)"


class Fragile:
    """Counts on from a prompt; reads at address 0 where there is more than one token to read.

    Args:
        problem: what happens as it is made.
    """

    name = "fragile"

    def __init__(self, problem: str = "") -> None:
        print("a library that prints")  # noqa: T201
        if problem == "crash":
            ctypes.string_at(0)
        if problem:
            raise ConfigError(problem) if problem == "mistake" else RuntimeError(problem)

    def run(self, prompt_ids: Sequence[int], params: SamplingParams) -> ContenderRun:
        started = time.perf_counter()
        self.step(Size(1, len(prompt_ids)))
        found = tuple(prompt_ids[-1] + i for i in range(1, params.max_tokens + 1))
        return ContenderRun(found, 0.5, 1.0 + time.perf_counter() - started, 1)

    def step(self, size: Size) -> dict[str, float]:
        if size.tokens > 1:
            ctypes.string_at(0)
        return {"total": float(os.getpid())}


class Sound:
    """The same in this process, which reads any number."""

    name = "sound"

    def run(self, prompt_ids: Sequence[int], params: SamplingParams) -> ContenderRun:
        return ContenderRun((prompt_ids[-1] + 1,), 0.5, 1.0, 1)


def test_a_peer_answers_from_its_own_process() -> None:
    run = PeerContender(Fragile, "x").run([7], SamplingParams(max_tokens=3))
    assert run.token_ids == (8, 9, 10)
    assert run.first_s == 0.5
    stepper = PeerStepper(Fragile, "x")
    assert not stepper.fits(Size(2, 1))
    assert stepper.step(Size(1, 1))["total"] != os.getpid()


@pytest.mark.slow  # each process imports torch
def test_a_crash_is_said_and_the_next_question_starts_it_anew() -> None:
    peer = PeerStepper(Fragile, "x")
    with pytest.raises(PeerFailed) as reason:
        peer.step(Size(1, 2))
    assert str(reason.value) == peer.failure == CRASHED
    assert peer.step(Size(1, 1))["total"] > 0


@pytest.mark.parametrize(
    ("problem", "failure"), [("crash", CRASHED), ("broken", "failed (RuntimeError: broken)")]
)
def test_what_fails_as_it_is_made_is_made_once(problem: str, failure: str) -> None:
    peer = PeerContender(Fragile, "x", problem=problem)
    for _ in range(2):
        with pytest.raises(PeerFailed) as reason:
            peer.run([7], SamplingParams())
        assert str(reason.value) == failure


def test_a_mistake_in_its_options_is_an_error_at_once() -> None:
    with pytest.raises(ConfigError, match="mistake"):
        PeerContender(Fragile, "x", problem="mistake")


@pytest.mark.slow  # each process imports torch
def test_a_crash_costs_its_figure_alone() -> None:
    sizes = [Size(1, 2), Size(1, 1)]
    figures = time_steps([PeerStepper(Fragile, "fragile")], sizes, 2, lambda: None)
    assert [figure.failure for figure in figures] == [CRASHED, None]
    assert len(figures[1].samples) == 2
    assert figures[0].as_dict() == {"name": "fragile", "rows": 1, "tokens": 2, "failure": CRASHED}

    contenders: list[Contender] = [Sound(), PeerContender(Fragile, "fragile")]
    read = time_reading(contenders, [3], 10, 1, 0, lambda: None)
    assert [figure.failure for figure in read] == [None, CRASHED]
    assert read[0].median_ms() == 500.0


def test_a_peer_that_crashes_is_left_out_of_a_comparison() -> None:
    contenders: list[Contender] = [Sound(), PeerContender(Fragile, "fragile")]
    prompts = [(BenchPrompt(str(n), "chat", "text"), [5] * n) for n in (1, 2, 1)]
    trials = run_trials(contenders, prompts, SamplingParams(max_tokens=1), [0.0], lambda _: None)
    assert [trial.contender for trial in trials] == ["sound"] * 3
