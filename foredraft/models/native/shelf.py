"""Memory for many tensors in a few pieces.

A forward walks through all weights, and huge pages behind them save a tenth of its time
(``kernels/pages.h``). Tensors allocated one by one, between others that come and go, lie scattered,
and the system gives huge pages to whole ones only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_PIECE_BYTES = 64 << 20
"""What is not used of a piece costs addresses, no memory."""
_HUGE_PAGE = 2 << 20
_LINE = 64


class Shelf:
    """Hands out uninitialised memory, one tensor beside the other."""

    def __init__(self) -> None:
        self._free: Tensor | None = None

    def empty(self, shape: Sequence[int]) -> Tensor:
        """A uint8 tensor; it begins with a cache line."""
        size = math.prod(shape)
        room = -(-size // _LINE) * _LINE
        if self._free is None or room > len(self._free):
            piece = torch.empty(max(room, _PIECE_BYTES) + _HUGE_PAGE, dtype=torch.uint8)
            self._free = piece[-piece.data_ptr() % _HUGE_PAGE :]
        taken, self._free = self._free[:room], self._free[room:]
        return taken[:size].view(*shape)
