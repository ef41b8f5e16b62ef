"""Cost model: time of a step by its rows, their tokens and their contexts; prices of nodes.

All parts share one model: it is measured once (`foredraft.models.timing`), follows the
machine through the steps that are run, and is shared out. The controller prices a row's nodes for
the batch as it is now, and hands the `Prices` to the drafter with the row.

A forward reads all weights, which takes ``read_ms``, and multiplies them with n tokens; it takes
about as long as the longer of the two, ``(read^p + multiply(n)^p)^(1/p)``, with a corner as round
as times on CPUs show (the roofline of S. Williams et al., 2009). Attention comes on top: each row's
entries are read once, and multiplied once a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from foredraft.core.errors import ConfigError

_SHARPNESS = 6.0
_MOST_TOKENS = 1024
"""Of a step, roughly."""
_LONGEST_CHAIN = 16
"""Nodes of the chains that are weighed."""

Times = tuple[tuple[int, float], ...]
"""(tokens, milliseconds), by rising tokens."""


Prices = tuple[float, ...]
"""Times of a row's step with 0, 1, 2, … draft nodes, in plain steps of that row: the first is 1.
Beyond the last, times rise with the average slope."""

USUAL_PRICES: Prices = (1.0, 1.15)
"""Prices of a usual CPU, if nothing was measured."""


def price_of(prices: Prices, num_nodes: float) -> float:
    """Price of ``num_nodes`` nodes; the number may be fractional, such as an expected value."""
    last = len(prices) - 1
    if num_nodes >= last:
        rise = (prices[-1] - prices[0]) / last if last else 0.0
        return prices[-1] + (num_nodes - last) * rise
    whole = int(num_nodes)
    return prices[whole] + (num_nodes - whole) * (prices[whole + 1] - prices[whole])


def relative(times: Sequence[float]) -> Prices:
    """Times of 0, 1, 2, … nodes, in units of the first."""
    return tuple(ms / times[0] for ms in times)


def chain_speedup(chance: float, round_share: float, prices: Prices) -> float:
    """Committed tokens by time over plain decoding, with chains of the best length.

    Args:
        chance: that a token is accepted if those before it are.
        round_share: time of the forward that drafts a token, in plain steps.
        prices: of nodes to verify.
    """
    tokens, best = 1.0, 1.0
    for num_nodes in range(1, _LONGEST_CHAIN + 1):
        tokens += chance**num_nodes
        best = max(best, tokens / (price_of(prices, num_nodes) + num_nodes * round_share))
    return best


def interpolated(points: Times, x: int) -> float:
    """Straight lines through the points, and beyond the last; at least two, or constant."""
    if len(points) < 2 or x <= points[0][0]:
        return points[0][1]
    enclosing = (pair for pair in pairwise(points) if x <= pair[1][0])
    left, right = next(enclosing, points[-2:])
    share = (x - left[0]) / (right[0] - left[0])
    return left[1] + share * (right[1] - left[1])


@dataclass(frozen=True)
class Roofline:
    """See the module docstring.

    Attributes:
        read_ms: whatever the number of tokens.
        base_ms, token_ms: multiplying takes ``base_ms + n * token_ms``.
    """

    read_ms: float
    base_ms: float
    token_ms: float

    @classmethod
    def through(cls, times: Times) -> Roofline:
        """One that fits measured times: the first is all reading, the larger half all multiplying.

        Not the last two: some kernels take steps, as matrix tiles of 16 tokens do.
        """
        large, last = times[-1]
        small, before = min(times[:-1] or times, key=lambda each: abs(2 * each[0] - large))
        token_ms = (last - before) / (large - small) if large > small else 0.0
        return cls(times[0][1], max(0.0, last - large * token_ms), token_ms)

    def ms(self, num_tokens: int) -> float:
        return float(max(1e-6, sum(self._parts(num_tokens)) ** (1.0 / _SHARPNESS)))

    def reading(self, num_tokens: int) -> float:
        """The share of a forward's time that memory bandwidth bounds, 0 to 1."""
        read, multiply = self._parts(num_tokens)
        return read / max(read + multiply, 1e-30)

    def _parts(self, num_tokens: int) -> tuple[float, float]:
        """Both to the power of p."""
        multiply_ms = self.base_ms + num_tokens * self.token_ms
        return self.read_ms**_SHARPNESS, multiply_ms**_SHARPNESS


@dataclass(frozen=True)
class Attention:
    """Milliseconds that contexts add.

    Attributes:
        entry_ms: for each cache entry of a row.
        pair_ms: for each entry and token of that row.
    """

    entry_ms: float = 0.0
    pair_ms: float = 0.0

    def ms(self, rows: Sequence[tuple[int, int]]) -> float:
        """``rows``: (tokens, context) of each."""
        return sum(context * (self.entry_ms + n * self.pair_ms) for n, context in rows)


_PROMPT_MS, _LEAST_PROMPT, _NEARLY = 500.0, 64, 1.1
"""A step that reads a prompt takes so long at most, unless it has no more tokens than these. More
tokens are worth waiting for where each of them takes so many times less."""
_FIRST = 0.2, 0.2, 0.1
"""How far times may be from those measured at load, in logarithms: at all sizes alike, where the
reading of weights bounds a forward, and at each size beside the others."""
_WANDERS = 0.04, 0.02, 0.01
"""How far they may wander in one step."""
_NOISE = 0.12
"""Of the time of a single step."""
_REACH = 1.5
"""Doublings of tokens over which times differ alike."""
_SLOWER, _FASTER = 0.2, 1.0
"""A step moves estimates as if it had been longer, or shorter, by this at most: much longer ones
are the machine's doing, and none is shorter than it can be."""


class _Drift:
    """Logarithm of the ratio of times now to measured ones, by size: a Kalman filter.

    Steps of some sizes say something of the others: the whole machine has become slower, or its
    memory, or a size beside its neighbours. A size that was not run for long is in doubt, and one
    step of it counts for much (R. E. Kalman, A New Approach to Linear Filtering and Prediction
    Problems, 1960; the covariance by size is that of a Gaussian process).

    Shape legend: K sizes.

    Args:
        sizes: numbers of tokens, rising.
        reading: how much the reading of weights bounds a forward of each size, 0 to 1.
    """

    def __init__(self, sizes: Sequence[int], reading: Sequence[float]) -> None:
        self._at_K = np.log2(sizes)
        near_KK = np.exp(-0.5 * (np.subtract.outer(self._at_K, self._at_K) / _REACH) ** 2)
        parts_3KK = np.stack((np.ones_like(near_KK), np.outer(reading, reading), near_KK))
        self._ratio_K = np.zeros(len(sizes))
        self._doubt_KK = np.tensordot(np.square(_FIRST), parts_3KK, 1)
        self._step_KK = np.tensordot(np.square(_WANDERS), parts_3KK, 1)

    def of(self, num_tokens: int) -> float:
        """Time now over the measured one."""
        return math.exp(np.interp(math.log2(num_tokens), self._at_K, self._ratio_K))

    def doubt(self, num_tokens: int, others: int) -> float:
        """Standard deviation of the logarithm of the ratio of two sizes' times."""
        weights_K = self._weights_K(num_tokens) - self._weights_K(others)
        return math.sqrt(max(0.0, float(weights_K @ self._doubt_KK @ weights_K)))

    def observe(self, num_tokens: int, ratio: float) -> None:
        """A step took so many times what it would have taken by the estimate so far."""
        self._doubt_KK += self._step_KK
        weights_K = self._weights_K(num_tokens)
        shared_K = self._doubt_KK @ weights_K
        variance = float(weights_K @ shared_K) + _NOISE**2
        change = math.log(max(math.exp(-_FASTER), min(math.exp(_SLOWER), ratio)))
        self._ratio_K += shared_K * (change / variance)
        self._doubt_KK -= np.outer(shared_K, shared_K / variance)

    def _weights_K(self, num_tokens: int) -> npt.NDArray[Any]:
        """Of each size in what is said of this number of tokens."""
        at, (last,) = math.log2(num_tokens), self._at_K.shape
        weights_K = np.zeros(last)
        after = int(np.searchsorted(self._at_K, at))
        if after in (0, last):
            weights_K[min(after, last - 1)] = 1.0
            return weights_K
        share = (at - self._at_K[after - 1]) / (self._at_K[after] - self._at_K[after - 1])
        weights_K[after - 1 : after + 1] = 1.0 - share, share
        return weights_K


class CostModel:
    """Milliseconds of a forward, measured and then followed.

    Args:
        times: of one row, by number of tokens.
        attention: the cost of contexts.
        context: of that row.

    Raises:
        ConfigError: sizes do not rise from 1 on, or a time is no time.
    """

    def __init__(self, times: Times, attention: Attention | None = None, context: int = 0) -> None:
        _check_times(times)
        self.attention = attention or Attention()
        times = tuple((n, self._without_attention([(n, context)], ms)) for n, ms in times)
        self._roofline = Roofline.through(times)
        # Measured time over the roofline's: kernels that work in tiles of 16 tokens take steps.
        self._shares = tuple((n, ms / self._roofline.ms(n)) for n, ms in times)
        sizes = [n for n, _ in times]
        while sizes[-1] < _MOST_TOKENS:
            sizes.append(2 * sizes[-1])
        self._drift = _Drift(sizes, [self._roofline.reading(n) for n in sizes])

    def ms(self, rows: Sequence[tuple[int, int]]) -> float:
        """A forward of these rows, each (tokens, context)."""
        num_tokens = sum(n for n, _ in rows)
        return self._weights_ms(num_tokens) + self.attention.ms(rows)

    def with_nodes(self, rows: Sequence[tuple[int, int]], most_nodes: int) -> tuple[float, ...]:
        """A forward of these rows with 0, 1, … ``most_nodes`` tokens more, of an average row."""
        return self._with_each(rows, range(most_nodes + 1))

    def _with_each(
        self, rows: Sequence[tuple[int, int]], nodes: Sequence[int]
    ) -> tuple[float, ...]:
        num_tokens, attention_ms = sum(n for n, _ in rows), self.attention.ms(rows)
        node_ms = self.attention.pair_ms * sum(context for _, context in rows) / len(rows)
        return tuple(self._weights_ms(num_tokens + n) + attention_ms + n * node_ms for n in nodes)

    def observe(self, rows: Sequence[tuple[int, int]], ms: float) -> None:
        """A forward of these rows took ``ms``: later predictions follow it."""
        num_tokens, ms = sum(n for n, _ in rows), self._without_attention(rows, ms)
        self._drift.observe(num_tokens, ms / self._weights_ms(num_tokens))

    def doubt(self, num_tokens: int, others: int) -> float:
        """How far the ratio of two sizes' times may be off: a standard deviation of its logarithm.

        It grows while one of them is not run.
        """
        return self._drift.doubt(num_tokens, others)

    def prompt_tokens(self, most: int) -> int:
        """Tokens of prompts in a step: the others in it wait, and all of it reads the weights.

        Args:
            most: of them, where a step is quick.
        """
        per_token = {
            n: self._weights_ms(n) / n
            for n in (most >> i for i in range(most.bit_length()))
            if n >= min(_LEAST_PROMPT, most)
        }
        enough = min(n for n, ms in per_token.items() if ms <= _NEARLY * per_token[most])
        quick = max((n for n, ms in per_token.items() if n * ms <= _PROMPT_MS), default=0)
        return max(enough, quick)

    def prices(self, contexts: Sequence[int], most_nodes: int) -> Prices:
        """For each of the rows of a batch, which all draft alike.

        Args:
            contexts: tokens in the cache of each row.
        """
        num_rows = len(contexts)
        rows = [(1, context) for context in contexts]
        return relative(self._with_each(rows, range(0, most_nodes * num_rows + 1, num_rows)))

    def times(self, sizes: Sequence[int], context: int = 0) -> Times:
        """Current estimate for one row in ms, by size, for display."""
        return tuple((n, self.ms([(n, context)])) for n in sizes)

    def _without_attention(self, rows: Sequence[tuple[int, int]], ms: float) -> float:
        return max(ms - self.attention.ms(rows), 0.1 * ms)

    def _weights_ms(self, num_tokens: int) -> float:
        last, share = self._shares[-1]
        if num_tokens < last:
            share = interpolated(self._shares, num_tokens)
        return share * self._roofline.ms(num_tokens) * self._drift.of(num_tokens)


def _check_times(times: Times) -> None:
    sizes = [size for size, _ in times]
    if not sizes or any(a >= b for a, b in pairwise([0, *sizes])):
        raise ConfigError(f"step times for {sizes} tokens; the numbers must rise from 1 on")
    for _, ms in times:
        if not isinstance(ms, int | float) or not 0.0 < ms < math.inf:
            raise ConfigError(f"{ms!r} is no time in milliseconds")
