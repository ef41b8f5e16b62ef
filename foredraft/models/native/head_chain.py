"""A drafting head on a GPU: one recorded round reads what was committed and drafts a chain.

Run step by step, a head of one layer costs more in launches and waiting than in work. So all that
it does between two steps of the target is one graph: it reads the tokens that the target has
committed since, and then goes on from its own, each chosen where its logits are, with the noise of
its position. The host waits once, for the likeliest tokens of every position.

Shape legend: R rows, T tokens of a row, K positions drafted, N = K R, V output rows of the head,
E hidden size, C candidates of a position, M blocks of a table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from foredraft.cache.layers import StoredLayers
from foredraft.cache.store import BlockStore
from foredraft.core.choices import NUM_LOOKED_AT
from foredraft.models.base import ChainRow, ScoredTokens
from foredraft.models.native.config import DecoderConfig
from foredraft.models.native.cuda import (
    TILE,
    Bucket,
    Grid,
    GridInputs,
    PagedDecoder,
    Pinned,
    Recorder,
    padded_context,
    power_of_two,
    storage_of,
)
from foredraft.models.native.model import Decoder, HandedDecoder
from foredraft.models.native.weights import DecoderWeights

_MOST_RECORDED = 64
_USUAL_STEPS = (2, 4, 6)


class ChainInputs(Protocol):
    """Makes the layer's inputs of tensors alone; see `StepRunner`."""

    def text_inputs(self, following: Tensor, taps: Sequence[Tensor]) -> Tensor: ...

    def own_inputs(self, tokens: Tensor, states_NE: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class _Shape:
    """Rounds of one shape share a recording."""

    rows: int
    steps: int
    context: int
    has_cuts: bool

    @property
    def text(self) -> Bucket:
        return Bucket(self.rows, TILE, self.context, (), is_chain=True)

    @property
    def own(self) -> Bucket:
        return Bucket(self.rows, 1, self.context, (), is_chain=True)

    def sizes(self, num_blocks: int) -> list[int]:
        """Numbers of the text's inputs, of each step's, and of each step's keys."""
        text, own = (
            8 * each.size + each.size * each.tokens + each.rows * num_blocks
            for each in (self.text, self.own)
        )
        return [text, *[own] * (self.steps - 1), *[6 * self.rows] * self.steps]


class _Numbers:
    """The inputs of all parts, one after another.

    Attributes:
        every: all of them; others are views of it.
        text, own: kinds of the text's inputs [8, N], and of each step's [K - 1, 8, R].
        tables: of both, [., R, M].
        keys: of each step [K, 6, R].
    """

    def __init__(self, shape: _Shape, store: BlockStore) -> None:
        steps, sizes = shape.steps - 1, shape.sizes(shape.context // store.block_size)
        self.every = np.zeros(sum(sizes), np.int64)
        ends, views = np.cumsum(sizes), []
        text, own = self.every[None, : ends[0]], self.every[ends[0] : ends[steps]]
        for part, bucket in ((text, shape.text), (own.reshape(steps, -1), shape.own)):
            size, tokens = bucket.size, bucket.tokens
            kinds = part[:, : 8 * size].reshape(len(part), 8, size)
            kinds[:, 2] = store.num_blocks  # scratch
            paths = part[:, 8 * size :][:, : size * tokens]
            paths.reshape(len(part), size, -1)[:] = np.arange(tokens)
            views += [kinds, part[:, size * (8 + tokens) :].reshape(len(part), bucket.rows, -1)]
        texts, text_tables, self.own, own_tables = views
        self.text, self.tables = texts[0], (text_tables, own_tables)
        self.keys = self.every[ends[steps] :].reshape(shape.steps, 6, shape.rows)
        self._empty = self.every.copy()

    def clear(self) -> None:
        self.every[:] = self._empty


@dataclass(frozen=True)
class _Round:
    here: _Numbers
    numbers: Pinned
    taps: Sequence[Tensor]
    replay: Callable[[], Tensor]


class RecordedChain:
    """See `HeadChain`.

    Args:
        config, weights: of the head's layers.
        layers: cache layers of their entries.
        inputs: makes the layer's inputs.
        names_V: the token of each output row, ascending.
        num_taps: layers that the head taps.
        decoder: runs the layers elsewhere.
    """

    most_read = TILE

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        layers: StoredLayers,
        inputs: ChainInputs,
        names_V: Tensor,
        num_taps: int,
        decoder: Decoder,
    ) -> None:
        is_handed = isinstance(decoder, HandedDecoder)
        self._decoder = (_HandedLayer if is_handed else _Layers)(config, weights)
        self._has_norm = not isinstance(decoder, HandedDecoder) or decoder.has_norm
        self._layers, self._inputs = layers, inputs
        self._device, self._dtype = weights.device, weights.dtype
        self._names_V, self._num_taps = names_V.to(weights.device), num_taps
        self._num_looked_at = min(NUM_LOOKED_AT, len(names_V))
        self._hidden_size = config.hidden_size
        self._recorder = Recorder(weights.device)
        self._rounds: dict[_Shape, _Round] = {}
        self._storage: tuple[object, ...] = ()

    def record(self, contexts: Sequence[int]) -> None:
        """Record the usual rounds of one request before a reply waits for them."""
        self._layers.hold_blocks()
        for context in contexts:
            for num_steps in _USUAL_STEPS:
                self._round(_Shape(1, num_steps, context, has_cuts=False))

    def can_run(self, slot: int, start: int) -> bool:
        layers = self._layers
        if layers.first(slot) <= start <= layers.covered(slot):
            return layers.skipped(slot) == 0
        return start % layers.store.block_size == 0  # a new run begins, at best with a block

    @torch.no_grad()
    def run(self, rows: Sequence[ChainRow], num_steps: int) -> list[list[ScoredTokens]]:
        layers = self._layers
        for row in rows:
            layers.begin(row.slot, row.start)
            layers.reserve(row.slot, row.start, row.start + len(row.following) + num_steps - 1)
        shape = self._shape(rows, num_steps)
        found = self._round(shape)
        self._fill(found.here, shape, rows)
        found.numbers.fill(found.here.every)
        for place, row in enumerate(rows):
            at = slice(place * TILE, place * TILE + len(row.following))
            torch._foreach_copy_([buffer_TE[at] for buffer_TE in found.taps], [*row.taps])
        lines = [self._scored(line) for line in found.replay().tolist()]  # the one transfer
        for row in rows:
            layers.hold(row.slot, row.start + len(row.following))
        return [lines[place :: shape.rows] for place in range(len(rows))]

    def _scored(self, line: Sequence[float]) -> ScoredTokens:
        """Of a line of `listed`."""
        count = self._num_looked_at
        pairs = zip(map(int, line[:count]), line[count : 2 * count], strict=True)
        return ScoredTokens([pair for pair in pairs if pair[1] > -math.inf], line[-1])

    def _shape(self, rows: Sequence[ChainRow], num_steps: int) -> _Shape:
        first = [row.start - self._layers.first(row.slot) for row in rows]
        context = padded_context(max(first) + TILE + num_steps, self._layers.store.block_size)
        has_cuts = any(row.key.has_filters for row in rows)
        return _Shape(power_of_two(len(rows)), num_steps, context, has_cuts)

    def _round(self, shape: _Shape) -> _Round:
        """The recording of this shape, made if there is none."""
        storage = storage_of(self._layers.store)
        if storage != self._storage or len(self._rounds) >= _MOST_RECORDED:
            self._recorder.wait()
            self._rounds.clear()
            self._recorder.start_over()
            self._storage = storage
        if shape not in self._rounds:
            self._rounds[shape] = self._record(shape)
        return self._rounds[shape]

    def _record(self, shape: _Shape) -> _Round:
        num_blocks = shape.context // self._layers.store.block_size
        here = _Numbers(shape, self._layers.store)
        numbers = Pinned(len(here.every), self._device)
        numbers.fill(here.every)
        size = (shape.rows * TILE, self._hidden_size)
        taps = [
            torch.zeros(size, dtype=self._dtype, device=self._device) for _ in range(self._num_taps)
        ]
        parts = torch.split(numbers.there, shape.sizes(num_blocks))
        work = self._work(shape, parts, taps)
        return _Round(here, numbers, taps, self._recorder.record(work))

    def _work(
        self, shape: _Shape, parts: Sequence[Tensor], taps: Sequence[Tensor]
    ) -> Callable[[], Tensor]:
        steps, keys = parts[1 : shape.steps], parts[shape.steps :]
        text = GridInputs.of(parts[0], shape.text)
        own = [GridInputs.of(part, shape.own) for part in steps]

        def work() -> Tensor:
            from foredraft.models.native.device_draws import drafted, listed

            inputs_TE = self._inputs.text_inputs(text.token_ids, taps)
            turns = self._decoder.turns([text.positions, *[each.positions for each in own]])
            grid = Grid(text, shape.text, self._layers, turns[0])
            states_TE = self._decoder.states(inputs_TE, grid)
            state_RE = states_TE.index_select(0, text.wanted[: shape.rows])
            size = shape.steps, shape.rows, len(self._names_V)
            sums_KRV = torch.empty(size, dtype=torch.float64, device=self._device)
            for step in range(shape.steps):
                logits_RV = self._decoder.logits_of(state_RE, self._has_norm)
                tokens_R = drafted(
                    *(logits_RV, keys[step], self._names_V, sums_KRV[step], shape.has_cuts)
                )
                if step + 1 < shape.steps:
                    inputs_RE = self._inputs.own_inputs(tokens_R, state_RE)
                    grid = Grid(own[step], shape.own, self._layers, turns[step + 1])
                    state_RE = self._decoder.states(inputs_RE, grid)
            return listed(sums_KRV.flatten(0, 1), self._names_V, self._num_looked_at)

        return work

    def _fill(self, here: _Numbers, shape: _Shape, rows: Sequence[ChainRow]) -> None:
        from foredraft.models.native.device_draws import key_numbers

        here.clear()
        block_size, steps = self._layers.store.block_size, shape.steps - 1
        for place, row in enumerate(rows):
            count = len(row.following)
            tokens = slice(place * TILE, place * TILE + count)
            positions = np.arange(row.start, row.start + count + steps)
            entries = positions - self._layers.first(row.slot)
            table = np.frombuffer(self._layers.table(row.slot), np.int32)
            blocks, offsets = np.divmod(entries, block_size)
            where = ((1, positions), (2, table[blocks]), (3, offsets), (7, entries + 1))
            for kind, found in where:
                here.text[kind, tokens] = found[:count]
                here.own[:, kind, place] = found[count:]
            here.text[0, tokens] = row.following
            here.text[4, place] = tokens.stop - 1
            here.text[6, place] = entries[0]
            here.own[:, 6, place] = entries[count:]
            for tables in here.tables:
                tables[:, place] = table[-1]
                tables[:, place, : len(table)] = table[: tables.shape[2]]
        padded = [*rows, *[rows[-1]] * (shape.rows - len(rows))]
        here.keys[:] = key_numbers([row.key for row in padded]).reshape(6, shape.rows)
        here.keys[:, 1] += np.arange(shape.steps)[:, None]


class _Layers(PagedDecoder):
    """The layers of a head."""

    def turns(self, positions: Sequence[Tensor]) -> list[list[tuple[Tensor, Tensor]]]:
        """The rotations of each of several lists of positions."""
        found = self._rotations(torch.cat([*positions]))
        sizes = [*map(len, positions)]
        parts = [
            zip(torch.split(cos, sizes), torch.split(sin, sizes), strict=True) for cos, sin in found
        ]
        return [[*each] for each in zip(*parts, strict=True)]

    def states(self, inputs_NE: Tensor, grid: Grid) -> Tensor:
        """The last layer's output [N, E]."""
        return self._through(inputs_NE.to(self._weights.dtype), grid)[0]

    def logits_of(self, states_NE: Tensor, has_norm: bool) -> Tensor:
        """Float32 [N, V]."""
        weights = self._weights
        norm = self._norm_of(weights.final_norm_E if has_norm else None)
        logits_NV: Tensor = self._packed.multiply(
            states_NE, weights.head_VE, norm=norm, dtype=torch.float32
        )
        return logits_NV


class _HandedLayer(_Layers):
    """One layer whose queries, keys and values are handed in; see `HandedDecoder`."""

    def states(self, inputs_NE: Tensor, grid: Grid) -> Tensor:
        (layer,), size = self._weights.layers, self._config.hidden_size
        inputs_NE = inputs_NE.to(self._weights.dtype)
        hidden_NE, qkv = inputs_NE[:, :size].contiguous(), inputs_NE[:, size:].contiguous()
        attended = self._see(qkv, 0, layer, grid)
        hidden_NE = self._added(hidden_NE, attended, layer.output_weight, None, None)
        return self._fed(hidden_NE, layer, grid.inputs.lengths)
