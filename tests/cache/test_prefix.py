"""Conversations keep their slots: what of them the next turn need not read again."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch

from foredraft.cache.base import KVShape
from foredraft.cache.prefix import Session, Sessions, common_prefix
from foredraft.core.errors import ConfigError
from foredraft.models.table import TokenCache


class Turns:
    """Requests on a cache of tokens, without an engine."""

    def __init__(self, look_ahead: int = 0, with_layers: bool = False) -> None:
        self.cache = TokenCache()
        shape = KVShape(1, 1, 2)
        self.layers = [self.cache.add_layers(shape, torch.float32)] if with_layers else []
        self.sessions = Sessions(self.cache, self.layers, look_ahead)

    def turn(self, session: Session | None, tokens: Sequence[int], keep: bool = True) -> int:
        """One request that reads all of its tokens but the last; how many were cached."""
        slot, num_cached = self.sessions.open(session, tokens)
        assert self.cache.context(slot) == tuple(tokens[:num_cached])
        self.cache.write(slot, tokens[num_cached:-1])
        self.cache.keep(slot, len(tokens) - 1 - num_cached, ())
        self.sessions.release(slot, session, tokens, keep)
        return num_cached

    @property
    def num_slots(self) -> int:
        return len(self.cache.entries)


def test_a_turn_reads_only_what_is_new() -> None:
    turns, session = Turns(), Session()
    assert turns.turn(session, [1, 2, 3, 4]) == 0
    assert turns.turn(session, [1, 2, 3, 4, 5, 6]) == 3  # the last one was not read
    assert turns.turn(session, [1, 2, 9]) == 2  # the text took another way
    assert turns.turn(session, [7, 8]) == 0
    assert turns.num_slots == 1


def test_something_is_always_left_to_read() -> None:
    turns, session = Turns(), Session()
    turns.turn(session, [1, 2, 3, 4])
    assert turns.turn(session, [1, 2]) == 1
    assert turns.turn(session, [1]) == 0


@pytest.mark.parametrize(("look_ahead", "expected"), [(0, 3), (1, 2), (2, 1), (5, 0)])
def test_entries_that_looked_ahead_are_read_again(look_ahead: int, expected: int) -> None:
    turns, session = Turns(look_ahead), Session()
    turns.turn(session, [1, 2, 3, 4, 5])
    assert turns.turn(session, [1, 2, 3, 9]) == expected


def test_a_drafter_s_layers_come_along_or_it_is_no_hit() -> None:
    turns, session = Turns(with_layers=True), Session()
    (layers,) = turns.layers
    turns.turn(session, [1, 2, 3, 4])
    assert turns.turn(session, [1, 2, 3, 4]) == 0  # nobody wrote them
    assert session.slot is not None
    layers.write(0, session.slot, 0, torch.ones(1, 2, 2), torch.ones(1, 2, 2))
    assert turns.turn(session, [1, 2, 3, 4]) == 2
    assert torch.equal(layers.read(0, session.slot, 2)[0], torch.ones(1, 2, 2))


def test_layers_of_others_on_the_same_cache_have_no_say() -> None:
    turns, session = Turns(), Session()
    other = turns.cache.add_layers(KVShape(1, 1, 2), torch.float32)
    turns.turn(session, [1, 2, 3, 4])
    assert session.slot is not None
    assert other.covered(session.slot) == 0
    assert turns.turn(session, [1, 2, 3, 4]) == 3


def test_after_a_failure_all_is_read_again() -> None:
    turns, session = Turns(), Session()
    turns.turn(session, [1, 2, 3], keep=False)
    assert turns.turn(session, [1, 2, 3]) == 0


def test_without_a_conversation_the_slot_is_free_again() -> None:
    turns = Turns()
    assert turns.turn(None, [1, 2, 3]) == turns.turn(None, [1, 2, 3]) == 0
    assert turns.num_slots == 0


def test_closing_gives_the_slot_back_once() -> None:
    turns, session = Turns(), Session()
    turns.turn(session, [1, 2, 3])
    turns.sessions.close(session)
    turns.sessions.close(session)
    assert (turns.num_slots, session.slot, session.tokens) == (0, None, [])
    turns.turn(session, [1, 2])
    session.busy = True
    with pytest.raises(ConfigError, match="under way"):
        turns.sessions.close(session)


def test_a_conversation_goes_on_only_where_it_was_begun() -> None:
    turns, other, session, own = Turns(), Turns(), Session(), Session()
    turns.turn(session, [1, 2, 3])
    other.turn(own, [4, 5])  # in a slot of the same number
    turns.sessions.check(session)
    other.sessions.check(Session())
    for refuse in (other.sessions.check, other.sessions.close):
        with pytest.raises(ConfigError, match="another LLM or engine"):
            refuse(session)
    turns.sessions.close(session)
    assert other.turn(session, [1, 2, 3]) == 0
    assert other.turn(own, [4, 5, 6]) == 1


def test_a_dropped_conversation_gives_its_slot_back_at_the_next_call() -> None:
    """Not from within the garbage collector."""
    turns, session, other = Turns(), Session(), Session()
    turns.turn(session, [1, 2, 3])
    turns.turn(other, [4, 5])
    del session
    gc.collect()
    assert turns.num_slots == 2
    turns.turn(other, [4, 5])
    assert turns.num_slots == 1
    turns.sessions.close(other)
    gc.collect()
    turns.sessions.free_dropped()
    assert turns.num_slots == 0


def test_a_closed_and_dropped_conversation_frees_no_slot_of_others() -> None:
    turns, session = Turns(), Session()
    turns.turn(session, [1, 2, 3])
    turns.sessions.close(session)
    other = Session()
    turns.turn(other, [4, 5, 6])  # in the slot that the first one had
    del session
    gc.collect()
    turns.sessions.free_dropped()
    assert turns.turn(other, [4, 5, 6]) == 2


def test_nothing_happens_when_the_interpreter_ends() -> None:
    """Whatever is freed that late may find torch gone."""
    code = """
from foredraft.cache.prefix import Session, Sessions
from foredraft.models.table import TokenCache
class Cache(TokenCache):
    def free(self, slot):
        raise SystemExit("freed at the end")
sessions, session = Sessions(Cache()), Session()
slot, _ = sessions.open(session, [1, 2])
sessions.release(slot, session, [1, 2])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_common_prefix_of_two_texts() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 4]) == common_prefix([1, 2, 4], [1, 2]) == 2
    assert common_prefix([], [1]) == 0
