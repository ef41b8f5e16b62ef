"""How much a cache may take."""

from __future__ import annotations

import pytest
import torch

from foredraft.cache.kv import KVCache, KVShape
from foredraft.cache.memory import checked_memory, default_memory, machine_memory
from foredraft.core.errors import ConfigError
from foredraft.options import LoadOptions


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (None, None),
        (1, 1),
        ("2GB", 2 * 10**9),
        ("2 gb", 2 * 10**9),
        ("1.5G", 15 * 10**8),
        ("512MiB", 512 * 2**20),
        ("64k", 64_000),
        ("123", 123),
        ("123B", 123),
    ],
)
def test_a_size_is_bytes_or_a_text(asked: object, expected: int | None) -> None:
    assert checked_memory("cache_memory", asked) == expected
    assert LoadOptions.of(cache_memory=asked).cache_memory == expected


@pytest.mark.parametrize("asked", [0, -1, "0", "", "much", "2TB", "-1GB", "1i", True, 1.5, "nan"])
def test_anything_else_is_refused(asked: object) -> None:
    with pytest.raises(ConfigError, match=r"cache_memory is .* such as '2GB'"):
        LoadOptions.of(cache_memory=asked)


def test_by_default_it_is_a_share_of_the_machine() -> None:
    assert default_memory("cpu") == machine_memory() // 4
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
