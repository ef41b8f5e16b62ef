"""Whether training a head for longer pays: extrapolate the learning curve of a pilot.

A head learns as E(n) = E_inf - b * n^-c: tokens a step after n tokens of text. E_inf, b and c are
fitted to the pilot's measurements; the band shows the uncertainty of the fit. The head's time a
step stays as it is, so training changes only tokens a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foredraft.bench.outlook import Outlook
from foredraft.core.errors import ConfigError
from foredraft.train.curves import read_compared

_POWERS = np.arange(0.05, 2.01, 0.05)
_LEAST_POINTS = 4
_DRAWS, _BAND = 200, (5.0, 95.0)
"""Bootstrap samples over points, and the percentiles of the 90 % interval."""

Points = npt.NDArray[Any]


@dataclass(frozen=True)
class LearningCurve:
    """The learning curve of a head so far.

    Attributes:
        kind: of the head.
        points_N2: tokens learnt from, and tokens a step on held-out replies.
        depth: of the chains that were measured: no more than one token more can be committed.
        tokens_per_s: that it learnt from.
    """

    kind: str
    points_N2: Points
    depth: int
    tokens_per_s: float

    @classmethod
    def of(cls, folder: Path, temperature: float) -> LearningCurve:
        """The curve of a folder of ``foredraft train``.

        Args:
            temperature: of the requests: that of the replies whose measurements count is 0 or 1,
                whichever is nearer; the other where the texts hold no such replies.

        Raises:
            ConfigError: it was measured too seldom.
            ModelLoadError: it is no head's folder.
        """
        (head, *_) = read_compared(folder)
        tests = [each for each in head.evaluations if each["tokens"] > 0]
        if len(tests) < _LEAST_POINTS:
            raise ConfigError(
                f"{folder} was measured {len(tests)} times while it learnt; to tell how it goes on "
                f"takes {_LEAST_POINTS}: train it a little longer, or with more --evaluations"
            )
        last = tests[-1]
        num_greedy, num_sampled = last["num_anchors"]
        is_greedy = num_greedy > 0 and (temperature < 0.5 or not num_sampled)
        name = "committed_greedy" if is_greedy else "committed_sampled"
        points_N2 = np.array([(each["tokens"], each[name]) for each in tests])
        return cls(head.kind, points_N2, len(last["greedy"]), last["tokens"] / last["seconds"])

    @property
    def tokens(self) -> float:
        """Learnt from so far."""
        return float(self.points_N2[-1, 0])

    @property
    def committed(self) -> float:
        """Tokens a step of the best checkpoint so far, which is the one that is kept."""
        return float(self.points_N2[:, 1].max())

    def after(self, tokens: float) -> tuple[float, float, float]:
        """Tokens a step after that many tokens of text, with the bounds of 90 % of fits."""
        drawn = np.random.default_rng(0)
        number = len(self.points_N2)
        found = [self._told(self.points_N2, tokens)]
        while len(found) <= _DRAWS:
            places = drawn.integers(number, size=number)
            if len({*places.tolist()}) >= 3:
                found.append(self._told(self.points_N2[places], tokens))
        low, high = np.percentile(found, _BAND)
        return found[0], float(min(low, found[0])), float(max(high, found[0]))

    def _told(self, points_N2: Points, tokens: float) -> float:
        """Prediction of the best fit, at least the current value, at most the possible one."""
        reached, rest = -inf, inf
        for power in _POWERS:
            shape_N = points_N2[:, 0] ** -power
            design_N2 = np.stack([np.ones_like(shape_N), -shape_N], axis=1)
            fitted = np.linalg.lstsq(design_N2, points_N2[:, 1], rcond=None)[0]
            fitted[1] = max(0.0, fitted[1])
            fitted[0] = (points_N2[:, 1] + fitted[1] * shape_N).mean()
            error = float(((design_N2 @ fitted - points_N2[:, 1]) ** 2).sum())
            if error < rest:
                rest, reached = error, float(fitted[0] - fitted[1] * tokens**-power)
        return min(max(reached, self.committed), self.depth + 1.0)


@dataclass(frozen=True)
class Payback:
    """Predicted gain of some more hours of training under a load.

    Attributes:
        kind: of the head.
        hours: of training, beyond the pilot.
        now: throughput relative to plain decoding with the current head.
        gain: with the head as it would be.
        low, high: between which 90 % of fits have it.
        instead: the setting without that training, and its gain.
        tokens: generated until the time of training is saved; None: it never is.
    """

    kind: str
    load: int
    hours: float
    now: float
    gain: float
    low: float
    high: float
    instead: str
    instead_gain: float
    tokens: float | None

    def said(self, tokens_per_day: float | None) -> str:
        """In a sentence."""
        begin = (
            f"{self.load} at once, {self.hours:g} h more of training {self.kind}: "
            f"{self.now:.2f}x to {self.gain:.2f}x ({self.low:.2f}-{self.high:.2f}x)"
        )
        if self.tokens is None:
            return f"{begin}; never paid back: {self.instead} has {self.instead_gain:.2f}x"
        days = f", {self.tokens / tokens_per_day:.1f} days" if tokens_per_day else ""
        return f"{begin}; paid back after {self.tokens / 1e6:.2g}M tokens{days}"


def paybacks(
    curve: LearningCurve, head: Outlook, choice: Outlook, hours: Sequence[float]
) -> Iterator[Payback]:
    """Predicted gain of training under one load.

    Acceptance starts at that of the recorded requests, and training improves it as on held-out
    replies: tokens a step beyond one grow by the same factor.

    Args:
        head: as it is.
        choice: the setting otherwise recommended.
    """
    for number in hours:
        told = curve.after(curve.tokens + 3600.0 * number * curve.tokens_per_s)
        gain, low, high = (_gain(head, curve, committed) for committed in told)
        # Milliseconds that the machine takes for a token of any request.
        plain_ms = head.gain * head.step_ms / (head.load * head.committed)
        saved_ms = plain_ms / choice.gain - plain_ms / gain
        tokens = 3.6e6 * number / saved_ms if saved_ms > 0.0 else None
        yield Payback(
            curve.kind,
            head.load,
            number,
            now=head.gain,
            gain=gain,
            low=low,
            high=high,
            instead=choice.setting.flags,
            instead_gain=choice.gain,
            tokens=tokens,
        )


def _gain(head: Outlook, curve: LearningCurve, committed: float) -> float:
    """The gain with the head at ``committed`` tokens a step on held-out replies."""
    growth = (committed - 1.0) / max(1e-6, curve.committed - 1.0)
    return head.gain * min(1.0 + (head.committed - 1.0) * growth, head.nodes + 1.0) / head.committed
