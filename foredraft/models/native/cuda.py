"""The decoders of GPUs: the forward of a decoding step is one CUDA graph, replayed.

A small forward on a GPU is hundreds of short kernels, and launching them one by one from Python
takes longer than running them. So each row of a `ForwardPlan` becomes a row of a grid of one of a
few shapes, padded to the same number of tokens; rows are padded too. The forward of each shape is
recorded when it first comes, with the kernels of `triton_ops`. Everything that differs between two
forwards of one shape is numbers in one small tensor. Prompts and very large steps run through the
eager decoder, and so do models and GPUs that the kernels do not know (`why_not_paged`). On a CPU
nothing is recorded, and Triton's interpreter runs the same code.

Shape legend: R rows of the grid, T tokens of one of its rows, N = R * T tokens of the grid,
C cache entries attended to, M cache blocks that hold them; others as in `model`.
"""

from __future__ import annotations

import importlib.util
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.cache.kv import KVCache
from foredraft.cache.store import BlockStore, Entries
from foredraft.core.choices import DrawKey
from foredraft.core.draws import Array
from foredraft.core.sampling import Law
from foredraft.models.native.config import DecoderConfig
from foredraft.models.native.model import (
    Decoder,
    EagerDecoder,
    FixedShapeDecoder,
    finished_logits,
    masked_attention,
)
from foredraft.models.native.plan import ForwardPlan
from foredraft.models.native.quant import Stack
from foredraft.models.native.weights import DecoderWeights, LayerWeights

if TYPE_CHECKING:
    from foredraft.models.native.triton_ops import Norm
    from foredraft.models.native.triton_packed import Inputs

_WARM_UPS = 2
"""Libraries allocate and choose kernels in their first calls, which may not be recorded."""

Result = TypeVar("Result")


class Recorder:
    """Records work as CUDA graphs that share one memory pool; elsewhere work is done again.

    The pool holds a graph's memory while it runs, so its size is that of the largest graph. Results
    of the work may lie in the pool: they are valid until the next run of any of its graphs.

    Args:
        device: where the work runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._pool: Any = None

    def wait(self) -> None:
        """Until nothing that was queued runs a recording: before any of them is dropped."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def start_over(self) -> None:
        """All recordings are dropped: a pool that nothing uses any more cannot be used again."""
        self._pool = None

    def record(self, work: Callable[[], Result]) -> Callable[[], Result]:
        """A function that replays ``work`` on the buffers of this call.

        Args:
            work: launches the same kernels each time, on memory that outlives the recording, and
                reads no value from the device. It may run several times here.
        """
        if self._device.type != "cuda":
            return work
        with torch.cuda.device(self._device), torch.no_grad(), masked_attention(self._device):
            return self._capture(work)

    def _capture(self, work: Callable[[], Result]) -> Callable[[], Result]:
        if self._stream is None:  # one for all: graphs that share a pool must share it too
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                work()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            result = work()

        def replay() -> Result:
            graph.replay()
            return result

        return replay


MAX_ROW_TOKENS = 64
"""A row of more is a prompt."""
_MAX_TOKENS = 256
"""Larger forwards are bound by arithmetic, not by launches: nothing is gained by recording them."""
_MAX_PENDING = 8
"""A row with more tokens to read than this is a prompt, whose size hardly comes twice."""
_MIN_CONTEXT = 256


class GridInputs(NamedTuple):
    """Inputs of a recorded forward, copied in before each replay; int64 [N] but for the last two.

    Attributes:
        token_ids: vocabulary ids.
        positions: for rotary embedding.
        blocks: the cache block that a token writes to.
        offsets: the entry of that block.
        wanted: tokens of the grid whose logits are wanted, in the plan's order.
        places: where the plan's tokens are in the grid.
        starts: the first R: how many entries a row's tokens all see before their own.
        lengths: how many entries a token sees, its own included; 0: padding.
        paths: [N, T] what a token sees of its row's own, in their order.
        tables: [R, M] the blocks that each row attends to.
    """

    token_ids: Tensor
    positions: Tensor
    blocks: Tensor
    offsets: Tensor
    wanted: Tensor
    places: Tensor
    starts: Tensor
    lengths: Tensor
    paths: Tensor
    tables: Tensor

    @classmethod
    def of(cls, numbers: Tensor, bucket: Bucket) -> GridInputs:
        """Views of what `grid_inputs` laid out."""
        size, own = bucket.size, bucket.size * bucket.tokens
        kinds_IN = numbers[: 8 * size].view(8, -1)
        paths, tables = numbers[8 * size : 8 * size + own], numbers[8 * size + own :]
        views = (*kinds_IN, paths.view(size, -1), tables.view(bucket.rows, -1))
        return cls._make(views)


@dataclass(frozen=True)
class Bucket:
    """A shape that forwards are padded to; equal buckets share a recording.

    Attributes:
        rows: R.
        tokens: T.
        context: C; no token of the forward sees an entry beyond.
        taps: layers whose output is wanted, ascending.
        is_chain: whether no row branches.
        num_wanted: logits are computed of so many tokens; None: of all.
    """

    rows: int
    tokens: int
    context: int
    taps: tuple[int, ...]
    is_chain: bool
    num_wanted: int | None = None

    @property
    def size(self) -> int:
        """N."""
        return self.rows * self.tokens


class Grid(NamedTuple):
    """A padded forward, as its layers run it.

    Attributes:
        cache: of its entries.
        rotations: see `Run`.
    """

    inputs: GridInputs
    bucket: Bucket
    cache: Entries
    rotations: Sequence[tuple[Tensor, Tensor]]


def fits_grid(plan: ForwardPlan) -> bool:
    """Whether ``plan`` is the forward of a decoding step, which will come again in its shape."""
    if plan.hidden_TE is not None or not plan.wanted:
        return False
    rows, tokens = padded_shape(plan)
    return (
        tokens <= MAX_ROW_TOKENS
        and rows * tokens <= _MAX_TOKENS
        and all(map(_has_few_pending, plan.rows, plan.row_wanted))
    )


def grid_inputs(plan: ForwardPlan, bucket: Bucket, cache: Entries) -> Tensor:
    """The plan's numbers, padded: all of `GridInputs` one after another, int64 on the CPU."""
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
        # Behind its last block that block itself, which is as finite as it is.
        tables[grid_row:] = table[-1]
        tables[grid_row:, : min(num_blocks, len(table))] = table[:num_blocks]
        places.extend(range(first, first + len(row)))
    kinds[5, : len(places)] = places
    kinds[4, : len(plan.wanted)] = [places[token] for token in plan.wanted]
    return torch.from_numpy(numbers)


def padded_shape(plan: ForwardPlan) -> tuple[int, int]:
    """Rows and tokens of a row, each rounded up to a power of two."""
    return power_of_two(len(plan.rows)), power_of_two(max(map(len, plan.rows)))


def _has_few_pending(row: range, wanted: range) -> bool:
    """Logits are wanted after the last pending token and after each node, or nowhere in the row."""
    return len(row) - max(len(wanted) - 1, 0) <= _MAX_PENDING


def power_of_two(count: int) -> int:
    """The smallest power of two that is not below ``count``."""
    return 1 << (count - 1).bit_length()


@dataclass(frozen=True)
class Graph:
    """One recorded forward.

    Attributes:
        inputs: `GridInputs`, written before each replay.
        logits_NV: float32; shared with other graphs of about the same size.
        replay: runs it; returns the outputs of the tapped layers [N, E].
        work: what was recorded, which holds the memory that the recording works on.
    """

    inputs: Tensor
    logits_NV: Tensor
    replay: Callable[[], dict[int, Tensor]]
    work: Callable[[], dict[int, Tensor]]


def enter_device(device: torch.device) -> None:
    """Make ``device`` the thread's own: Triton launches kernels there, wherever tensors lie.

    It stays so: between two forwards heads launch there, too.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def storage_of(store: BlockStore) -> tuple[object, ...]:
    """Where entries are; recordings are good as long as this stays."""
    return store.keys.data_ptr(), store.values.data_ptr(), store.keys.shape


def copy_to(source: Tensor, target: Tensor) -> None:
    """Copy from the CPU without waiting; pinned memory is not reused before it has been read."""
    target.copy_(source.pin_memory() if target.is_cuda else source, non_blocking=True)


_ANY_DRAW = DrawKey(0, 0, 1.0)
_MOST_DRAWN = 32
"""Rows of logits that are drawn from in a recording: it has a copy of them."""


class RecordedDraws:
    """Draws from rows of logits where they are, recorded; see `device_draws`.

    Args:
        device: where the logits are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._recorder = device, Recorder(device)
        self._recorded: dict[
            tuple[int, int, bool], tuple[Tensor, Pinned, Callable[[], Tensor]]
        ] = {}

    @torch.no_grad()
    def draw(self, logits_NV: Tensor, keys: Sequence[DrawKey]) -> list[Law | None]:
        """A draw from each row of float32 logits; all numbers come in one transfer.

        None where the largest logit is not finite or one is NaN.
        """
        from foredraft.models.native.device_draws import drawn, key_numbers, laws_of

        rows, has_cuts = power_of_two(len(keys)), any(key.has_filters for key in keys)
        if rows > _MOST_DRAWN:  # bound by their number, not by launches
            numbers_6N = torch.from_numpy(key_numbers(keys)).to(self._device)
            return laws_of(drawn(logits_NV, numbers_6N, has_cuts), logits_NV, keys)
        kind = rows, logits_NV.shape[1], has_cuts
        if kind not in self._recorded:
            self._recorded[kind] = self._record(*kind)
        buffer_RV, numbers, replay = self._recorded[kind]
        buffer_RV[: len(keys)].copy_(logits_NV)
        numbers.fill(key_numbers([*keys, *[keys[-1]] * (rows - len(keys))]))
        return laws_of(replay(), logits_NV, keys)

    def record(self, vocab: int) -> None:
        """Record the draws of one request's steps before a reply waits for them."""
        for rows in (1, 2, 4, 8, TILE):
            self.draw(torch.zeros(rows, vocab, device=self._device), [_ANY_DRAW] * rows)

    def _record(
        self, rows: int, vocab: int, has_cuts: bool
    ) -> tuple[Tensor, Pinned, Callable[[], Tensor]]:
        from foredraft.models.native.device_draws import drawn

        buffer_RV = torch.zeros(rows, vocab, device=self._device)
        numbers = Pinned(6 * rows, self._device)
        work = partial(drawn, buffer_RV, numbers.there, has_cuts)
        return buffer_RV, numbers, self._recorder.record(work)


class Pinned:
    """Whole numbers that are written on the host and read on the device.

    They may be written again when the device has answered: what was copied then has been read.

    Attributes:
        there: int64, on the device.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._here = torch.zeros(count, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._numbers = self._here.numpy()
        self.there = self._here.to(device, copy=True)

    def fill(self, numbers: Array) -> None:
        self._numbers[:] = numbers
        self.there.copy_(self._here, non_blocking=True)


TILE = 16
"""Tokens that a step has at least."""
_CONTEXT_STEP = 4
"""A context is this many times the next shorter one: what lies behind a slot's end costs little."""
_MOST_SHARED = 64
"""Query heads that share keys: a tile of attention holds those of one token at least."""
_TABLE_BYTES = 32 << 20
"""Of rotations of all positions, at most."""


def paged_bucket(
    plan: ForwardPlan, block_size: int, taps: Sequence[int] = (), least: int = TILE
) -> Bucket:
    """The smallest bucket that ``plan`` fits, of at least ``least`` tokens."""
    rows, tokens = padded_shape(plan)
    if rows == 1 and tokens <= TILE:
        tokens = TILE if tokens > least else least
    rows = max(rows, -(-least // tokens))
    seen = max(plan.entries[row.start] for row in plan.rows) + tokens
    context = padded_context(seen, block_size)
    return Bucket(rows, tokens, context, tuple(sorted(set(taps))), _is_chain(plan))


def padded_context(seen: int, block_size: int) -> int:
    """The context of a recording of tokens that see so many entries."""
    context = max(_MIN_CONTEXT, block_size)
    while context < seen:
        context *= _CONTEXT_STEP
    return context


def usual_contexts(block_size: int, most: int) -> list[int]:
    """The contexts of recordings that are made before a request comes.

    Args:
        most: entries of a text.
    """
    seen = (min(most, _CONTEXT_STEP**power * _MIN_CONTEXT) for power in range(3))
    return sorted({padded_context(each, block_size) for each in seen})


def _is_chain(plan: ForwardPlan) -> bool:
    """Whether each token sees all before it."""
    seen = (prefix + len(extra) for prefix, extra in zip(plan.prefixes, plan.extras, strict=True))
    return all(count == entry + 1 for count, entry in zip(seen, plan.entries, strict=True))


class PagedDecoder(EagerDecoder):
    """Runs a `ForwardPlan`, that of a decoding step as one recorded graph of our own kernels.

    Recordings hold the cache's address. So the cache keeps its memory from the first one on, and
    when it has to move, all are made anew. One decoder serves one cache.

    Memory beyond weights and cache: the pool that all graphs share (activations of the largest
    grid), logits [N, V] for each power of two N that grids have come in, and the driver's record of
    each kernel of each graph.

    Args:
        config: the model's shape.
        weights: its weights, on any device.

    Attributes:
        max_graphs: the least recently used one makes room for another.
        num_recorded: forwards that were recorded.
        num_replayed: forwards that ran as a recording.
    """

    max_graphs = 32

    def __init__(self, config: DecoderConfig, weights: DecoderWeights) -> None:
        from foredraft.models.native import triton_ops, triton_packed

        self._ops, self._packed = triton_ops, triton_packed
        super().__init__(config, triton_packed.on_card(weights, weights.device))
        self._groups_heads = True
        is_plain = isinstance(self._weights.layers[0].gate_up_weight, Tensor)
        self._least = TILE if is_plain and not config.experts else TILE // 2
        self._begin()

    def _begin(self) -> None:
        """Without recordings."""
        self._recorder = Recorder(self._weights.device)
        self._graphs: OrderedDict[Bucket, Graph] = OrderedDict()
        self._logits: dict[int, Tensor] = {}
        self._storage: tuple[object, ...] = ()
        self._taps: frozenset[int] = frozenset()
        self._tables: list[tuple[Tensor, Tensor]] | None = None
        self.num_recorded = self.num_replayed = 0

    @torch.no_grad()
    def forward(
        self, plan: ForwardPlan, cache: Entries, taps: Sequence[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Write the plan's tokens into the cache and score the wanted ones.

        Returns:
            float32 logits [N, V], and for each tap the output [T, E] of that layer. They are the
            caller's: the next forward does not touch them.
        """
        if isinstance(cache, KVCache) and self.fits(plan):
            return self._replayed(plan, cache, taps)
        return super().forward(plan, cache, taps)

    def _replayed(
        self, plan: ForwardPlan, cache: KVCache, taps: Sequence[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """As `forward`, by a recording."""
        cache.store.check_fits(self._config.kv_shape, self._weights.dtype)
        self._taps |= {*taps}  # what was wanted once is there in all: no shape is recorded twice
        bucket = self._bucket(plan, cache.store.block_size, [*self._taps])
        graph = self._graph(bucket, cache, grid_inputs(plan, bucket, cache))
        tapped = graph.replay()
        self.num_replayed += 1
        places_T = GridInputs.of(graph.inputs, bucket).places[: len(plan)]
        logits_NV = graph.logits_NV[: len(plan.wanted)].clone()
        return logits_NV, {i: tapped[i].index_select(0, places_T) for i in taps}

    def fits(self, plan: ForwardPlan) -> bool:
        """Whether ``plan`` is run as a recording."""
        return fits_grid(plan)

    def _bucket(self, plan: ForwardPlan, block_size: int, taps: Sequence[int]) -> Bucket:
        return paged_bucket(plan, block_size, taps, self._least)

    def _graph(self, bucket: Bucket, cache: KVCache, inputs: Tensor) -> Graph:
        """The bucket's recording with these inputs in place, made if there is none."""
        storage = storage_of(cache.store)
        if storage != self._storage:
            self._drop(len(self._graphs))
            self._storage = storage
            cache.hold_memory()
        if bucket in self._graphs:
            copy_to(inputs, self._graphs[bucket].inputs)
            self._graphs.move_to_end(bucket)
        else:
            self._drop(len(self._graphs) + 1 - self.max_graphs)
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
        device, num_wanted = self._weights.device, bucket.num_wanted or bucket.size
        fixed = torch.empty_like(inputs, device=device)
        copy_to(inputs, fixed)
        rounded = power_of_two(num_wanted)
        if rounded not in self._logits:
            shape = (rounded, self._config.vocab_size)
            self._logits[rounded] = torch.empty(shape, device=device)
        logits_NV = self._logits[rounded][:num_wanted]

        work = self._work(fixed, bucket, cache, logits_NV)
        replay = self._recorder.record(work)
        self.num_recorded += 1
        return Graph(fixed, logits_NV, replay, work)

    def _work(
        self, fixed: Tensor, bucket: Bucket, cache: KVCache, logits_NV: Tensor
    ) -> Callable[[], dict[int, Tensor]]:
        """The forward of a bucket on the inputs ``fixed``."""
        inputs = GridInputs.of(fixed, bucket)
        return lambda: self._run(inputs, bucket, cache, logits_NV)

    def _norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        if weight is None or self._config.family.norm_offset:
            return super()._norm(x, weight, bias, eps)
        return F.rms_norm(x, weight.shape, weight, eps or self._config.rms_norm_eps)

    def logits(self, normed_TE: Tensor) -> Tensor:
        head_VE = self._weights.head_VE
        if isinstance(head_VE, Tensor):
            return super().logits(normed_TE)
        logits_TV = self._packed.multiply(normed_TE, head_VE, dtype=torch.float32)
        return finished_logits(logits_TV, self._config)

    def _linear(self, x: Tensor, weight: Stack, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, Tensor):
            return super()._linear(x, weight, bias)
        return self._packed.dequantised_product(x, weight, bias)

    def record(self, cache: KVCache, taps: Sequence[int], contexts: Sequence[int]) -> None:
        """Record the usual steps of one request, with these taps, before a reply waits for it.

        Args:
            cache: has its memory already, which all recordings then hold.
        """
        self._taps |= {*taps}
        for context in contexts:
            for tokens, is_chain, num_wanted in self._usual_steps:
                shape = 1, tokens, context, tuple(sorted(self._taps))
                bucket = Bucket(*shape, is_chain, num_wanted)
                self._graph(bucket, cache, grid_inputs(ForwardPlan(), bucket, cache))

    @property
    def _most(self) -> int:
        """Tokens of the largest usual step."""
        return max(self._least, TILE)

    @property
    def _usual_steps(self) -> set[tuple[int, bool, int | None]]:
        """Tokens, whether they are a chain, and `Bucket.num_wanted` of one row's usual steps."""
        return {*product((self._least, self._most), (True, False), (None,))}

    def _run(
        self, inputs: GridInputs, bucket: Bucket, cache: KVCache, logits_NV: Tensor
    ) -> dict[int, Tensor]:
        """The forward on fixed buffers; nothing here depends on their values."""
        grid = Grid(inputs, bucket, cache, self._turns(inputs.positions))
        hidden_NE, tapped = self._through(self.embed(inputs.token_ids), grid)
        wanted = inputs.wanted[: len(logits_NV)]
        self._write_logits(hidden_NE.index_select(0, wanted), logits_NV)
        return tapped

    def _through(self, hidden_NE: Tensor, grid: Grid) -> tuple[Tensor, dict[int, Tensor]]:
        """All layers: the last one's output [N, E], and that of the tapped ones."""
        multiply, weights, tapped = self._packed.multiply, self._weights, dict[int, Tensor]()
        for index, layer in enumerate(weights.layers):
            if index not in weights.no_attention:
                norm = self._norm_of(layer.attention_norm_E)
                qkv = multiply(hidden_NE, layer.qkv_weight, layer.qkv_bias, norm=norm)
                attended = self._see(qkv, index, layer, grid)
                hidden_NE = self._added(
                    *(hidden_NE, attended, layer.output_weight),
                    *(layer.output_bias, layer.attention_post_norm_E),
                )
            hidden_NE = self._fed(hidden_NE, layer, grid.inputs.lengths)
            if index in grid.bucket.taps:
                tapped[index] = hidden_NE
        return hidden_NE, tapped

    def _norm_of(self, weight_K: Tensor | None) -> Norm | None:
        """A norm as the kernels take it."""
        config = self._config
        if weight_K is None:
            return None
        return self._ops.Norm(weight_K, config.rms_norm_eps, config.family.norm_offset)

    def _fed(self, hidden_NE: Tensor, layer: LayerWeights, lengths_N: Tensor) -> Tensor:
        """The feed-forward part of a layer."""
        activation = "silu" if self._config.activation == "silu" else "gelu_tanh"
        if layer.router_XE is not None:
            return self._mixed(hidden_NE, layer, lengths_N, activation)
        sums, down = None, layer.down_weight
        if not isinstance(layer.gate_up_weight, Tensor):
            sums = self._packed.room_for_sums(len(hidden_NE), down.shape[1], down, hidden_NE)
        activated_NF = self._packed.multiply(
            *(hidden_NE, layer.gate_up_weight),
            norm=self._norm_of(layer.mlp_norm_E),
            activation=activation,
            out_sums=sums,
        )
        return self._added(
            *(hidden_NE, self._packed.Inputs(activated_NF, sums), down),
            *(None, layer.mlp_post_norm_E),
        )

    def _write_logits(self, hidden_NE: Tensor, logits_NV: Tensor) -> None:
        """The head, with its norm, into ``logits_NV``."""
        config, weights = self._config, self._weights
        norm = self._norm_of(weights.final_norm_E)
        self._packed.multiply(hidden_NE, weights.head_VE, norm=norm, out_NM=logits_NV)
        logits_NV.copy_(finished_logits(logits_NV, config))  # onto itself: nothing

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

    def _see(self, qkv: Tensor, index: int, layer: LayerWeights, grid: Grid) -> Inputs:
        """Keys and values stored, and what each token sees of them; [N, H D]."""
        config, kind, inputs = self._config, layer.kind, grid.inputs
        store = grid.cache.store.keys, grid.cache.store.values
        query_norm, key_norm = self._norm_of(layer.query_norm_D), self._norm_of(layer.key_norm_D)
        query_NHD = self._ops.rotate_and_store(
            *(qkv, config.num_attention_heads, config.head_dim, store, index),
            *(inputs.blocks, inputs.offsets),
            rotation=None if kind.rope is None else grid.rotations[kind.rope],
            norms=(query_norm, key_norm) if query_norm and key_norm else None,
        )
        sums = None
        if config.head_dim in (32, 64, 128, 256):
            num_inputs, weight = query_NHD[0].numel(), layer.output_weight
            sums = self._packed.room_for_sums(len(qkv), num_inputs, weight, qkv)
        attended_NHD = self._ops.attend(
            *(query_NHD, store, index, inputs.tables, inputs.lengths, inputs.starts, inputs.paths),
            context=grid.bucket.context,
            is_chain=grid.bucket.is_chain,
            scale=config.query_scale or config.head_dim**-0.5,
            window=kind.window,
            cap=config.attention_cap,
            out_sums=sums,
        )
        return self._packed.Inputs(attended_NHD.flatten(1), sums)

    def _added(
        self,
        hidden_NE: Tensor,
        part: Inputs,
        weight: Stack,
        bias: Tensor | None,
        post_norm_E: Tensor | None,
    ) -> Tensor:
        scale = self._config.residual_scale
        if post_norm_E is not None or (bias is not None and scale != 1.0):
            part_NE = self._packed.multiply(part, weight, bias)
            return self._add_normed(hidden_NE, part_NE, post_norm_E)
        return self._packed.multiply(part, weight, bias, residual_NM=hidden_NE, scale=scale)

    def _mixed(
        self, hidden_NE: Tensor, layer: LayerWeights, lengths_N: Tensor, activation: str
    ) -> Tensor:
        from foredraft.models.native.triton_experts import mixture

        assert self._config.experts is not None
        is_added = layer.mlp_post_norm_E is None
        mixed_NE = mixture(
            *(hidden_NE, layer, self._config.experts, lengths_N),
            norm=self._norm_of(layer.mlp_norm_E),
            activation=activation,
            scale=self._config.residual_scale if is_added else None,
            floor=self._config.family.chance_floor,
        )
        if is_added:
            return mixed_NE
        return self._add_normed(hidden_NE, mixed_NE, layer.mlp_post_norm_E)

    def _add_normed(self, hidden_NE: Tensor, part_NE: Tensor, post_norm_E: Tensor | None) -> Tensor:
        """As `_add`; torch adds up a norm's squares in another order for other numbers of rows."""
        part_NE, _ = self._packed.prepared(part_NE, self._norm_of(post_norm_E), 0)
        return self._add(hidden_NE, part_NE, None)


_PIECES = MAX_ROW_TOKENS, _MAX_TOKENS
"""Tokens that pieces of prompts are padded to."""
_LONG = (1 << 14) - _MAX_TOKENS
"""Behind so many entries pieces are small, for each of their tokens has sums of each stretch: those
of 256 tokens of an 8B take 0.5 GiB at this context, and four times as much at the next."""


class ExactDecoder(PagedDecoder):
    """Reads prompts with the kernels of steps, too, so that no token's bits depend on company.

    They are then those of its text alone, however it was cut into pieces, wherever a cached
    beginning ends, and whatever else is in the forward. Steps are those of `PagedDecoder`. Products
    of more than 16 tokens take tiles of 32, whose instructions and their order are those of tiles
    of 16.
    """

    @torch.no_grad()
    def forward(
        self, plan: ForwardPlan, cache: Entries, taps: Sequence[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        is_of_head = plan.hidden_TE is not None
        if is_of_head or self.fits(plan) or not isinstance(cache, KVCache):
            return super().forward(plan, cache, taps)
        groups = pieces(plan, _PIECES[max(map(plan.end, plan.rows)) <= _LONG])
        found = [self._replayed(plan.part(spans), cache, taps) for spans in groups]
        tokens = [token for spans in groups for span in spans for token in span]
        all_wanted = {*plan.wanted}
        wanted = [token for token in tokens if token in all_wanted]
        logits_NV = _in_order(torch.cat([logits_NV for logits_NV, _ in found]), wanted)
        tapped = {i: _in_order(torch.cat([each[i] for _, each in found]), tokens) for i in taps}
        return logits_NV, tapped

    def _bucket(self, plan: ForwardPlan, block_size: int, taps: Sequence[int]) -> Bucket:
        """Pieces of prompts have few sizes, and logits of few tokens."""
        found = super()._bucket(plan, block_size, taps)
        if found.rows > 1 or found.tokens <= self._most or fits_grid(plan):
            return found
        tokens = next((count for count in _PIECES if count >= found.tokens), found.tokens)
        few = self._most if len(plan.wanted) <= self._most else None
        return replace(found, tokens=tokens, num_wanted=few)

    @property
    def _usual_steps(self) -> set[tuple[int, bool, int | None]]:
        return {*super()._usual_steps, *product(_PIECES, (True,), (self._most,))}

    def fits(self, plan: ForwardPlan) -> bool:
        rows, tokens = padded_shape(plan)
        is_small = tokens <= MAX_ROW_TOKENS and rows * tokens <= _MAX_TOKENS
        return is_small and plan.hidden_TE is None


class LargeTileDecoder(ExactDecoder):
    """Takes tiles of 32 tokens for steps, too: prompts and steps are then one program.

    For cards where `model.probe` finds that tiles of 16 have other bits.
    """

    def __init__(self, config: DecoderConfig, weights: DecoderWeights) -> None:
        super().__init__(config, weights)
        self._least = 2 * TILE


def pieces(plan: ForwardPlan, most: int = _MAX_TOKENS) -> list[list[range]]:
    """Tokens of forwards that fit a grid: short rows together, others in pieces, in their order.

    Args:
        most: tokens of a piece.
    """
    short = [row for row in plan.rows if len(row) <= TILE]
    together = _MAX_TOKENS // TILE
    groups = [short[first : first + together] for first in range(0, len(short), together)]
    for row in plan.rows:
        if len(row) > TILE:
            groups += [[piece] for piece in _cut(plan, row, most)]
    return groups


def _cut(plan: ForwardPlan, row: range, most: int) -> Iterator[range]:
    """A long row in pieces, the last of which has all of its tree if that branches.

    Two of 64 tokens take less time than one of 256, and three do not.
    """
    branches = not _is_chain(plan.part([row]))
    root = next((token for token in row if branches and plan.extras[token]), row.stop)
    start = row.start
    while start < row.stop:
        left = row.stop - start
        size = MAX_ROW_TOKENS if left <= 2 * MAX_ROW_TOKENS else most
        end = min(start + size, row.stop)
        if root < end < row.stop:
            end = root if start < root else row.stop
        yield range(start, end)
        start = end


def _in_order(x_NE: Tensor, numbers: Sequence[int]) -> Tensor:
    """The rows by their numbers, ascending."""
    order = sorted(range(len(numbers)), key=numbers.__getitem__)
    return x_NE.index_select(0, torch.tensor(order, dtype=torch.int64).to(x_NE.device))


def exact_decoder(config: DecoderConfig, weights: DecoderWeights) -> Decoder:
    """The fastest decoder of a GPU whose bits depend on no company."""
    paged = why_not_paged(config, weights.device) is None
    return (ExactDecoder if paged else FixedShapeDecoder)(config, weights)


def has_triton(device: torch.device) -> bool:
    """Whether kernels in Triton run there."""
    is_cuda = device.type == "cuda" and torch.version.cuda is not None
    return is_cuda and importlib.util.find_spec("triton") is not None


def unusual_layers(config: DecoderConfig) -> str | None:
    """Parts of layers that the kernels do not know; None: there are none."""
    family = config.family
    features = {
        "recurrent layers": config.recurrent is not None,
        "norms that subtract the mean": family.layer_norms,
        "layers whose parts read one input": family.is_parallel,
        "feed-forward parts without gates, or with biases": not family.is_gated or config.mlp_bias,
        "attention sinks": bool(family.names.sinks),
        "norms behind rotary embedding": family.norms_rotated,
        "heads of two sizes": config.wide_heads is not None,
        "latent attention": config.latent is not None,
    }
    return next((name for name, is_there in features.items() if is_there), None)


def why_not_paged(config: DecoderConfig, device: torch.device) -> str | None:
    """A feature of the model or device that the kernels do not support; None: all are supported."""
    if not has_kernels(device):
        return "they take Triton and a GPU of compute capability 8.0 or more"
    if reason := unusual_layers(config):
        return reason
    if (experts := config.experts) and (
        experts.has_bias
        or config.family.chances != "softmax"
        or experts.num_shared != experts.shared_gate
    ):
        return "experts that are chosen otherwise than by a softmax"
    if any(size != config.head_dim for size in config.head_norm_sizes()):
        return "norms of all heads together"
    if config.head_dim > 256:
        return f"heads of {config.head_dim}"
    if (shared := config.num_attention_heads // config.num_key_value_heads) > _MOST_SHARED:
        return f"{shared} query heads to a key-value head"
    return None


def has_kernels(device: torch.device) -> bool:
    """Whether Triton is there, and matrix units for bfloat16: Ampere, or its heirs."""
    return has_triton(device) and torch.cuda.get_device_capability(device) >= (8, 0)
