"""The decoder in plain torch: the reference that faster paths must equal, on any device.

Shape legend: T tokens of the forward, R tokens of one row, H query heads, G key-value heads,
C cache entries a row sees, D head size, E hidden size, V vocabulary, N wanted logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.cache.store import Entries
from foredraft.models.native.config import DecoderConfig
from foredraft.models.native.head import head_logits
from foredraft.models.native.packed import Matrix, as_tensor
from foredraft.models.native.parts import rms_norm
from foredraft.models.native.plan import ForwardPlan
from foredraft.models.native.rope import inverse_frequencies, rotate
from foredraft.models.native.weights import DecoderWeights, LayerWeights


class Run(Protocol):
    """What all layers of one forward share.

    Attributes:
        cos_TD: of the rotary angles.
        sin_TD: likewise, the first half of each head negated (see `rope.rotate`).
    """

    @property
    def cos_TD(self) -> Tensor: ...

    @property
    def sin_TD(self) -> Tensor: ...

    def attend(self, index: int, query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor) -> Tensor:
        """Store layer ``index``'s keys and values, and attend to what each token sees; [T, H D]."""
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
        self._inv_freq = inverse_frequencies(config).to(weights.device)

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
            device = self._weights.device
            hidden_TE = F.embedding(plan.token_ids_T.to(device), self._weights.embedding_VE)
        layers = plan.layers_to_run(len(self._weights.layers))
        hidden_TE, tapped = self._run_layers(run, hidden_TE, layers, taps)
        return self._head(hidden_TE[plan.heads]), tapped

    def run_of(self, plan: ForwardPlan, cache: Entries) -> Run:
        """What each layer attends with in a forward."""
        device = self._weights.device
        masks = [_to(plan.mask(row), device) for row in plan.rows]
        rotations = self._rotations(plan.positions_T.to(device))
        return _RowRun(plan, cache, *rotations, masks, self._attend)

    def logits(self, normed_TE: Tensor) -> Tensor:
        """The head alone: float32 logits [T, V] of normed states."""
        return head_logits(normed_TE, self._weights.head_VE)

    def _run_layers(
        self, run: Run, hidden_TE: Tensor, layers: Iterable[int], taps: Sequence[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The last layer's output [T, E], and that of the tapped ones."""
        tapped: dict[int, Tensor] = {}
        for index in layers:
            layer = self._weights.layers[index]
            if index not in self._weights.no_attention:
                hidden_TE = hidden_TE + self._attention(run, index, layer, hidden_TE)
            if index not in self._weights.no_mlp:
                hidden_TE = hidden_TE + self._mlp(layer, hidden_TE)
            if index in taps:
                tapped[index] = hidden_TE
        return hidden_TE, tapped

    def _head(self, hidden_NE: Tensor) -> Tensor:
        """Float32 logits [N, V] of the last layer's output."""
        return self.logits(self._norm(hidden_NE, self._weights.final_norm_E))

    def _rotations(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [T, D] for `rope.rotate`, in the weights' dtype."""
        angles_TF = torch.outer(positions_T.to(torch.float32), self._inv_freq)
        cos_TF = angles_TF.cos().to(self._weights.dtype)
        sin_TF = angles_TF.sin().to(self._weights.dtype)
        return torch.cat((cos_TF, cos_TF), 1), torch.cat((-sin_TF, sin_TF), 1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self._config.rms_norm_eps)

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
        if layer.query_norm_D is not None and layer.key_norm_D is not None:
            query_THD, key_TGD = torch.split(turned, [num_query, num_kv], 1)
            normed = (
                self._norm(query_THD, layer.query_norm_D),
                self._norm(key_TGD, layer.key_norm_D),
            )
            turned = torch.cat(normed, 1)
        turned = rotate(turned, run.cos_TD, run.sin_TD)
        query_THD, key_TGD = torch.split(turned, [num_query, num_kv], 1)
        attended = run.attend(index, query_THD, key_TGD, value_TGD)
        return self._linear(attended, layer.output_weight, layer.output_bias)

    def _linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, as_tensor(weight, x.dtype), bias)

    def _attend(
        self, query_RHD: Tensor, keys_GCD: Tensor, values_GCD: Tensor, mask_RC: Tensor | None
    ) -> Tensor:
        """Attention of one row's tokens over its entries; [R, H, D]."""
        attended_HRD = F.scaled_dot_product_attention(
            query_RHD.transpose(0, 1)[None],
            keys_GCD[None],
            values_GCD[None],
            attn_mask=mask_RC,
            enable_gqa=True,
        )[0]
        return attended_HRD.transpose(0, 1)

    def _mlp(self, layer: LayerWeights, hidden_TE: Tensor) -> Tensor:
        gate_up = self._linear(self._norm(hidden_TE, layer.mlp_norm_E), layer.gate_up_weight)
        gate, up = gate_up.chunk(2, dim=-1)
        return self._linear(F.silu(gate) * up, layer.down_weight)


class _RowRun:
    """A forward that attends row by row. See `Run`."""

    def __init__(
        self,
        plan: ForwardPlan,
        cache: Entries,
        cos_TD: Tensor,
        sin_TD: Tensor,
        masks: list[Tensor | None],
        attend_row: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    ) -> None:
        self.cos_TD, self.sin_TD = cos_TD, sin_TD
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

    def attend(self, index: int, query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor) -> Tensor:
        outputs = []
        blocks_T, offsets_T = self._written
        self._store.keys[:, index][blocks_T, :, offsets_T] = key_TGD
        self._store.values[:, index][blocks_T, :, offsets_T] = value_TGD
        rows = zip(self._plan.rows, self._rows, self._masks, self._num_nodes, strict=True)
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
