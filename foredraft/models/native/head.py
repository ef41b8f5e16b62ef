"""The product with the LM head: sums are float32, whatever the dtype of the weights.

Rounded to bfloat16, logits of about 20 are 0.125 apart: likely tokens tie, and the one that comes
first in the vocabulary wins.

Shape legend: N wanted logits, E hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.models.native.packed import Matrix, as_tensor

_ROWS_AT_ONCE = 512
"""Rows that are converted at once on CPUs: they stay in the core's cache until multiplied."""


def head_logits(normed_NE: Tensor, head_VE: Matrix) -> Tensor:
    """Float32 logits [N, V].

    GPUs multiply what is stored and add up in float32. CPUs have no such product: there the head is
    converted piece by piece, which for 49k rows takes 6 ms where a rounded product takes 2.5.
    """
    if not isinstance(head_VE, Tensor):
        return normed_NE.float() @ as_tensor(head_VE, torch.float32).T
    if head_VE.dtype == torch.float32:
        return normed_NE @ head_VE.T
    if head_VE.device.type in ("cuda", "meta"):
        return torch.mm(normed_NE, head_VE.T, out_dtype=torch.float32)
    inputs_NE = normed_NE.float()
    logits_NV = torch.empty((len(normed_NE), len(head_VE)), device=head_VE.device)
    for first in range(0, len(head_VE), _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        torch.mm(inputs_NE, head_VE[rows].float().T, out=logits_NV[:, rows])
    return logits_NV
