"""The likeliest tokens of a head's logits: one compiled pass, or torch where it is not to be had.

Shape legend: N nodes, R output rows, K candidates of a node.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_double, c_int64, c_void_p

import torch
from torch import Tensor

from foredraft.core.choices import Choice
from foredraft.kernels.build import KernelUnavailable, load_library

LEAST_CHANCE = 4e-3
"""What is less likely is not looked at: noise makes it ten times as likely, so that it might be
worth a node, once in a thousand times."""


class Candidates:
    """Finds them among the tokens that a head can name.

    Args:
        ids_R: the token of each output row.
    """

    def __init__(self, ids_R: Tensor) -> None:
        self._ids_R = ids_R.long().cpu().contiguous()

    def likeliest(self, logits_NR: Tensor, count: int, scale: float) -> list[list[Choice]]:
        """Of each node at most ``count`` tokens, likeliest first, with their probabilities.

        Args:
            logits_NR: float32.
            scale: 1 / temperature.
        """
        count = min(count, len(self._ids_R))
        library = _library() if logits_NR.device.type == "cpu" else None
        if library is None or logits_NR.dtype != torch.float32:
            return self._by_torch(logits_NR, count, scale)
        logits_NR = logits_NR.contiguous()
        num_nodes, num_rows = logits_NR.shape
        tokens = (c_int64 * (num_nodes * count))()
        chances = (c_double * (num_nodes * count))()
        found = (c_int64 * num_nodes)()
        library.foredraft_candidates(
            *(logits_NR.data_ptr(), num_nodes, num_rows, count, scale, LEAST_CHANCE),
            *(self._ids_R.data_ptr(), tokens, chances, found),
        )
        starts = range(0, num_nodes * count, count)
        return [
            [*map(Choice, tokens[start : start + n], chances[start : start + n])]
            for start, n in zip(starts, found, strict=True)
        ]

    def _by_torch(self, logits_NR: Tensor, count: int, scale: float) -> list[list[Choice]]:
        top = logits_NR.topk(count)
        log_total_N1 = (logits_NR * scale).logsumexp(1, keepdim=True)
        chances_NK = (top.values * scale - log_total_N1).exp().tolist()
        tokens_NK = self._ids_R[top.indices.cpu()].tolist()
        return [
            [Choice(*pair) for pair in zip(tokens, chances, strict=True) if pair[1] >= LEAST_CHANCE]
            for tokens, chances in zip(tokens_NK, chances_NK, strict=True)
        ]


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        library = load_library("heads")
    except KernelUnavailable:
        return None
    find = library.foredraft_candidates
    find.argtypes = [c_void_p, *[c_int64] * 3, c_double, c_double, *[c_void_p] * 4]
    find.restype = None
    return library
