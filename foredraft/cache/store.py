"""Memory of the blocks: one contiguous piece per block, with all layers.

Shape legend: N blocks, L layers, H key-value heads, B entries of a block, D head size, T tokens,
R rows of N and H together, S slots with M blocks each.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from array import array
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from foredraft.cache.base import KVShape
from foredraft.core.errors import ConfigError


class Entries(Protocol):
    """The entries of slots as a decoder reads and writes them, block by block."""

    @property
    def store(self) -> BlockStore: ...

    def table(self, slot: int) -> array[int]:
        """The slot's blocks, in the order of its entries, as C integers."""


class BlockStore:
    """Keys and values [N + 1, L, H, B, D], grown on demand; the last block is scratch. They are one
    tensor where keys are values.

    Entries of int8 are [4 + D]: a float32 in front is the scale of their numbers. Only the fused
    kernel reads and writes those.

    On CPU memory is handed out by the system page by page as it is written, so room for all blocks
    that there may ever be costs nothing and no block ever moves. On a GPU all of it is taken
    at once, as recordings hold its address; where that much is not free, the store doubles.

    Args:
        shape: of one token's entry.
        dtype: of keys and values.
        device: where they live.
        block_size: entries of a block.

    Attributes:
        wide: what the same blocks hold of layers with other heads (`KVShape.wide`), or None.
    """

    def __init__(
        self, shape: KVShape, dtype: torch.dtype, device: torch.device | str, block_size: int
    ) -> None:
        self.shape, self.block_size = shape, block_size
        self.wide = BlockStore(shape.wide, dtype, device, block_size) if shape.wide else None
        own = [self._empty(0, dtype, device) for _ in range(2 - shape.keys_are_values)]
        self.keys, self.values = own[0], own[-1]

    @property
    def _own(self) -> list[Tensor]:
        return [self.keys] if self.shape.keys_are_values else [self.keys, self.values]

    @property
    def _all(self) -> list[Tensor]:
        return [*self._own, *(self.wide._all if self.wide else ())]

    @property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype

    @property
    def device(self) -> torch.device:
        return self.keys.device

    @property
    def num_blocks(self) -> int:
        """Capacity in blocks; also the index of the scratch block, which is never read."""
        return self.keys.shape[0] - 1

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.shape.bytes_per_token(self.dtype)

    def num_bytes(self, num_made: int) -> int:
        """Bytes of memory taken if only the first ``num_made`` blocks have been used."""
        touched = num_made if self.device.type == "cpu" else self.num_blocks
        return min(touched, self.num_blocks) * self.block_bytes

    def check_fits(self, shape: KVShape, *dtypes: torch.dtype) -> None:
        """Refuse a model whose entries have another shape or dtype.

        Args:
            dtypes: dtypes that the model can write.

        Raises:
            ConfigError: the store has another shape or dtype.
        """
        if self.shape != shape or self.dtype not in dtypes:
            raise ConfigError(
                f"a model with {dtypes[0]} entries of {shape} cannot use a cache of {self.dtype} "
                f"entries of {self.shape}: make it of the model's own"
            )

    def make_room(self, num_blocks: int, most: int) -> None:
        """Hold at least ``num_blocks``; there will never be more than ``most``.

        Raises:
            MemoryError, RuntimeError: there is no memory; nothing has changed then.
        """
        if num_blocks <= self.num_blocks:
            return
        grown = max(num_blocks, min(2 * self.num_blocks, most))
        wanted = [max(most, num_blocks), grown, num_blocks]
        for count in wanted:
            try:
                self._resize(count)
                return
            except (MemoryError, RuntimeError):
                if count == num_blocks:
                    raise

    def release(self) -> None:
        """Give all memory back."""
        self._resize(0)

    def copy(self, source: int, target: int) -> None:
        """Copy a block; there must be room for both."""
        for store in self._all:
            store[target] = store[source]

    def clear_entries(self, table: Sequence[int], entries: range) -> None:
        """Zero some entries of a slot in all layers."""
        size, start = self.block_size, entries.start
        while start < entries.stop:
            block, first = table[start // size], start % size
            count = min(size - first, entries.stop - start)
            for store in self._all:
                store[block, :, :, first : first + count] = 0
            start += count

    def move(self, table: Sequence[int], sources: Sequence[int], first: int) -> None:
        """Copy the entries ``sources`` of a slot to ``first`` and following; ranges may overlap."""
        count = len(sources)
        blocks, offsets = self.addresses(table, [*sources, *range(first, first + count)])
        source, target = (blocks[:count], offsets[:count]), (blocks[count:], offsets[count:])
        for store in self._all:
            store[target[0], :, :, target[1]] = store[source[0], :, :, source[1]]

    def put(
        self, layer: int, table: Sequence[int], start: int, keys_HTD: Tensor, values_HTD: Tensor
    ) -> None:
        """Set the entries of a slot from ``start`` on in one layer."""
        at = self.addresses(table, range(start, start + keys_HTD.shape[1]))
        for store, new_HTD in zip(self._own, (keys_HTD, values_HTD), strict=False):
            store[:, layer][at[0], :, at[1]] = new_HTD.transpose(0, 1).to(store)

    def get(self, layer: int, table: Sequence[int], end: int) -> tuple[Tensor, Tensor]:
        """Copies [H, end, D] of the first entries of a slot in one layer."""
        keys, values = self.gather(layer, self.rows(table[: -(-end // self.block_size)]))
        return keys[:, :end], values[:, :end]

    def rows(self, blocks: Sequence[int]) -> Tensor:
        """Row indices of the blocks' entries in layer 0, head by head; for `gather`."""
        heads, blocks_M = self.shape.num_kv_heads, torch.tensor(blocks, dtype=torch.int64)
        rows_HM = blocks_M * (self.shape.num_layers * heads) + torch.arange(heads)[:, None]
        return rows_HM.flatten().to(self.device)

    def gather(self, layer: int, rows_R: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [H, N B, D] of the blocks behind ``rows_R`` (see `rows`)."""
        heads, size = self.shape.num_kv_heads, self.shape.head_dim
        every = (store.flatten(0, 2)[layer * heads :] for store in (self.keys, self.values))
        keys, values = (store.index_select(0, rows_R).view(heads, -1, size) for store in every)
        return keys, values

    def addresses(self, table: Sequence[int], entries: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Block and offset of each of a slot's entries, [T] each."""
        size = self.block_size
        blocks = [table[entry // size] for entry in entries]
        offsets = [entry % size for entry in entries]
        at = torch.tensor([blocks, offsets], dtype=torch.int64).to(self.device)
        return at[0], at[1]

    def _resize(self, count: int) -> None:
        grown = [self._empty(count, store.dtype, store.device) for store in self._own]
        if self.wide:
            self.wide._resize(count)  # last of what may fail
        kept = min(count, self.num_blocks)  # not the last one
        for new, store in zip(grown, self._own, strict=True):
            new[:kept] = store[:kept]
        self.keys, self.values = grown[0], grown[-1]

    def _empty(self, count: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        layers, heads = self.shape.num_layers, self.shape.num_kv_heads
        shape = (count + 1, layers, heads, self.block_size, self.shape.entry_size(dtype))
        num_numbers = torch.Size(shape).numel()
        if torch.device(device).type == "cpu" and num_numbers:
            return _reserved(num_numbers * dtype.itemsize).view(dtype).view(shape)
        return torch.empty(shape, dtype=dtype, device=device)


def _reserved(num_bytes: int) -> Tensor:
    """Zeros whose memory is allocated page by page on first write.

    The mapping does not reserve swap (MAP_NORESERVE); else the system would reserve it for a child
    process, too, and refuse to start one.

    Raises:
        MemoryError: the address space is exhausted.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if sys.platform == "linux":
        flags |= getattr(mmap, "MAP_NORESERVE", 0x4000)  # named since Python 3.13
    try:
        memory = mmap.mmap(-1, num_bytes, flags)
    except OSError as error:
        raise MemoryError(f"no room for {num_bytes} bytes of cache: {error}") from error
    # A layer's entries lie a block apart: with small pages each few of them begin with a search for
    # the address. The system may decline.
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
