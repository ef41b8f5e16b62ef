"""The number of threads of a forward: at most the cores, and the fastest number lately.

More threads are faster while each has a core. Beside a busy process they are slower than fewer
threads, since all wait for the one that lost its core. No report of free cores is reliable (a
container sees other cores than it may use, a virtual machine does not see its host), so the number
is tried out: now and then a few forwards run with the next number up or down. A token's bits do not
depend on it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import MutableMapping
from statistics import fmean
from typing import TypeAlias

from foredraft.core.errors import ConfigError
from foredraft.system.cgroups import available_cpus

_TRIAL = 3
"""Forwards of a trial."""
_FIRST_TRIAL, _MOST_BETWEEN = 12, 128
"""Forwards up to the first trial, and between later ones: each that finds nothing doubles them."""
_AFTER_WIN = 2
"""Forwards from a trial that won to the next: what it has beaten may only have had a hiccup."""
_LOST = 1.4
"""A trial ends at a forward that took so many times the usual."""
_WON = 0.95
_SUSPICIOUS, _FOLLOWED = 1.25, 4
"""When most of so many forwards take so many times the usual, fewer threads are tried."""
_STEP = 0.2
_COLD = 3
"""Forwards of a size of which the fastest is the usual: the first find nothing in the caches, and
a number of threads that is tried after one of them would seem fast."""

OPENMP_SPIN = "GOMP_SPINCOUNT"
_SPIN_ROUNDS = 20_000

ForwardSize: TypeAlias = tuple[int, ...]
"""Forwards that take about as long as each other."""


def forward_size(*amounts: int) -> ForwardSize:
    """Powers of two of what there is to do: tokens, entries, layers and so on."""
    return tuple(amount.bit_length() for amount in amounts)


def spin_briefly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let torch's threads sleep soon after an operation, unless the user has said how they wait.

    They wait for the next one for a millisecond otherwise, on cores that the kernel's own threads
    need by then: a step with drafts takes 5 % longer. Not at all would be slow where torch runs
    the forward. Must be called before torch is imported.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault(OPENMP_SPIN, str(_SPIN_ROUNDS))


def check_threads(num_threads: int) -> None:
    """Raises `ConfigError` for a number that this machine has no cores for."""
    most = available_cpus()
    if not 1 <= num_threads <= most:
        raise ConfigError(
            f"threads is {num_threads}; this machine runs 1 to {most} of them at the same time"
        )


def steps_up_to(most: int) -> list[int]:
    """Numbers worth telling apart: 1, 2, 3, 4, 6, 8, 12, 16, ... and ``most``."""
    powers = [1 << i for i in range(most.bit_length())]
    between = [3 * power for power in powers]
    return sorted({n for n in [*powers, *between] if n < most} | {most})


class ThreadChooser:
    """Follows the fastest number of threads. Starts with the most.

    Only times of forwards of one size are compared; a trial counts by how many times the usual its
    forwards took. Forwards of a size that is not known yet take no part in it.
    """

    def __init__(self, most: int) -> None:
        self._steps = steps_up_to(most)
        self._best = self._trying = len(self._steps) - 1  # among the steps
        self._usual: dict[ForwardSize, float] = {}  # seconds with the best
        self._counts: Counter[ForwardSize] = Counter()
        self._ratios: list[float] = []  # to the usual: of the trial, or of the last forwards
        self._between = self._left = _FIRST_TRIAL
        self._direction = -1

    @property
    def best(self) -> int:
        """Threads that were fastest lately."""
        return self._steps[self._best]

    def choose(self, size: ForwardSize) -> int:
        """Threads of the next forward."""
        return self._steps[self._trying] if self._is_known(size) else self.best

    def _is_known(self, size: ForwardSize) -> bool:
        return self._counts[size] >= _COLD

    def observe(self, size: ForwardSize, seconds: float) -> None:
        """A forward with as many threads as `choose` said took this long."""
        if len(self._steps) == 1:
            return
        usual, is_known = self._usual.get(size, seconds), self._is_known(size)
        if self._trying != self._best and is_known:
            self._observe_trial(seconds / usual)
            return
        followed = usual + _STEP * (seconds - usual)
        self._usual[size] = followed if is_known else min(usual, seconds)
        self._counts[size] += 1
        if self._trying != self._best:
            return
        self._ratios = [*self._ratios[1 - _FOLLOWED :], seconds / usual]
        self._left -= 1
        num_slow = sum(ratio > _SUSPICIOUS for ratio in self._ratios)
        slower = len(self._ratios) == _FOLLOWED and num_slow > _FOLLOWED // 2
        if slower and self._best > 0:
            self._direction, self._between = -1, _FIRST_TRIAL
        if self._left <= 0 or slower:
            self._begin_trial()

    def _begin_trial(self) -> None:
        wanted = self._best + self._direction
        if not 0 <= wanted < len(self._steps):
            wanted = self._best - self._direction
        self._trying, self._ratios = wanted, []

    def _observe_trial(self, ratio: float) -> None:
        self._ratios.append(ratio)
        if ratio < _LOST and len(self._ratios) < _TRIAL:
            return
        mean = fmean(self._ratios)
        if mean < _WON:
            self._usual = {size: mean * seconds for size, seconds in self._usual.items()}
            self._best, self._between = self._trying, _AFTER_WIN
        else:
            self._trying, self._direction = self._best, -self._direction
            self._between = min(2 * self._between, _MOST_BETWEEN)
        self._left, self._ratios = self._between, []
