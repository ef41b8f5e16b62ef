"""The cost of a forward by its tokens, as measured at load."""

from __future__ import annotations

from foredraft.models.table import TableModel
from foredraft.models.timing import measure_forward_ms


def test_times_rise_with_size_and_leave_nothing_behind() -> None:
    target = TableModel.random(20, seed=1)
    times = measure_forward_ms(target)
    sizes, milliseconds = zip(*times, strict=True)
    assert list(sizes) == sorted(sizes)
    assert list(milliseconds) == sorted(milliseconds)
    assert target.cache.allocate() == 0


def test_a_small_context_limits_the_sizes() -> None:
    small = TableModel(20, TableModel.random(20, seed=1).probs, max_context=12)
    assert [size for size, _ in measure_forward_ms(small)] == [1, 2, 4, 5]
