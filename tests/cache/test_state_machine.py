"""Under any sequence of operations a cache of blocks holds the same entries as plain lists."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from foredraft.cache.base import KVShape, owner_of
from foredraft.cache.kv import KVCache
from foredraft.cache.paged import Cache
from foredraft.core.errors import CacheFullError
from foredraft.engine.slots import open_slot, release
from foredraft.models.table import TokenCache
from tests.cache.test_kv import SHAPE, entries_of, tokens_of

BLOCK = 4
TEXTS = st.builds(
    lambda length, rest: [*range(10, 10 + length), *rest],
    st.sampled_from([0, 3, 4, 6, 8, 13]),
    st.sampled_from([[0], [1], [0, 1, 1]]),
)
"""They often begin alike."""


class Machine(RuleBasedStateMachine):
    """Slots, what they should hold, and a drafter's layers beside them that hold the same."""

    slots = Bundle("slots")

    def new_cache(self, max_tokens: int) -> Cache:
        return TokenCache(max_tokens=max_tokens, block_size=BLOCK)

    def put(self, slot: int, tokens: Sequence[int]) -> None:
        assert isinstance(self.cache, TokenCache)
        self.cache.write(slot, tokens)

    def read(self, slot: int) -> list[int]:
        assert isinstance(self.cache, TokenCache)
        return list(self.cache.context(slot))

    @initialize(max_tokens=st.sampled_from([24, 40, 400]))
    def begin(self, max_tokens: int) -> None:
        self.cache = self.new_cache(max_tokens)
        self.layers = self.cache.add_layers(KVShape(1, 1, 1), torch.float32)
        self.lists: dict[int, list[int]] = {}
        self.salts: dict[int, str | None] = {}  # by slot that was opened with one
        self.known: dict[str | None, list[list[int]]] = {}

    @rule(target=slots)
    def allocate(self) -> int:
        slot = self.cache.allocate()
        assert slot not in self.lists
        self.lists[slot] = []
        return slot

    @rule(target=slots, text=TEXTS, salt=st.sampled_from([None, None, "a"]))
    def open(self, text: list[int], salt: str | None) -> int:
        num_found = self.cache.num_shared(owner_of(salt), text)
        slot, num_cached = open_slot(self.cache, text, salt)
        assert num_cached == min(num_found, len(text) - 1)
        found = [
            known for known in self.known.get(salt, []) if known[:num_cached] == text[:num_cached]
        ]
        assert found or not num_cached, "nobody of this owner has left such a text"
        self.lists[slot], self.salts[slot] = text[:num_cached], salt
        return slot

    @rule(
        target=slots,
        texts=st.lists(TEXTS, min_size=1, max_size=4),
        salt=st.sampled_from([None, None, "a"]),
        is_followed=st.booleans(),
        stays=st.booleans(),
    )
    def serve(
        self, texts: list[list[int]], salt: str | None, is_followed: bool, stays: bool
    ) -> int | MultipleResults[int]:
        """Requests, from their prompts to their ends; the last one may stay."""
        for left, text in zip(reversed(range(len(texts))), texts, strict=True):
            slot = self.open(text, salt)
            self.write(slot, text[len(self.lists[slot]) :], [], [])
            self.note(slot)
            if is_followed:
                self.follow(slot, 1)
            self.all_slots_hold_what_lists_would()
            if stays and not left:
                return slot
            self.release(slot)
        return multiple()

    @rule(target=slots, slot=slots, values=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def go_two_ways(self, slot: int, values: list[int]) -> int:
        copy = self.fork(slot)
        self.write(copy, values, [], [])
        self.all_slots_hold_what_lists_would()
        self.write(slot, [7, *values], [], [])
        return copy

    @rule(
        slot=slots,
        pending=st.lists(st.integers(0, 1), max_size=9),
        nodes=st.lists(st.integers(2, 9), max_size=5),
        data=st.data(),
    )
    def forward(self, slot: int, pending: list[int], nodes: list[int], data: st.DataObject) -> None:
        chosen = data.draw(st.sets(st.sampled_from(range(len(nodes)))) if nodes else st.just(set()))
        self.write(slot, pending, nodes, sorted(chosen))

    def write(self, slot: int, pending: list[int], nodes: list[int], path: list[int]) -> None:
        try:
            self.cache.reserve(slot, len(pending) + len(nodes))
        except CacheFullError:
            usage = self.cache.usage
            assert usage.available < len(pending) + len(nodes) + 2 * BLOCK
            return
        self.put(slot, [*pending, *nodes])
        self.cache.keep(slot, len(pending), path)
        self.lists[slot] += [*pending, *(nodes[node] for node in path)]

    @rule(slot=slots, guesses=st.integers(0, 3))
    def follow(self, slot: int, guesses: int) -> None:
        """The drafter writes what it lacks, if it can, and some guesses behind."""
        text = self.lists[slot]
        covered = self.layers.covered(slot)
        start = self.layers.next_start(slot, covered, len(text) - covered)
        if start > len(text):
            return
        values = [*text[start:], *([-1] * guesses)]
        state = torch.tensor(values, dtype=torch.float32).view(1, -1, 1)
        try:
            self.layers.write(0, slot, start, state, -state)
        except CacheFullError:
            return
        self.cache.slot(slot).runs[self.layers].cut(len(text))

    @rule(slot=slots)
    def follow_from_near_the_end(self, slot: int) -> None:
        """A drafter that does not care for what is there begins behind it."""
        text = self.lists[slot]
        position = max(len(text) - 5, 0)
        start = self.layers.next_start(slot, position, len(text) - position)
        if start >= len(text):
            return
        state = torch.tensor(text[start:], dtype=torch.float32).view(1, -1, 1)
        with contextlib.suppress(CacheFullError):
            self.layers.write(0, slot, start, state, -state)

    @rule(slot=slots)
    def note(self, slot: int) -> None:
        """Others find its full blocks from now on."""
        self.cache.publish(slot, [*self.lists[slot], 1])
        if slot in self.salts:
            self.known.setdefault(self.salts[slot], []).append(list(self.lists[slot]))

    @rule(slot=slots, data=st.data())
    def truncate(self, slot: int, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, len(self.lists[slot])))
        self.cache.truncate(slot, length)
        del self.lists[slot][length:]

    @rule(target=slots, slot=slots)
    def fork(self, slot: int) -> int:
        copy = self.cache.fork(slot)
        self.lists[copy] = list(self.lists[slot])
        if slot in self.salts:
            self.salts[copy] = self.salts[slot]
        return copy

    @rule(slot=consumes(slots))
    def free(self, slot: int) -> None:
        self.cache.free(slot)
        self.forget(slot)

    @rule(slot=consumes(slots))
    def release(self, slot: int) -> None:
        text = self.lists[slot]
        if slot in self.salts:
            self.known.setdefault(self.salts[slot], []).append(list(text))
        release(self.cache, slot, [*text, 1])
        self.forget(slot)

    @rule()
    def distrust(self) -> None:
        """Nothing is found any more, and no slot has an owner."""
        self.cache.distrust()
        assert not self.cache.pool.index.blocks
        self.salts.clear()

    @rule()
    def give_up_what_is_cached(self) -> None:
        self.cache.forget()
        assert self.cache.usage.cached == 0

    def forget(self, slot: int) -> None:
        del self.lists[slot]
        self.salts.pop(slot, None)

    @invariant()
    def the_accounts_are_right(self) -> None:
        self.cache.check()
        usage = self.cache.usage
        assert usage.used + usage.cached + usage.free == usage.total
        assert sorted(self.cache.slots) == sorted(self.lists)
        if not self.lists:
            assert usage.used == 0

    @invariant()
    def all_slots_hold_what_lists_would(self) -> None:
        for slot, expected in self.lists.items():
            assert self.cache.length(slot) == len(expected)
            assert self.read(slot) == expected
            covered = self.layers.covered(slot)
            assert covered <= len(expected)
            if not covered:
                continue
            states, values = self.layers.read(0, slot, covered)
            self.check_states(
                states.flatten().tolist(), expected[self.layers.first(slot) : covered]
            )
            assert torch.equal(values, -states)

    def check_states(self, states: list[float], expected: list[int]) -> None:
        """Entries are those of the text, but for a few late ones that the last stands in for."""
        wrong = [i for i, (a, b) in enumerate(zip(states, expected, strict=True)) if a != b]
        assert not wrong or wrong[0], "no entry came before"
        assert all(states[i] == states[i - 1] for i in wrong)


class TensorMachine(Machine):
    """The same with keys and values."""

    def new_cache(self, max_tokens: int) -> Cache:
        memory = max_tokens * (SHAPE.bytes_per_token(torch.float32) + 8)
        return KVCache(SHAPE, torch.float32, "cpu", 4096, memory, BLOCK)

    def put(self, slot: int, tokens: Sequence[int]) -> None:
        assert isinstance(self.cache, KVCache)
        self.cache.will_write(slot, len(tokens))
        first, table = self.cache.length(slot), self.cache.table(slot)
        for layer, keys_HTD in enumerate(entries_of(tokens)):
            if tokens:
                self.cache.store.put(layer, table, first, keys_HTD, -keys_HTD)

    def read(self, slot: int) -> list[int]:
        assert isinstance(self.cache, KVCache)
        store, table, end = self.cache.store, self.cache.table(slot), self.cache.length(slot)
        if not end:
            return []
        layers = [store.get(layer, table, end) for layer in range(SHAPE.num_layers)]
        keys, values = (torch.stack(part) for part in zip(*layers, strict=True))
        return tokens_of(keys, values)


@pytest.mark.parametrize("machine", [Machine, TensorMachine])
def test_any_course_of_events(machine: type[Machine]) -> None:
    case = machine.TestCase
    case.settings = settings(max_examples=80, stateful_step_count=25)
    case().runTest()
