"""Models of transformers that carry a state from token to token: Mamba, its hybrids and others.

Nothing can be taken out of such a state. A forward with drafts runs on a copy of it; where one of
them is rejected, the copy is dropped, and the next forwards begin with the tokens that were
accepted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from foredraft.cache.base import check_keep
from foredraft.cache.blocks import in_blocks
from foredraft.core.errors import CapabilityError
from foredraft.core.tree import EMPTY_TREE
from foredraft.models.base import ScoreRow
from foredraft.models.hf.cache import Held, HFCache, SlotLayer

_MOST_UNREAD = 16
"""Accepted tokens that forwards with drafts read again, until the state reads them for good."""


@dataclass
class _Past:
    """The past of a slot.

    Attributes:
        past: as transformers has it, behind the first ``num_read`` tokens.
        tokens: of the slot.
        row: the last forward, and ``ahead`` the copy that it ran on; None: it had no drafts.
        num_run: tokens behind which it left that past.
    """

    past: Any
    num_read: int = 0
    tokens: list[int] = field(default_factory=list)
    row: ScoreRow | None = None
    ahead: Any = None
    num_run: int = 0


class HFStateCache(HFCache):
    """One past per slot, which is copied where drafts are scored.

    A slot that was kept is taken over by a text that goes on from its end, and by no other.

    Attributes:
        reads_on: whether a forward of several tokens goes on from a state. Else all but a text's
            first forward have one token.
    """

    reads_on = True

    def allocate(self) -> int:
        slot = super().allocate()
        self._held[slot].past = _Past(self._held[slot].past)
        return slot

    def forwards(self, row: ScoreRow) -> Iterator[tuple[ScoreRow, int]]:
        for part, start in self._parts_of(row):
            self._held[row.slot].past.num_run = start + len(part.pending) + len(part.tree)
            yield part, start

    def _parts_of(self, row: ScoreRow) -> Iterator[tuple[ScoreRow, int]]:
        slot, state = row.slot, self._held[row.slot].past
        length = self.length(slot)
        if state.num_read > length:  # the text was cut, or a forward failed
            state.past, state.num_read = self._new_past(), 0
        state.row, state.ahead = row, None
        start, unread = state.num_read, tuple(state.tokens[state.num_read : length])
        chain, tokens = row.tree, (*unread, *row.pending)
        if self.reads_on and chain and len(unread) <= _MOST_UNREAD:
            state.ahead = deepcopy(state.past)
            yield replace(row, pending=tokens), start
            return
        state.num_read = length + 1  # until `keep` says how many they are
        alone = replace(row, tree=EMPTY_TREE)
        cuts = [len(tokens)] if self.reads_on or not start else range(1, len(tokens) + 1)
        for first, end in pairwise((0, *cuts)):
            yield replace(alone, pending=tokens[first:end]), start + first
        if chain:
            state.ahead = deepcopy(state.past)
        for node, token in enumerate(chain.tokens):
            yield replace(alone, pending=(token,)), start + len(tokens) + node

    def open(self, slot: int) -> Any:
        state = self._held[slot].past
        return state.past if state.ahead is None else state.ahead

    def num_written(self, slot: int) -> set[int]:
        """Of layers with attention; where there are none, no entries can be counted."""
        layers = [each for each in self.open(slot).layers if isinstance(each, DynamicLayer)]
        found = {each.get_seq_length() for each in layers if each.is_initialized}
        return found or {self._held[slot].past.num_run}

    @torch.no_grad()
    def keep(self, slot: int, num_pending: int, path: Sequence[int]) -> None:
        state, start = self._held[slot].past, self.length(slot)
        row = state.row or ScoreRow(slot, [])
        check_keep(num_pending, path, len(row.pending) + len(row.tree))
        chosen = [row.tree.tokens[node] for node in path]
        state.tokens[start:] = [*row.pending[:num_pending], *chosen]
        length = start + num_pending + len(path)
        if len(path) == len(row.tree) and num_pending == len(row.pending):
            state.past, state.num_read = self.open(slot), length
        elif state.num_read > start and num_pending == len(row.pending):
            state.num_read = start + num_pending
        state.row = state.ahead = None
        self._set_length(self._slots[slot], length)
        self._measure(slot)

    def truncate(self, slot: int, length: int) -> int:
        self._held[slot].past.row = self._held[slot].past.ahead = None
        return super(HFCache, self).truncate(slot, length)

    @torch.no_grad()
    def fork(self, slot: int) -> int:
        copy = super(HFCache, self).fork(slot)
        state = deepcopy(self._held[slot].past)
        self._held[copy] = Held(replace(state, row=None, ahead=None))
        self._measure(copy)
        return copy

    def _find(self, owner: bytes, tokens: Sequence[int]) -> tuple[int, int]:
        texts = {slot: self._held[slot].text for slot in self._parked}
        whole = [
            (len(text), slot)
            for slot, text in texts.items()
            if self._slots[slot].owner == owner and text == tuple(tokens[: len(text)])
        ]
        length, slot = max(whole, default=(0, -1))
        return slot, length

    def _measure(self, slot: int) -> None:
        """Count the entries of layers with attention; a state is as large whatever it has read."""
        state = self._held[slot].past
        layers = [each for each in state.past.layers if isinstance(each, DynamicLayer)]
        found = [x for each in layers if each.is_initialized for x in (each.keys, each.values)]
        if found and not self._token_bytes and found[0].shape[-2]:
            self._token_bytes = sum(x.nbytes // x.shape[-2] for x in found)
            self.memory.add(self, self._token_bytes)
        self._held[slot].room = in_blocks(self.length(slot))

    def _own_layers(self, slot: int) -> list[SlotLayer]:
        return []


def find_reading(target: Any, tokens: Sequence[int]) -> None:
    """Find out whether a forward of several tokens goes on from a state, beside another text's.

    Args:
        target: an `HFTarget` with a `HFStateCache`.
        tokens: some that differ.

    Raises:
        CapabilityError: not even one of a single token does.
    """
    cache, cut = target.cache, len(tokens) // 2
    fresh, at_once = (_last_logits(target, cache.allocate(), t) for t in (tokens[cut:], tokens))
    noise = 0.001 if target.model.dtype in (torch.float32, torch.float64) else 0.1
    for cache.reads_on in (True, False):
        slot, other = cache.allocate(), cache.allocate()
        _last_logits(target, slot, tokens[:cut])
        _last_logits(target, other, tokens[::-1])
        behind = _last_logits(target, slot, tokens[cut:])
        for each in [*cache.slots]:
            cache.free(each)
        if (at_once - behind).abs().max() <= noise * (at_once - fresh).abs().max():
            return
    raise CapabilityError(
        f"{type(target.model).__name__} does not go on from the state in its cache: it may keep it "
        "elsewhere, where texts cannot take turns"
    )


def _last_logits(target: Any, slot: int, tokens: Sequence[int]) -> Tensor:
    """Read tokens behind a slot's; logits [V] after the last one."""
    logits_V: Tensor = target.score([ScoreRow(slot, tokens)])[0].logits_NV[-1]
    target.cache.keep(slot, len(tokens), ())
    return logits_V


def state_layers(config: Any) -> list[Any]:
    """Layers of an empty cache of a model with states."""
    layers: list[Any] = DynamicCache(config=config).layers
    return layers
