"""Small forwards of a head's decoder, whose description is made once and rewritten for each.

A round of drafting is a forward of a few tokens right after one of the target, whose weights have
swept everything else out of the caches: laying out a plan and describing it to the kernel takes
longer there than the kernel does. Here little is touched. Not for several threads at once.

Shape legend: T tokens of a run, N wanted logits, E hidden size, R output rows.
"""

from __future__ import annotations

from ctypes import POINTER, addressof, c_int32, c_void_p, cast
from typing import Any

import torch
from torch import Tensor

from foredraft.cache.layers import StoredLayers
from foredraft.models.base import HeadRow
from foredraft.models.native.fused import FusedDecoder
from foredraft.models.native.interface import Forward, ForwardRow

MOST_TOKENS = 16
"""Of a prepared forward: more are worth a plan."""

_MOST_EXTRAS = 4096
_ENTRIES_AT_ONCE = 1024
"""By which work memory grows."""


class PreparedForward:
    """Forwards of up to `MOST_TOKENS` tokens of one row.

    Args:
        decoder: runs them.
        layers: where its entries go; None: it has no layers.
    """

    def __init__(self, decoder: FusedDecoder, layers: StoredLayers | None = None) -> None:
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

    def head(self, inputs_TE: Tensor) -> Tensor:
        """Norm and head alone: float32 logits [T, R] of contiguous float32 states."""
        count = len(inputs_TE)
        if count > MOST_TOKENS:
            return torch.cat(
                [self.head(some_TE) for some_TE in torch.split(inputs_TE, MOST_TOKENS)]
            )
        self._lists.wanted[:count] = range(count)
        return self._run(inputs_TE, count, 1)

    def run(self, row: HeadRow, inputs_TE: Tensor) -> tuple[Tensor, Tensor]:
        """See `foredraft.models.base.HeadRunner`; for what `can_run`, its entries reserved."""
        assert self._layers is not None
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
        return states_TE, self._run(inputs_TE, row.num_wanted, end)

    def can_run(self, row: HeadRow, num_tokens: int) -> bool:
        """Whether a run of so many tokens fits the lists."""
        assert self._layers is not None
        most_extras = num_tokens * len(row.tree)
        if self._layers.skipped(row.slot):
            num_seen = row.start + row.num_text - self._layers.first(row.slot)
            most_extras += num_tokens * num_seen
        return 0 < num_tokens <= MOST_TOKENS and most_extras <= _MOST_EXTRAS and not row.is_block

    def _run(self, inputs_TE: Tensor, num_wanted: int, num_entries: int) -> Tensor:
        if num_entries > self._room:
            self._make_room(num_entries)
        forward, count = self._forward, len(inputs_TE)
        logits_NR = torch.empty(num_wanted, self._num_rows)
        self._row.end_token = forward.num_tokens = count
        forward.num_wanted, forward.max_entries = num_wanted, num_entries
        forward.hidden, forward.logits = inputs_TE.data_ptr(), logits_NR.data_ptr()
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
        store, forward = self._layers.store, self._forward
        forward.keys, forward.values = store.keys.data_ptr(), store.values.data_ptr()
        forward.block_stride, forward.layer_stride, forward.head_stride, _, _ = store.keys.stride()
        forward.block_entries = store.block_size


class _Lists:
    """What a description says of each token, in memory that stays where it is.

    See ``ForedraftForward`` of interface.h.
    """

    def __init__(self) -> None:
        self.token_ids = _new_ints(MOST_TOKENS)  # zeros: states are given
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
