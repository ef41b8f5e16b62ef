"""What goes into a head's layer: states and tokens, each behind a norm, and one matrix for all.

Shape legend: T tokens, C parts, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.models.base import HeadTarget

_TABLE_BYTES = 128e6


class NormedProduct:
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
        # A norm's weights scale the columns of the matrix behind it: one product less to make.
        self._product = target.product((matrix * torch.cat([*norms])).detach())
        self._eps = eps

    def __call__(self, *parts: Tensor) -> Tensor:
        """Float32 [T, E], from as many parts [T, E] as there are norms."""
        x_TCE = torch.stack([part.float() for part in parts], 1)
        return self._product(unit(x_TCE, self._eps).flatten(1))


class JoinedTokens:
    """What tokens add to a layer's input: their normed embeddings times a matrix.

    It depends on nothing else, so for vocabularies that are not too large it is kept for all of
    them, in bfloat16.

    Args:
        target: for its embeddings.
        norm_E: the norm's weights.
        weight_EE: the matrix.
        eps: of the norm.
    """

    def __init__(self, target: HeadTarget, norm_E: Tensor, weight_EE: Tensor, eps: float) -> None:
        self._parts, self._eps, vocab = target.parts, eps, target.vocab_size
        weight_EE = (weight_EE * norm_E).detach()
        self._weight_EE = weight_EE.to(self._parts.device, self._parts.dtype)
        self._table_VE: Tensor | None = None
        if 2 * vocab * len(weight_EE) <= _TABLE_BYTES:
            firsts = range(0, vocab, 4096)
            ids = [torch.arange(first, min(first + 4096, vocab)) for first in firsts]
            self._table_VE = torch.cat([self._make(ids_T).to(torch.bfloat16) for ids_T in ids])

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        """Float32 [T, E]."""
        ids_T = torch.tensor(tokens)
        if self._table_VE is None:
            return self._make(ids_T).float()
        return F.embedding(ids_T.to(self._table_VE.device), self._table_VE).float()

    @torch.no_grad()
    def _make(self, ids_T: Tensor) -> Tensor:
        normed_TE = unit(self._parts.embed(ids_T), self._eps)
        return F.linear(normed_TE.to(self._weight_EE.dtype), self._weight_EE)


def unit(x: Tensor, eps: float) -> Tensor:
    """Root mean square 1 along the last dimension, in float32."""
    return F.rms_norm(x.float(), (x.shape[-1],), eps=eps)
