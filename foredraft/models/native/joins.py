"""Input projections of draft heads: they join states and a token to a layer's input.

Shape legend: T tokens, P joined states, E hidden size, K inputs of a product (P times E), V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL, c_double, c_int64, c_void_p
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.kernels.build import load_library
from foredraft.models.base import Join
from foredraft.models.native.packed import Int8Matrix
from foredraft.models.native.runner import NO_LAYERS
from foredraft.models.native.weights import DecoderWeights


def native_join(
    weight_EK: Tensor, table_VE: Tensor | None, eps: float, dtype: torch.dtype, fused: bool
) -> Join:
    """See `foredraft.models.base.HeadTarget.join`."""
    new = FusedJoin if fused else PlainJoin
    return new(weight_EK.detach().to(dtype), table_VE, eps)


class PlainJoin:
    """By torch, where the weights are."""

    def __init__(self, weight_EK: Tensor, table_VE: Tensor | None, eps: float) -> None:
        self._weight_EK, self._table_VE, self._eps = weight_EK, table_VE, eps

    @torch.no_grad()
    def __call__(self, states: Sequence[Tensor], tokens: Sequence[int]) -> Tensor:
        device = self._weight_EK.device
        x_TPE = torch.stack([*states], 1).to(device).float()
        x_TPE = F.rms_norm(x_TPE, x_TPE.shape[-1:], eps=self._eps)
        joined_TE = F.linear(x_TPE.flatten(1).to(self._weight_EK.dtype), self._weight_EK).float()
        if self._table_VE is None:
            return joined_TE
        return joined_TE + self._table_VE[torch.tensor(tokens, device=device)].float()


class FusedJoin:
    """By the fused kernel, in 8 bits and on one thread.

    Waking another thread takes longer than a small product does.
    """

    def __init__(self, weight_EK: Tensor, table_VE: Tensor | None, eps: float) -> None:
        from foredraft.models.native.fused import FusedDecoder
        from foredraft.models.native.prepared import PreparedForward

        num_rows, num_inputs = weight_EK.shape
        config = replace(NO_LAYERS, vocab_size=num_rows, hidden_size=num_inputs, rms_norm_eps=eps)
        packed = Int8Matrix.of_weight(weight_EK.float())
        no_embedding = torch.empty(1, num_inputs, dtype=weight_EK.dtype)
        weights = DecoderWeights(no_embedding, (), torch.ones(num_inputs), packed)
        self._product = PreparedForward(FusedDecoder(config, weights, num_threads=1))
        self._library = _library()
        self._num_inputs, self._eps = num_inputs, eps
        self._table_VE = None if table_VE is None else table_VE.bfloat16().contiguous()

    def __call__(self, states: Sequence[Tensor], tokens: Sequence[int]) -> Tensor:
        # The product's own norm brings a row to 1; several states are brought there each alone.
        alone = len(states) == 1
        x_TK = states[0].float().contiguous() if alone else self._unit_rows(states)
        joined_TE = self._product.head(x_TK)
        if self._table_VE is not None:
            count, width = joined_TE.shape
            self._library.foredraft_add_rows(
                self._table_VE.data_ptr(),
                (c_int64 * count)(*tokens),
                count,
                width,
                joined_TE.data_ptr(),
            )
        return joined_TE

    def _unit_rows(self, states: Sequence[Tensor]) -> Tensor:
        count, size = states[0].shape
        x_TK = torch.empty(count, self._num_inputs)
        for i, x_TE in enumerate(states):
            if x_TE.dtype not in (torch.bfloat16, torch.float32) or x_TE.stride(1) != 1:
                x_TE = x_TE.float().contiguous()
            self._library.foredraft_unit_rows(
                x_TE.data_ptr(),
                x_TE.dtype == torch.bfloat16,
                count,
                x_TE.stride(0),
                size,
                self._eps,
                x_TK.data_ptr() + i * size * x_TK.itemsize,
                self._num_inputs,
            )
        return x_TK


def _library() -> CDLL:
    library = load_library("heads")
    sizes = [c_int64] * 4
    library.foredraft_unit_rows.argtypes = [c_void_p, *sizes, c_double, c_void_p, c_int64]
    library.foredraft_unit_rows.restype = None
    library.foredraft_add_rows.argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_void_p]
    library.foredraft_add_rows.restype = None
    return library
