"""One model over several processes, with the bits of one (tensor parallel; a prototype).

Each process holds some rows of every matrix, and whole rows: a number of the model is a product
over all inputs, made by one process, in one order of additions. What processes tell one another is
copied and never added up: there are all-gathers and no all-reduce. So neither the number of
processes nor that of tokens changes a bit. See README.md beside this file.

Shape legend: T tokens of a forward, N outputs, K inputs, H query heads, G key-value heads, C cache
entries, D head size, E hidden size, F feed-forward width, V vocabulary, P processes.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from foredraft.cache.blocks import BLOCK
from foredraft.cache.kv import KVCache
from foredraft.cache.memory import CacheMemory
from foredraft.cache.store import BlockStore
from foredraft.core.errors import ConfigError, EngineStoppedError
from foredraft.models.base import Capabilities, ScoreRow, Scores, check_taps
from foredraft.models.native.config import DecoderConfig
from foredraft.models.native.model import (
    FixedShapeDecoder,
    SeenEntries,
    finished_logits,
    scored,
)
from foredraft.models.native.plan import ForwardPlan, announce, plan_forward
from foredraft.models.native.quant import Stack, as_tensor
from foredraft.models.native.weights import DecoderWeights

_OUTPUTS = 32
"""Outputs of each product, as libraries order additions by its shape. What a process holds is a
multiple of it, so that vectorised loops have no remainder, which they would treat differently."""


@dataclass(frozen=True)
class Processes:
    """Those that share a model.

    Attributes:
        group: None: one alone. Idle processes wait in it for the first one: its timeout must be as
            long as that may be.
    """

    group: dist.ProcessGroup | None = None

    @property
    def count(self) -> int:
        return self.group.size() if self.group else 1

    @property
    def place(self) -> int:
        """Of this one; the first, at 0, has the engine."""
        return self.group.rank() if self.group else 0

    def joined(self, part_TN: Tensor) -> Tensor:
        """What all of them have, side by side; [T, P N]."""
        if self.group is None or not len(part_TN):
            return part_TN.repeat(1, self.count)
        own = part_TN.contiguous().view(torch.uint8)
        parts = [torch.empty_like(own) for _ in range(self.count)]
        dist.all_gather(parts, own, self.group)
        return torch.cat(parts, 1).view(part_TN.dtype)

    def tell(self, message: object) -> None:
        """From the first process to the others; in JSON."""
        if self.group is not None:
            text = bytearray(json.dumps(message).encode())
            self._pass_on(torch.tensor([len(text)]))
            self._pass_on(torch.frombuffer(text, dtype=torch.uint8))

    def told(self) -> Any:
        """What `tell` said; waits for it."""
        size = self._pass_on(torch.zeros(1, dtype=torch.int64))
        text = self._pass_on(torch.empty(int(size), dtype=torch.uint8))
        return json.loads(bytes(text.tolist()))

    def _pass_on(self, message: Tensor) -> Tensor:
        assert self.group is not None
        dist.broadcast(message, dist.get_global_rank(self.group, 0), self.group)
        return message


class SplitDecoder(FixedShapeDecoder):
    """One process's part of every forward. All of them run the same forwards in the same order.

    Args:
        config, weights: of this process: see `part_of`.
    """

    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights, processes: Processes
    ) -> None:
        super().__init__(config, weights)
        self._processes = processes

    def _linear(self, x: Tensor, weight: Stack, bias: Tensor | None = None) -> Tensor:
        """This process's outputs [T, N] of all inputs [T, K], or of its own [T, K / P]."""
        weight, product = as_tensor(weight, x.dtype), super()._linear
        if x.shape[-1] < weight.shape[1]:
            x = self._processes.joined(x)
        rows = torch.split(weight, _OUTPUTS)
        biases = [None] * len(rows) if bias is None else torch.split(bias, _OUTPUTS)
        pieces = zip(rows, biases, strict=True)
        return torch.cat([product(x, rows.to(x.dtype), bias) for rows, bias in pieces], -1)

    def _add(self, hidden_TE: Tensor, part_TE: Tensor, post_norm_E: Tensor | None) -> Tensor:
        return super()._add(hidden_TE, self._processes.joined(part_TE), post_norm_E)

    def logits(self, normed_TE: Tensor) -> Tensor:
        part_TV = self._linear(normed_TE.float(), self._weights.head_VE)
        return finished_logits(self._processes.joined(part_TV), self._config)

    def _head_norm(self, x_THD: Tensor, weight: Tensor | None) -> Tensor:
        return self._norm(x_THD.flatten(0, 1), weight).view(x_THD.shape)

    def _sees(self, query_HRD: Tensor, seen: SeenEntries) -> Tensor:
        """One key-value head at a time: how many there are here changes no shape."""
        shared, sees = len(query_HRD) // len(seen.keys_GCD), super()._sees
        queries = torch.split(query_HRD, shared)
        entries = zip(torch.split(seen.keys_GCD, 1), torch.split(seen.values_GCD, 1), strict=True)
        heads = zip(queries, entries, strict=True)
        assert seen.sinks_H is None  # only gpt-oss has them, a mixture: refused
        rest = seen.mask_RC, None
        return torch.cat([sees(query, SeenEntries(*entry, *rest)) for query, entry in heads])


def part_of(
    config: DecoderConfig, weights: DecoderWeights, processes: Processes
) -> tuple[DecoderConfig, DecoderWeights]:
    """What one process holds of a model: its heads, and its rows of every other matrix.

    Embeddings, which are only looked up, and norms are whole everywhere.

    Raises:
        ConfigError: the model cannot be split like this.
    """
    count, hidden, wide = processes.count, config.hidden_size, config.intermediate_size
    _check_split(config, count)
    num_query, num_kv = config.num_attention_heads, config.num_key_value_heads
    heads = [number * config.head_dim for number in (num_query, num_kv, num_kv)]

    def share(matrix: Stack | None, heights: Sequence[int]) -> Any:
        if matrix is None:
            return None
        parts = torch.split(as_tensor(matrix, weights.dtype), list(heights))
        return torch.cat([part.chunk(count)[processes.place] for part in parts])

    layers = [
        replace(
            layer,
            qkv_weight=share(layer.qkv_weight, heads),
            qkv_bias=share(layer.qkv_bias, heads),
            output_weight=share(layer.output_weight, [hidden]),
            output_bias=share(layer.output_bias, [hidden]),
            gate_up_weight=share(layer.gate_up_weight, [wide, wide]),
            down_weight=share(layer.down_weight, [hidden]),
        )
        for layer in weights.layers
    ]
    head_VE = share(weights.head_VE, [config.vocab_size])
    own_config = replace(
        config, num_attention_heads=num_query // count, num_key_value_heads=num_kv // count
    )
    return own_config, replace(weights, layers=tuple(layers), head_VE=head_VE)


def _check_split(config: DecoderConfig, count: int) -> None:
    size, num_kv = config.head_dim, config.num_key_value_heads
    is_wide = config.wide_heads or max(config.head_norm_sizes(), default=size) > size
    if config.experts or is_wide:
        raise ConfigError(
            f"{config.model_type}: mixtures, heads of two sizes and norms of all heads cannot be "
            "split"
        )
    heights = {
        "num_key_value_heads x head_dim": num_kv * size,
        "num_attention_heads x head_dim": config.num_attention_heads * size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
    }
    for name, height in heights.items():
        if height % (count * _OUTPUTS) or num_kv % count:
            raise ConfigError(
                f"{count} processes cannot share a model whose {name} is {height}: each needs "
                f"a multiple of {_OUTPUTS}, and as many of the {num_kv} key-value heads"
            )


class _SplitCache(KVCache):
    """The first process's cache. It notes what the others must do to their entries, too."""

    def __init__(self, *args: Any) -> None:
        self.notes: list[tuple[Any, ...]] = []
        super().__init__(*args)

    def _make_room(self, blocks: Sequence[int]) -> None:
        super()._make_room(blocks)
        self.notes.append(("make_room", self.pool.num_made, self.pool.num_total))

    def _copy_block(self, source: int, target: int) -> None:
        super()._copy_block(source, target)
        self.notes.append(("copy", source, target))

    def _move(self, slot: int, sources: Sequence[int], first: int) -> None:
        super()._move(slot, sources, first)
        self.notes.append(("move", [*self.table(slot)], [*sources], first))

    def _release(self) -> None:
        super()._release()
        self.notes.append(("release",))


class SplitTarget:
    """See `foredraft.models.base.Target`. Made by the first process; the others `follow`.

    Only this one decides anything: it has the engine, its drafters and the accounts of the cache.
    The others are told what to do to their entries and what to run, once a forward.

    Args:
        config, weights: of the whole model.
        processes: that share it.
        max_context, cache_memory: see `NativeTarget`; the memory is that of this process.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        processes: Processes,
        max_context: int | None = None,
        cache_memory: CacheMemory | int | None = None,
    ) -> None:
        config, weights = part_of(config, weights, processes)
        self.vocab_size = config.vocab_size
        self.max_context = min(max_context or config.max_context, config.max_context)
        self.capabilities = Capabilities(tree_attention=True, taps=range(config.num_hidden_layers))
        self.cache = _SplitCache(
            *(config.kv_shape, weights.dtype, weights.device, self.max_context, cache_memory)
        )
        self._decoder = SplitDecoder(config, weights, processes)
        self._processes = processes
        self._problem: Exception | None = None

    @torch.no_grad()
    def score(self, rows: Sequence[ScoreRow], taps: Sequence[int] = ()) -> Scores:
        """One forward of all processes.

        Raises:
            EngineStoppedError: one of them is gone, or has failed: there will be no more.
        """
        check_taps(taps, self.capabilities.taps)
        plan = plan_forward(rows, [self.cache.length(row.slot) for row in rows])
        announce(plan, self.cache)
        try:
            if self._problem is None:
                tables = [(slot, [*self.cache.table(slot)]) for slot in {*plan.slots}]
                self._processes.tell((self.cache.notes, _lists_of(plan), tables))
                self.cache.notes.clear()
                return scored(self._decoder, plan, self.cache, (), taps)
        except Exception as error:  # the others may be anywhere in this forward
            self._problem = error
        raise EngineStoppedError(f"the processes of a split model are apart: {self._problem}")

    def end(self) -> None:
        """Let the others go."""
        if self._problem is None:
            self._processes.tell(None)


@torch.no_grad()
def follow(config: DecoderConfig, weights: DecoderWeights, processes: Processes) -> None:
    """Run this process's part of all forwards, until the first process ends it.

    Raises:
        RuntimeError: another process is gone.
    """
    config, weights = part_of(config, weights, processes)
    store = BlockStore(config.kv_shape, weights.dtype, weights.device, BLOCK)
    decoder = SplitDecoder(config, weights, processes)
    obey: Mapping[str, Callable[..., None]] = {
        "make_room": store.make_room,
        "copy": store.copy,
        "move": store.move,
        "release": store.release,
    }
    while (message := processes.told()) is not None:
        notes, lists, tables = message
        for name, *arguments in notes:
            obey[name](*arguments)
        decoder.forward(_plan_of(lists), _Tables(store, dict(tables)))


@dataclass(frozen=True)
class _Tables:
    """The blocks of a forward's slots; see `Entries`."""

    store: BlockStore
    tables: Mapping[int, Sequence[int]]

    def table(self, slot: int) -> array[int]:
        return array("i", self.tables[slot])


def _lists_of(plan: ForwardPlan) -> list[Any]:
    """What a decoder needs of a plan, for `_plan_of`."""
    rows = [(row.start, row.stop) for row in plan.rows]
    tokens = (plan.token_ids, plan.positions, plan.slots, plan.entries, plan.prefixes)
    return [*tokens, plan.extras, plan.wanted, rows]


def _plan_of(lists: Sequence[Any]) -> ForwardPlan:
    *tokens, extras, wanted, rows = lists
    token_ids, positions, slots, entries, prefixes = tokens
    spans = [range(*row) for row in rows]
    return ForwardPlan(token_ids, positions, slots, entries, prefixes, extras, wanted, spans)
