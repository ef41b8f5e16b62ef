"""Thousands of schedules, with everything failing that can; see `tests.simulator.simulation`."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from foredraft.engine.engine import Engine
from foredraft.engine.places import Places
from foredraft.engine.request import Request
from tests.simulator.__main__ import simulate
from tests.simulator.simulation import Simulation


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Every injected fault is said in the log."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("first", range(0, 4000, 1000))
def test_nothing_is_broken(first: int) -> None:
    _, steps, seen = simulate(first, 5000)
    assert steps >= 5000
    for name in ("length", "stop", "cancelled", "error", "error by a fault", "preemption"):
        assert seen[name] > 0, name


@pytest.mark.slow
def test_nothing_is_broken_for_long() -> None:
    simulate(1_000_000, 100_000)


def test_a_schedule_is_its_seed() -> None:
    one, other = Simulation(12), Simulation(12)
    one.run()
    other.run()
    assert (one.num_steps, one.seen) == (other.num_steps, other.seen)
    assert [a.token_ids for a in one.asked.values()] == [a.token_ids for a in other.asked.values()]


# ----------------------------------------------------------------------- the simulator would notice


def notices(num_steps: int = 20_000) -> bool:
    try:
        simulate(0, num_steps)
    except BaseException:
        return True
    return False


def test_it_notices_a_slot_that_is_not_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def close(self: Places, row: Request) -> None:
        row.slot, row.num_cached = -1, 0

    monkeypatch.setattr(Places, "close", close)
    assert notices()


def test_it_notices_a_row_that_resumes_too_late_in_its_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    preempt = Engine._preempt

    def forgetful(self: Engine, row: Request) -> None:
        preempt(self, row)
        del row.tokens[-1:]

    monkeypatch.setattr(Engine, "_preempt", forgetful)
    assert notices()


def test_it_notices_a_queue_out_of_order(monkeypatch: pytest.MonkeyPatch) -> None:
    add = Engine.add

    def hurried(self: Engine, rows: list[Request], reader: object = None) -> None:
        add(self, rows, reader)  # type: ignore[arg-type]
        self._scheduler._waiting.reverse()

    monkeypatch.setattr(Engine, "add", hurried)
    assert notices()
