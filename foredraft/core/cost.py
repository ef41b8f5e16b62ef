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
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from foredraft.core.errors import ConfigError

_SHARPNESS = 6.0
_STEP = 0.1
_SHARE_STEP = 0.03
_MOST = 0.3

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


def chain_speedup(chance: float, round_share: float, prices: Prices, most_nodes: int = 16) -> float:
    """Committed tokens by time over plain decoding, with chains of the best length.

    Args:
        chance: that a token is accepted if those before it are.
        round_share: time of the forward that drafts a token, in plain steps.
        prices: of nodes to verify.
        most_nodes: of a chain.
    """
    tokens, best = 1.0, 1.0
    for num_nodes in range(1, most_nodes + 1):
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
        read, multiply = self._parts(num_tokens)
        return float(max(1e-6, (read + multiply) ** (1.0 / _SHARPNESS)))

    def moved(self, num_tokens: int, ms: float) -> Roofline:
        """A little closer to the observation, mostly in the part that bounds the forward."""
        read, multiply = self._parts(num_tokens)
        change = max(-_MOST, min(_MOST, ms / self.ms(num_tokens) - 1.0)) * _STEP
        share = read / max(read + multiply, 1e-30)
        slower = 1.0 + change * (1.0 - share)
        return replace(
            self,
            read_ms=self.read_ms * (1.0 + change * share),
            base_ms=self.base_ms * slower,
            token_ms=self.token_ms * slower,
        )

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
_FIRST = 4
"""Steps of a size that may correct it."""
_KNOWN = 8
"""Steps of one token after which their time is known."""
_MUCH_LESS = 0.75
"""Steps below this fraction of the expected time correct it; smaller differences are noise."""


class _Corrections:
    """Corrects load-time measurements that were taken while other processes used the CPU.

    For each power-of-two bucket of tokens, the first steps that run faster than predicted lower the
    prediction at once, also for buckets in between that have no data yet. Later steps, slower steps
    and all steps of one token, which always come soon, are followed by `Roofline.moved`.
    """

    def __init__(self) -> None:
        self._factors: dict[int, float] = {}
        self._counts: Counter[int] = Counter()

    @property
    def were_made(self) -> bool:
        return any(factor < 1.0 for factor in self._factors.values())

    def of(self, num_tokens: int) -> float:
        bucket = (num_tokens - 1).bit_length()
        if not bucket or not self._factors:
            return 1.0
        below = max((each for each in self._factors if each <= bucket), default=None)
        above = min((each for each in self._factors if each >= bucket), default=None)
        return min(self._factors[each] for each in (below, above) if each is not None)

    def takes(self, num_tokens: int, ratio: float) -> bool:
        """Take in a step's ``ratio`` of measured to expected time; True: it was a correction."""
        bucket = (num_tokens - 1).bit_length()
        if not bucket or self._counts[bucket] >= _FIRST:
            return False
        self._counts[bucket] += 1
        factor = self.of(num_tokens)
        is_usual = factor == 1.0 and ratio > _MUCH_LESS
        self._factors[bucket] = 1.0 if is_usual else min(1.0, factor * ratio)
        return not is_usual


class _Shares:
    """Ratio of measured to roofline time by size, for staircases that the roofline cannot express.

    They were measured once, perhaps beside a busy neighbour. A ratio is updated by the error of its
    size minus the current error of all sizes; an error common to all sizes is left to the roofline.

    Args:
        measured: by rising tokens.
    """

    def __init__(self, measured: Times) -> None:
        self._points = measured
        self._usual = 0.0

    def of(self, num_tokens: int) -> float:
        last, share = self._points[-1]
        return share if num_tokens >= last else interpolated(self._points, num_tokens)

    def observe(self, num_tokens: int, change: float) -> None:
        """A forward of ``num_tokens`` tokens took ``1 + change`` times the predicted time."""
        change = max(-_MOST, min(_MOST, change))
        self._usual += _STEP * (change - self._usual)
        moved = _SHARE_STEP * (change - self._usual)
        sizes = [size for size, _ in self._points]
        below = max((size for size in sizes if size <= num_tokens), default=sizes[0])
        above = min((size for size in sizes if size >= num_tokens), default=below)
        self._points = tuple(
            (size, share * (1.0 + moved) if size in (below, above) else share)
            for size, share in self._points
        )


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
        self._shares = _Shares(tuple((n, ms / self._roofline.ms(n)) for n, ms in times))
        self._corrections = _Corrections()
        self._num_alone = 0

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
        self._num_alone += num_tokens == 1
        if self._corrections.takes(num_tokens, ms / self._weights_ms(num_tokens)):
            return
        in_roofline = ms / (self._shares.of(num_tokens) * self._corrections.of(num_tokens))
        change = in_roofline / self._roofline.ms(num_tokens) - 1.0
        self._roofline = self._roofline.moved(num_tokens, in_roofline)
        self._shares.observe(num_tokens, change)

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
        factor = self._shares.of(num_tokens) * self._corrections.of(num_tokens)
        ms = factor * self._roofline.ms(num_tokens)
        if num_tokens > 1 or not self._corrections.were_made or self._num_alone >= _KNOWN:
            return ms
        return min(ms, self._weights_ms(2))  # while all steps draft, no step has one token alone


def _check_times(times: Times) -> None:
    sizes = [size for size, _ in times]
    if not sizes or any(a >= b for a, b in pairwise([0, *sizes])):
        raise ConfigError(f"step times for {sizes} tokens; the numbers must rise from 1 on")
    for _, ms in times:
        if not isinstance(ms, int | float) or not 0.0 < ms < math.inf:
            raise ConfigError(f"{ms!r} is no time in milliseconds")
