"""The paged key-value cache of a native model; slots share blocks with copy-on-write.

Shape legend: L layers, H key-value heads, T tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foredraft.cache.base import KVShape
from foredraft.cache.blocks import BLOCK
from foredraft.cache.memory import CacheMemory
from foredraft.cache.paged import Cache
from foredraft.cache.store import BlockStore


class KVCache(Cache):
    """Keys and values of tokens (see `foredraft.cache.paged.Cache`).

    Args:
        shape: the model's cache shape.
        dtype: of keys and values.
        device: where they live.
        max_length: the most tokens a slot may hold.
        memory: limit of the entries in bytes, or one shared with other caches; None: a share of the
            machine's memory.
        block_size: entries of a block.
    """

    def __init__(
        self,
        shape: KVShape,
        dtype: torch.dtype,
        device: torch.device | str,
        max_length: int,
        memory: CacheMemory | int | None = None,
        block_size: int = BLOCK,
    ) -> None:
        self.store = BlockStore(shape, dtype, device, block_size)
        super().__init__(max_length, CacheMemory.of(memory, device), block_size, device)
        self.memory.add(self, shape.bytes_per_token(dtype))
        self._holds_memory = False

    @property
    def shape(self) -> KVShape:
        return self.store.shape

    @property
    def num_bytes(self) -> int:
        """Memory taken."""
        own = self.store.num_bytes(self.pool.num_made)
        return own + sum(layers.num_bytes for layers in self._layers)

    def fill(self, slot: int, num_tokens: int) -> None:
        """Append ``num_tokens`` empty entries as valid ones, to time a long context.

        Raises:
            ValueError, MemoryError, RuntimeError: as `reserve`.
        """
        self.reserve(slot, num_tokens)
        self.will_write(slot, num_tokens)
        start = self.length(slot)
        self.store.clear_entries(self.table(slot), range(start, start + num_tokens))
        self.keep(slot, num_tokens, ())

    def hold_memory(self) -> None:
        """Keep the memory when the last slot is freed, because CUDA graphs hold its address."""
        self._holds_memory = True

    def _make_room(self, blocks: Sequence[int]) -> None:
        self.store.make_room(self.pool.num_made, self.pool.num_total)

    def _copy_block(self, source: int, target: int) -> None:
        self.store.copy(source, target)

    def _move(self, slot: int, sources: Sequence[int], first: int) -> None:
        self.store.move(self.table(slot), sources, first)

    def _release(self) -> None:
        if not self._holds_memory:
            super()._release()
            self.store.release()
