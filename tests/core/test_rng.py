"""Random numbers: known answers, range, and one number for one decision."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.core.rng import Purpose, keyed_uniform, philox4x32

WORDS = st.integers(0, 2**32 - 1)
ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (  # the digits of pi
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_known_answers_of_random123(
    counter: tuple[int, int, int, int], key: tuple[int, int], answer: tuple[int, ...]
) -> None:
    assert philox4x32(counter, key) == answer


@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**40),
    st.sampled_from(Purpose),
    st.integers(0, 2**16),
)
def test_uniform_is_in_range_and_a_pure_function(
    seed: int, position: int, purpose: Purpose, index: int
) -> None:
    uniform = keyed_uniform(seed, position, purpose, index)
    assert 0.0 <= uniform < 1.0
    assert uniform == keyed_uniform(seed, position, purpose, index)
    assert (uniform * 2**53).is_integer()


def test_no_two_keys_share_a_number() -> None:
    seeds = (0, 1, 2**32, 2**63)
    positions = (0, 1, 2, 2**32, 2**32 + 1)
    keys = list(itertools.product(seeds, positions, Purpose, range(8)))
    assert len({keyed_uniform(*key) for key in keys}) == len(keys)


def test_every_bit_of_seed_and_position_counts() -> None:
    by_seed = {keyed_uniform(1 << bit, 0, Purpose.TARGET) for bit in range(64)}
    by_position = {keyed_uniform(0, 1 << bit, Purpose.TARGET) for bit in range(48)}
    assert len(by_seed) == 64
    assert len(by_position) == 48
