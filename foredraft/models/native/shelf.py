"""Arena: tensors in few large chunks aligned to 2 MB, so that huge pages apply.

A forward reads all weights, and huge pages save a tenth of its time (``kernels/pages.h``). Tensors
that are allocated one by one lie scattered between others, and the system backs only whole ranges
of 2 MB with huge pages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_PIECE_BYTES = 64 << 20
"""The unused part of a chunk costs address space, not memory."""
_HUGE_PAGE = 2 << 20
_LINE = 64


class Shelf:
    """Bump allocator of uninitialised tensors."""

    def __init__(self) -> None:
        self._free: Tensor | None = None

    def empty(self, shape: Sequence[int]) -> Tensor:
        """A uint8 tensor, aligned to a cache line."""
        size = math.prod(shape)
        room = -(-size // _LINE) * _LINE
        if self._free is None or room > len(self._free):
            piece = torch.empty(max(room, _PIECE_BYTES) + _HUGE_PAGE, dtype=torch.uint8)
            self._free = piece[-piece.data_ptr() % _HUGE_PAGE :]
        taken, self._free = self._free[:room], self._free[room:]
        return taken[:size].view(*shape)
