"""Number of threads of a forward, on made-up machines."""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from foredraft.core.errors import ConfigError
from foredraft.kernels.threads import (
    ThreadChooser,
    check_threads,
    forward_size,
    spin_briefly,
)
from foredraft.system.cgroups import available_cpus
from tests.kernels.drivers import CORES, compile_driver, output_of

Machine = Callable[[int], float]
"""Seconds of a forward of one token, by the number of threads."""


def idle(cores: int) -> Machine:
    return lambda threads: 1e-3 * (2.0 + 8.0 / threads) if threads <= cores else 0.1


def busy(free: int) -> Machine:
    """Beyond the free cores every forward waits for a thread that has none."""
    return lambda threads: idle(64)(threads) * (1.0 if threads <= free else 3.0)


def run(chooser: ThreadChooser, machine: Machine, forwards: int, seed: int = 0) -> list[int]:
    """Threads of each of so many forwards of 1 to 9 tokens; times are a fifth noise."""
    generator, chosen = random.Random(seed), []
    for _ in range(forwards):
        tokens = generator.randrange(1, 10)
        chosen.append(chooser.choose((tokens,)))
        seconds = machine(chosen[-1]) * (1.0 + 0.1 * tokens) * generator.uniform(0.9, 1.1)
        chooser.observe((tokens,), seconds)
    return chosen


def seconds_of(machine: Machine, chosen: list[int]) -> float:
    return sum(machine(threads) for threads in chosen)


@pytest.mark.parametrize("cores", [1, 2, 4, 16])
def test_an_idle_machine_is_used_whole(cores: int) -> None:
    chosen = run(ThreadChooser(cores), idle(cores), 2000)
    assert chosen[1000:].count(cores) >= 1000 - 2 * 3 * 1000 / 128, "trials become rare"
    early = chosen[:500]
    assert seconds_of(idle(cores), early) < 1.1 * seconds_of(idle(cores), [cores] * 500)


@pytest.mark.parametrize(("cores", "free"), [(2, 1), (4, 3), (16, 12), (16, 1)])
def test_busy_cores_are_left_to_their_users(cores: int, free: int) -> None:
    chosen = run(ThreadChooser(cores), busy(free), 500)
    late = chosen[-200:]
    assert seconds_of(busy(free), late) < 1.1 * seconds_of(busy(free), [free] * len(late))


def test_the_number_follows_the_machine() -> None:
    chooser = ThreadChooser(2)
    run(chooser, idle(2), 300)
    assert run(chooser, busy(1), 60)[-20:].count(1) >= 17
    assert run(chooser, idle(2), 300)[-20:].count(2) >= 17


@pytest.mark.parametrize(("hiccup", "most"), [(1, 1.02), (4, 1.06), (8, 1.0), (12, 0.95)])
def test_hiccups_of_the_machine_cost_little(hiccup: int, most: float) -> None:
    """Every 64 forwards another process takes a core for some of them."""
    for seed in range(3):
        chooser, generator, spent, with_all = ThreadChooser(2), random.Random(seed), 0.0, 0.0
        for i in range(2000):
            machine = busy(1) if i % 64 < hiccup else idle(2)
            threads, noise = chooser.choose((1,)), generator.uniform(0.95, 1.05)
            chooser.observe((1,), machine(threads) * noise)
            spent, with_all = spent + machine(threads) * noise, with_all + machine(2) * noise
        assert spent < most * with_all


def test_long_and_short_forwards_in_turn_do_not_deceive_it() -> None:
    chooser, generator, chosen = ThreadChooser(2), random.Random(0), []
    for _ in range(600):
        tokens, entries = generator.choice([(1, 256), (8, 256), (1, 2000), (8, 2000)])
        size = forward_size(tokens, entries)
        chosen.append(chooser.choose(size))
        seconds = idle(2)(chosen[-1]) * (1.0 + 0.01 * tokens) * (1.0 + entries / 1000)
        chooser.observe(size, seconds * generator.uniform(0.9, 1.1))
    assert chosen[100:].count(1) <= 25


def test_what_has_never_been_seen_runs_with_the_best_number_in_a_trial_too() -> None:
    chooser = ThreadChooser(2)
    seen = 0
    while chooser.choose((1,)) == 2:
        chooser.observe((1,), 1.0)
        seen += 1
        assert seen < 100
    assert chooser.choose((2,)) == 2
    chooser.observe((2,), 5.0)
    assert chooser.choose((1,)) == 1  # still to be tried


def test_what_the_machine_has_not_is_refused() -> None:
    check_threads(available_cpus())
    with pytest.raises(ConfigError, match="threads is 100000; this machine runs 1 to"):
        check_threads(100_000)


def test_how_openmp_waits_is_the_users_to_say() -> None:
    for said in ({"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}):
        environment = dict(said)
        spin_briefly(environment)
        assert environment == said
    silent: dict[str, str] = {}
    spin_briefly(silent)
    assert list(silent) == ["GOMP_SPINCOUNT"]


def test_cold_forwards_are_not_what_a_trial_is_compared_with() -> None:
    """As when costs are measured at load: all sizes in turns, the first ones with cold caches."""
    chooser, chosen = ThreadChooser(2), list[int]()
    for number, tokens in enumerate((1, 2, 3, 4, 5, 8, 12, 16, 17, 24) * 3):
        size = forward_size(tokens)
        chosen.append(chooser.choose(size))
        cold = 4.0 if number < 10 else 1.0
        chooser.observe(size, cold * (2.0 + 0.2 * tokens) / chosen[-1])
    assert chooser.best == 2
    assert chosen.count(1) <= 3


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a thread choose its core")
def test_a_thread_does_not_wait_on_the_core_of_the_one_that_it_waits_for(tmp_path: Path) -> None:
    """Where the system puts both on one core, each spins in the other's way at every phase."""
    compiler = shutil.which("g++") or pytest.skip("no g++")
    said = output_of([str(compile_driver([compiler, "-O1"], CORES, tmp_path))])
    assert [line.split() for line in said.splitlines()] == [["1", "01"], []]
