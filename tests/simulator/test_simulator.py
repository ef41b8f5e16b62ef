"""Thousands of schedules, with everything failing that can; see `tests.simulator.simulation`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import pytest

from foredraft.cache.paged import Cache
from foredraft.core.proposal import NOT_READY
from foredraft.engine import drafting, slots
from foredraft.engine.engine import Engine
from foredraft.engine.request import Request
from foredraft.engine.turn import Turn
from tests.simulator.__main__ import simulate
from tests.simulator.simulation import Simulation


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Every injected fault is said in the log."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("first", [0, 2000])
def test_nothing_is_broken(first: int) -> None:
    _, steps, seen = simulate(first, 5000)
    assert steps >= 5000
    for name in ("length", "stop", "cancelled", "error", "error by a fault", "preemption"):
        assert seen[name] > 0, name
    assert seen["interrupted step"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nothing_is_broken_for_long() -> None:
    simulate(1_000_000, 100_000)


def test_a_schedule_is_its_seed() -> None:
    one, other = Simulation(12), Simulation(12)
    one.run()
    other.run()
    assert (one.num_steps, one.seen) == (other.num_steps, other.seen)
    assert [a.token_ids for a in one.asked.values()] == [a.token_ids for a in other.asked.values()]


# ----------------------------------------------------------------------- the simulator would notice


Patch = pytest.MonkeyPatch


def a_slot_that_is_not_given_back(patch: Patch) -> None:
    def close(cache: Cache, row: Request) -> None:
        row.slot, row.num_cached = -1, 0

    patch.setattr(slots, "end", close)


def a_row_that_resumes_too_late_in_its_text(patch: Patch) -> None:
    preempt = Engine._preempt

    def forgetful(self: Engine, row: Request) -> None:
        preempt(self, row)
        del row.tokens[-1:]

    patch.setattr(Engine, "_preempt", forgetful)


def drafts_that_are_counted_and_were_not_asked_for(patch: Patch) -> None:
    propose = drafting.propose

    def counting(batch: Sequence[Turn]) -> None:
        propose(batch)
        for turn in batch:
            turn.budget = turn.allowance.budget

    patch.setattr(drafting, "propose", counting)


def a_drafter_that_is_not_ready_and_counts_as_asked(patch: Patch) -> None:
    patch.setitem(vars(NOT_READY), "is_ready", True)


def guesses_in_what_others_begin_with(patch: Patch) -> None:
    """Entries that a drafter leaves behind the text, on the target's own cache."""
    publish = Cache.publish

    def hasty(self: Cache, slot: int, tokens: Sequence[int]) -> None:
        state, length = self.slot(slot), self.length(slot)
        state.length = min(len(state.table) * self.block_size, len(tokens))
        publish(self, slot, tokens)
        state.length = length

    patch.setattr(Cache, "publish", hasty)


def a_row_that_nobody_drafts_for_after_a_preemption(patch: Patch) -> None:
    begin = drafting.begin

    def once(request: Request, running: Sequence[Request]) -> None:
        if request.num_prompt == len(request.tokens):
            begin(request, running)

    patch.setattr(drafting, "begin", once)


def a_text_that_is_kept_only_as_far_as_a_drafter_followed(patch: Patch) -> None:
    retire = Cache.retire

    def covered(self: Cache, slot: int, tokens: Sequence[int]) -> None:
        held = min((layers.covered(slot) for layers in self._layers), default=len(tokens))
        retire(self, slot, tokens[:held])

    patch.setattr(Cache, "retire", covered)


def bad_entries_that_are_found_by_way_of_a_text_in_use(patch: Patch) -> None:
    patch.setattr(Cache, "distrust", lambda self: self.pool.distrust())


def a_request_that_fails_for_the_memory_of_others(patch: Patch) -> None:
    def hasty(self: Engine, batch: Sequence[Turn], error: Exception) -> list[Turn]:
        batch[-1].request.fail(error)
        return []

    patch.setattr(Engine, "_with_room", hasty)


def a_queue_out_of_order(patch: Patch) -> None:
    add = Engine.add

    def hurried(self: Engine, rows: list[Request], reader: object = None) -> None:
        add(self, rows, reader)  # type: ignore[arg-type]
        self._scheduler._waiting.reverse()

    patch.setattr(Engine, "add", hurried)


def who_stays_apart_in_the_steps_of_others(patch: Patch) -> None:
    patch.setattr("foredraft.engine.scheduler._apart", lambda request: None)


def a_drafter_that_an_interrupt_left_behind(patch: Patch) -> None:
    def forgetful(self: Engine) -> None:
        self._was_interrupted = False

    patch.setattr(Engine, "_end_drafting", forgetful)
    patch.setattr("tests.simulator.simulation.INTERRUPTED", 1.0)


MISTAKES: dict[Callable[[Patch], None], int] = {
    a_slot_that_is_not_given_back: 0,
    a_row_that_resumes_too_late_in_its_text: 0,
    drafts_that_are_counted_and_were_not_asked_for: 0,
    a_drafter_that_is_not_ready_and_counts_as_asked: 0,
    guesses_in_what_others_begin_with: 200,  # few schedules are short of memory just there
    a_row_that_nobody_drafts_for_after_a_preemption: 0,
    a_text_that_is_kept_only_as_far_as_a_drafter_followed: 0,
    bad_entries_that_are_found_by_way_of_a_text_in_use: 1410,  # one in ten thousand
    a_request_that_fails_for_the_memory_of_others: 0,
    a_queue_out_of_order: 0,
    who_stays_apart_in_the_steps_of_others: 0,
    a_drafter_that_an_interrupt_left_behind: 390,
}
"""What is broken, and the seed of the first schedule that is tried."""


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_it_notices(mistake: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mistake(monkeypatch)
    with pytest.raises(BaseException):
        simulate(MISTAKES[mistake], 20_000)
