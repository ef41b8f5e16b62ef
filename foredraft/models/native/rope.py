"""Rotary position embedding (arXiv 2104.09864), rotating the two halves of a head.

Scalings that stretch a context: linear (arXiv 2306.15595), llama3, yarn (arXiv 2309.00071) and
longrope (arXiv 2402.13753). Frequencies never depend on the current length of a text: keys in the
cache would otherwise have another embedding than the queries that attend to them.

Shape legend: T tokens, H heads, D head size, P rotated numbers of a head, in pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.models.files.schema import RopeFields

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
"""``rope_type`` values. A dynamic one is plain as long as a text fits ``max_position_embeddings``,
which is as long as it may be."""


_PLAIN = RopeFields()


@dataclass(frozen=True)
class RotaryEmbedding:
    """One rotary embedding.

    Attributes:
        theta: base of the frequencies.
        size: P, how many of a head's first numbers it rotates.
        fields: its scaling.
        context: ``max_position_embeddings``.
        is_long: of longrope, whether the factors for long texts are meant.
    """

    theta: float
    size: int
    fields: RopeFields = _PLAIN
    context: int = 0
    is_long: bool = False

    @property
    def kind(self) -> str:
        return self.fields.rope_type or "default"

    @property
    def amplitude(self) -> float:
        """Factor of cosines and sines."""
        fields = self.fields
        if self.kind == "yarn":
            return _yarn_amplitude(fields, self._factor)
        if self.kind == "longrope":
            if fields.attention_factor is not None:
                return fields.attention_factor
            if self._factor <= 1:
                return 1.0
            return math.sqrt(1 + math.log(self._factor) / math.log(self._original_context))
        return 1.0

    def inverse_frequencies(self) -> Tensor:
        """Rotation speed of each pair of numbers, float32 [P / 2]."""
        exponent = torch.arange(0, self.size, 2, dtype=torch.float32) / self.size
        inv_freq: Tensor = 1.0 / (self.theta**exponent)
        if self.kind == "linear":
            return inv_freq / self._factor
        if self.kind == "llama3":
            return self._llama3(inv_freq)
        if self.kind == "yarn":
            return self._yarn(inv_freq)
        if self.kind == "longrope":
            factors = self.fields.long_factor if self.is_long else self.fields.short_factor
            return 1.0 / (torch.tensor(factors) * self.theta**exponent)
        return inv_freq

    @property
    def _original_context(self) -> int:
        return self.fields.original_max_position_embeddings or self.context

    @property
    def _factor(self) -> float:
        return self.fields.factor or self.context / self._original_context

    def _llama3(self, inv_freq: Tensor) -> Tensor:
        """Slow rotations are slowed by ``factor``, fast ones kept, with a ramp between."""
        low, high = self.fields.low_freq_factor, self.fields.high_freq_factor
        assert low is not None
        assert high is not None
        turns = inv_freq * (self._original_context / (2 * math.pi))
        ramp = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return inv_freq / self._factor * (1 - ramp) + inv_freq * ramp

    def _yarn(self, inv_freq: Tensor) -> Tensor:
        """The same, with a ramp over pairs instead of over turns."""
        fast, slow = self.fields.beta_fast or 32, self.fields.beta_slow or 1
        low, high = (self._pair_of(turns) for turns in (fast, slow))
        if self.fields.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.size - 1)
        if low == high:
            high += 0.001
        pairs = torch.arange(self.size // 2, dtype=torch.float32)
        kept = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
        return inv_freq / self._factor * (1 - kept) + inv_freq * kept

    def _pair_of(self, turns: float) -> float:
        """The pair that turns so often in the original context."""
        length = self._original_context / (turns * 2 * math.pi)
        return self.size * math.log(length) / (2 * math.log(self.theta))


def _yarn_amplitude(fields: RopeFields, factor: float) -> float:
    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if fields.attention_factor is not None:
        return fields.attention_factor
    if fields.mscale and fields.mscale_all_dim:
        return scale(fields.mscale) / scale(fields.mscale_all_dim)
    return scale(1.0)


def rotate(x_THD: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
    """Rotate the first P numbers of every head.

    ``cos`` repeats its half, ``sin`` too, with its first half negated.
    """
    size = cos_TP.shape[-1]
    turned, rest = x_THD[..., :size], x_THD[..., size:]
    swapped = torch.roll(turned, size // 2, -1)
    turned = turned * cos_TP[:, None] + swapped * sin_TP[:, None]
    return turned if not rest.shape[-1] else torch.cat((turned, rest), -1)
