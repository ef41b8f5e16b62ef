"""The largest of many numbers: as a full sort would have them."""

from __future__ import annotations

import numpy as np
import pytest

from foredraft.core.sampling import kth_largest, largest


@pytest.mark.parametrize("size", [1, 5, 128, 1000, 49_152])
@pytest.mark.parametrize("count", [1, 2, 7, 60, 500])
def test_they_are_those_of_a_sort(size: int, count: int) -> None:
    generator = np.random.default_rng(size + count)
    values_V = np.round(generator.normal(size=size) * 8).astype(np.float32)  # with many ties
    expected = np.lexsort((np.arange(size), -values_V))[:count].tolist()
    assert largest(values_V, count) == expected
    if count <= size:
        assert kth_largest(values_V, count) == np.sort(values_V)[-count]


def test_none_are_none() -> None:
    assert largest(np.ones(3), 0) == []
