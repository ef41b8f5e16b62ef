"""Small forwards of drafters, whose description is made once and rewritten for each.

A round of drafting is a forward of a few tokens right after one of the target, whose weights have
swept everything else out of the caches: laying out a plan and describing it to the kernel takes
longer there than a head's kernel does. Here little is touched. Not for several threads at once.

Shape legend: T tokens of a run, N wanted logits, E hidden size, R output rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, addressof, c_int32, c_void_p, cast
from typing import Any

import torch
from torch import Tensor

from foredraft.cache.kv import KVCache
from foredraft.cache.layers import StoredLayers
from foredraft.core.draws import Draw, DrawKey, DrawRow, found_draws
from foredraft.models.base import HeadRow
from foredraft.models.native.fused import FusedDecoder, point_to_store
from foredraft.models.native.interface import Forward, ForwardRow

MOST_TOKENS = 16
"""Of a prepared forward: more are worth a plan."""

Layers = StoredLayers | KVCache

_MOST_EXTRAS = 4096
_ENTRIES_AT_ONCE = 1024
"""By which work memory grows."""


class _Prepared:
    """Forwards of up to `MOST_TOKENS` tokens of one row.

    Args:
        decoder: runs them.
        layers: where its entries go; None: it has no layers.
    """

    def __init__(self, decoder: FusedDecoder, layers: Layers | None) -> None:
        self._decoder, self._layers = decoder, layers
        self._hidden_size, self._num_rows = decoder.sizes
        self._lists = _Lists()
        self._row, self._taps = ForwardRow(), (c_void_p * max(1, decoder.num_layers))()
        self._tables = (c_void_p * MOST_TOKENS)()
        self._forward = Forward(
            num_rows=1,
            rows=POINTER(ForwardRow)(self._row),
            end_layer=decoder.num_layers,
            taps=self._taps,
            tables=self._tables,
            **self._lists.pointers(),
        )
        self._room = 0  # entries that there is work memory for
        self._make_room(1)

    def _run(self, count: int, num_wanted: int, num_entries: int) -> Tensor:
        """Logits of the last tokens, of ``count`` that are described."""
        if num_entries > self._room:
            self._make_room(num_entries)
        forward = self._forward
        logits_NR = torch.empty(num_wanted, self._num_rows)
        self._row.end_token = forward.num_tokens = count
        forward.num_wanted, forward.max_entries = num_wanted, num_entries
        forward.logits = logits_NR.data_ptr()
        self._decoder.call(forward)
        return logits_NR

    def _make_room(self, num_entries: int) -> None:
        self._room = -(-num_entries // _ENTRIES_AT_ONCE) * _ENTRIES_AT_ONCE
        self._memory = self._decoder.new_work_memory(MOST_TOKENS, MOST_TOKENS, self._room)
        self._forward.workspace = self._memory.data_ptr()

    def _point_to_layers(self, slot: int, count: int) -> None:
        """They move when they grow, and so does a slot's table."""
        assert self._layers is not None
        address, _ = self._layers.table(slot).buffer_info()
        self._tables[:count] = [address] * count
        point_to_store(self._forward, self._layers.store)


class PreparedForward(_Prepared):
    """Forwards of a head's decoder.

    Args:
        decoder: runs them.
        layers: where its entries go; None: it has no layers.
    """

    def __init__(self, decoder: FusedDecoder, layers: StoredLayers | None = None) -> None:
        super().__init__(decoder, layers)

    def head(self, inputs_TE: Tensor) -> Tensor:
        """Norm and head alone: float32 logits [T, R] of contiguous float32 states."""
        count = len(inputs_TE)
        if count > MOST_TOKENS:
            return torch.cat(
                [self.head(some_TE) for some_TE in torch.split(inputs_TE, MOST_TOKENS)]
            )
        self._lists.wanted[:count] = range(count)
        self._forward.hidden = inputs_TE.data_ptr()
        return self._run(count, count, 1)

    def run(self, row: HeadRow, inputs_TE: Tensor) -> tuple[Tensor, Tensor]:
        """See `foredraft.models.base.HeadRunner`; for what `can_run`, its entries reserved."""
        assert isinstance(self._layers, StoredLayers)
        count, tree = len(inputs_TE), row.tree
        skipped = self._layers.skipped(row.slot)
        # Entries are counted from the first block that the run touches, positions are not.
        before = self._layers.first(row.slot) - skipped
        root = row.start + row.num_text - before
        end = root + len(tree)
        lists, first = self._lists, end - count
        entries = range(first, end)
        positions, extras = [*range(before + first, before + end)], list[int]()
        starts = [0] * (count + 1)
        first_node = max(0, root - first)
        for at in range(0 if skipped else first_node, count):
            if skipped:  # what is not there cannot be in a prefix
                extras += range(skipped, min(first + at + 1, root))
            if at >= first_node:
                path = _path(tree.parents, first + at - root)
                positions[at] = before + root - 1 + len(path)
                extras += [root + node for node in reversed(path)]
            starts[at + 1] = len(extras)
        lists.entries[:count] = entries
        lists.positions[:count] = positions
        lists.prefixes[:count] = [0 if skipped else min(entry + 1, root) for entry in entries]
        lists.extra_starts[: count + 1] = starts
        lists.extras[: len(extras)] = extras
        lists.wanted[: row.num_wanted] = range(count - row.num_wanted, count)
        self._point_to_layers(row.slot, count)
        states_TE = torch.empty(count, self._hidden_size)
        self._taps[self._decoder.num_layers - 1] = states_TE.data_ptr()
        self._forward.hidden = inputs_TE.data_ptr()
        return states_TE, self._run(count, row.num_wanted, end)

    def can_run(self, row: HeadRow, num_tokens: int) -> bool:
        """Whether a run of so many tokens fits the lists."""
        assert isinstance(self._layers, StoredLayers)
        most_extras = num_tokens * len(row.tree)
        if self._layers.skipped(row.slot):
            num_seen = row.start + row.num_text - self._layers.first(row.slot)
            most_extras += num_tokens * num_seen
        return 0 < num_tokens <= MOST_TOKENS and most_extras <= _MOST_EXTRAS and not row.is_block


class PreparedChain(_Prepared):
    """Forwards of a whole decoder, of tokens one behind the other, all of which are drawn from.

    Args:
        decoder: runs them.
        cache: where their entries go.
    """

    def __init__(self, decoder: FusedDecoder, cache: KVCache) -> None:
        super().__init__(decoder, cache)
        self._draws = (DrawRow * MOST_TOKENS)()
        self._forward.draws = self._draws

    def run(
        self,
        slot: int,
        tokens: Sequence[int],
        start: int,
        key: DrawKey,
        num_wanted: int | None = None,
    ) -> tuple[Tensor, list[Draw | None]]:
        """Logits [N, V] and draws behind the last tokens; room for all entries is reserved.

        Args:
            start: entries before them.
            key: of the first draw; those of the others follow.
            num_wanted: N; None: behind each token.
        """
        lists, count, end = self._lists, len(tokens), start + len(tokens)
        num_wanted = num_wanted or count
        lists.token_ids[:count] = tokens
        lists.entries[:count] = lists.positions[:count] = range(start, end)
        lists.prefixes[:count] = range(start + 1, end + 1)
        lists.wanted[:num_wanted] = range(count - num_wanted, count)
        for ahead, draw in enumerate(self._draws[:num_wanted]):
            draw.row, draw.seed = ahead, key.seed
            draw.position, draw.scale = key.position + ahead, key.scale
        self._forward.num_draws = num_wanted
        self._point_to_layers(slot, count)
        logits_NV = self._run(count, num_wanted, end)
        return logits_NV, found_draws(self._draws[:num_wanted])


class _Lists:
    """What a description says of each token, in memory that stays where it is.

    See ``ForedraftForward`` of interface.h.
    """

    def __init__(self) -> None:
        self.token_ids = _new_ints(MOST_TOKENS)  # zeros where states are given
        self.positions = _new_ints(MOST_TOKENS)
        self.entries = _new_ints(MOST_TOKENS)
        self.prefixes = _new_ints(MOST_TOKENS)
        self.extra_starts = _new_ints(MOST_TOKENS + 1)
        self.extras = _new_ints(_MOST_EXTRAS)
        self.wanted = _new_ints(MOST_TOKENS)

    def pointers(self) -> dict[str, Any]:
        return {name: cast(addressof(kept), POINTER(c_int32)) for name, kept in vars(self).items()}


def _new_ints(
    count: int,
) -> Any:  # an array; slices of it take any sequence, which stubs do not say
    return (c_int32 * count)()


def _path(parents: tuple[int, ...], node: int) -> list[int]:
    """A node and its ancestors, innermost first."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path
