"""The cache of a transformers model, kept per slot so that rejected tokens can be taken out.

transformers' own caches grow by copying everything at each step and, with a sliding window, drop
entries that a rejection would need back. The layers here grow in place, keep every entry, and are
otherwise what the model's code expects; windows are left to the attention mask.

Shape legend: H key-value heads, T new tokens, C capacity, D head size (keys and values may
differ in it).
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from foredraft.cache.base import CacheUsage, KVShape, SlotLengths, check_keep
from foredraft.cache.blocks import BLOCK, BlockTables, in_blocks
from foredraft.cache.index import common_prefix
from foredraft.cache.layers import AddedLayers, StoredLayers
from foredraft.core.errors import CacheFullError, CapabilityError


class SlotLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer of one slot.

    ``keys`` and ``values``, the names that transformers reads, are views of what is filled.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stores: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append [1, H, T, D] keys and values; returns all of them."""
        start, stop = self.get_seq_length(), self.get_seq_length() + key_states.shape[-2]
        if not self._stores:
            self._stores = [key_states[..., :0, :], value_states[..., :0, :]]
        self.make_room(stop)
        for store, new in zip(self._stores, (key_states, value_states), strict=True):
            store[..., start:stop, :] = new
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True
        self.resize(stop)
        return self.keys, self.values

    def make_room(self, num_entries: int) -> None:
        """Hold at least this many, if their shape is known yet."""
        self._stores = [_with_room(store, num_entries) for store in self._stores]

    def resize(self, length: int) -> None:
        """Let the first ``length`` entries be the ones that count."""
        if self._stores:
            self.keys, self.values = (store[..., :length, :] for store in self._stores)

    def gather(self, first: int, path: Sequence[int]) -> None:
        """Move the entries ``first + node`` of a path to ``first`` and following."""
        for store in self._stores:
            source = torch.tensor([first + node for node in path], device=store.device)
            # index_select copies before anything is overwritten, so the ranges may overlap.
            store[..., first : first + len(path), :] = store.index_select(-2, source)

    def copy(self) -> SlotLayer:
        twin = SlotLayer()
        if self._stores:
            twin.update(self.keys, self.values)
        return twin

    @property
    def capacity(self) -> int:
        return self._stores[0].shape[-2] if self._stores else 0

    @property
    def num_bytes(self) -> int:
        return sum(store.numel() * store.dtype.itemsize for store in self._stores)


def _with_room(store_HCD: Tensor, num_entries: int) -> Tensor:
    """The store, or a larger copy of it where it is too small."""
    *heads, capacity, head_dim = store_HCD.shape
    if num_entries <= capacity:
        return store_HCD
    room = in_blocks(max(num_entries, capacity * 3 // 2))
    grown_HCD = store_HCD.new_empty((*heads, room, head_dim))
    grown_HCD[..., :capacity, :] = store_HCD
    return grown_HCD


@dataclass(frozen=True)
class _Parked:
    """A slot that is kept because its text may come again."""

    owner: bytes
    tokens: tuple[int, ...]


class HFCache:
    """One transformers cache per slot (see `foredraft.cache.base.Cache`).

    Slots share nothing: a text that comes again takes over the slot that was kept of it, or a copy.

    Args:
        new_layers: makes the layers of an empty slot: `SlotLayer`, or `DummyLayer` where the
            model's layer keeps nothing.
        max_length: the most tokens a slot may hold.
        device: where added layers live.
        memory: bytes that entries may take; None: no limit. It is kept from the first forward on,
            which shows how large they are.
    """

    def __init__(
        self,
        new_layers: Callable[[], list[Any]],
        max_length: int = sys.maxsize,
        device: torch.device | str = "cpu",
        memory: int | None = None,
    ) -> None:
        self._new_layers = new_layers
        self._max_length, self._memory = max_length, memory
        self._lengths = SlotLengths()
        self._added = AddedLayers(device)
        self._tables = BlockTables(
            lambda: 2**31 - 1, BLOCK, lambda blocks: None, self._added.copy_block
        )
        self._slots: dict[int, Any] = {}
        self._parked: OrderedDict[int, _Parked] = OrderedDict()  # by slot, the oldest first

    @property
    def num_bytes(self) -> int:
        own = sum(layer.num_bytes for slot in self._slots for layer in self._layers(slot))
        return own + self._added.num_bytes

    @property
    def slots(self) -> list[int]:
        """Those that are allocated, and not merely kept."""
        return [slot for slot in self._slots if slot not in self._parked]

    @property
    def usage(self) -> CacheUsage:
        used = sum(map(self._room, self.slots))
        cached = sum(map(self._room, self._parked))
        total = max(used + cached, self._most_tokens())
        return CacheUsage(total, used, cached, total - used - cached)

    def check(self) -> None:
        assert set(self._slots) == set(self._lengths.slots), "slots without a length"
        assert set(self._parked) <= set(self._slots), "kept slots that are not there"
        self._tables.check()

    def allocate(self) -> int:
        slot = self._lengths.open()
        self._slots[slot] = _dynamic_cache(self._new_layers())
        self._tables.open(slot)
        self._added.open(slot)
        return slot

    def length(self, slot: int) -> int:
        return self._lengths[slot]

    def reserve(self, slot: int, num_tokens: int) -> None:
        needed = self._lengths[slot] + num_tokens
        if needed > self._max_length:
            raise ValueError(f"{needed} cache entries wanted; a slot holds {self._max_length}")
        self._make_way(in_blocks(needed) - self._room(slot))
        for layer in self._layers(slot):
            layer.make_room(needed)

    def share(self, owner: bytes, tokens: Sequence[int]) -> tuple[int, int]:
        found = {
            slot: common_prefix(parked.tokens, tokens)
            for slot, parked in self._parked.items()
            if parked.owner == owner
        }
        best = max(found, key=lambda slot: found[slot], default=-1)
        if not found.get(best):
            return self.allocate(), 0
        self._parked.move_to_end(best)
        if found[best] == len(self._parked[best].tokens):
            del self._parked[best]
            return best, found[best]
        copy = self.fork(best)
        self.truncate(copy, found[best])
        return copy, found[best]

    def retire(self, slot: int, owner: bytes, tokens: Sequence[int]) -> None:
        self.truncate(slot, len(tokens))
        text = tuple(tokens)
        for other, parked in [*self._parked.items()]:
            if parked.owner == owner and text[: len(parked.tokens)] == parked.tokens:
                self._drop(other)
        self._parked[slot] = _Parked(owner, text)

    def distrust(self, slot: int, owner: bytes, tokens: Sequence[int]) -> None:
        for other, parked in [*self._parked.items()]:
            if parked.owner == owner and common_prefix(parked.tokens, tokens):
                self._drop(other)

    def forget(self) -> None:
        for slot in [*self._parked]:
            self._drop(slot)

    def add_layers(self, shape: KVShape, dtype: torch.dtype) -> StoredLayers:
        return self._added.add(shape, dtype, self._tables, self._lengths.slots)

    def open(self, slot: int) -> Any:
        """The slot as a transformers cache that holds the entries that count, and no others."""
        length = self._lengths[slot]
        for layer in self._layers(slot):
            layer.resize(length)
        return self._slots[slot]

    def num_written(self, slot: int) -> set[int]:
        """How many entries the layers hold, counting or not; more than one value is a fault."""
        return {layer.get_seq_length() for layer in self._layers(slot)}

    @torch.no_grad()
    def keep(self, slot: int, num_pending: int, path: Sequence[int]) -> None:
        start = self._lengths[slot]
        check_keep(num_pending, path, min(self.num_written(slot), default=start) - start)
        first = start + num_pending
        if list(path) != list(range(len(path))):
            for layer in self._layers(slot):
                layer.gather(first, path)
        self._set_length(slot, first + len(path))

    def truncate(self, slot: int, length: int) -> None:
        if not 0 <= length <= self._lengths[slot]:
            raise ValueError(f"cannot truncate {self._lengths[slot]} entries to {length}")
        self._set_length(slot, length)
        self._added.truncate(slot, length)
        self._tables.cut(slot, length)

    @torch.no_grad()
    def fork(self, slot: int) -> int:
        length, copy = self._lengths[slot], self.allocate()
        layers = self.open(slot).layers
        self._slots[copy] = _dynamic_cache(
            [layer.copy() if isinstance(layer, SlotLayer) else DummyLayer() for layer in layers]
        )
        self._lengths[copy] = length
        self._tables.share(slot, copy, length)
        self._added.copy(slot, copy, length)
        return copy

    def free(self, slot: int) -> None:
        self._lengths.close(slot)
        del self._slots[slot]
        self._tables.close(slot)
        self._added.close(slot)
        if not self._slots:
            self._tables.pool.start_over()
            self._added.release()

    def _drop(self, slot: int) -> None:
        """Give up a slot that was kept."""
        del self._parked[slot]
        self.free(slot)

    def _make_way(self, num_tokens: int) -> None:
        """See that so many more entries fit into the memory."""
        while (usage := self.usage).free < num_tokens:
            if not self._parked:
                raise CacheFullError(
                    f"the cache has no room for {num_tokens} more tokens: {usage.used} of the "
                    f"{usage.total} that its memory allows are in use; wait until requests end, "
                    "send fewer at once, or let it have more (cache_memory)"
                )
            self._drop(next(iter(self._parked)))

    def _most_tokens(self) -> int:
        """That the memory allows, as far as is known."""
        if self._memory is None:
            return 2**31 - 1
        room = sum(map(self._room, self._slots))
        return self._memory * room // self.num_bytes if self.num_bytes else 2**31 - 1

    def _room(self, slot: int) -> int:
        """Entries that the slot takes memory for."""
        return max((layer.capacity for layer in self._layers(slot)), default=0)

    def _set_length(self, slot: int, length: int) -> None:
        self._lengths[slot] = length
        for layer in self._layers(slot):
            layer.resize(length)

    def _layers(self, slot: int) -> list[SlotLayer]:
        return [layer for layer in self._slots[slot].layers if isinstance(layer, SlotLayer)]


def _dynamic_cache(layers: list[Any]) -> Any:
    cache = DynamicCache()
    cache.layers = layers
    cache.layer_class_to_replicate = SlotLayer  # for layers the config does not mention
    return cache


def layer_factory(config: Any) -> Callable[[], list[Any]]:
    """What makes the cache layers of one slot of a model with this config.

    Raises:
        CapabilityError: a layer keeps a running state instead of one entry a token, so a
            rejected token could not be taken out of it again.
    """
    kinds = [type(layer) for layer in DynamicCache(config=config).layers]
    for index, kind in enumerate(kinds):
        if kind not in (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer):
            raise CapabilityError(
                f"layer {index} of this {config.model_type} model keeps its past in a "
                f"{kind.__name__}, from which a rejected token cannot be taken out again; "
                "speculation needs a model with plain attention caches"
            )
    return lambda: [DummyLayer() if kind is DummyLayer else SlotLayer() for kind in kinds]
