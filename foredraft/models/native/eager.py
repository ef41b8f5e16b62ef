"""The decoder in plain torch: the reference that faster paths must equal, on any device.

Shape legend: T tokens of the forward, R tokens of one row, H query heads, G key-value heads,
C cache entries a row sees, D head size, P rotated numbers of a head, E hidden size, X experts,
V vocabulary, N wanted logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.cache.store import Entries
from foredraft.models.native.config import DecoderConfig
from foredraft.models.native.head import head_logits
from foredraft.models.native.packed import Stack, as_tensor, rows_of
from foredraft.models.native.parts import rms_norm
from foredraft.models.native.plan import ForwardPlan
from foredraft.models.native.rope import rotate
from foredraft.models.native.weights import DecoderWeights, LayerWeights


class Run(Protocol):
    """What all layers of one forward share.

    Attributes:
        rotations: of each rotary embedding cosines [T, P], and sines whose first half is negated
            (see `rope.rotate`).
    """

    @property
    def rotations(self) -> Sequence[tuple[Tensor, Tensor]]: ...

    def attend(
        self,
        index: int,
        window: int | None,
        query_THD: Tensor,
        key_TGD: Tensor,
        value_TGD: Tensor,
    ) -> Tensor:
        """Store layer ``index``'s keys and values, and attend to what each token sees; [T, H D].

        Args:
            window: how many entries a token sees, its own included; None: all.
        """
        ...


class EagerDecoder:
    """Runs a `ForwardPlan` layer by layer."""

    name = "eager"
    partial = True
    reads_packed = False
    reads_unseen = False
    draws = False

    def __init__(self, config: DecoderConfig, weights: DecoderWeights) -> None:
        self._config, self._weights = config, weights
        self._inv_freqs = [rope.inverse_frequencies().to(weights.device) for rope in config.ropes]

    def forward(
        self, plan: ForwardPlan, cache: Entries, taps: Sequence[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Write the plan's tokens into the cache and score the wanted ones.

        Returns:
            float32 logits [N, V], and for each tap the output [T, E] of that layer.

        Raises:
            ConfigError: the cache is of another model, or of another dtype than the weights.
        """
        cache.store.check_fits(self._config.kv_shape, self._weights.dtype)
        run, hidden_TE = self.run_of(plan, cache), plan.hidden_TE
        if hidden_TE is None:
            hidden_TE = self.embed(plan.token_ids_T)
        layers = plan.layers_to_run(len(self._weights.layers))
        hidden_TE, tapped = self._run_layers(run, hidden_TE, layers, taps)
        return self._head(hidden_TE[plan.heads]), tapped

    def run_of(self, plan: ForwardPlan, cache: Entries) -> Run:
        """What each layer attends with in a forward."""
        device = self._weights.device
        masks = {
            window: [_to(plan.mask(row, window), device) for row in plan.rows]
            for window in (None, *self._config.windows)
        }
        rotations = self._rotations(plan.positions_T.to(device))
        return _RowRun(plan, cache, rotations, masks, self._attend)

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """What the first layer gets of these tokens; [T, E]."""
        weights = self._weights
        hidden_TE = rows_of(weights.embedding_VE, token_ids_T.to(weights.device), weights.dtype)
        scale = self._config.embedding_scale
        return hidden_TE if scale == 1.0 else hidden_TE * scale

    def logits(self, normed_TE: Tensor) -> Tensor:
        """The head alone: float32 logits [T, V] of normed states."""
        return finished_logits(head_logits(normed_TE, self._weights.head_VE), self._config)

    def _run_layers(
        self, run: Run, hidden_TE: Tensor, layers: Iterable[int], taps: Sequence[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The last layer's output [T, E], and that of the tapped ones."""
        tapped: dict[int, Tensor] = {}
        for index in layers:
            layer = self._weights.layers[index]
            if index not in self._weights.no_attention:
                part_TE = self._attention(run, index, layer, hidden_TE)
                hidden_TE = self._add(hidden_TE, part_TE, layer.attention_post_norm_E)
            if index not in self._weights.no_mlp:
                part_TE = self._mlp(layer, hidden_TE)
                hidden_TE = self._add(hidden_TE, part_TE, layer.mlp_post_norm_E)
            if index in taps:
                tapped[index] = hidden_TE
        return hidden_TE, tapped

    def _add(self, hidden_TE: Tensor, part_TE: Tensor, post_norm_E: Tensor | None) -> Tensor:
        part_TE, scale = self._norm(part_TE, post_norm_E), self._config.residual_scale
        return hidden_TE + (part_TE if scale == 1.0 else part_TE * scale)

    def _head(self, hidden_NE: Tensor) -> Tensor:
        """Float32 logits [N, V] of the last layer's output."""
        return self.logits(self._norm(hidden_NE, self._weights.final_norm_E))

    def _rotations(self, positions_T: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Cosines and signed sines [T, P] for `rope.rotate`, in the weights' dtype."""
        found, dtype = [], self._weights.dtype
        for rope, inv_freq in zip(self._config.ropes, self._inv_freqs, strict=True):
            angles_TF = torch.outer(positions_T.to(torch.float32), inv_freq)
            cos_TF, sin_TF = angles_TF.cos(), angles_TF.sin()
            if rope.amplitude != 1.0:
                cos_TF, sin_TF = cos_TF * rope.amplitude, sin_TF * rope.amplitude
            cos_TF, sin_TF = cos_TF.to(dtype), sin_TF.to(dtype)
            found.append((torch.cat((cos_TF, cos_TF), 1), torch.cat((-sin_TF, sin_TF), 1)))
        return found

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Without a weight there is no norm."""
        if weight is None:
            return x
        return rms_norm(x, weight, self._config.rms_norm_eps, self._config.family.norm_offset)

    def _head_norm(self, x_THD: Tensor, weight: Tensor | None) -> Tensor:
        """Of each head, or of all heads together, as the weight has it."""
        if weight is None or len(weight) == x_THD.shape[-1]:
            return self._norm(x_THD, weight)
        return self._norm(x_THD.flatten(1), weight).view(x_THD.shape)

    def _attention(self, run: Run, index: int, layer: LayerWeights, hidden_TE: Tensor) -> Tensor:
        normed_TE = self._norm(hidden_TE, layer.attention_norm_E)
        qkv = self._linear(normed_TE, layer.qkv_weight, layer.qkv_bias)
        return self._attended(run, index, layer, qkv)

    def _attended(self, run: Run, index: int, layer: LayerWeights, qkv: Tensor) -> Tensor:
        """All of attention [T, E] behind queries, keys and values [T, (H + 2G) D]."""
        config = self._config
        heads = qkv.view(len(qkv), -1, config.head_dim)
        num_query, num_kv = config.num_attention_heads, config.num_key_value_heads
        turned, value_TGD = torch.split(heads, [num_query + num_kv, num_kv], 1)
        if layer.query_norm_D is not None:
            query_THD, key_TGD = torch.split(turned, [num_query, num_kv], 1)
            normed = (
                self._head_norm(query_THD, layer.query_norm_D),
                self._head_norm(key_TGD, layer.key_norm_D),
            )
            turned = torch.cat(normed, 1)
        if layer.kind.rope is not None:
            turned = rotate(turned, *run.rotations[layer.kind.rope])
        query_THD, key_TGD = torch.split(turned, [num_query, num_kv], 1)
        attended = run.attend(index, layer.kind.window, query_THD, key_TGD, value_TGD)
        return self._linear(attended, layer.output_weight, layer.output_bias)

    def _linear(self, x: Tensor, weight: Stack, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, as_tensor(weight, x.dtype), bias)

    def _attend(
        self, query_RHD: Tensor, keys_GCD: Tensor, values_GCD: Tensor, mask_RC: Tensor | None
    ) -> Tensor:
        """Attention of one row's tokens over its entries; [R, H, D]."""
        return self._sees(query_RHD.transpose(0, 1), keys_GCD, values_GCD, mask_RC).transpose(0, 1)

    def _sees(
        self, query_HRD: Tensor, keys_GCD: Tensor, values_GCD: Tensor, mask_RC: Tensor | None
    ) -> Tensor:
        """Values by the softmax of scores; [H, R, D]."""
        cap, scale = self._config.attention_cap, self._config.query_scale
        if cap is None:
            return F.scaled_dot_product_attention(
                *(query_HRD[None], keys_GCD[None], values_GCD[None]),
                attn_mask=mask_RC,
                scale=scale,
                enable_gqa=True,
            )[0]
        shared = len(query_HRD) // len(keys_GCD)
        keys, values = (x.repeat_interleave(shared, 0) for x in (keys_GCD, values_GCD))
        return capped_attention(query_HRD, keys, values, mask_RC, scale, cap)

    def _mlp(self, layer: LayerWeights, hidden_TE: Tensor) -> Tensor:
        normed_TE = self._norm(hidden_TE, layer.mlp_norm_E)
        if layer.router_XE is not None:
            return self._mixture(layer, layer.router_XE, normed_TE)
        return self._feed_forward(normed_TE, layer.gate_up_weight, layer.down_weight)

    def _feed_forward(self, normed_TE: Tensor, gate_up_weight: Stack, down_weight: Stack) -> Tensor:
        gate, up = self._linear(normed_TE, gate_up_weight).chunk(2, dim=-1)
        activated = F.silu(gate) if self._config.activation == "silu" else _gelu_tanh(gate)
        return self._linear(activated * up, down_weight)

    def _mixture(self, layer: LayerWeights, router_XE: Tensor, normed_TE: Tensor) -> Tensor:
        """What each token's likeliest experts give, by their chances; in the order of experts."""
        experts = self._config.experts
        assert experts is not None
        chances_TX = self._linear(normed_TE, router_XE).float().softmax(-1)
        chances_TK, chosen_TK = chances_TX.topk(experts.per_token)
        if experts.normalised:
            chances_TK = chances_TK / chances_TK.sum(-1, keepdim=True)
        chances_TK = chances_TK.to(normed_TE.dtype)
        gate_up, down = (
            as_tensor(weight, normed_TE.dtype).chunk(experts.count)
            for weight in (layer.gate_up_weight, layer.down_weight)
        )
        sums_TE = torch.zeros_like(normed_TE)
        for expert in sorted({*chosen_TK.flatten().tolist()}):
            tokens, places = (chosen_TK == expert).nonzero(as_tuple=True)
            part = self._feed_forward(normed_TE[tokens], gate_up[expert], down[expert])
            sums_TE.index_add_(0, tokens, part * chances_TK[tokens, places, None])
        return sums_TE


class _RowRun:
    """A forward that attends row by row. See `Run`."""

    def __init__(
        self,
        plan: ForwardPlan,
        cache: Entries,
        rotations: Sequence[tuple[Tensor, Tensor]],
        masks: Mapping[int | None, list[Tensor | None]],
        attend_row: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    ) -> None:
        self.rotations = rotations
        self._plan, self._store, self._masks = plan, cache.store, masks
        blocks, size = list[int](), cache.store.block_size
        for row in plan.rows:
            table = cache.table(plan.slot(row))
            blocks.extend(table[entry // size] for entry in plan.entries[_slice(row)])
        offsets = [entry % size for entry in plan.entries]
        self._written = torch.tensor([blocks, offsets], dtype=torch.int64).to(cache.store.device)
        self._rows = [_rows_of(cache, plan.slot(row), plan.end(row)) for row in plan.rows]
        self._attend_row = attend_row
        self._num_nodes = [sum(map(bool, plan.extras[_slice(row)])) for row in plan.rows]

    def attend(
        self,
        index: int,
        window: int | None,
        query_THD: Tensor,
        key_TGD: Tensor,
        value_TGD: Tensor,
    ) -> Tensor:
        outputs = []
        blocks_T, offsets_T = self._written
        self._store.keys[:, index][blocks_T, :, offsets_T] = key_TGD
        self._store.values[:, index][blocks_T, :, offsets_T] = value_TGD
        rows = zip(self._plan.rows, self._rows, self._masks[window], self._num_nodes, strict=True)
        for row, rows_R, mask, num_nodes in rows:
            end = self._plan.end(row)
            keys_GCD, values_GCD = (x[:, :end] for x in self._store.gather(index, rows_R))
            if num_nodes:
                _make_finite(keys_GCD[:, end - num_nodes :])
                _make_finite(values_GCD[:, end - num_nodes :])
            query_RHD = query_THD[_slice(row)]
            outputs.append(self._attend_row(query_RHD, keys_GCD, values_GCD, mask).flatten(1))
        return torch.cat(outputs)


def _rows_of(cache: Entries, slot: int, end: int) -> Tensor:
    """Where the blocks lie that hold a slot's entries before ``end``; see `BlockStore.rows`."""
    num_blocks = -(-end // cache.store.block_size)
    return cache.store.rows(cache.table(slot)[:num_blocks])


def capped_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float | None,
    cap: float,
) -> Tensor:
    """Attention [..., R, D] whose scores s become c tanh(s / c).

    Args:
        mask: where what is seen is True, or numbers to add; None: all is seen.
        scale: None: 1 / root of D.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = cap * torch.tanh(query @ keys.transpose(-1, -2) * (scale / cap))
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    return scores.softmax(-1, dtype=torch.float32).to(values.dtype) @ values


def finished_logits(logits_NV: Tensor, config: DecoderConfig) -> Tensor:
    """What products with the head become: scaled, and capped."""
    if config.logits_scale != 1.0:
        logits_NV = logits_NV * config.logits_scale
    if config.logits_cap is not None:
        logits_NV = config.logits_cap * torch.tanh(logits_NV / config.logits_cap)
    return logits_NV


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _make_finite(entries_GND: Tensor) -> None:
    """Of tree nodes: attention gives what it may not see a weight of 0, and 0 times NaN is NaN.

    A node that is NaN itself stays so, and nobody goes on from there; its siblings, and the tokens
    before it, are what they would be without it. Done to what attention reads, not to the cache.
    """
    torch.nan_to_num(entries_GND, 0.0, 0.0, 0.0, out=entries_GND)


def _slice(span: range) -> slice:
    return slice(span.start, span.stop)


def _to(mask: Tensor | None, device: torch.device) -> Tensor | None:
    return None if mask is None else mask.to(device)
