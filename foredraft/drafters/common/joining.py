"""Several states of a token as one: each behind a norm of its own, then one matrix for all.

Shape legend: T tokens, C parts, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.models.base import HeadTarget


class Join:
    """``matrix @ concat(norm(part) for each part)``, as drafting computes it.

    Args:
        target: whose kernel multiplies.
        norms: weights [E] of the parts' norms.
        matrix: [E, C E].
        eps: of the norms.
    """

    def __init__(
        self, target: HeadTarget, norms: Sequence[Tensor], matrix: Tensor, eps: float
    ) -> None:
        self._norms_CE = torch.stack([norm.detach().float() for norm in norms])
        self._norms_CE = self._norms_CE.to(target.parts.device)
        self._product, self._eps = target.product(matrix.detach()), eps

    def __call__(self, *parts: Tensor) -> Tensor:
        """[T, E] in float32, from as many parts [T, E] as there are norms."""
        x_TCE = torch.stack([part.float() for part in parts], 1)
        scale = torch.rsqrt(x_TCE.square().mean(-1, keepdim=True) + self._eps)
        return self._product((x_TCE * scale * self._norms_CE).flatten(1))
