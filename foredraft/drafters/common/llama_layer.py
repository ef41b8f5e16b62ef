"""A llama-shaped decoder layer as a torch module, for training heads that have one.

Drafting runs the same weights through the target's own kernel (see `PartsTarget.parts`).

Shape legend: B texts, L tokens, E hidden size, H query heads, G key-value heads, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foredraft.models.base import ModelShape


class RMSNorm(nn.Module):
    """Root mean square norm (arXiv 1910.07467), computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        return (x.float() * scale).to(x.dtype) * self.weight.to(x.dtype)


def rotary(shape: ModelShape, positions_L: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [L, D] of plain rotary embedding (arXiv 2104.09864), halves rotated."""
    exponents = torch.arange(0, shape.head_dim, 2, device=positions_L.device).float()
    frequencies = shape.rope_theta ** (-exponents / shape.head_dim)
    angles_LD = (positions_L.float()[:, None] * frequencies).repeat(1, 2)
    return angles_LD.cos(), angles_LD.sin()


def rotate(x_BHLD: Tensor, cos_LD: Tensor, sin_LD: Tensor) -> Tensor:
    first, second = x_BHLD.float().chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return (x_BHLD.float() * cos_LD + turned * sin_LD).to(x_BHLD.dtype)


class LlamaLayer(nn.Module):
    """Attention and gated feed-forward, each behind a norm and beside the residual.

    Its parameters have the names and shapes that `HeadSource.layer` hands out:
    ``attention_norm.weight`` [E], ``qkv.weight`` [(H + 2G) D, E], ``output.weight`` [E, H D],
    ``mlp_norm.weight`` [E], ``gate_up.weight`` [2F, E] (gate first), ``down.weight`` [E, F].
    """

    attention_norm: nn.Module

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        heads = shape.num_attention_heads + 2 * shape.num_key_value_heads
        self.attention_norm = RMSNorm(hidden, eps)
        self.qkv = nn.Linear(hidden, heads * shape.head_dim, bias=False)
        self.output = nn.Linear(shape.num_attention_heads * shape.head_dim, hidden, bias=False)
        self.mlp_norm = RMSNorm(hidden, eps)
        self.gate_up = nn.Linear(hidden, 2 * shape.intermediate_size, bias=False)
        self.down = nn.Linear(shape.intermediate_size, hidden, bias=False)

    def weights(self) -> dict[str, Tensor]:
        """Its tensors by name, as `foredraft.models.base.HeadWeights` wants them."""
        return {name: tensor.detach() for name, tensor in self.named_parameters()}

    def attention_input(self, x_BLE: Tensor) -> Tensor:
        """What queries, keys and values are made of."""
        normed: Tensor = self.attention_norm(x_BLE)
        return normed

    def heads(self, x_BLE: Tensor, positions_L: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, H, L, D], keys and values [B, G, L, D]; rotated."""
        shape, (batch, length) = self.shape, x_BLE.shape[:2]
        num_heads, groups = shape.num_attention_heads, shape.num_key_value_heads
        qkv = self.qkv(self.attention_input(x_BLE))
        qkv = qkv.view(batch, length, num_heads + 2 * groups, shape.head_dim).transpose(1, 2)
        queries, keys, values = qkv.split((num_heads, groups, groups), 1)
        cos_LD, sin_LD = rotary(shape, positions_L)
        return rotate(queries, cos_LD, sin_LD), rotate(keys, cos_LD, sin_LD), values

    def finish(self, x_BLE: Tensor, attended_BHLD: Tensor) -> Tensor:
        """All that comes after attention."""
        x_BLE = x_BLE + self.output(attended_BHLD.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x_BLE)).chunk(2, -1)
        product: Tensor = self.down(F.silu(gate) * up)
        return x_BLE + product

    def forward(self, x_BLE: Tensor) -> Tensor:
        """Causal, from position 0."""
        positions_L = torch.arange(x_BLE.shape[1], device=x_BLE.device)
        queries, keys, values = self.heads(x_BLE, positions_L)
        attended = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=True
        )
        return self.finish(x_BLE, attended)
