"""Counter-based random numbers: philox4x32-10 (Salmon et al., SC 2011).

A number is a pure function of (request seed, absolute position, purpose, index). Nothing is
advanced, so batch composition, preemption and replica cannot change what a request draws.
"""

from __future__ import annotations

from enum import IntEnum

_MASK32 = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
SEED_BITS = 64


class Purpose(IntEnum):
    """The use of a random number. Two purposes never share a number."""

    TARGET = 0
    """Draw of the token at an absolute position, the same with and without speculation."""
    ACCEPT = 1
    """Accept-or-reject decision of one verification step."""
    RESIDUAL = 2
    """Draw of the next token after a drawn proposal was verified."""
    DRAFT = 3
    """Draw of a draft token. Drafters see this purpose only."""


def philox4x32(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Ten philox rounds over four 32-bit words; the reference generator of the paper."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK32, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK32
        k0, k1 = (k0 + WEYL[0]) & _MASK32, (k1 + WEYL[1]) & _MASK32
    return c0, c1, c2, c3


def keyed_uniform(seed: int, position: int, purpose: Purpose, index: int = 0) -> float:
    """A double in [0, 1) with 53 random bits, fixed by its four arguments."""
    counter = (position & _MASK32, position >> 32, int(purpose), index)
    high, low, _, _ = philox4x32(counter, (seed & _MASK32, (seed >> 32) & _MASK32))
    return float((high << 21) | (low >> 11)) * 2.0**-53
