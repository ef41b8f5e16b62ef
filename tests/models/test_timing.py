"""Measuring a forward's time leaves no trace."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from foredraft.cache.kv import KVCache, KVShape
from foredraft.models import timing
from foredraft.models.table import TableModel
from foredraft.models.timing import measure_cost


def test_times_rise_with_size_and_leave_nothing_behind() -> None:
    target = TableModel.random(20, seed=1)
    cost = measure_cost(target)
    milliseconds = [cost.ms([(n, 0)]) for n in (1, 2, 3, 4, 5, 8, 12, 17)]
    assert milliseconds == pytest.approx(sorted(milliseconds))
    assert target.cache.allocate() == 0
    measure_cost(TableModel(20, TableModel.random(20, seed=1).probs, max_context=12))


def test_a_slow_model_is_timed_at_the_telling_sizes_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One token takes 0.6 s, as that of a large model may."""
    now, tried = [0.0], list[int]()

    def forward_ms(target: TableModel, slot: int, num_tokens: int) -> float:
        tried.append(num_tokens)
        now[0] += 0.6
        return 600.0 + num_tokens

    monkeypatch.setattr(timing, "_forward_ms", forward_ms)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    cost = measure_cost(TableModel.random(20, seed=1))
    assert len(tried) < 7
    assert set(tried) == {1, 2, 4, 8}
    assert cost.ms([(1, 0)]) == pytest.approx(601.0)
    assert cost.ms([(4, 0)]) == pytest.approx(604.0)
    assert cost.ms([(8, 0)]) == pytest.approx(608.0)


def test_what_a_gpu_records_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first forward of a size takes seconds there, and the limit would leave no second."""
    now, tried = [0.0], list[int]()

    def forward_ms(target: TableModel, slot: int, num_tokens: int) -> float:
        taken = 1.0 if num_tokens in tried else 3000.0
        tried.append(num_tokens)
        now[0] += taken / 1e3
        return taken

    target = TableModel.random(20, seed=1)
    parts = SimpleNamespace(device=torch.device("cuda"))
    target.capabilities = replace(target.capabilities, parts=parts)
    monkeypatch.setattr(timing, "_forward_ms", forward_ms)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    cost = measure_cost(target)
    assert [cost.ms([(n, 64)]) for n in (1, 4, 17)] == pytest.approx([1.0] * 3)


def test_a_slow_moment_of_one_token_makes_no_other_size_dear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Times never fall with size, and noise only adds: so the smaller size was the wrong one."""

    def forward_ms(target: TableModel, slot: int, num_tokens: int) -> float:
        return 32.0 if num_tokens == 1 else 20.0 + 2.0 * num_tokens

    monkeypatch.setattr(timing, "_forward_ms", forward_ms)
    cost = measure_cost(TableModel.random(20, seed=1))
    times = [cost.ms([(n, 0)]) for n in (1, 2, 4)]
    assert times == pytest.approx([24.0, 24.0, 28.0])


def test_what_a_context_adds_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TableModel.random(20, seed=1)
    cache = KVCache(KVShape(1, 1, 4), torch.float32, "cpu", target.max_context)
    monkeypatch.setattr(target, "cache", cache)
    monkeypatch.setattr(target, "score", lambda rows: cache.will_write(0, len(rows[0].pending)))

    def forward_ms(_: TableModel, slot: int, num_tokens: int) -> float:
        return 10.0 + num_tokens + cache.length(slot) * (0.002 + 0.001 * num_tokens)

    monkeypatch.setattr(timing, "_forward_ms", forward_ms)
    cost = measure_cost(target)
    assert cost.attention.entry_ms == pytest.approx(0.002)
    assert cost.attention.pair_ms == pytest.approx(0.001)
    assert cost.ms([(1, 2000)]) == pytest.approx(11.0 + 2000 * 0.003)
    assert cost.ms([(8, 0)]) == pytest.approx(18.0)
    assert cache.num_bytes == 0


def test_without_memory_for_a_long_context_it_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TableModel.random(20, seed=1)
    cache = KVCache(KVShape(1, 1, 4), torch.float32, "cpu", 512)
    monkeypatch.setattr(target, "cache", cache)
    monkeypatch.setattr(target, "score", lambda rows: cache.will_write(0, len(rows[0].pending)))
    monkeypatch.setattr(timing, "_forward_ms", lambda _, slot, num_tokens: 10.0 + num_tokens)
    assert measure_cost(target).attention.ms([(8, 4000)]) == 0.0
