"""A draft model that is as good as one likes: the target, with noise in its weights.

How well a way to verify works depends on how close draft model and target are. Here the distance
is a number, and no second model has to be downloaded.
"""

from __future__ import annotations

import torch

from foredraft.core.errors import ConfigError
from foredraft.models.base import Target
from foredraft.models.native.target import NativeTarget

_SEED = 0
_ROWS_AT_ONCE = 1024


@torch.no_grad()
def add_noise(model: Target | None, share: float) -> None:
    """Add normal noise to every matrix of a loaded model, embeddings included, in place.

    Args:
        model: of the native backend, in floating point.
        share: the noise's standard deviation, in standard deviations of the matrix.

    Raises:
        ConfigError: there is no model, or one whose weights cannot be changed.
    """
    if not isinstance(model, NativeTarget):
        raise ConfigError("noise in the weights needs a model of the native backend")
    generator = torch.Generator(model.weights.device).manual_seed(_SEED)
    for matrix in model.weights.matrices():
        if not matrix.is_floating_point():
            raise ConfigError("noise in the weights needs floating point; leave out --weights int8")
        spread = share * float(matrix.float().std())
        for rows in torch.split(matrix, _ROWS_AT_ONCE):
            noise = torch.randn(rows.shape, generator=generator, device=rows.device)
            rows.copy_(rows.float() + noise * spread)
