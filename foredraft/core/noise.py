"""Keyed Gumbel noise: with it, the likeliest token after adding noise is a draw from the target.

The target's token at an absolute position is argmax(weight + g) over the tokens that can occur,
where weight is log p up to a constant and g = -log(-log u) is Gumbel noise keyed by (seed,
position, token). A drafter that adds the same noise to its own weights chooses the target's token
as often as the two distributions allow (Daliri et al., arXiv 2408.07978). Filters are applied to
the weights before; the noise is never renormalised. docs/understand/verify.md has the proofs.

**The bits.** u = 1 - w, w = (2 r + 1) / 2^53, r uniform in [0, 2^52): u is never 0 or 1, and exact.
r takes its high 8 bits, the *coarse* byte c, from a philox block that 16 tokens share, and its low
44 bits from one of the token's own. With the counter (position, position >> 32, Purpose.TARGET,
index):

    coarse   index = 16 (v >> 8) + ((v >> 2) & 15),  word (v >> 6) & 3,  byte v & 3, lowest first
    fine     index = 2^31 + v,                       word 0, then the high 12 bits of word 1

**Same bits everywhere.** Compiled (kernels/gumbel.h) and numpy do the same IEEE +, -, *, / in the
same order, with a logarithm of our own: libraries differ in the last bit of theirs.

**What compiled code skips.** The coarse byte bounds the noise: -log u > w >= c / 256, so
g < -log(c / 256). Hashing one block in 16 tokens shows which few can still win; only those get fine
bits and logarithms. Nothing that could win is lost to rounding either, because rounding keeps
order: x <= X and g <= G imply fl(x + g) <= fl(X + G). So neither the order of looking nor the
bounds can change a result. numpy looks at all tokens: it is the specification.

Shape legend: N rows, V vocabulary, M some tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foredraft.core import draws
from foredraft.core.draws import Array, Scored
from foredraft.core.rng import MULTIPLIERS, WEYL, Purpose

MAX_VOCAB = 1 << 31
"""A philox index has 32 bits, and one of them tells coarse from fine."""


def gumbel_argmax(
    logits_V: Tensor | Array,
    seed: int,
    position: int,
    scale: float = 1.0,
    cut: float = -math.inf,
) -> int:
    """The token with the largest (logit - largest logit) * scale + g(seed, position, token).

    Its distribution is softmax(scale * logits) over seeds or positions; of equal sums the smallest
    token wins.

    Args:
        logits_V: float32 or float64 on CPU; -inf is a token that cannot occur.
        seed: 0 <= seed < 2**64.
        position: absolute position of the token in its text, 0 <= position < 2**64.
        scale: positive and finite: 1 / temperature, for drafts perhaps times a sharpness.
        cut: tokens with a smaller logit cannot occur; no larger than the largest logit.

    Raises:
        ValueError: the largest logit is not finite, a logit is NaN, or an argument out of range.
        TypeError: the logits have another dtype.
    """
    if isinstance(logits_V, Tensor) and _is_plain(logits_V):
        # No numpy: after a forward the caches have forgotten it.
        _check_key(seed, position)
        _check_scale(scale)
        row = (logits_V.data_ptr(), logits_V.dtype is torch.float64, len(logits_V))
        token = draws.argmax(*row, seed, position, scale, cut)
        if token is not None and token < 0:
            raise _not_finite(_as_array(logits_V))
        if token is not None:
            return token
    if cut > -math.inf:
        values_V = _as_array(logits_V)
        logits_V = np.where(values_V < cut, -math.inf, values_V)
    return gumbel_top(logits_V, 1, seed, position, scale)[0][0]


def gumbel_top(
    logits_V: Tensor | Array, count: int, seed: int, position: int, scale: float = 1.0
) -> Scored:
    """The ``count`` tokens with the largest sums, best first, each with its sum.

    The first is `gumbel_argmax`. In distribution they are draws without replacement; as drafts
    they are the siblings to verify. There are fewer when fewer tokens can occur. Arguments and
    errors: see `gumbel_argmax`.
    """
    logits_NV = _as_array(logits_V)[None]
    return gumbel_top_rows(logits_NV, count, [seed], [position], [scale])[0]


def gumbel_top_rows(
    logits_NV: Tensor | Array,
    count: int,
    seeds: Sequence[int],
    positions: Sequence[int],
    scales: Sequence[float],
) -> list[Scored]:
    """`gumbel_top` of several rows, each with its own seed, position and scale, in one call."""
    logits_NV = _checked(logits_NV, count)
    for seed, position, scale in zip(seeds, positions, scales, strict=True):
        _check_key(seed, position)
        _check_scale(scale)
    if len(seeds) != len(logits_NV):
        raise ValueError(f"{len(logits_NV)} rows of logits, but {len(seeds)} seeds")
    keys = [*zip(seeds, positions, scales, strict=True)]
    compiled = draws.top_rows(logits_NV, count, keys)
    if compiled is None:
        pairs = zip(logits_NV, keys, strict=True)
        return [_numpy_top(logits_V, count, *key) for logits_V, key in pairs]
    scored, num_done = compiled
    if num_done < len(logits_NV):
        raise _not_finite(logits_NV[num_done])
    return scored


def gumbel_noise(tokens: Sequence[int], seed: int, position: int) -> list[float]:
    """The noise of each of ``tokens``, for drafters that weigh a few candidates."""
    _check_key(seed, position)
    if len(tokens) and not 0 <= min(tokens) <= max(tokens) < MAX_VOCAB:
        raise ValueError(f"tokens must be in [0, {MAX_VOCAB}); got {list(tokens)}")
    values = draws.noise_of(tokens, seed, position)
    if values is None:
        values = _noise(np.asarray(tokens, dtype=np.int64), seed, position).tolist()
    return values


def _as_array(logits: Tensor | Array) -> Array:
    return logits.detach().numpy() if isinstance(logits, Tensor) else logits


def _is_plain(logits_V: Tensor) -> bool:
    """Whether compiled code can read them where they are."""
    is_float = logits_V.dtype is torch.float32 or logits_V.dtype is torch.float64
    is_here = logits_V.device.type == "cpu" and logits_V.is_contiguous()
    return is_float and is_here and logits_V.dim() == 1 and len(logits_V) > 0


def _checked(logits: Tensor | Array, count: int) -> Array:
    logits_NV = np.ascontiguousarray(_as_array(logits))
    if logits_NV.dtype not in (np.float32, np.float64):
        raise TypeError(f"logits are {logits_NV.dtype}; convert them to float32 or float64")
    if logits_NV.ndim != 2 or not 0 < logits_NV.shape[1] <= MAX_VOCAB:
        raise ValueError(f"logits of one row must be [V] with V > 0; got {logits_NV.shape[1:]}")
    if count < 1:
        raise ValueError(f"count is {count}; at least one token must be asked for")
    return logits_NV


def _check_key(seed: int, position: int) -> None:
    for name, value in (("seed", seed), ("position", position)):
        if not 0 <= value < 1 << 64:
            raise ValueError(f"{name} is {value}; it must be in [0, 2**64)")


def _check_scale(scale: float) -> None:
    if not 0.0 < scale < math.inf:
        raise ValueError(f"scale is {scale}; it must be positive and finite")


def _not_finite(logits_V: Array) -> ValueError:
    return ValueError(f"the largest of {len(logits_V)} logits is {logits_V.max()}, not finite")


# ---- numpy --------------------------------------------------------------------------------------

_FINE = 1 << 31
_LN2_HIGH, _LN2_LOW = float.fromhex("0x1.62e42feep-1"), float.fromhex("0x1.a39ef35793c76p-33")
_SQRT_HALF = 0x3FE6A09E667F3BCD
"""The bits of the square root of one half."""


def _philox(index_M: Array, seed: int, position: int) -> list[Array]:
    """`rng.philox4x32` of many indices: four words [M], uint64 that hold 32 bits."""
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    m0, m1 = map(np.uint64, MULTIPLIERS)
    # Words that all indices share stay scalars for as long as possible.
    c0: Any = np.uint64(position & 0xFFFFFFFF)
    c1: Any = np.uint64(position >> 32)
    c2: Any = np.uint64(Purpose.TARGET)
    c3: Any = index_M.astype(np.uint64)
    for i in range(10):
        k0, k1 = (np.uint64((seed >> 32 * j) + i * WEYL[j] & 0xFFFFFFFF) for j in range(2))
        p0, p1 = c0 * m0, c2 * m1
        c0, c1, c2, c3 = p1 >> shift ^ (c1 ^ k0), p1 & mask, p0 >> shift ^ (c3 ^ k1), p0 & mask
    return [c0, c1, c2, c3]


def _log(x_M: Array) -> Array:
    """The logarithm of normal doubles > 0; the comment in gumbel.h says how."""
    bits_M = x_M.view(np.int64)
    exponent_M = (bits_M - _SQRT_HALF) >> 52
    k, f = exponent_M.astype(np.float64), (bits_M - (exponent_M << 52)).view(np.float64) - 1.0
    s = f / (2.0 + f)
    z = s * s
    r = np.full_like(z, 2.0 / 21)
    for odd in range(19, 2, -2):
        r = r * z + 2.0 / odd
    r = r * z
    half = 0.5 * f * f
    return k * _LN2_HIGH - ((half - (s * (half + r) + k * _LN2_LOW)) - f)


def _gumbel(rarity_M: Array) -> Array:
    w_M = (2 * rarity_M + 1).astype(np.float64) * 2.0**-53
    return -_log(-_log(1.0 - w_M))


def _noise(tokens_M: Array, seed: int, position: int) -> Array:
    """The noise of each token, all of it."""
    block_M = (tokens_M >> 8) * 16 + (tokens_M >> 2 & 15)
    index = np.concatenate([block_M, tokens_M + _FINE])
    words = np.stack(_philox(index, seed, position)).view(np.int64)
    coarse, fine = words[:, : len(tokens_M)], words[:, len(tokens_M) :]
    word_M = coarse[tokens_M >> 6 & 3, np.arange(len(tokens_M))]
    byte_M = word_M >> 8 * (tokens_M & 3) & 255
    return _gumbel(byte_M << 44 | fine[0] << 12 | fine[1] >> 20)


def _numpy_top(logits_V: Array, count: int, seed: int, position: int, scale: float) -> Scored:
    base = float(logits_V.max())
    if not math.isfinite(base):
        raise _not_finite(logits_V)
    with np.errstate(over="ignore"):  # far below the largest is -inf, as without a warning in C++
        weight_V = (logits_V.astype(np.float64) - base) * scale
    tokens = np.flatnonzero(weight_V > -math.inf)
    score = weight_V[tokens] + _noise(tokens, seed, position)
    order = np.argsort(-score, kind="stable")[:count]  # of equal ones the smallest token first
    return list(zip(tokens[order].tolist(), score[order].tolist(), strict=True))
