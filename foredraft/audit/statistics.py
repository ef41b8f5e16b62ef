"""Were these tokens drawn from these laws?

Token i of a text was to be drawn from the law p_i, which is known and depends on the tokens before
it. For any function f_i that is chosen before the token is drawn, f_i(y_i) - E[f_i] has mean 0
whatever came before: the sum is a martingale, so no prompt has to be repeated, and tokens of any
number of texts count alike. Each test takes another f_i. The tail of the sum is the normal one,
widened by its skewness (Cramér, 1938): at the small p-values that matter here the normal tail alone
would alarm a little too often.

Shape legend: V vocabulary, C cells: tokens that are looked at one by one, and the rest together.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Array: TypeAlias = npt.NDArray[Any]

RARE = 1e-4
"""Tokens below this probability share one cell: they are too rare to test one by one."""
_LEAST_VARIANCE = 10.0
"""Least variance of a sum, in squares of its largest step: below it the normal tail does not
apply."""
_NUM_BINS = 10
_LEAST_IN_BIN = 25


@dataclass(frozen=True)
class Cells:
    """A law in cells: each token of some probability is one, and all others together are the last.

    Attributes:
        tokens_C: their tokens, without the last cell.
        probs_C: probability of each cell, the last one's included.
    """

    tokens_C: Array
    probs_C: Array

    @classmethod
    def of(cls, probs_V: Array, also: Sequence[int] | Array = ()) -> Cells:
        """Cells of a law.

        Args:
            also: tokens that get a cell of their own, however rare.
        """
        tokens_C = np.union1d(np.flatnonzero(probs_V > RARE), np.asarray(also, dtype=np.int64))
        probs_C = probs_V[tokens_C].astype(np.float64)
        return cls(tokens_C, np.append(probs_C, max(0.0, 1.0 - float(probs_C.sum()))))

    def cell(self, token: int) -> int:
        place = int(np.searchsorted(self.tokens_C, token))
        is_named = place < len(self.tokens_C) and self.tokens_C[place] == token
        return place if is_named else len(self.tokens_C)


@dataclass(frozen=True)
class Drafted:
    """The draft at a position, known before its token was drawn.

    Attributes:
        token: the first draft token.
        likely: the likelier tokens of the distribution that it was drawn from, ascending, and
            their probabilities; None: it was chosen.
    """

    token: int
    likely: tuple[Array, Array] | None = None


@dataclass
class Sum:
    """One martingale.

    Attributes:
        total: sum of f(y) - E[f].
        variance: sum of Var[f] under the laws.
        skew: sum of third central moments.
        largest: the largest |f - E[f]| that was possible.
        reach: change of the total for a shift of 1: see `shift`.
    """

    name: str
    total: float = 0.0
    variance: float = 0.0
    skew: float = 0.0
    largest: float = 0.0
    reach: float = 0.0
    count: int = 0

    def add(self, cell: int, probs_C: Array, values_C: Array, reach: float = 0.0) -> None:
        """Add a token.

        Args:
            cell: where it fell.
            values_C: f of each cell.
        """
        mean = float(probs_C @ values_C)
        off_C = values_C - mean
        square_C = off_C * off_C
        self.total += float(off_C[cell])
        self.variance += float(probs_C @ square_C)
        self.skew += float(probs_C @ (square_C * off_C))
        self.largest = max(self.largest, float(np.abs(off_C[probs_C > RARE]).max(initial=0.0)))
        self.reach += reach
        self.count += 1

    @property
    def p_value(self) -> float:
        """Two-sided; 1 while there is too little data."""
        if self.variance < _LEAST_VARIANCE * self.largest**2 or not self.variance:
            return 1.0
        z = self.total / math.sqrt(self.variance)
        skewness: float = self.skew / self.variance**1.5
        widened = math.exp(min(50.0, max(0.0, skewness * z**3 / 6.0)))
        return min(1.0, math.erfc(abs(z) / math.sqrt(2.0)) * widened)

    @property
    def largest_p_value(self) -> float:
        """Two-sided, and never too small, however few tokens make the sum (Freedman, 1975)."""
        if not self.variance:
            return 1.0
        size = self.largest * abs(self.total) / self.variance
        exponent = ((1.0 + size) * math.log1p(size) - size) * self.variance / self.largest**2
        return min(1.0, 2.0 * math.exp(-exponent))

    @property
    def shift(self) -> float | None:
        """The shift that would explain the total: of the share of tokens that are not the law's
        own but the draft's."""
        return self.total / self.reach if self.reach else None

    def detectable(self, alpha: float, power: float) -> float:
        """The smallest shift that this power detects; infinite if none."""
        if not self.reach or self.variance < _LEAST_VARIANCE * self.largest**2:
            return math.inf
        quantile = NormalDist().inv_cdf
        return (
            (quantile(1.0 - alpha / 2.0) + quantile(power)) * math.sqrt(self.variance) / self.reach
        )


@dataclass
class LawTests:
    """All tests of tokens against their laws.

    Args:
        seed: of the numbers that make the place of a token in its law uniform.

    Attributes:
        impossible: tokens that had no probability at all.
    """

    seed: int = 0
    drafted: Sum = field(default_factory=lambda: Sum("drafted token"))
    surprisal: Sum = field(default_factory=lambda: Sum("surprisal"))
    behind: Sum = field(default_factory=lambda: Sum("surprisal behind a guess that held"))
    repeats: Sum = field(default_factory=lambda: Sum("repeats"))
    bins: list[int] = field(default_factory=lambda: [0] * _NUM_BINS)
    impossible: int = 0
    _last_prob: float | None = None
    _held: bool = False

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def begin(self) -> None:
        """A new text: no token is before its first one."""
        self._last_prob, self._held = None, False

    def add(
        self, probs_V: Array, token: int, drafted: Drafted | None = None, last: int | None = None
    ) -> None:
        """Add a token and the law it was to be drawn from.

        Args:
            drafted: the draft there, made before the draw. If there is none the likeliest token
                takes its place: a lossy rule favours it, too.
            last: the token before it, if that has a probability here: two that are drawn with the
                same random numbers are too often the same.
        """
        before, self._last_prob = self._last_prob, float(probs_V[token])
        is_behind, self._held = self._held, drafted is not None and token == drafted.token
        self.impossible += not self._last_prob > 0.0
        if float(probs_V.max()) >= 1.0:
            return  # nothing was drawn
        self._add_drafted(probs_V, token, drafted or Drafted(int(probs_V.argmax())))
        cells = Cells.of(probs_V)
        likely_C = np.log(np.maximum(cells.probs_C, RARE))
        likely_C[-1] = math.log(RARE)
        self.surprisal.add(cells.cell(token), cells.probs_C, likely_C)
        if is_behind:  # it may have come with the draft, drawn by other code than the replaced one
            self.behind.add(cells.cell(token), cells.probs_C, likely_C)
        self._add_place(cells, cells.cell(token))
        if last is not None and before is not None and RARE < probs_V[last] < 1.0 - RARE:
            self._add_repeat(token == last, before, float(probs_V[last]))

    @property
    def count(self) -> int:
        """Tokens that were drawn."""
        return self.surprisal.count

    def p_values(self) -> dict[str, float]:
        """The p-value of each test, corrected for their number (Holm)."""
        raw = {each.name: each.p_value for each in (self.drafted, self.surprisal, self.behind)}
        raw[self.repeats.name] = self.repeats.largest_p_value
        raw["place in the law"] = self._p_of_bins()
        raw = {name: 0.0 if self.impossible else p for name, p in raw.items()}
        return holm(raw)

    def rejects(self, alpha: float) -> bool:
        """Whether some test says that the tokens are not of the laws."""
        return min(self.p_values().values()) <= alpha

    def detectable(self, alpha: float, power: float) -> float:
        """The smallest shift towards drafted tokens that would be found."""
        return self.drafted.detectable(alpha / 5, power)

    def _add_drafted(self, probs_V: Array, token: int, drafted: Drafted) -> None:
        if drafted.likely is None:
            cells = Cells(np.array([drafted.token]), _both(float(probs_V[drafted.token])))
            self.drafted.add(cells.cell(token), cells.probs_C, np.array([1.0, 0.0]), reach=1.0)
            return
        tokens, probs = drafted.likely
        cells = Cells.of(probs_V, tokens)
        draft_C, target_C = np.zeros_like(cells.probs_C), cells.probs_C.copy()
        draft_C[np.searchsorted(cells.tokens_C, tokens)] = probs
        target_C[-1] = 0.0  # of the rest only the sum is known
        difference_C = draft_C - target_C
        values_C = difference_C / np.maximum(draft_C + target_C, 1e-12)
        distance = 0.5 * float(np.abs(difference_C).sum())
        reach = float(difference_C @ values_C) / distance if distance > 1e-6 else 0.0
        self.drafted.add(cells.cell(token), cells.probs_C, values_C, reach)

    def _add_repeat(self, is_repeated: bool, before: float, now: float) -> None:
        """Whether the token before came again, by its probabilities before and now.

        Gumbel noise, used again, draws it again with a probability of
        now / (now + (1 - now) before) or more: a token that was unlikely had much noise.
        """
        law_C, again_C = _both(now), _both(now / (now + (1.0 - now) * before))
        values_C = (again_C - law_C) / (again_C + law_C)
        self.repeats.add(0 if is_repeated else 1, law_C, values_C)

    def _add_place(self, cells: Cells, cell: int) -> None:
        """The token's place in its law, uniform in [0, 1): likelier tokens come first."""
        order = np.argsort(-cells.probs_C[:-1], kind="stable")
        ordered_C = np.append(cells.probs_C[:-1][order], cells.probs_C[-1])
        rank = cell if cell == len(order) else int(np.flatnonzero(order == cell)[0])
        before = float(ordered_C[:rank].sum())
        place = min(before + self._random.random() * float(ordered_C[rank]), 1.0 - 1e-12)
        self.bins[int(place * _NUM_BINS)] += 1

    def _p_of_bins(self) -> float:
        due = sum(self.bins) / _NUM_BINS
        if due < _LEAST_IN_BIN:
            return 1.0
        return chi_square_tail(sum((n - due) ** 2 for n in self.bins) / due, _NUM_BINS - 1)


def _both(probability: float) -> Array:
    return np.array([probability, max(0.0, 1.0 - probability)])


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """p-values that hold for all tests together (Holm, 1979)."""
    corrected: dict[str, float] = {}
    worst = 0.0
    for done, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        worst = max(worst, min(1.0, p * (len(p_values) - done)))
        corrected[name] = worst
    return corrected


def chi_square_tail(statistic: float, degrees: int) -> float:
    """P(chi-square with that many degrees of freedom >= statistic)."""
    halves = torch.tensor([degrees / 2.0, max(0.0, statistic) / 2.0], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


def tail_bound(sample: Sequence[float], number: int, alpha: float) -> float:
    """The value that the largest of ``number`` further draws passes with probability ``alpha``.

    Peaks over a threshold: the largest tenth is fitted by a generalized Pareto tail through
    probability-weighted moments (Hosking and Wallis, 1987), which serves light and heavy tails.
    Its shape is taken one standard error heavier than it looks, so a small sample gives a wide
    bound, but no heavier than 1/2, where the variance ends. The sample is at least 0 each; 0.0 if
    it has nothing else, and zeros are no peaks.
    """
    values = np.sort(np.asarray(sample, dtype=np.float64))
    if not values.size or values[-1] == 0.0:
        return 0.0
    count = min(max(2, values.size // 10), int(np.count_nonzero(values)))
    at = float(values[-count - 1]) if values.size > count else 0.0
    excess = values[-count:] - at
    mean: float = excess.mean()
    weighted: float = (excess * np.arange(count)[::-1]).mean() / max(1, count - 1)
    looks = 2.0 - mean / (mean - 2.0 * weighted) if mean > 2.0 * weighted else 0.0
    shape = min(max(0.0, looks) + count**-0.5, 0.5)
    rarer = max(1.0, count * number / (len(values) * alpha))
    return float(at + mean * math.expm1(shape * math.log(rarer)) / shape)


def share_below(num_tokens: int, power: float) -> float:
    """Upper bound of the share of differing tokens if none of ``num_tokens`` differs."""
    return 1.0 - (1.0 - power) ** (1.0 / num_tokens) if num_tokens else 1.0
