"""Arithmetic that the verification rules share, in float64.

Shape legend: V vocabulary.
"""

from __future__ import annotations

from torch import Tensor


def normalised(weights_V: Tensor) -> Tensor:
    """Weights as float64 probabilities. float32 softmax sums to one only within 1e-6."""
    weights_V = weights_V.double()
    return weights_V / weights_V.sum()


def positive_part(target_V: Tensor, draft_V: Tensor) -> Tensor:
    """max(target - draft, 0): the mass that drafting left uncovered, not normalised."""
    return (target_V - draft_V).clamp_min(0.0)


def residual_or(fallback_V: Tensor, residual_V: Tensor) -> Tensor:
    """The residual, or ``fallback_V`` where rounding left none.

    A residual without mass means target and draft agree, and is then reached with probability 0.
    """
    return residual_V if float(residual_V.sum()) > 0.0 else fallback_V
