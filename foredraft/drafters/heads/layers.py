"""Layers of heads: a llama-shaped decoder layer as a torch module, and joins of inputs.

Training computes with the module; drafting runs the same weights through the target's own kernel
(see `HeadTarget.head_runner`).

Shape legend: B texts, L tokens, E hidden size, H query heads, G key-value heads, D head size.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foredraft.models.base import HeadTarget, HeadWeights, ModelShape
from foredraft.models.files.kept import recipe_of


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

    Its parameters have the names and shapes that `TrainingTarget.layer` hands out:
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
        """Input of the projections to queries, keys and values."""
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


def head_weights(
    layers: Iterable[nn.Module], norm: RMSNorm, output_RE: Tensor, shape: ModelShape
) -> HeadWeights:
    """Weights with which a target runs a head's layers; see `LlamaLayer.weights`."""
    weights = [cast(LlamaLayer, layer).weights() for layer in layers]
    return HeadWeights(weights, norm.weight.detach(), output_RE.detach(), shape)


_TABLE_BYTES = 128e6


class JoinedTokens:
    """Contribution of tokens to a layer's input: their normed embeddings times a matrix.

    Args:
        target: owner of the embeddings.

    Attributes:
        table_VE: the contributions of all tokens in bfloat16, kept if the vocabulary is not too
            large, because they depend on the token alone.
    """

    def __init__(self, target: HeadTarget, weight_EE: Tensor, eps: float) -> None:
        self._parts, self._eps, vocab_size = target.parts, eps, target.vocab_size
        self._weight_EE = weight_EE.detach().to(self._parts.device, self._parts.dtype)
        self.table_VE: Tensor | None = None
        on_card = self._parts.device.type != "cpu"
        self._join = target.join(self._weight_EE, None, eps) if on_card else None
        if 2 * vocab_size * len(weight_EE) <= _TABLE_BYTES:
            recipe, parts = recipe_of(sys.modules[__name__], self._weight_EE, eps), self._parts
            self.table_VE = parts.kept("joined-tokens", recipe, lambda: self._of_all(vocab_size))

    def _of_all(self, vocab_size: int) -> Tensor:
        pieces = torch.split(torch.arange(vocab_size), 4096)
        return torch.cat([self._of(ids_T).bfloat16() for ids_T in pieces])

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        """[T, E]; float32 on the CPU."""
        if self._join is not None:
            return self._join([self._parts.embed(torch.as_tensor(tokens))], ())
        return self._of(torch.as_tensor(tokens)).float()

    @torch.no_grad()
    def _of(self, ids_T: Tensor) -> Tensor:
        x_TE = self._parts.embed(ids_T).float()
        normed_TE = F.rms_norm(x_TE, x_TE.shape[-1:], eps=self._eps)
        return F.linear(normed_TE.to(self._weight_EE.dtype), self._weight_EE)


class Joined:
    """``matrix @ concat(norm(state) for each state)``, plus the contributions of tokens.

    Args:
        target: its kernel multiplies.
        norms: weights [E] of the states' norms.
        matrix: [R, C E].
        tokens: their contributions; None: there are none.
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
        # A norm's weights are folded into the columns of the matrix after it: one product less.
        weight = (matrix * torch.cat([*norms])).detach().to(target.parts.device)
        self._join = target.join(weight, table_VE, eps)

    def __call__(self, states: Sequence[Tensor], tokens: Sequence[int] = ()) -> Tensor:
        """[T, R], float32 on the CPU, of as many states [T, E] as norms, and T tokens."""
        joined = self._join(states, tokens)
        if self._tokens is None or self._tokens.table_VE is not None:  # they are in it
            return joined
        return joined + self._tokens(tokens)

    def of_one(self, states_NE: Tensor, tokens: Sequence[int]) -> Tensor:
        """[N, R] from a single state [N, E] of each token."""
        return self([states_NE], tokens)
