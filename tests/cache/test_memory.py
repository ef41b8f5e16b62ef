"""Memory limits of caches."""

from __future__ import annotations

import gc

import pytest
import torch

from foredraft.cache.kv import KVCache, KVShape
from foredraft.cache.memory import (
    CacheMemory,
    available_memory,
    check_fits,
    checked_memory,
    default_memory,
    machine_memory,
)
from foredraft.core.errors import CacheFullError, ConfigError
from foredraft.options import LoadOptions


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (None, None),
        (1, 1),
        ("2GB", 2 * 10**9),
        ("2 gb", 2 * 10**9),
        ("1.5GB", 15 * 10**8),
        ("512MiB", 512 * 2**20),
        ("64kb", 64_000),
        ("123", 123),
        ("123B", 123),
    ],
)
def test_a_size_is_bytes_or_a_text(asked: object, expected: int | None) -> None:
    assert checked_memory("cache_memory", asked) == expected
    assert LoadOptions.of(cache_memory=asked).cache_memory == expected


@pytest.mark.parametrize("asked", [0, -1, "0", "", "much", "-1GB", "1i", True, 1.5, "nan"])
def test_anything_else_is_refused(asked: object) -> None:
    with pytest.raises(ConfigError, match=r"cache_memory is .* such as '2GB'"):
        LoadOptions.of(cache_memory=asked)


def test_by_default_it_is_a_share_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.cache.memory.available_memory", machine_memory)
    assert default_memory("cpu") == machine_memory() // 4
    assert default_memory("cpu", 200 << 20) == min(machine_memory() // 4, 1 << 30)
    shape = KVShape(2, 3, 4)
    per_token = shape.bytes_per_token(torch.float32)
    total = KVCache(shape, torch.float32, "cpu", 100).usage.total
    assert 0 <= default_memory("cpu") - total * per_token < 64 * per_token


def test_further_layers_take_of_the_same_memory() -> None:
    shape = KVShape(2, 3, 4)
    memory = 640 * shape.bytes_per_token(torch.float32)
    cache = KVCache(shape, torch.float32, "cpu", 1000, memory)
    assert cache.usage.total == 640
    layers = cache.add_layers(shape, torch.float32)
    assert cache.usage.total == 320
    del layers
    assert cache.usage.total == 640


def test_one_limit_holds_for_all_caches_together() -> None:
    """A draft model's cache beside the target's, and a head's layers: as many tokens in each."""
    shape, token = KVShape(2, 3, 4), KVShape(2, 3, 4).bytes_per_token(torch.float32)
    memory = CacheMemory(640 * token)
    target, draft = (KVCache(shape, torch.float32, "cpu", 1000, memory) for _ in range(2))
    assert target.usage.total == draft.usage.total == 320
    layers = target.add_layers(KVShape(4, 3, 4), torch.float32)
    assert target.usage.total == draft.usage.total == 128
    for cache in (target, draft):
        slot = cache.allocate()
        cache.reserve(slot, cache.usage.total)
        with pytest.raises(CacheFullError):
            cache.reserve(slot, cache.usage.total + 1)
    assert target.num_bytes + draft.num_bytes <= 640 * token
    layers.reserve(0, 0, 128)
    del draft, cache
    gc.collect()
    assert target.usage.total == 213 // 64 * 64


def test_caches_take_a_share_of_what_is_left() -> None:
    there = machine_memory()
    left = available_memory() - there // 2
    found = default_memory("cpu", to_come=there // 2)
    assert found <= max(there // 4, 64 << 20)
    assert found == pytest.approx(max(min(there // 4, left // 2), 64 << 20), rel=0.3)
    assert default_memory("cpu", to_come=2 * there) == 64 << 20


def test_a_model_that_does_not_fit_is_refused_in_words() -> None:
    check_fits("small", 1 << 20, 1 << 20)
    with pytest.raises(ConfigError, match=r"huge takes 5000\.0 GB .* Q4_K_M"):
        check_fits("huge", 5 * 10**12, 0)
    with pytest.raises(ConfigError, match=r"5000\.0 GB for caches, .* less cache_memory"):
        check_fits("small", 1 << 20, 1 << 20, 5 * 10**12)
