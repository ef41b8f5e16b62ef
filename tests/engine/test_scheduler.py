"""The order of rows: a request that has waited long enough goes before all new ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.engine.request import Request
from foredraft.engine.scheduler import MAX_PRIORITY, PRIORITY_ROUNDS, Scheduler
from tests.engine.helpers import new_request

ARRIVALS = st.lists(
    st.tuples(st.integers(0, 6), st.integers(1, 30), st.integers(1, 6), st.integers(-1, 2)),
    min_size=1,
    max_size=25,
)
"""Steps since the one before, length of the prompt, tokens to decode, priority."""


def row_of(number: int, num_prompt: int, priority: int) -> Request:
    return new_request([0] * num_prompt, number=number, priority=priority)


class Played:
    """Rows that read what they are given and decode for a while."""

    def __init__(self, max_rows: int, max_step_tokens: int) -> None:
        self.scheduler = Scheduler(max_rows, max_step_tokens)
        self.left: dict[int, int] = {}
        self.began: list[Request] = []

    def step(self) -> int:
        """Returns how many tokens of prompts were read."""
        while (row := self.scheduler.next_waiting()) is not None:
            row.slot = 0
            self.scheduler.start(row)
            self.began.append(row)
        turns, num_read = self.scheduler.next_batch(), 0
        for turn in turns:
            assert 1 <= turn.num_read <= turn.request.num_pending
            num_read += turn.num_read if turn.request.num_pending > 1 else 0
            if not turn.reads_all:
                turn.request.num_cached += turn.num_read
                continue
            turn.request.num_cached += turn.num_read
            turn.request.tokens.append(0)
            self.left[turn.request.request_id] -= 1
            if not self.left[turn.request.request_id]:
                self.scheduler.remove(turn.request)
        return num_read


@settings(max_examples=150)
@given(ARRIVALS, st.integers(1, 4), st.integers(1, 16))
def test_every_row_ends_and_a_step_reads_no_more_than_it_may(
    arrivals: list[tuple[int, int, int, int]], max_rows: int, max_step_tokens: int
) -> None:
    played = Played(max_rows, max_step_tokens)
    needed = 0
    for number, (pause, num_prompt, num_decoded, priority) in enumerate(arrivals):
        for _ in range(pause):
            assert played.step() <= max_step_tokens
        played.left[number] = num_decoded
        played.scheduler.add(row_of(number, num_prompt, priority))
        needed += num_prompt + num_decoded
    for _ in range(needed):
        played.step()
    assert not len(played.scheduler)


@settings(max_examples=8)
@given(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3))
def test_nobody_waits_longer_than_a_priority_is_worth(
    urgency: int, num_steps: int, max_rows: int
) -> None:
    """Urgent rows arrive without end, more than there is room for."""
    played = Played(max_rows, 16)
    waits = row_of(0, 1, 0)
    played.left[0] = 1
    for number in range(1, 1 + 3 * max_rows):
        played.left[number] = num_steps
        played.scheduler.add(row_of(number, 1, urgency))
    played.scheduler.add(waits)
    ahead = urgency * PRIORITY_ROUNDS + 3 * max_rows + 1  # rows that are worth as much or more
    most = (ahead + max_rows) * num_steps
    for steps in range(most):
        if waits in played.began:
            break
        number = len(played.left)
        played.left[number] = num_steps
        played.scheduler.add(row_of(number, 1, urgency))
        played.step()
        assert steps < most - 1, "it starves"


def test_no_priority_is_a_right_to_go_first_for_ever() -> None:
    """A request that has waited for the longest head start goes before all new ones."""
    scheduler = Scheduler(max_batch_size=1)
    first = row_of(0, 1, priority=0)
    scheduler.add(first)
    for number in range(1, PRIORITY_ROUNDS * MAX_PRIORITY):
        urgent = row_of(number, 1, priority=2**31)
        scheduler.add(urgent)
        assert scheduler.next_waiting() is urgent
        scheduler.start(urgent)
        scheduler.remove(urgent)
    scheduler.add(row_of(number + 1, 1, priority=2**31))
    assert scheduler.next_waiting() is first


def tenants_row(number: int, tenant: str | None) -> Request:
    return new_request([0], number=number, tenant=tenant)


def begun_by(scheduler: Scheduler, num_rows: int) -> list[str | None]:
    """The owners of the rows that begin next; each ends at once."""
    owners: list[str | None] = []
    for _ in range(num_rows):
        row = scheduler.next_waiting()
        assert row is not None
        scheduler.start(row)
        scheduler.remove(row)
        owners.append(row.owner)
    return owners


def test_an_owner_with_many_requests_takes_turns_with_the_others() -> None:
    scheduler = Scheduler(max_batch_size=1)
    for number in range(100):
        scheduler.add(tenants_row(number, f"many/{number}"))
    assert begun_by(scheduler, 10) == ["many"] * 10
    for number in range(100, 103):
        scheduler.add(tenants_row(number, "few/x"))
    scheduler.add(tenants_row(103, None))
    assert begun_by(scheduler, 7) == ["few", None, "many", "few", "many", "few", "many"]
    assert begun_by(scheduler, 87) == ["many"] * 87


def test_the_last_seat_is_kept_for_owners_who_come_back() -> None:
    """Each time another owner's reply ends, its next request finds the seat of the last one."""
    scheduler = Scheduler(max_batch_size=8)
    for number in range(40):
        scheduler.add(tenants_row(number, "greedy/"))
    others = [tenants_row(100 + number, "other/") for number in range(20)]
    for row in others[:4]:
        scheduler.add(row)
    while (begun := scheduler.next_waiting()) is not None:
        scheduler.start(begun)
    assert [row.owner for row in scheduler.running].count("other") == 4
    for ended, next_one in zip(others, others[4:], strict=False):
        scheduler.remove(ended)
        assert scheduler.next_waiting() is None, "it is the last seat"
        scheduler.add(next_one)
        assert scheduler.next_waiting() is next_one
        scheduler.start(next_one)
    for row in [row for row in scheduler.running if row.owner == "other"]:
        scheduler.remove(row)
    count = 0
    while (begun := scheduler.next_waiting()) is not None:
        scheduler.start(begun)
        count += 1
    assert count == 4, "no other owner is there"


def test_cancelled_requests_cost_their_owner_no_turns() -> None:
    scheduler = Scheduler(max_batch_size=1)
    rows = [tenants_row(number, "one/") for number in range(50)]
    for row in rows:
        scheduler.add(row)
    for number in range(50, 53):
        scheduler.add(tenants_row(number, "other/"))
    for row in rows:
        scheduler.remove(row)
    scheduler.add(tenants_row(53, "one/"))
    assert "one" in begun_by(scheduler, 2)


def test_a_step_takes_no_longer_because_thousands_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, num_looked_at = Scheduler(max_batch_size=2), 0

    def is_ready(request: Request) -> bool:
        nonlocal num_looked_at
        num_looked_at += 1
        return True

    monkeypatch.setattr(Request, "is_ready", property(is_ready))
    for number in range(1000):
        scheduler.add(row_of(number, 1, 0))
    while (row := scheduler.next_waiting()) is not None:
        scheduler.start(row)
    num_looked_at = 0
    assert scheduler.next_waiting() is None
    assert num_looked_at == 0
    assert scheduler.find(999) in scheduler._waiting
    scheduler.remove(row_one := scheduler.running[0])
    assert scheduler.find(row_one.request_id) is None
    assert scheduler.next_waiting() is scheduler.find(2)
    assert num_looked_at == 1
