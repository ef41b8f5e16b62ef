"""The cost of a forward by its tokens: measured when asked for, then followed."""

from __future__ import annotations

import pytest

from foredraft.core.tree import TokenTree
from foredraft.models import timing
from foredraft.models.base import ScoreRow
from foredraft.models.table import TableModel
from foredraft.models.timing import ForwardTimes, Roofline, measure_forward_ms

NEAR = ((1, 9.1), (2, 9.1), (3, 9.2), (4, 9.3), (5, 11.2), (8, 15.9), (12, 23.2), (17, 32.8))
FAR = ((1, 6.2), (2, 6.6), (3, 8.1), (4, 9.5), (5, 11.6), (8, 16.5), (12, 24.0), (17, 33.9))
"""Two states of one machine, minutes apart."""


def test_times_rise_with_size_and_leave_nothing_behind() -> None:
    target = TableModel.random(20, seed=1)
    times = measure_forward_ms(target)
    sizes, milliseconds = zip(*times, strict=True)
    assert list(sizes) == sorted(sizes)
    assert list(milliseconds) == sorted(milliseconds)
    assert target.cache.allocate() == 0


def test_a_small_context_limits_the_sizes() -> None:
    small = TableModel(20, TableModel.random(20, seed=1).probs, max_context=12)
    assert [size for size, _ in measure_forward_ms(small)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("times", [NEAR, FAR])
def test_a_roofline_comes_close_to_measured_times(times: timing.Times) -> None:
    roofline = Roofline.through(times)
    for size, ms in times:
        assert roofline.ms(size) == pytest.approx(ms, rel=0.15)


@pytest.mark.parametrize(("before", "after"), [(NEAR, FAR), (FAR, NEAR)])
def test_times_follow_the_machine(
    before: timing.Times, after: timing.Times, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "measure_forward_ms", lambda _: before)
    times, now = ForwardTimes(TableModel.random(20, seed=1)), dict(after)
    assert times() == before
    for _ in range(60):
        times.observe(1, now[1])
    for size, ms in times():  # sizes that nobody has tried since have moved as well
        if size <= 3:
            assert ms == pytest.approx(now[size], rel=0.2)
    for size in (1, 4, 8) * 40:
        times.observe(size, now[size])
    for size, ms in times():
        assert ms == pytest.approx(now[size], rel=0.17)


def test_one_slow_moment_changes_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "measure_forward_ms", lambda _: NEAR)
    times = ForwardTimes(TableModel.random(20, seed=1))
    times()
    times.observe(1, 500.0)
    assert dict(times())[1] == pytest.approx(9.1, rel=0.04)


def test_decoding_steps_of_one_row_are_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TableModel.random(20, seed=1)
    times = ForwardTimes(target)
    seen: list[int] = []
    monkeypatch.setattr(times, "observe", lambda num_tokens, ms: seen.append(num_tokens))
    watched = times.watch(target)
    slots = [target.cache.allocate(), target.cache.allocate()]
    watched.score([ScoreRow(slots[0], [1, 2, 3])])  # a prompt
    watched.score([ScoreRow(slot, [1]) for slot in slots])
    watched.score([ScoreRow(slots[0], [1], TokenTree.chain([2, 3]))])
    assert seen == [3]
    assert watched.vocab_size == target.vocab_size


def test_nothing_is_measured_until_somebody_asks() -> None:
    times = ForwardTimes(TableModel.random(20, seed=1))
    times.observe(1, 5.0)
    assert times._times == ()
