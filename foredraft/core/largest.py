"""The largest of many numbers, without sorting them all and without torch's threads.

Torch's own functions wake a pool of threads for so many numbers. Those then spin for a while, on
the CPUs that the next forward wants.

Shape legend: V numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_BLOCK = 128


def largest(values_V: npt.NDArray[Any], count: int) -> list[int]:
    """Where the ``count`` largest numbers are, largest first, of equal ones the first."""
    count = min(count, values_V.size)
    if count == 0:
        return []
    candidates = np.flatnonzero(values_V >= _at_most_kth(values_V, count))
    order = np.argsort(-values_V[candidates], kind="stable")[:count]
    return [int(place) for place in candidates[order]]


def kth_largest(values_V: npt.NDArray[Any], k: int) -> Any:
    """The k-th largest number, 1 <= k <= V."""
    candidates = values_V[values_V >= _at_most_kth(values_V, k)]
    return np.partition(candidates, -k)[-k]


def _at_most_kth(values_V: npt.NDArray[Any], k: int) -> Any:
    """A number that is no larger than the k-th largest, and that few are larger than.

    ``k`` blocks have maxima that reach it, so at least so many numbers do.
    """
    num_blocks = values_V.size // _BLOCK
    if num_blocks <= k:
        return -np.inf
    maxima = values_V[: num_blocks * _BLOCK].reshape(num_blocks, _BLOCK).max(axis=1)
    return np.partition(maxima, -k)[-k]
