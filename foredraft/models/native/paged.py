"""The decoder of GPUs with Triton: a step in kernels of our own, which read the cache where it is.

A step of up to 16 tokens is always a forward of 16, most of which may be padding that sees nothing:
each product is then of one shape and one order of sums, and a token has the same bits alone and in
the company of others. Reading weights takes the time; the padding costs next to nothing.

Where Triton or a kind of layer is missing, `GraphedDecoder` does the same with torch alone.

Shape legend: as in `grid`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.cache.kv import KVCache
from foredraft.cache.store import Entries
from foredraft.models.native.config import DecoderConfig
from foredraft.models.native.decoder import Decoder
from foredraft.models.native.eager import finished_logits
from foredraft.models.native.graphed import GraphedDecoder
from foredraft.models.native.grid import Bucket, padded_shape
from foredraft.models.native.plan import ForwardPlan
from foredraft.models.native.weights import DecoderWeights, LayerWeights

TILE = 16
"""Tokens that a step has at least."""
_MIN_CONTEXT = 256
_CONTEXT_STEP = 4
"""A context is this many times the next shorter one: what lies behind a slot's end costs little."""
_MOST_SHARED = 64
"""Query heads that share keys: a tile of attention holds those of one token at least."""
_TABLE_BYTES = 32 << 20
"""Of rotations of all positions, at most."""


class PagedInputs(NamedTuple):
    """What differs between two forwards of one shape; int64, each [N] but for the last two.

    Attributes:
        token_ids, positions, blocks, offsets, heads, places, starts: as in `grid.GridInputs`.
        lengths: how many entries a token sees, its own included; 0: padding.
        paths: [N T] what a token sees of its row's own, in their order.
        tables: [R M] the blocks that each row attends to.
    """

    token_ids: Tensor
    positions: Tensor
    blocks: Tensor
    offsets: Tensor
    heads: Tensor
    places: Tensor
    starts: Tensor
    lengths: Tensor
    paths: Tensor
    tables: Tensor

    @classmethod
    def of(cls, numbers: Tensor, bucket: Bucket) -> PagedInputs:
        """Views of what `paged_inputs` laid out."""
        size, own = bucket.size, bucket.size * bucket.tokens
        kinds_IN = numbers[: 8 * size].view(8, -1)
        paths, tables = numbers[8 * size : 8 * size + own], numbers[8 * size + own :]
        views = (*kinds_IN, paths.view(size, -1), tables.view(bucket.rows, -1))
        return cls._make(views)


def paged_bucket(plan: ForwardPlan, block_size: int, taps: Sequence[int] = ()) -> Bucket:
    """The smallest bucket that ``plan`` fits, of at least `TILE` tokens."""
    rows, tokens = padded_shape(plan)
    if rows == 1 and tokens <= TILE:
        tokens = TILE
    rows = max(rows, -(-TILE // tokens))
    seen = max(plan.entries[row.start] for row in plan.rows) + tokens
    context = max(_MIN_CONTEXT, block_size)
    while context < seen:
        context *= _CONTEXT_STEP
    return Bucket(rows, tokens, context, tuple(sorted(set(taps))), _is_chain(plan))


def _is_chain(plan: ForwardPlan) -> bool:
    """Whether each token sees all before it."""
    seen = (prefix + len(extra) for prefix, extra in zip(plan.prefixes, plan.extras, strict=True))
    return all(count == entry + 1 for count, entry in zip(seen, plan.entries, strict=True))


def paged_inputs(plan: ForwardPlan, bucket: Bucket, cache: Entries) -> Tensor:
    """The plan's numbers, padded: all of `PagedInputs` one after another, int64 on the CPU."""
    size, tokens, block_size = bucket.size, bucket.tokens, cache.store.block_size
    num_blocks = bucket.context // block_size
    numbers = np.zeros(8 * size + size * tokens + bucket.rows * num_blocks, np.int64)
    kinds = numbers[: 8 * size].reshape(8, size)
    paths = numbers[8 * size : 8 * size + size * tokens].reshape(size, tokens)
    tables = numbers[8 * size + size * tokens :].reshape(bucket.rows, num_blocks)
    kinds[2] = cache.store.num_blocks
    if bucket.is_chain:
        paths[:] = np.arange(tokens)
    places: list[int] = []
    for grid_row, row in enumerate(plan.rows):
        first, start = grid_row * tokens, plan.entries[row.start]
        here, there = slice(row.start, row.stop), slice(first, first + len(row))
        table = np.frombuffer(cache.table(plan.slot(row)), np.int32)
        entries = np.asarray(plan.entries[here])
        kinds[0, there] = plan.token_ids[here]
        kinds[1, there] = plan.positions[here]
        kinds[2, there] = table[entries // block_size]
        kinds[3, there] = entries % block_size
        kinds[6, grid_row] = start
        kinds[7, there] = plan.prefixes[here]
        if not bucket.is_chain:
            for place, token in enumerate(row, first):
                seen = [*range(start, plan.prefixes[token]), *plan.extras[token]]
                paths[place, : len(seen)] = [entry - start for entry in seen]
        kinds[7, there] += [len(extra) for extra in plan.extras[here]]
        tables[grid_row, : min(num_blocks, len(table))] = table[:num_blocks]
        places.extend(range(first, first + len(row)))
    kinds[5, : len(places)] = places
    kinds[4, : len(plan.heads)] = [places[token] for token in plan.heads]
    return torch.from_numpy(numbers)


class PagedDecoder(GraphedDecoder):
    """Runs a `ForwardPlan`, that of a decoding step as one recorded graph of our own kernels."""

    reads_unseen = False

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, **options: int) -> None:
        super().__init__(config, weights, **options)
        self._tables: list[tuple[Tensor, Tensor]] | None = None

    def forward(
        self, plan: ForwardPlan, cache: Entries, taps: Sequence[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        if not isinstance(cache, KVCache) or not self.fits(plan):
            return super().forward(plan, cache, taps)
        cache.store.check_fits(self._config.kv_shape, self._weights.dtype)
        bucket = paged_bucket(plan, cache.store.block_size, taps)
        graph = self._graph(bucket, cache, paged_inputs(plan, bucket, cache))
        return self._replayed(graph, plan, PagedInputs.of(graph.inputs, bucket).places)

    def _work(
        self, fixed: Tensor, bucket: Bucket, cache: KVCache, logits_NV: Tensor
    ) -> Callable[[], dict[int, Tensor]]:
        inputs = PagedInputs.of(fixed, bucket)
        return lambda: self._step(inputs, bucket, cache, logits_NV)

    def _step(
        self, inputs: PagedInputs, bucket: Bucket, cache: KVCache, logits_NV: Tensor
    ) -> dict[int, Tensor]:
        """The forward on fixed buffers; nothing here depends on their values."""
        from foredraft.models.native import triton_ops as ops

        config, weights, tapped = self._config, self._weights, dict[int, Tensor]()
        rotations = self._turns(inputs.positions)
        hidden_NE = self.embed(inputs.token_ids)
        norms: dict[str, Any] = {
            "eps": config.rms_norm_eps,
            "norm_offset": config.family.norm_offset,
        }
        for index, layer in enumerate(weights.layers):
            if index not in weights.no_attention:
                qkv = ops.linear(
                    *(hidden_NE, _plain(layer.qkv_weight), layer.qkv_bias),
                    norm_K=layer.attention_norm_E,
                    **norms,
                )
                attended_NX = self._see(ops, qkv, index, layer, inputs, bucket, cache, rotations)
                hidden_NE = self._added(
                    *(ops, hidden_NE, attended_NX, _plain(layer.output_weight)),
                    *(layer.output_bias, layer.attention_post_norm_E),
                )
            if index not in weights.no_mlp:
                activated_NF = ops.linear(
                    *(hidden_NE, _plain(layer.gate_up_weight)),
                    norm_K=layer.mlp_norm_E,
                    activation="silu" if config.activation == "silu" else "gelu_tanh",
                    **norms,
                )
                hidden_NE = self._added(
                    *(ops, hidden_NE, activated_NF, _plain(layer.down_weight)),
                    *(None, layer.mlp_post_norm_E),
                )
            if index in bucket.taps:
                tapped[index] = hidden_NE
        wanted_NE = hidden_NE.index_select(0, inputs.heads)
        ops.linear(
            *(wanted_NE, _plain(weights.head_VE)),
            norm_K=weights.final_norm_E,
            out_NM=logits_NV,
            **norms,
        )
        if config.logits_scale != 1.0 or config.logits_cap is not None:
            logits_NV.copy_(finished_logits(logits_NV, config))
        return tapped

    def _turns(self, positions_N: Tensor) -> list[tuple[Tensor, Tensor]]:
        """As `_rotations`, looked up where a table of all positions is small."""
        if self._tables is None:
            count = self._config.max_context
            sizes = [count * rope.size for rope in self._config.ropes]
            small = 2 * sum(sizes) * self._weights.dtype.itemsize <= _TABLE_BYTES
            every = torch.arange(count if small else 0, device=positions_N.device)
            self._tables = self._rotations(every) if small else []
        if not self._tables:
            return self._rotations(positions_N)
        return [
            (F.embedding(positions_N, cos), F.embedding(positions_N, sin))
            for cos, sin in self._tables
        ]

    def _see(  # type: ignore[no-untyped-def]
        self,
        ops,
        qkv: Tensor,
        index: int,
        layer: LayerWeights,
        inputs: PagedInputs,
        bucket: Bucket,
        cache: KVCache,
        rotations: Sequence[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Keys and values stored, and what each token sees of them; [N, H D]."""
        config, kind = self._config, layer.kind
        store = cache.store.keys, cache.store.values
        norms = None
        if layer.query_norm_D is not None and layer.key_norm_D is not None:
            norms = layer.query_norm_D, layer.key_norm_D
        query_NHD = ops.rotate_and_store(
            *(qkv, config.num_attention_heads, config.head_dim, store, index),
            *(inputs.blocks, inputs.offsets),
            rotation=None if kind.rope is None else rotations[kind.rope],
            norms=norms,
            eps=config.rms_norm_eps,
            norm_offset=config.family.norm_offset,
        )
        attended_NHD: Tensor = ops.attend(
            *(query_NHD, store, index, inputs.tables, inputs.lengths, inputs.starts, inputs.paths),
            context=bucket.context,
            is_chain=bucket.is_chain,
            scale=config.query_scale or config.head_dim**-0.5,
            window=kind.window,
            cap=config.attention_cap,
        )
        return attended_NHD.flatten(1)

    def _added(  # type: ignore[no-untyped-def]
        self,
        ops,
        hidden_NE: Tensor,
        part_NK: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        post_norm_E: Tensor | None,
    ) -> Tensor:
        if post_norm_E is not None or (bias is not None and self._config.residual_scale != 1.0):
            return self._add(hidden_NE, F.linear(part_NK, weight, bias), post_norm_E)
        scale = self._config.residual_scale
        added: Tensor = ops.linear(part_NK, weight, bias, residual_NM=hidden_NE, scale=scale)
        return added


def graphed_decoder(config: DecoderConfig, weights: DecoderWeights) -> Decoder:
    """The fastest decoder of a GPU for this model."""
    paged = _has_kernels(weights.device) and why_not_paged(config, weights) is None
    return (PagedDecoder if paged else GraphedDecoder)(config, weights)


def _has_kernels(device: torch.device) -> bool:
    """Whether Triton is there, and the shared memory that the tiles take: Hopper, or its heir."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    is_large = torch.cuda.get_device_capability(device)[0] in (9, 10)
    return is_large and importlib.util.find_spec("triton") is not None


def why_not_paged(config: DecoderConfig, weights: DecoderWeights) -> str | None:
    """What of a model the kernels do not know; None: nothing."""
    if config.experts:
        return "mixtures of experts"
    if not all(isinstance(m, Tensor) for x in weights.layers for m in _matrices(x)):
        return "weights in few bits"
    if not isinstance(weights.head_VE, Tensor):
        return "a head in few bits"
    norms = [x.query_norm_D for x in weights.layers if x.query_norm_D is not None]
    if any(len(norm) != config.head_dim for norm in norms):
        return "norms of all heads together"
    if config.head_dim > 256:
        return f"heads of {config.head_dim}"
    if (shared := config.num_attention_heads // config.num_key_value_heads) > _MOST_SHARED:
        return f"{shared} query heads to a key-value head"
    return None


def _matrices(layer: LayerWeights) -> list[object]:
    return [layer.qkv_weight, layer.output_weight, layer.gate_up_weight, layer.down_weight]


def _plain(matrix: object) -> Tensor:
    assert isinstance(matrix, Tensor)
    return matrix
