"""The ends of a native target, for drafters that stand on them.

Shape legend: T tokens, R some rows of the head, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from foredraft.models.files.kept import KeptFiles, recipe_of
from foredraft.models.native.config import DecoderConfig
from foredraft.models.native.packed import rows_of
from foredraft.models.native.weights import DecoderWeights


class NativeParts:
    """See `foredraft.models.base.TargetParts`.

    Args:
        config: of the target.
        weights: of the target.
        logits: the decoder's own product with the head.
        kept: the model's on-disk cache.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        logits: Callable[[Tensor], Tensor],
        kept: KeptFiles,
    ) -> None:
        self._config, self._weights, self._logits = config, weights, logits
        self._kept = kept

    @property
    def hidden_size(self) -> int:
        return self._config.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.dtype

    @property
    def device(self) -> torch.device:
        return self._weights.device

    @torch.no_grad()
    def embed(self, token_ids_T: Tensor) -> Tensor:
        return rows_of(self._weights.embedding_VE, token_ids_T, self.dtype)

    @torch.no_grad()
    def norm(self, hidden_TE: Tensor) -> Tensor:
        config = self._config
        offset = config.family.norm_offset
        return rms_norm(hidden_TE, self._weights.final_norm_E, config.rms_norm_eps, offset)

    @torch.no_grad()
    def logits(self, normed_TE: Tensor) -> Tensor:
        return self._logits(normed_TE)

    @torch.no_grad()
    def head_rows(self, token_ids_R: Tensor) -> Tensor:
        rows_RE = rows_of(self._weights.head_VE, token_ids_R, self.dtype)
        scale = self._config.logits_scale
        return rows_RE if scale == 1.0 else rows_RE * scale

    def kept(self, name: str, recipe: str, make: Callable[[], Tensor]) -> Tensor:
        recipe = recipe_of(recipe, self._weights.dtype)
        tensors = self._kept.tensors(name, recipe)
        if tensors is None:
            tensors = {name: make()}
            self._kept.keep(name, recipe, tensors)
        return tensors[name]


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Computed in float32, rounded to the dtype of ``x`` before the weight and after it.

    Args:
        offset: added to the weight; such norms are rounded only after the product.
    """
    scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    if offset:
        return (scaled * (offset + weight.float())).to(x.dtype)
    return (weight * scaled.to(x.dtype)).to(x.dtype)
