"""States of recurrent layers: whatever is read, kept and taken back, they are those of the text."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Sequence

import pytest
import torch

from foredraft.cache.base import KVShape, owner_of
from foredraft.cache.states import StateCache, StateShape

BLOCK = 4
SHAPE = StateShape(num_layers=2, state_size=1, entry_size=1)


def new_cache(num_tokens: int | None = None, rewinds: int = 0) -> StateCache:
    kv_shape = KVShape(1, 1, 6)
    memory = None if num_tokens is None else num_tokens * 72
    cache = StateCache(kv_shape, SHAPE, torch.float32, "cpu", 400, memory, BLOCK)
    cache.rewinds = rewinds
    return cache


def folded(state: float, token: float) -> float:
    """The state behind one more token; no two texts of a test have the same."""
    return (state * 31 + token + 1) % 9973


def of_text(tokens: Sequence[int]) -> float:
    state = 0.0
    for token in tokens:
        state = folded(state, token)
    return state


def read(
    cache: StateCache,
    slot: int,
    start: int,
    pending: Sequence[int],
    nodes: Sequence[int] = (),
    parents: Sequence[int] = (),
) -> list[float]:
    """A forward, as a decoder makes it; the states behind each token."""
    count = start + len(pending) + len(nodes) - cache.length(slot)
    cache.reserve(slot, count)
    cache.will_write(slot, count)
    row = cache.open_states(slot, start, len(pending), parents)
    tokens = [*row.old_LTW[0, :, 0].tolist(), *pending, *nodes]
    before = [*range(-1, row.num_old - 1), *row.parents]
    behind = {-1: float(row.state.values_LS[0, 0])}
    for element, token in enumerate(tokens):
        behind[element] = folded(behind[before[element]], token)
    for save in row.saves:
        save.values_LS[:] = behind[row.num_before(save) - 1]
    own = torch.tensor([*pending, *nodes][row.first_logged :], dtype=torch.float32)
    row.new_LTW[:] = own[None, :, None]
    cache.close_states([row])
    return [behind[element] for element in range(row.num_old, len(tokens))]


@pytest.mark.parametrize("rewinds", [0, 6])
@pytest.mark.parametrize("seed", range(6))
def test_states_are_those_of_the_text(seed: int, rewinds: int) -> None:
    dice, cache = random.Random(f"states {seed}"), new_cache(rewinds=rewinds)
    texts: dict[int, list[int]] = {}
    known: list[list[int]] = [[1, 2, 3, 4, 5, 6, 7, 8, 9]]
    num_found = 0
    for _ in range(600):
        if not texts or (len(texts) < 5 and dice.random() < 0.1):
            text = [*dice.choice(known), *(dice.randrange(9) for _ in range(3))]
            slot, length = cache.share(owner_of(None), text[:-1])
            assert length <= cache.num_shared(owner_of(None), text)
            texts[slot], num_found = text[:length], num_found + length
        slot = dice.choice([*texts])
        text = texts[slot]
        action = dice.random()
        if len(text) > 120 or action < 0.05:
            cache.publish(slot, text)
            known.append(text)
            cache.retire(slot, text)
            del texts[slot]
        elif action < 0.12 and len(texts) < 5:
            texts[cache.fork(slot)] = [*text]
        elif action < 0.2:
            wanted = dice.randint(max(0, len(text) - 12), len(text))
            length = cache.truncate(slot, wanted)
            assert length == wanted or length % BLOCK == 0
            if len(text) - wanted <= rewinds and len(text) > wanted > 40:
                assert cache._rows[slot].state.position <= wanted
            del text[length:]
        else:
            if dice.random() < 0.3:  # a copy drafts on the same cache
                for ahead in range(3):
                    (state,) = read(cache, slot, len(text) + ahead, [ahead])
                    assert state == of_text([*text, *range(ahead + 1)])
            pending = [dice.randrange(9) for _ in range(dice.choice([1, 1, 1, 3, 30]))]
            nodes = [dice.randrange(9) for _ in range(dice.choice([0, 0, 5]))]
            parents = [dice.randint(-1, node - 1) for node in range(len(nodes))]
            states = read(cache, slot, len(text), pending, nodes, parents)
            path = [len(nodes) - 1] if nodes else []
            while path and parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            kept = path[: dice.randint(0, len(path))]
            text += pending
            assert states[len(pending) - 1] == of_text(text)
            for number in range(len(path)):
                behind = [*text, *(nodes[node] for node in path[: number + 1])]
                assert states[len(pending) + path[number]] == of_text(behind)
            cache.keep(slot, len(pending), kept)
            text += [nodes[node] for node in kept]
            cache.publish(slot, text)
        cache.check()
    assert num_found > 0


def test_a_forward_that_fails_changes_nothing() -> None:
    cache = new_cache()
    slot = cache.allocate()
    read(cache, slot, 0, [1, 2, 3, 4, 5])
    cache.keep(slot, 5, ())
    cache.reserve(slot, 1)
    cache.will_write(slot, 1)
    cache.open_states(slot, 5, 1, ())  # and no more of it
    assert read(cache, slot, 5, [6])[-1] == of_text([1, 2, 3, 4, 5, 6])


def test_states_at_ends_of_blocks_keep_to_their_share_of_the_memory() -> None:
    cache = new_cache(num_tokens=40)
    limit = cache.memory.num_bytes
    assert limit is not None
    for start in range(4):
        slot, text = cache.allocate(), list[int]()
        for token in range(30):
            read(cache, slot, len(text), [token + start])
            cache.keep(slot, 1, ())
            text.append(token + start)
        held = cache._buffers.num_held * SHAPE.state_bytes
        assert len(cache._ends) <= 1 or 4 * held <= limit + 16 * SHAPE.state_bytes
        cache.free(slot)


def test_a_cache_is_freed_with_its_states() -> None:
    cache = new_cache()
    slot = cache.allocate()
    read(cache, slot, 0, [*range(40)])
    cache.keep(slot, 40, ())
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None
