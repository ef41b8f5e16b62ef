"""What goes into a head's layer: states and tokens, each behind a norm, and one matrix for all.

Shape legend: T tokens, C states, E hidden size, R outputs, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.models.base import HeadTarget, TargetParts

_TABLE_BYTES = 128e6


class JoinedTokens:
    """What tokens add to a layer's input: their normed embeddings times a matrix.

    Args:
        parts: of the target, for its embeddings.
        weight_EE: the matrix.
        eps: of the norm.
        vocab_size: V.

    Attributes:
        table_VE: it depends on nothing else, so for vocabularies that are not too large it is kept
            for all of them, in bfloat16.
    """

    def __init__(self, parts: TargetParts, weight_EE: Tensor, eps: float, vocab_size: int) -> None:
        self._parts, self._eps = parts, eps
        self._weight_EE = weight_EE.detach().to(parts.device, parts.dtype)
        self.table_VE: Tensor | None = None
        if 2 * vocab_size * len(weight_EE) <= _TABLE_BYTES:
            firsts = range(0, vocab_size, 4096)
            ids = [torch.arange(first, min(first + 4096, vocab_size)) for first in firsts]
            self.table_VE = torch.cat([self._of(ids_T).bfloat16() for ids_T in ids])

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        """Float32 [T, E]."""
        return self._of(torch.tensor(tokens)).float()

    @torch.no_grad()
    def _of(self, ids_T: Tensor) -> Tensor:
        x_TE = self._parts.embed(ids_T).float()
        normed_TE = F.rms_norm(x_TE, x_TE.shape[-1:], eps=self._eps)
        return F.linear(normed_TE.to(self._weight_EE.dtype), self._weight_EE)


class Joined:
    """``matrix @ concat(norm(state) for each state)``, and what tokens add to it.

    Args:
        target: whose kernel multiplies.
        norms: weights [E] of the states' norms.
        matrix: [R, C E].
        eps: of the norms.
        tokens: what they add; None: nothing.
    """

    def __init__(
        self,
        target: HeadTarget,
        norms: Sequence[Tensor],
        matrix: Tensor,
        eps: float,
        tokens: JoinedTokens | None = None,
    ) -> None:
        self._tokens = tokens
        table_VE = None if tokens is None else tokens.table_VE
        # A norm's weights scale the columns of the matrix behind it: one product less to make.
        weight = (matrix * torch.cat([*norms])).detach().to(target.parts.device)
        self._join = target.join(weight, table_VE, eps)

    def __call__(self, states: Sequence[Tensor], tokens: Sequence[int] = ()) -> Tensor:
        """Float32 [T, R], from states [T, E] as many as there are norms, and T tokens."""
        joined = self._join(states, tokens)
        if self._tokens is None or self._tokens.table_VE is not None:  # they are in it
            return joined
        return joined + self._tokens(tokens)
