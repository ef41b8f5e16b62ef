"""GPTQ: 4-bit quantisation that corrects later columns for the error of earlier ones.

The method is of E. Frantar et al. (arXiv 2210.17323). Rounding to nearest assumes that all inputs
of a product are equally large and independent. They are not: their covariance on the model's own
text shows which errors matter, and how weights that are not yet rounded can compensate them. A copy
that drafts agrees with the target more often, and is as fast.

Shape legend: R rows (outputs) of a matrix, K inputs, T tokens, B blocks of 32 inputs, C inputs of a
block.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.models.base import ScoreRow
from foredraft.models.native.config import DecoderConfig
from foredraft.models.native.model import EagerDecoder
from foredraft.models.native.plan import plan_forward
from foredraft.models.native.quant import (
    INT4,
    INT8,
    SCALE_INPUTS,
    Blocks,
    Matrix,
    Shelf,
    Stack,
    as_tensor,
)
from foredraft.models.native.weights import DecoderWeights, LayerWeights

_DAMPING = 0.01
"""Fraction of the inputs' mean square added to each: it covers inputs that the text lacks."""
_SHRINKS = (1.0, 0.9, 0.8, 0.7, 0.6)
"""Fractions of a block's range that are tried for its scale: clipping few large weights can pay."""
_TINY = torch.finfo(torch.float32).tiny
_LEVELS = 15


class _LayerByLayer(EagerDecoder):
    """Runs single layers of all texts together."""

    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights, texts: Sequence[Sequence[int]]
    ) -> None:
        super().__init__(config, weights)
        self._products: dict[int, Tensor] | None = {}
        cache = config.new_cache(weights.dtype, weights.device, max(map(len, texts)))
        rows = [ScoreRow(cache.allocate(), text, wants_logits=False) for text in texts]
        for row in rows:
            cache.reserve(row.slot, len(row.pending))
        self._run_texts = self.run_of(plan_forward(rows, [0] * len(rows)), cache)
        self._of_all, self._products = self._products, None

    def through(self, index: int, hidden_TE: Tensor) -> Tensor:
        """The output [T, E] of a layer, as it is now."""
        hidden_TE, _ = self._run_layers(self._run_texts, hidden_TE, [index], ())
        return hidden_TE

    def products_of(self, index: int, hidden_TE: Tensor) -> dict[int, Tensor]:
        """Products [K, K] of pairs of inputs, for each matrix of a layer by its identity."""
        products = self._products = {**self._of_all}
        self.through(index, hidden_TE)
        self._products = None
        return products

    def replace_layer(self, index: int, layer: LayerWeights) -> None:
        """Replace a layer for the following forwards."""
        layers = [*self._weights.layers]
        layers[index] = layer
        self._weights = replace(self._weights, layers=tuple(layers))

    def _linear(self, x: Tensor, weight: Stack, bias: Tensor | None = None) -> Tensor:
        if self._products is not None:
            x_TK = x.float()
            self._products[id(weight)] = x_TK.T @ x_TK
        return super()._linear(x, weight, bias)


@torch.no_grad()
def compensated(
    config: DecoderConfig,
    weights: DecoderWeights,
    texts: Sequence[Sequence[int]],
    advance: Callable[[str], None],
) -> DecoderWeights:
    """A 4-bit copy with an 8-bit LM head, calibrated on these texts; only matrices are copied.

    Each layer is quantised for the outputs of the quantised layers before it.

    Args:
        texts: token ids that the model wrote itself; some thousands in all.
        advance: called after each layer with a line about it.
    """
    decoder, shelf = _LayerByLayer(config, weights, texts), Shelf()
    ids_T = torch.tensor([token for text in texts for token in text])
    hidden_TE = decoder.embed(ids_T)
    layers = list[LayerWeights]()

    def unpacked(_: str, weight: Stack, num_parts: int) -> Matrix:
        return as_tensor(weight, weights.dtype)

    for index, layer in enumerate(weights.layers):
        products = decoder.products_of(index, hidden_TE)

        def packed(
            _: str, weight: Stack, num_parts: int, products: dict[int, Tensor] = products
        ) -> Matrix:
            weight_RK = as_tensor(weight, torch.float32).float()
            blocks = _rounded(weight_RK, products[id(weight)])
            return INT4.of_blocks(blocks, weight_RK.shape[1], num_parts, shelf)

        layers.append(layer.with_matrices(packed))
        decoder.replace_layer(index, layers[-1].with_matrices(unpacked))
        hidden_TE = decoder.through(index, hidden_TE)
        advance(f"layer {index + 1}")
    head_VE = INT8.of_weight(as_tensor(weights.head_VE, weights.dtype), 1, shelf)
    return replace(weights, layers=tuple(layers), head_VE=head_VE)


def _rounded(weight_RK: Tensor, product_KK: Tensor) -> Blocks:
    """A matrix in 4 bits, block by block; later columns absorb each column's error."""
    short = -weight_RK.shape[1] % SCALE_INPUTS
    weight_RK = F.pad(weight_RK, (0, short)).clone()
    product_KK = F.pad(product_KK, (0, short, 0, short))
    upper_KK = _undoing(product_KK)
    weights_K = product_KK.diagonal()
    num_blocks = weight_RK.shape[1] // SCALE_INPUTS
    integers_RBC = torch.empty(len(weight_RK), num_blocks, SCALE_INPUTS, dtype=torch.int8)
    scales_RB, minima_RB = (
        torch.empty(len(weight_RK), num_blocks, dtype=torch.float16) for _ in range(2)
    )
    for block in range(num_blocks):
        inputs = slice(block * SCALE_INPUTS, (block + 1) * SCALE_INPUTS)
        part_RC, upper_CC = weight_RK[:, inputs].clone(), upper_KK[inputs, inputs]
        scales_RB[:, block], minima_RB[:, block] = _best_scales(part_RC, weights_K[inputs])
        scale_R, minimum_R = scales_RB[:, block].float(), minima_RB[:, block].float()
        step_R = scale_R.clamp_min(_TINY)
        errors_RC = torch.empty_like(part_RC)
        for column in range(SCALE_INPUTS):
            now_R = part_RC[:, column]
            level_R = ((now_R - minimum_R) / step_R).round_().clamp_(0, _LEVELS)
            integers_RBC[:, block, column] = level_R.to(torch.int8)
            error_R = (now_R - (level_R * scale_R + minimum_R)) / upper_CC[column, column]
            part_RC[:, column:] -= error_R[:, None] * upper_CC[column, column:]
            errors_RC[:, column] = error_R
        weight_RK[:, inputs.stop :] -= errors_RC @ upper_KK[inputs, inputs.stop :]
    return Blocks(integers_RBC, scales_RB, minima_RB)


def _undoing(product_KK: Tensor) -> Tensor:
    """The share of an input's error that later inputs absorb: an upper triangle [K, K]."""
    diagonal_K = product_KK.diagonal().clone()
    mean = diagonal_K.mean().clamp_min(1e-12)
    damped_KK = product_KK + torch.diag((_DAMPING * mean).expand_as(diagonal_K))
    inverse_KK = torch.cholesky_inverse(torch.linalg.cholesky(damped_KK))
    upper_KK: Tensor = torch.linalg.cholesky(inverse_KK, upper=True)
    return upper_KK


def _best_scales(part_RC: Tensor, weights_C: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum of each row [R] with the least error, where large inputs count more."""
    low_R, high_R = part_RC.amin(1), part_RC.amax(1)
    best_R = torch.full_like(low_R, math.inf)
    scales_R, minima_R = (torch.empty(len(low_R), dtype=torch.float16) for _ in range(2))
    for above, below in itertools.product(_SHRINKS, _SHRINKS):
        range_R = high_R - low_R
        minimum_R = (low_R + (1 - above) * range_R / 2).to(torch.float16)
        top_R = high_R - (1 - below) * range_R / 2
        scale_R = ((top_R - minimum_R.float()) / _LEVELS).to(torch.float16)
        step_R1 = scale_R.float().clamp_min(_TINY)[:, None]
        level_RC = ((part_RC - minimum_R.float()[:, None]) / step_R1).round_().clamp_(0, _LEVELS)
        lost_RC = level_RC * step_R1 + minimum_R.float()[:, None] - part_RC
        error_R = lost_RC.square() @ weights_C
        is_better_R = error_R < best_R
        best_R = torch.where(is_better_R, error_R, best_R)
        scales_R = torch.where(is_better_R, scale_R, scales_R)
        minima_R = torch.where(is_better_R, minimum_R, minima_R)
    return scales_R, minima_R
