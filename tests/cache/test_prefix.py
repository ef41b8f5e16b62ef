"""Texts that begin as earlier ones did: what of them need not be read again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from foredraft.cache.base import KVShape
from foredraft.core.errors import CacheFullError
from foredraft.engine.slots import check, open_slot, release
from foredraft.models.table import TokenCache
from tests.cache.test_kv import HFProbe, KVProbe, Probe, TokenProbe

TEXT = [*range(1000, 1200)]  # three blocks and a part of a fourth


class Requests:
    """Requests on a cache, without an engine."""

    def __init__(self, probe: Probe) -> None:
        self.probe, self.cache = probe, probe.cache

    def begin(self, tokens: Sequence[int], salt: str | None = None) -> tuple[int, int]:
        """One that reads all of its tokens but the last; its slot, and how many were cached."""
        slot, num_cached = open_slot(self.cache, tokens, salt)
        assert self.probe.read(slot) == list(tokens[:num_cached])
        self.cache.reserve(slot, len(tokens) - 1 - num_cached)
        self.probe.write(slot, tokens[num_cached:-1])
        self.cache.keep(slot, len(tokens) - 1 - num_cached, ())
        self.cache.check()
        return slot, num_cached

    def run(self, tokens: Sequence[int], salt: str | None = None) -> int:
        """A whole request; how many of its tokens were cached."""
        slot, num_cached = self.begin(tokens, salt)
        release(self.cache, slot, tokens)
        self.cache.check()
        return num_cached


def test_a_turn_reads_only_what_is_new(probe: Probe) -> None:
    requests = Requests(probe)
    assert requests.run([1, 2, 3, 4]) == 0
    assert requests.run([1, 2, 3, 4, 5, 6]) == 3  # the last one was not read
    assert requests.run([1, 2, 9]) == 2  # the text took another way
    assert requests.run([1, 2, 3, 4, 5, 7]) == 5  # and both are still there
    assert requests.run([7, 8]) == 0
    assert probe.cache.slots == []
    assert probe.cache.usage.used == 0


def test_a_long_text_is_found_by_its_blocks_and_by_a_part_of_one(probe: Probe) -> None:
    requests = Requests(probe)
    requests.run(TEXT)
    assert requests.run([*TEXT[:150], 5, 6]) == 150
    assert requests.run([*TEXT, 7]) == 199
    assert requests.run([*TEXT[:128], 5, 6]) == 128
    assert requests.run([4, *TEXT]) == 0


def test_requests_that_run_share_what_is_cached(probe: Probe) -> None:
    requests = Requests(probe)
    requests.run([*TEXT[:129], 1])
    running = [requests.begin([*TEXT[:129], 2, i, i]) for i in range(4)]
    if isinstance(probe, HFProbe):  # its slots are one another's copies, and this one was taken
        assert [count for _, count in running] == [129, 0, 0, 0]
    else:
        assert [count for _, count in running] == [129] * 4
    for i, (slot, _) in enumerate(running):
        assert probe.read(slot) == [*TEXT[:129], 2, i]
    if not isinstance(probe, HFProbe):
        assert probe.cache.usage.used == (2 + 4) * 64
    for i, (slot, _) in enumerate(running):
        release(requests.cache, slot, [*TEXT[:129], 2, i, i])
    assert requests.run([*TEXT[:129], 2, 3, 3, 3]) == 131


LAYERS = KVShape(1, 1, 2)


def state(count: int) -> torch.Tensor:
    """An entry a position, each of its own."""
    return torch.arange(2.0 * count).view(1, count, 2)


def test_a_hit_is_the_target_s_and_layers_say_how_far_they_cover_it(probe: Probe) -> None:
    requests = Requests(probe)
    layers = probe.cache.add_layers(LAYERS, torch.float32)
    requests.run(TEXT)
    slot, num_cached = requests.begin([*TEXT[:150], 5])  # the layers' entries were not written
    assert (num_cached, layers.covered(slot)) == (150, 0)
    assert layers.next_start(slot, 150, 1) == layers.next_start(slot, 150, 100) == 150
    assert layers.next_start(slot, 150, 150) == 192
    release(requests.cache, slot, [*TEXT[:150], 5])
    other = [*range(500, 700)]
    slot, _ = requests.begin(other)
    layers.write(0, slot, 0, state(150), -state(150))
    release(requests.cache, slot, other)
    slot, num_cached = requests.begin([*other[:140], 5])
    assert (num_cached, layers.covered(slot), layers.first(slot)) == (140, 140, 0)
    assert torch.equal(layers.read(0, slot, 140)[0], state(150)[:, :140])
    layers.write(0, slot, 130, -state(10), state(10))  # into a block that others share
    release(requests.cache, slot, [*other[:140], 5])
    slot, num_cached = requests.begin([*other[:150], 5])
    assert (num_cached, layers.covered(slot)) == (150, 150)
    assert torch.equal(layers.read(0, slot, 150)[0], state(150))
    longer, num_cached = requests.begin([*other[:180], 5])
    assert num_cached == 180 > layers.covered(longer)  # too many are missing
    assert layers.next_start(longer, 180, 1) == 180
    assert layers.next_start(longer, 180, 76) == 192


def test_layers_begin_right_behind_what_they_lack(probe: Probe) -> None:
    """In the middle of a block; its earlier entries are not seen, and it is left when others do."""
    requests = Requests(probe)
    layers = probe.cache.add_layers(LAYERS, torch.float32)
    requests.run(TEXT[:101])
    slot, num_cached = requests.begin(TEXT)
    assert (num_cached, layers.next_start(slot, 100, 1)) == (100, 100)
    layers.write(0, slot, 100, state(60), -state(60))
    assert (layers.first(slot), layers.skipped(slot), layers.covered(slot)) == (100, 36, 160)
    assert torch.equal(layers.read(0, slot, 160)[0], state(60))
    assert torch.equal(layers.read(0, slot, 160)[1], -state(60))
    assert list(layers.table(slot)) == list(probe.cache.slot(slot).table[1:])
    fork = requests.cache.fork(slot)
    requests.cache.truncate(fork, 100)
    assert (layers.first(fork), layers.covered(fork)) == (0, 0)
    layers.write(0, slot, 160, state(39), -state(39))
    assert (layers.first(slot), layers.skipped(slot), layers.covered(slot)) == (128, 0, 199)
    release(requests.cache, slot, TEXT)
    slot, num_cached = requests.begin([*TEXT, 1])  # the block that begins in its middle is not seen
    assert (num_cached, layers.first(slot), layers.covered(slot)) == (199, 128, 199)


def test_layers_begin_behind_what_they_lack_at_the_border_of_a_block(probe: Probe) -> None:
    requests = Requests(probe)
    layers = probe.cache.add_layers(LAYERS, torch.float32)
    requests.run(TEXT[:101])
    slot, num_cached = requests.begin(TEXT)
    assert num_cached == 100
    start = layers.next_start(slot, 100, 99)
    assert start == 128
    layers.write(0, slot, start, state(71), -state(71))
    assert (layers.first(slot), layers.covered(slot)) == (128, 199)
    assert torch.equal(layers.read(0, slot, 199)[0], state(71))
    assert list(layers.table(slot)) == list(probe.cache.slot(slot).table[2:])
    release(requests.cache, slot, TEXT)
    slot, num_cached = requests.begin([*TEXT, 1])  # who begins with all of it sees as much
    assert (num_cached, layers.first(slot), layers.covered(slot)) == (199, 128, 199)
    probe.cache.truncate(slot, 130)
    assert (layers.first(slot), layers.covered(slot)) == (128, 130)
    probe.cache.truncate(slot, 128)
    assert (layers.first(slot), layers.covered(slot)) == (0, 0)


def test_a_few_entries_that_come_late_are_stood_in_for(probe: Probe) -> None:
    """A head that looks ahead lacks the last entries of what it follows."""
    requests = Requests(probe)
    layers = probe.cache.add_layers(LAYERS, torch.float32)
    slot, _ = requests.begin(TEXT)
    layers.write(0, slot, 0, state(196), state(196))
    release(requests.cache, slot, TEXT)
    slot, num_cached = requests.begin(TEXT)
    assert (num_cached, layers.covered(slot)) == (199, 196)
    assert layers.next_start(slot, 199, 1) == layers.covered(slot) == 199
    keys_HTD = layers.read(0, slot, 199)[0]
    assert torch.equal(keys_HTD[:, :196], state(196))
    assert torch.equal(keys_HTD[0, 196:], state(196)[0, 195].expand(3, 2))


def test_a_block_is_found_while_its_request_runs_and_layers_fill_it_for_all(probe: Probe) -> None:
    requests = Requests(probe)
    layers = probe.cache.add_layers(LAYERS, torch.float32)
    slot, _ = requests.begin(TEXT)
    layers.write(0, slot, 0, state(110), state(110))
    requests.cache.publish(slot, TEXT)
    used = probe.cache.usage.used
    early, num_cached = open_slot(requests.cache, TEXT)
    assert (num_cached, layers.covered(early)) == (192, 110)
    layers.write(0, slot, 110, state(89), state(89))  # the drafter catches up
    if not isinstance(probe, HFProbe):
        assert probe.cache.usage.used == used, "no copy was made for it"
    late, num_cached = open_slot(requests.cache, TEXT)
    assert num_cached == 192
    if not isinstance(probe, HFProbe):  # a copy holds what there was when it was made
        assert layers.covered(late) == 192
        assert torch.equal(layers.read(0, late, 192)[0], layers.read(0, slot, 192)[0])
    for each in (slot, early, late):
        release(requests.cache, each, TEXT)
    probe.cache.check()
    assert requests.run(TEXT) == 199


def test_a_text_without_entries_gives_way_to_the_same_text_with_them() -> None:
    """Else no head could ever follow who begins with it."""
    requests = Requests(TokenProbe())
    layers = requests.cache.add_layers(LAYERS, torch.float32)
    bare, _ = requests.begin(TEXT)
    whole, _ = requests.begin(TEXT)
    layers.write(0, whole, 0, state(199), state(199))
    for slot in (bare, whole):
        release(requests.cache, slot, TEXT)
    assert requests.cache.usage.cached == 256
    slot, num_cached = requests.begin(TEXT)
    assert (num_cached, layers.covered(slot)) == (199, 199)


def test_tenants_never_share(probe: Probe) -> None:
    requests = Requests(probe)
    salts = [None, "", "a", "b", "None", "('a',)", "\udc80"]
    for salt in salts:
        assert requests.run(TEXT, salt) == 0
    for salt in salts:
        assert requests.run(TEXT, salt) == 199


def test_what_is_distrusted_is_found_no_more(probe: Probe) -> None:
    """Texts in use go on, and what they go on to is not found either."""
    requests = Requests(probe)
    requests.run(TEXT)
    requests.run([7, 8, 9], salt="other")
    bad, _ = requests.begin([*TEXT[:150], 5])
    beside, _ = requests.begin([*TEXT[:140], 6])
    requests.cache.publish(beside, [*TEXT[:140], 6])
    requests.cache.distrust()
    release(requests.cache, bad, [*TEXT[:150], 5])
    requests.cache.check()
    assert probe.read(beside) == TEXT[:140]
    requests.cache.publish(beside, [*TEXT[:140], 6])
    release(requests.cache, beside, [*TEXT[:140], 6])
    requests.cache.check()
    assert requests.run(TEXT) == 0
    assert requests.run([7, 8, 9], salt="other") == 0
    assert requests.run(TEXT) == len(TEXT) - 1


def test_the_least_recently_used_text_goes_and_its_end_first() -> None:
    requests = Requests(TokenProbe(max_tokens=6 * 64))
    other, third = [*range(130)], [*range(500, 630)]
    requests.run([*TEXT[:129], 1])
    requests.run(other)
    assert requests.run([*TEXT[:64], 2]) == 64
    assert requests.run(third) == 0  # takes the three blocks that were used longest ago
    assert requests.run(other[:129]) == 128
    assert requests.run([*TEXT[:64], 2]) == 64
    assert requests.run(third[:129]) == 128
    assert requests.run([*TEXT[:128], 2]) == 64
    assert requests.cache.usage.available == 6 * 64


def test_a_text_that_is_left_beginning_first_still_goes_end_first() -> None:
    """A drafter that lags writes into shared blocks one after another, and leaves them so."""
    requests = Requests(TokenProbe())
    layers = requests.cache.add_layers(KVShape(1, 1, 2), torch.float32)
    requests.run(TEXT)
    slot, num_cached = requests.begin([*TEXT[:128], 5, 6])
    assert num_cached == 128
    layers.write(0, slot, 0, torch.zeros(1, 128, 2), torch.zeros(1, 128, 2))
    requests.cache.check()
    release(requests.cache, slot, [*TEXT[:128], 5, 6])
    assert requests.run(TEXT) == 199


def test_what_is_in_use_is_never_evicted() -> None:
    requests = Requests(TokenProbe(max_tokens=6 * 64))
    slot, _ = requests.begin(TEXT)
    with pytest.raises(CacheFullError):
        requests.begin([*range(130)])
    requests.cache.free(1)
    assert requests.probe.read(slot) == TEXT[:-1]
    usage = requests.cache.usage
    assert (usage.total, usage.used, usage.cached, usage.free) == (384, 256, 0, 128)


def test_a_request_that_fits_alone_fits_behind_its_own_traces() -> None:
    """Cached entries of earlier requests must not block a new one, not even a block it began
    with."""
    requests = Requests(TokenProbe(max_tokens=4 * 64))
    assert requests.run([*range(100)]) == 0
    assert requests.run([*range(90), *TEXT[:160]]) == 90
    assert requests.run([*range(90), *TEXT[:160]]) == 249
    assert requests.run([*range(200)]) == 90


def test_what_is_kept_can_be_given_up_and_is_counted(probe: Probe) -> None:
    requests = Requests(probe)
    requests.run(TEXT)
    requests.run(TEXT)
    assert probe.cache.usage.cached > 0
    requests.cache.forget()
    assert probe.cache.usage.cached == probe.cache.usage.used == 0
    assert requests.run(TEXT) == 0


def test_a_fault_in_the_accounts_is_found(caplog: pytest.LogCaptureFixture) -> None:
    cache = KVProbe().cache
    slot = cache.allocate()
    cache.reserve(slot, 200)
    cache.pool.give_back(cache.table(slot)[1:2])
    with pytest.raises(AssertionError, match="listed by"):
        check(cache, must_be_right=True)
    check(cache, must_be_right=False)
    assert caplog.text.count("please report it") == 1


# ------------------------------------------------- slots that were forked name the same block twice


OWNER = b"somebody"


def test_a_beginning_that_another_slot_keeps_is_forgotten_last() -> None:
    """The first slot's beginning lies in a block of its own; the fork goes on behind it."""
    cache = TokenCache(block_size=2, max_tokens=8)
    for rest in ([1, 1], [2, 2]):
        slot, _ = cache.share(OWNER, [])
        cache.write(slot, [7, 7, *rest])
        cache.keep(slot, 4, ())
        cache.retire(slot, [7, 7, *rest])
        cache.check()
    other = cache.allocate()
    cache.reserve(other, 4)  # takes what was used longest ago: an end
    assert cache.share(OWNER, [7, 7, 2, 2])[1] == 4
