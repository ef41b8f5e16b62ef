"""The cache of a transformers model, kept per slot so that rejected tokens can be taken out.

transformers' own caches grow by copying everything at each step and, with a sliding window, drop
entries that a rejection would need back. The layers here grow in place, keep every entry, and are
otherwise what the model's code expects; windows are left to the attention mask.

Shape legend: H key-value heads, T new tokens, C capacity, D head size (keys and values may
differ in it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from foredraft.cache.base import SlotLengths, padded_capacity
from foredraft.core.errors import CapabilityError


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
        start = self.get_seq_length()
        old = self._stores or [key_states[..., :0, :], value_states[..., :0, :]]
        self._stores = [
            _appended(store, new, start)
            for store, new in zip(old, (key_states, value_states), strict=True)
        ]
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True
        self.resize(start + key_states.shape[-2])
        return self.keys, self.values

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
    def num_bytes(self) -> int:
        return sum(store.numel() * store.dtype.itemsize for store in self._stores)


def _appended(store_HCD: Tensor, new_HTD: Tensor, start: int) -> Tensor:
    """``store`` with ``new`` written at ``start``; a larger copy of it where it is too small."""
    stop = start + new_HTD.shape[-2]
    if stop > store_HCD.shape[-2]:
        capacity = padded_capacity(max(stop, start * 3 // 2))
        grown_HCD = new_HTD.new_empty((*new_HTD.shape[:-2], capacity, new_HTD.shape[-1]))
        grown_HCD[..., :start, :] = store_HCD[..., :start, :]
        store_HCD = grown_HCD
    store_HCD[..., start:stop, :] = new_HTD
    return store_HCD


class HFCache:
    """One transformers cache per slot (see `foredraft.cache.base.Cache`).

    Args:
        new_layers: makes the layers of an empty slot: `SlotLayer`, or `DummyLayer` where the
            model's layer keeps nothing.
    """

    def __init__(self, new_layers: Callable[[], list[Any]]) -> None:
        self._new_layers = new_layers
        self._lengths = SlotLengths()
        self._slots: dict[int, Any] = {}

    @property
    def num_bytes(self) -> int:
        return sum(layer.num_bytes for slot in self._slots for layer in self._layers(slot))

    def allocate(self) -> int:
        slot = self._lengths.open()
        self._slots[slot] = _dynamic_cache(self._new_layers())
        return slot

    def length(self, slot: int) -> int:
        return self._lengths[slot]

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
        first = self._lengths[slot] + num_pending
        if list(path) != list(range(len(path))):
            for layer in self._layers(slot):
                layer.gather(first, path)
        self._lengths[slot] = first + len(path)

    def truncate(self, slot: int, length: int) -> None:
        if not 0 <= length <= self._lengths[slot]:
            raise ValueError(f"cannot truncate {self._lengths[slot]} entries to {length}")
        self._lengths[slot] = length

    @torch.no_grad()
    def fork(self, slot: int) -> int:
        length, copy = self._lengths[slot], self.allocate()
        layers = self.open(slot).layers
        self._slots[copy] = _dynamic_cache(
            [layer.copy() if isinstance(layer, SlotLayer) else DummyLayer() for layer in layers]
        )
        self._lengths[copy] = length
        return copy

    def free(self, slot: int) -> None:
        self._lengths.close(slot)
        del self._slots[slot]

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
