"""The decoder of GPUs: the forward of a decoding step is one CUDA graph, replayed.

A small forward on a GPU is hundreds of short kernels, and launching them one by one from Python
takes longer than running them. So the plans of decoding steps are laid out on a grid of one of a
few shapes (see `grid`), and the forward of each shape is recorded when it first comes. Prompts,
forwards of some layers only and very large steps run through the eager decoder.

On other devices nothing is recorded, and the same code runs as it is.

Shape legend: as in `eager` and `grid`; further B rows that attend, P query heads that share a
key-value head.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.cache.kv import KVCache
from foredraft.cache.store import Entries
from foredraft.models.native.config import DecoderConfig
from foredraft.models.native.eager import EagerDecoder, capped_attention
from foredraft.models.native.grid import (
    Bucket,
    GridInputs,
    attention_bias,
    choose_bucket,
    fits_grid,
    grid_inputs,
    power_of_two,
)
from foredraft.models.native.plan import ForwardPlan
from foredraft.models.native.recording import Recorder
from foredraft.models.native.weights import DecoderWeights

_MAX_GRAPHS = 32

_log = logging.getLogger("foredraft")


@dataclass(frozen=True)
class Graph:
    """One recorded forward.

    Attributes:
        inputs: `GridInputs`, written before each replay.
        logits_NV: float32; shared with other graphs of about the same size.
        replay: runs it; returns the outputs of the tapped layers [N, E].
    """

    inputs: Tensor
    logits_NV: Tensor
    replay: Callable[[], dict[int, Tensor]]


class GraphedDecoder(EagerDecoder):
    """Runs a `ForwardPlan`, that of a decoding step as one recorded graph.

    Recordings hold the cache's address. So the cache keeps its memory from the first one on, and
    when it has to move, all are made anew. One decoder serves one cache.

    Memory beyond weights and cache: the pool that all graphs share (activations of the largest
    grid), logits [N, V] for each power of two N that grids have come in, and the driver's record of
    each kernel of each graph.

    Args:
        config: the model's shape.
        weights: its weights, on any device.
        max_graphs: the least recently used one makes room for another.

    Attributes:
        num_recorded: forwards that were recorded.
        num_replayed: forwards that ran as a recording.
    """

    name = "graphed"
    reads_unseen = True

    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights, max_graphs: int = _MAX_GRAPHS
    ) -> None:
        super().__init__(config, weights)
        self._max_graphs = max_graphs
        self._recorder = Recorder(weights.device)
        self._graphs: OrderedDict[Bucket, Graph] = OrderedDict()
        self._logits: dict[int, Tensor] = {}
        self._storage: tuple[object, ...] = ()
        self.num_recorded = self.num_replayed = 0

    def forward(
        self, plan: ForwardPlan, cache: Entries, taps: Sequence[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Write the plan's tokens into the cache and score the wanted ones.

        Returns:
            float32 logits [N, V], and for each tap the output [T, E] of that layer. They are the
            caller's: the next forward does not touch them.
        """
        if not isinstance(cache, KVCache) or not self.fits(plan):
            return super().forward(plan, cache, taps)
        cache.store.check_fits(self._config.kv_shape, self._weights.dtype)
        for row in plan.rows:
            cache.clear_behind(plan.slot(row), plan.end(row))
        bucket = choose_bucket(plan, cache.store.block_size, taps)
        graph = self._graph(bucket, cache, grid_inputs(plan, bucket, cache))
        return self._replayed(graph, plan, GridInputs.of(graph.inputs, bucket).places)

    def fits(self, plan: ForwardPlan) -> bool:
        """Whether ``plan`` is run as a recording."""
        return self._config.experts is None and fits_grid(plan)

    def _replayed(
        self, graph: Graph, plan: ForwardPlan, places_N: Tensor
    ) -> tuple[Tensor, dict[int, Tensor]]:
        tapped = graph.replay()
        self.num_replayed += 1
        places_T = places_N[: len(plan)]
        logits_NV = graph.logits_NV[: len(plan.heads)].clone()
        return logits_NV, {i: x.index_select(0, places_T) for i, x in tapped.items()}

    def _graph(self, bucket: Bucket, cache: KVCache, inputs: Tensor) -> Graph:
        """The bucket's recording with these inputs in place, made if there is none."""
        storage = _storage(cache)
        if storage != self._storage:
            self._drop(len(self._graphs))
            self._storage = storage
            cache.hold_memory()
        if bucket in self._graphs:
            _copy(inputs, self._graphs[bucket].inputs)
            self._graphs.move_to_end(bucket)
        else:
            self._drop(len(self._graphs) + 1 - self._max_graphs)
            self._graphs[bucket] = self._record(bucket, cache, inputs)
        return self._graphs[bucket]

    def _drop(self, count: int) -> None:
        """Forget the ``count`` least recently used recordings."""
        if count <= 0:
            return
        self._recorder.wait()
        for _ in range(count):
            self._graphs.popitem(last=False)
        if not self._graphs:
            self._recorder.start_over()

    def _record(self, bucket: Bucket, cache: KVCache, inputs: Tensor) -> Graph:
        """Record with real inputs: doing a forward several times leaves the same in the cache."""
        device = self._weights.device
        fixed = torch.empty_like(inputs, device=device)
        _copy(inputs, fixed)
        rounded = power_of_two(bucket.size)
        if rounded not in self._logits:
            shape = (rounded, self._config.vocab_size)
            self._logits[rounded] = torch.empty(shape, device=device)
        logits_NV = self._logits[rounded][: bucket.size]

        replay = self._recorder.record(self._work(fixed, bucket, cache, logits_NV))
        self.num_recorded += 1
        _log.debug("recorded %s, %d graphs", bucket, len(self._graphs) + 1)
        return Graph(fixed, logits_NV, replay)

    def _work(
        self, fixed: Tensor, bucket: Bucket, cache: KVCache, logits_NV: Tensor
    ) -> Callable[[], dict[int, Tensor]]:
        """The forward of a bucket on the inputs ``fixed``."""
        inputs = GridInputs.of(fixed, bucket)
        return lambda: self._run(inputs, bucket, cache, logits_NV)

    def _run(
        self, inputs: GridInputs, bucket: Bucket, cache: KVCache, logits_NV: Tensor
    ) -> dict[int, Tensor]:
        """The forward on fixed buffers; nothing here depends on their values."""
        biases = {
            window: self._for_groups(attention_bias(inputs, bucket, self._weights.dtype, window))
            for window in (None, *self._config.windows)
        }
        rotations = self._rotations(inputs.positions)
        run = _GridRun(inputs, bucket, cache, rotations, biases, self._attend_grouped)
        hidden_NE = self.embed(inputs.token_ids)
        layers = range(len(self._weights.layers))
        hidden_NE, tapped = self._run_layers(run, hidden_NE, layers, bucket.taps)
        logits_NV.copy_(self._head(hidden_NE.index_select(0, inputs.heads)))
        return tapped

    def _for_groups(self, bias_BTC: Tensor) -> Tensor:
        """The bias for queries as `_attend_grouped` lays them out; [B, 1, P T, C]."""
        per_group = self._config.num_attention_heads // self._config.num_key_value_heads
        return bias_BTC.repeat(1, per_group, 1)[:, None]

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None or self._config.family.norm_offset:
            return super()._norm(x, weight)
        return F.rms_norm(x, weight.shape, weight, self._config.rms_norm_eps)

    def _attend(
        self, query_RHD: Tensor, keys_GCD: Tensor, values_GCD: Tensor, mask_RC: Tensor | None
    ) -> Tensor:
        bias = None
        if mask_RC is not None:
            zeros_RC = torch.zeros(mask_RC.shape, dtype=query_RHD.dtype, device=mask_RC.device)
            bias = self._for_groups(zeros_RC.masked_fill_(~mask_RC, float("-inf"))[None])
        return self._attend_grouped(query_RHD[None], keys_GCD[None], values_GCD[None], bias)[0]

    def _attend_grouped(
        self, query_BTHD: Tensor, keys_BGCD: Tensor, values_BGCD: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Attention of B rows, [B, T, H, D].

        The P query heads that share keys are laid behind one another as if they were further
        tokens: keys are then read once for all of them, by the kernels for masked attention, which
        know no shared keys.

        Args:
            bias: [B, 1, P T, C] to add to the scores, or None.
        """
        rows, tokens, _, head_dim = query_BTHD.shape
        groups, cap = keys_BGCD.shape[1], self._config.attention_cap
        query_BGPTD = query_BTHD.view(rows, tokens, groups, -1, head_dim).permute(0, 2, 3, 1, 4)
        query_BGMD = query_BGPTD.reshape(rows, groups, -1, head_dim)
        scale = self._config.query_scale
        attended = (
            F.scaled_dot_product_attention(
                query_BGMD, keys_BGCD, values_BGCD, attn_mask=bias, scale=scale
            )
            if cap is None
            else capped_attention(query_BGMD, keys_BGCD, values_BGCD, bias, scale, cap)
        )
        attended_BGPTD = attended.view(rows, groups, -1, tokens, head_dim)
        return attended_BGPTD.permute(0, 3, 1, 2, 4).reshape(rows, tokens, -1, head_dim)


class _GridRun:
    """A forward that attends for all rows of a grid at once. See `eager.Run`."""

    def __init__(
        self,
        inputs: GridInputs,
        bucket: Bucket,
        cache: KVCache,
        rotations: Sequence[tuple[Tensor, Tensor]],
        biases: Mapping[int | None, Tensor],
        attend_grouped: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    ) -> None:
        self.rotations = rotations
        self._inputs, self._bucket, self._store, self._biases = inputs, bucket, cache.store, biases
        self._attend_grouped = attend_grouped
        self._rows = self._store.rows_of(inputs.tables.view(bucket.rows, -1))

    def attend(
        self,
        index: int,
        window: int | None,
        query_THD: Tensor,
        key_TGD: Tensor,
        value_TGD: Tensor,
    ) -> Tensor:
        store, bucket = self._store, self._bucket
        written = (self._inputs.blocks, slice(None), self._inputs.offsets)
        store.keys[:, index][written] = key_TGD
        store.values[:, index][written] = value_TGD
        keys_RGCD, values_RGCD = (
            rows.index_select(0, self._rows).view(bucket.rows, -1, bucket.context, rows.shape[-1])
            for rows in store.layer_rows(index)
        )
        attended_RTHD = self._attend_grouped(
            query_THD.view(bucket.rows, bucket.tokens, *query_THD.shape[1:]),
            keys_RGCD,
            values_RGCD,
            self._biases[window],
        )
        return attended_RTHD.reshape(bucket.size, -1)


def _storage(cache: KVCache) -> tuple[object, ...]:
    """Where the cache is; recordings are good as long as this stays."""
    keys, values = cache.store.keys, cache.store.values
    return keys.data_ptr(), values.data_ptr(), keys.shape


def _copy(source: Tensor, target: Tensor) -> None:
    """Copy from the CPU without waiting; pinned memory is not reused before it has been read."""
    target.copy_(source.pin_memory() if target.is_cuda else source, non_blocking=True)
