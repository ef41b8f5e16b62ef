"""The log-likelihood ratio test of counts against the law they should have (G-test).

For counts O and expected counts E, G = 2 sum O ln(O/E) is chi-squared with one degree of freedom
less than there are cells, when every E is large enough (Sokal and Rohlf, Biometry, chapter 17).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from scipy.stats import chi2

Outcome = TypeVar("Outcome", bound=Hashable)

ALPHA = 1e-6
"""Each test's chance to reject a correct engine, for a new choice of seeds."""
MIN_EXPECTED = 5.0


@dataclass(frozen=True)
class GTest:
    """The outcome: the statistic, its degrees of freedom, the probability of one as large."""

    statistic: float
    dof: int
    p_value: float
    num_samples: int

    @property
    def rejects(self) -> bool:
        return self.p_value < ALPHA

    def __str__(self) -> str:
        return (
            f"G = {self.statistic:.1f} at {self.dof} degrees of freedom "
            f"(p = {self.p_value:.2g}, {self.num_samples} samples)"
        )


def g_test(counts: Counter[Outcome], law: Mapping[Outcome, float]) -> GTest:
    """Test ``counts`` against ``law``.

    Cells with an expected count under five are pooled; an outcome without probability is proof on
    its own.
    """
    num_samples = counts.total()
    if any(law.get(outcome, 0.0) <= 0.0 for outcome in counts):
        return GTest(math.inf, 1, 0.0, num_samples)
    cells = _pooled([(counts[outcome], p * num_samples) for outcome, p in law.items() if p > 0.0])
    statistic = 2.0 * math.fsum(seen * math.log(seen / due) for seen, due in cells if seen)
    dof = len(cells) - 1
    p_value = float(chi2.sf(statistic, dof)) if dof else 1.0
    return GTest(statistic, dof, p_value, num_samples)


def _pooled(cells: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Merge the smallest cells until each expects five."""
    cells = sorted(cells, key=lambda cell: cell[1])
    while len(cells) > 1 and cells[0][1] < MIN_EXPECTED:
        (seen, due), (more_seen, more_due), *rest = cells
        cells = sorted([(seen + more_seen, due + more_due), *rest], key=lambda cell: cell[1])
    return cells
