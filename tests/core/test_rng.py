"""Random numbers: known answers, range, and one number for one decision."""

from __future__ import annotations

import itertools
import math

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


@given(st.tuples(WORDS, WORDS, WORDS, WORDS), st.tuples(WORDS, WORDS))
def test_philox_words_stay_32_bits(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> None:
    assert all(0 <= word <= ONES for word in philox4x32(counter, key))


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


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


@pytest.mark.parametrize("purpose", Purpose)
def test_numbers_are_uniform_along_seeds_and_positions(purpose: Purpose) -> None:
    """Mean and mean square within five standard errors of a uniform's."""
    count = 4000
    by_seed = [keyed_uniform(seed, 3, purpose) for seed in range(count)]
    by_position = [keyed_uniform(3, position, purpose) for position in range(count)]
    for values in (by_seed, by_position):
        assert abs(_mean(values) - 1 / 2) < 5 * math.sqrt(1 / 12 / count)
        assert abs(_mean([u * u for u in values]) - 1 / 3) < 5 * math.sqrt(4 / 45 / count)


@pytest.mark.parametrize(("left", "right"), list(itertools.combinations(Purpose, 2)))
def test_purposes_are_uncorrelated(left: Purpose, right: Purpose) -> None:
    count = 3000
    products = [
        (keyed_uniform(7, i, left) - 0.5) * (keyed_uniform(7, i, right) - 0.5) for i in range(count)
    ]
    assert abs(_mean(products)) < 5 / 12 / math.sqrt(count)


@pytest.mark.parametrize("lag", [1, 2, 7])
def test_neighbouring_positions_and_indices_are_uncorrelated(lag: int) -> None:
    count = 3000
    for numbers in (
        [keyed_uniform(7, i, Purpose.DRAFT) for i in range(count + lag)],
        [keyed_uniform(7, 0, Purpose.DRAFT, i) for i in range(count + lag)],
    ):
        products = [(numbers[i] - 0.5) * (numbers[i + lag] - 0.5) for i in range(count)]
        assert abs(_mean(products)) < 5 / 12 / math.sqrt(count)
