"""The cache of a transformers model, kept per slot so that rejected tokens can be taken out.

transformers' own caches grow by copying everything at each step and, with a sliding window, drop
entries that a rejection would need back. The layers here grow in place, keep every entry, and are
otherwise what the model's code expects; windows are left to the attention mask.

Shape legend: H key-value heads, T new tokens, C capacity, D head size (keys and values may
differ in it).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from foredraft.cache.base import CacheUsage, check_keep, common_prefix
from foredraft.cache.blocks import in_blocks
from foredraft.cache.memory import UNLIMITED, CacheMemory
from foredraft.cache.paged import Cache
from foredraft.core.errors import CacheFullError, CapabilityError
from foredraft.models.base import ScoreRow


class SlotLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer of one slot.

    ``keys`` and ``values``, the names that transformers reads, are views of the filled part.
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


@dataclass
class Held:
    """A slot's entries.

    Attributes:
        past: as transformers has it.
        room: entries that it takes memory for.
        text: its first tokens, as far as its owner's other slots may share them.
        is_parked: whether it is only kept for that.
    """

    past: Any
    room: int = 0
    text: tuple[int, ...] = ()
    is_parked: bool = False


class HFCache(Cache):
    """One transformers cache per slot (see `foredraft.cache.paged.Cache`).

    Slots share nothing: a text that comes again takes over the slot that was kept of it, or a copy.
    Blocks are for added layers alone.

    Args:
        new_layers: makes the layers of an empty slot: `SlotLayer`, or `DummyLayer` where the
            model's layer keeps nothing.
        max_length: the most tokens a slot may hold.
        device: where added layers live.
        memory: what entries may take, in bytes, or shared with other caches; None: no limit. It is
            kept from the first forward on, which shows how large they are.
    """

    def __init__(
        self,
        new_layers: Callable[[], list[Any]],
        max_length: int = sys.maxsize,
        device: torch.device | str = "cpu",
        memory: CacheMemory | int | None = None,
    ) -> None:
        memory = memory if isinstance(memory, CacheMemory) else CacheMemory(memory)
        super().__init__(max_length, memory, device=device)
        self._new_layers = new_layers
        self._held: dict[int, Held] = {}  # by slot; of those kept for sharing the oldest first
        self._token_bytes = 0  # 0: no forward has shown it yet

    @property
    def num_bytes(self) -> int:
        own = sum(layer.num_bytes for slot in self._held for layer in self._own_layers(slot))
        return own + sum(layers.num_bytes for layers in self._layers)

    @property
    def slots(self) -> list[int]:
        """The allocated slots, without those that are only kept for sharing."""
        return [slot for slot, held in self._held.items() if not held.is_parked]

    @property
    def _parked(self) -> list[int]:
        return [slot for slot, held in self._held.items() if held.is_parked]

    @property
    def usage(self) -> CacheUsage:
        there = list(self._held.values())  # at once: another thread may change slots
        cached = sum(held.room for held in there if held.is_parked)
        used = sum(held.room for held in there if not held.is_parked)
        total = max(used + cached, self.memory.num_tokens if self._token_bytes else UNLIMITED)
        return CacheUsage(total, used, cached, total - used - cached)

    def check(self) -> None:
        assert set(self._held) == set(self._slots), "slots without entries"
        self.pool.check([slot.table for slot in self._slots.values()])

    def allocate(self) -> int:
        slot = super().allocate()
        self._held[slot] = Held(self._new_past())
        return slot

    def _new_past(self) -> Any:
        return _dynamic_cache(self._new_layers())

    def forwards(self, row: ScoreRow) -> Iterator[tuple[ScoreRow, int]]:
        """The forwards that score a row, of which the last one's logits count.

        Yields:
            A row to run on the cache that `open` returns, and how many entries that has.
        """
        yield row, self.length(row.slot)

    def reserve(self, slot: int, num_tokens: int) -> None:
        needed = self.length(slot) + num_tokens
        if needed > self._max_length:
            raise ValueError(f"{needed} cache entries wanted; a slot holds {self._max_length}")
        self._make_way(in_blocks(needed) + self._source_room(slot) - self._held[slot].room)
        for layer in self._own_layers(slot):
            layer.make_room(needed)
        self._measure(slot)

    def share(self, owner: bytes, tokens: Sequence[int]) -> tuple[int, int]:
        best, length = self._find(owner, tokens)
        if not length:
            slot = self.allocate()
        elif self._held[best].is_parked and length == len(self._held[best].text):
            slot = best
            self._held[slot].text, self._held[slot].is_parked = (), False
        else:
            self._held[best] = self._held.pop(best)  # now the newest
            slot = self.fork(best)
            self.truncate(slot, length)
        self._slots[slot].owner = owner
        return slot, length

    def num_shared(self, owner: bytes, tokens: Sequence[int]) -> int:
        return self._find(owner, tokens)[1]

    def publish(self, slot: int, tokens: Sequence[int]) -> None:
        if self._slots[slot].owner is not None:
            end = min(self.length(slot), len(tokens)) // self.block_size * self.block_size
            self._held[slot].text = tuple(tokens[:end])

    def retire(self, slot: int, tokens: Sequence[int]) -> None:
        owner = self._slots[slot].owner
        if owner is None:
            self.free(slot)
            return
        self.truncate(slot, len(tokens))
        text = tuple(tokens)
        for other in self._parked:
            begins = self._held[other].text
            if self._slots[other].owner == owner and text[: len(begins)] == begins:
                self.free(other)
        held = self._held[slot] = self._held.pop(slot)  # now the newest
        held.text, held.is_parked = text, True

    def distrust(self) -> None:
        super().distrust()
        self.forget()
        for held in self._held.values():
            held.text = ()

    def forget(self) -> None:
        for slot in self._parked:
            self.free(slot)

    def open(self, slot: int) -> Any:
        """The slot as a transformers cache that holds the entries that count, and no others."""
        length = self.length(slot)
        for layer in self._own_layers(slot):
            layer.resize(length)
        return self._held[slot].past

    def num_written(self, slot: int) -> set[int]:
        """Numbers of entries in the layers, valid or not; more than one value is a fault."""
        return {layer.get_seq_length() for layer in self._own_layers(slot)}

    @torch.no_grad()
    def keep(self, slot: int, num_pending: int, path: Sequence[int]) -> None:
        start = self.length(slot)
        check_keep(num_pending, path, min(self.num_written(slot), default=start) - start)
        first = start + num_pending
        if list(path) != list(range(len(path))):
            for layer in self._own_layers(slot):
                layer.gather(first, path)
        self._set_length(self._slots[slot], first + len(path))
        self.open(slot)
        self._measure(slot)

    def truncate(self, slot: int, length: int) -> int:
        length = super().truncate(slot, length)
        self.open(slot)
        return length

    @torch.no_grad()
    def fork(self, slot: int) -> int:
        layers = self.open(slot).layers
        copy = super().fork(slot)
        copies = [each.copy() if isinstance(each, SlotLayer) else DummyLayer() for each in layers]
        self._held[copy] = Held(_dynamic_cache(copies))
        self._measure(copy)
        return copy

    def free(self, slot: int) -> None:
        super().free(slot)
        del self._held[slot]

    def _find(self, owner: bytes, tokens: Sequence[int]) -> tuple[int, int]:
        """The slot with the longest beginning of a text, and its length; a kept slot if
        possible."""
        best, most = -1, 0
        for slot in (*self._parked, *self.slots):
            if self._slots[slot].owner != owner:
                continue
            if (count := common_prefix(self._held[slot].text, tokens)) > most:
                best, most = slot, count
        return best, most

    def _make_way(self, num_tokens: int) -> None:
        """Evict kept slots until that many more entries fit into the memory."""
        while (usage := self.usage).free < num_tokens:
            if not (parked := self._parked):
                raise CacheFullError(
                    f"the cache has no room for {num_tokens} more tokens: {usage.used} of the "
                    f"{usage.total} that its memory allows are in use; wait until requests end, "
                    "send fewer at once, or let it have more (cache_memory)"
                )
            self.free(parked[0])

    def _measure(self, slot: int) -> None:
        """Count the entries that a slot in use takes memory for: a forward may have added some."""
        layers = self._own_layers(slot)
        room = max((layer.capacity for layer in layers), default=0)
        if room and not self._token_bytes:
            self._token_bytes = sum(layer.num_bytes for layer in layers) // room
            self.memory.add(self, self._token_bytes)
        self._held[slot].room = room + self._source_room(slot)

    def _source_room(self, slot: int) -> int:
        """The memory that a slot's source takes, in entries; there is none here."""
        return 0

    def _most_blocks(self) -> int:
        return UNLIMITED

    def _own_layers(self, slot: int) -> list[SlotLayer]:
        return [layer for layer in self._held[slot].past.layers if isinstance(layer, SlotLayer)]


def _dynamic_cache(layers: list[Any]) -> Any:
    cache = DynamicCache()
    cache.layers = layers
    cache.layer_class_to_replicate = SlotLayer  # for layers the config does not mention
    return cache


def layer_factory(config: Any) -> Callable[[], list[Any]]:
    """A factory of the cache layers of one slot for a model with this config.

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
