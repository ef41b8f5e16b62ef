"""Learn a `NgramTable`: count, interpolate, and leave out what a shorter context says as well.

Shape legend: T tokens of all texts, N places of a reply where a context fits, G contexts of one
length, K successors kept of each, C contexts that are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foredraft.drafters.table import LONGEST, NO_SHARES, NUM_SUCCESSORS, SEEDS, NgramTable
from foredraft.train.texts import Text

_SEPARATOR = np.uint64(1 << 40)
_DOUBT = 4.0
"""A context that was seen as often as this counts as much as what the shorter ones say."""
_SAME = 0.2
"""A context is left out where a shorter one names the same token, about as likely."""
_ENTRY_BYTES = 4 + NUM_SUCCESSORS * 3
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class TablePlan:
    """How to learn.

    Attributes:
        min_count: times that a context's likeliest successor must have come.
        megabytes: of the file, at most; the contexts that were seen most are kept.
    """

    min_count: int = 2
    megabytes: float = 4.0


@dataclass
class _Order:
    """All contexts of one length.

    Attributes:
        keys_G: their hashes.
        totals_G: how often each was seen.
        tokens_GK, chances_GK: successors, interpolated.
        told_G, sure_G: first successor, and its chance, of what is stored for a context or for the
            longest shorter one of it.
        is_stored_G: whether it is stored itself.
        group_T: number of the context before each token; -1: none.
    """

    keys_G: NDArray[np.uint64]
    totals_G: Ints
    tokens_GK: Ints
    chances_GK: Floats
    told_G: Ints
    sure_G: Floats
    is_stored_G: NDArray[np.bool_]
    group_T: Ints


def learn_table(texts: Sequence[Text], vocab_size: int, plan: TablePlan) -> NgramTable:
    """A table of what followed what in replies; contexts may reach back into the prompts."""
    tokens_T, is_reply_T = _joined(texts)
    hashes_T = np.zeros(len(tokens_T), np.uint64)
    fits_T, orders = is_reply_T, list[_Order]()
    for length in range(1, LONGEST + 1):
        front_T = np.roll(tokens_T, length)
        front_T[:length] = _SEPARATOR
        fits_T = fits_T & (front_T != _SEPARATOR)
        hashes_T = _next_hashes(hashes_T, front_T)
        places_N = np.nonzero(fits_T)[0]
        if not len(places_N):
            break
        shorter = orders[-1] if orders else None
        orders.append(_count(tokens_T, hashes_T, places_N, shorter, plan.min_count))
    return _stored(orders, vocab_size, plan)


def _joined(texts: Sequence[Text]) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """All tokens, a separator behind each text, and which of them are of replies."""
    tokens, is_reply = [], []
    for text in texts:
        tokens += [text.tokens.astype(np.uint64), np.array([_SEPARATOR])]
        is_reply.append(np.arange(len(text.tokens) + 1) >= text.num_prompt)
        is_reply[-1][-1] = False
    empty = np.empty(0, np.uint64), np.empty(0, bool)
    return (np.concatenate(tokens), np.concatenate(is_reply)) if texts else empty


def _next_hashes(hashes_T: NDArray[np.uint64], front_T: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`foredraft.drafters.table.ngrams.next_hash` of each."""
    mixed = hashes_T * np.uint64(SEEDS[0]) + front_T + np.uint64(1)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(SEEDS[1])
    return mixed ^ (mixed >> np.uint64(32))


def _count(
    tokens_T: NDArray[np.uint64],
    hashes_T: NDArray[np.uint64],
    places_N: Ints,
    shorter: _Order | None,
    min_count: int,
) -> _Order:
    keys_G, first_G, group_N = np.unique(hashes_T[places_N], return_index=True, return_inverse=True)
    own_tokens_GK, counts_GK, totals_G = _most_frequent(
        group_N, tokens_T[places_N].astype(np.int64), len(keys_G)
    )
    weights_G1 = (totals_G / (totals_G + _DOUBT))[:, None]
    own_GK = weights_G1 * counts_GK / totals_G[:, None]
    parent_G = np.zeros(len(keys_G), np.int64)
    if shorter is None:
        tokens_GK, chances_GK = own_tokens_GK, own_GK
    else:
        parent_G = shorter.group_T[places_N[first_G]]
        tokens_GK, chances_GK = _merged(
            own_tokens_GK,
            own_GK,
            shorter.tokens_GK[parent_G],
            (1.0 - weights_G1) * shorter.chances_GK[parent_G],
        )
    is_stored_G = counts_GK[:, 0] >= min_count
    told_G, sure_G = tokens_GK[:, 0], chances_GK[:, 0]
    if shorter is not None:
        theirs, as_sure = shorter.told_G[parent_G], shorter.sure_G[parent_G]
        is_stored_G &= (theirs != told_G) | (np.abs(as_sure - sure_G) > _SAME)
        told_G = np.where(is_stored_G, told_G, theirs)
        sure_G = np.where(is_stored_G, sure_G, as_sure)
    else:
        told_G, sure_G = np.where(is_stored_G, told_G, -1), np.where(is_stored_G, sure_G, 0.0)
    group_T = np.full(len(tokens_T), -1, np.int64)
    group_T[places_N] = group_N
    return _Order(keys_G, totals_G, tokens_GK, chances_GK, told_G, sure_G, is_stored_G, group_T)


def _most_frequent(group_N: Ints, next_N: Ints, num_groups: int) -> tuple[Ints, Ints, Ints]:
    """The K tokens that came most in each group [G, K], how often each, and all cases [G]."""
    width = int(next_N.max()) + 1
    pairs, counts = np.unique(group_N * width + next_N, return_counts=True)
    groups, tokens = pairs // width, pairs % width
    order = np.lexsort((-counts, groups))
    groups, tokens, counts = groups[order], tokens[order], counts[order]
    starts_G = np.searchsorted(groups, np.arange(num_groups))
    ranks = np.arange(len(groups)) - starts_G[groups]
    totals_G = np.add.reduceat(counts, starts_G)
    tokens_GK = np.full((num_groups, NUM_SUCCESSORS), -1, np.int64)
    counts_GK = np.zeros((num_groups, NUM_SUCCESSORS), np.int64)
    kept = ranks < NUM_SUCCESSORS
    tokens_GK[groups[kept], ranks[kept]] = tokens[kept]
    counts_GK[groups[kept], ranks[kept]] = counts[kept]
    return tokens_GK, counts_GK, totals_G


def _merged(
    own_GK: Ints, chances_GK: Floats, shorter_GK: Ints, less_GK: Floats
) -> tuple[Ints, Floats]:
    """The K likeliest of both, the chances of a token that is in both added."""
    chances_GK, less_GK = chances_GK.copy(), less_GK.copy()
    for j in range(own_GK.shape[1]):
        for k in range(shorter_GK.shape[1]):
            same = (own_GK[:, j] == shorter_GK[:, k]) & (own_GK[:, j] >= 0)
            chances_GK[same, j] += less_GK[same, k]
            less_GK[same, k] = 0.0
    tokens = np.concatenate((own_GK, shorter_GK), 1)
    chances = np.where(tokens >= 0, np.concatenate((chances_GK, less_GK), 1), 0.0)
    best = np.argsort(-chances, axis=1, kind="stable")[:, :NUM_SUCCESSORS]
    return np.take_along_axis(tokens, best, 1), np.take_along_axis(chances, best, 1)


def _stored(orders: Sequence[_Order], vocab_size: int, plan: TablePlan) -> NgramTable:
    kept = [order.is_stored_G for order in orders]

    def of_all(name: str) -> Any:
        parts = [getattr(o, name)[is_kept] for o, is_kept in zip(orders, kept, strict=True)]
        return np.concatenate(parts)

    if orders:
        keys, totals = of_all("keys_G") & np.uint64(0xFFFFFFFF), of_all("totals_G")
        tokens, chances = of_all("tokens_GK"), of_all("chances_GK")
        most = max(1, int(plan.megabytes * 1e6 / _ENTRY_BYTES))
        keys, first = np.unique(keys, return_index=True)  # of two with one key the shorter one
        if len(keys) > most:
            frequent = np.sort(np.argsort(-totals[first], kind="stable")[:most])
            keys, first = keys[frequent], first[frequent]
        tokens, chances = tokens[first], chances[first]
    else:
        keys, tokens = np.empty(0), np.empty((0, NUM_SUCCESSORS))
        chances = np.empty((0, NUM_SUCCESSORS))
    ids = np.uint16 if vocab_size <= 1 << 16 else np.int32
    rounded_CK = np.clip(np.rint(chances * 255.0), 0, 255).astype(np.uint8)
    tokens_CK = np.where(rounded_CK > 0, tokens, 0).astype(ids)
    return NgramTable(
        torch.from_numpy(keys.astype(np.uint32)),
        torch.from_numpy(tokens_CK),
        torch.from_numpy(rounded_CK),
        NO_SHARES,
    )
