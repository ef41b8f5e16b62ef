"""What a forward costs is measured without a trace."""

from __future__ import annotations

import pytest

from foredraft.models import timing
from foredraft.models.table import TableModel
from foredraft.models.timing import measure_cost


def test_times_rise_with_size_and_leave_nothing_behind() -> None:
    target = TableModel.random(20, seed=1)
    cost = measure_cost(target)
    milliseconds = [cost.ms([(n, 0)]) for n in (1, 2, 3, 4, 5, 8, 12, 17)]
    assert milliseconds == sorted(milliseconds)
    assert target.cache.allocate() == 0


def test_a_small_context_limits_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    small = TableModel(20, TableModel.random(20, seed=1).probs, max_context=12)
    tried: set[int] = set()
    measure = timing._forward_ms

    def forward_ms(target: TableModel, slot: int, num_tokens: int) -> float:
        tried.add(num_tokens)
        return measure(target, slot, num_tokens)

    monkeypatch.setattr(timing, "_forward_ms", forward_ms)
    measure_cost(small)
    assert tried == {1, 2, 3, 4, 5}
