"""A table of successors of the last few tokens in a target's own text, in one mapped file.

A context of one to five tokens is kept by a key of 32 bits, the number of its tokens mixed in; two
contexts share a key once in some ten thousand look-ups, which costs a draft. Each key has its
likeliest successors. Their chances are those of back-off by interpolation: a shorter context counts
less the more often the longer one was seen. They are combined in advance, so that the entry of the
longest known context suffices (Jelinek and Mercer, 1980; weights as of Witten and Bell, 1991).

Shape legend: C contexts, K successors of each.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from foredraft.core.errors import ConfigError, ModelLoadError
from foredraft.drafters.base import Drafter, DraftRow
from foredraft.drafters.guide import Guide
from foredraft.drafters.spec import DrafterContext, DrafterSpec
from foredraft.drafters.text.confidence import MatchConfidence
from foredraft.drafters.text.per_request import GuidedDrafter
from foredraft.drafters.text.suffix import SuffixPlace, SuffixText
from foredraft.drafters.trained import (
    WEIGHTS,
    TargetIdentity,
    check_kind,
    check_target,
    check_weights,
    identify,
    named_folder,
    read_info,
    shipped_head,
)

KIND = "table"
BOTH = "with earlier matches"
"""Key of the figures measured for a table together with the text's own repetitions."""
LONGEST = 5
"""Tokens of a context."""
NUM_SUCCESSORS = 3
_MASK = (1 << 64) - 1
_HALF = 16
"""Bits of half a key."""
SEEDS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9)
"""Odd multipliers of the keys."""
Context = tuple[int, ...]


def next_hash(hashed: int, token: int) -> int:
    """The hash of a context that is one token longer, at its front; 0 is that of none.

    `foredraft.train.table` computes the same for many places at once.
    """
    mixed = (hashed * SEEDS[0] + token + 1) & _MASK
    mixed ^= mixed >> 29
    mixed = (mixed * SEEDS[1]) & _MASK
    return mixed ^ (mixed >> 32)


class NgramTable:
    """Successors of contexts.

    Args:
        keys_C: uint32, ascending: the lower 32 bits of the contexts' hashes.
        tokens_CK: uint16 or int32 ids, the likeliest first.
        chances_CK: uint8, in 255ths; 0: there is no such successor.
        shares: how often the likeliest token came, by situation and tenths of its chance, in
            "greedy" text and in "sampled"; see `foredraft.drafters.text.table.opinions`.
    """

    def __init__(
        self,
        keys_C: Tensor,
        tokens_CK: Tensor,
        chances_CK: Tensor,
        shares: Mapping[str, Sequence[Sequence[float]]],
    ) -> None:
        self.shares = shares
        self.tensors = {"keys": keys_C, "tokens": tokens_CK, "chances": chances_CK}
        # Single items come out of a memoryview several times faster than out of an array.
        self._keys = keys_C.numpy().data
        # Where the keys of each upper half begin: a few are left to search.
        halves = np.arange((1 << _HALF) + 1, dtype=np.uint64) << np.uint64(_HALF)
        self._starts = np.searchsorted(keys_C.numpy(), halves).data
        self._tokens = tokens_CK.flatten().numpy().data
        self._chances = chances_CK.flatten().numpy().data

    def __len__(self) -> int:
        return len(self._keys)

    def successors(self, context: Sequence[int]) -> list[tuple[int, float]]:
        """Successors, likeliest first, by the longest known context.

        Args:
            context: any tokens; the last few are looked at.
        """
        hashed, found, keys, starts = 0, -1, self._keys, self._starts
        for length in range(1, min(LONGEST, len(context)) + 1):
            hashed = next_hash(hashed, context[-length])
            key = hashed & 0xFFFFFFFF
            end = starts[(key >> _HALF) + 1]
            place = bisect_left(keys, key, starts[key >> _HALF], end)
            if place < end and keys[place] == key:
                found = place
        if found < 0:
            return []
        span = range(found * NUM_SUCCESSORS, (found + 1) * NUM_SUCCESSORS)
        return [(self._tokens[i], self._chances[i] / 255.0) for i in span if self._chances[i]]


def load_table(directory: Path, target: TargetIdentity, vocab_size: int) -> NgramTable:
    """A table, mapped and checked: kind, target and file.

    Raises:
        ConfigError: no table is there, or it is of another target.
        ModelLoadError: it is damaged.
    """
    info = read_info(directory)
    check_kind(info, KIND, directory)
    check_target(info, target, directory)
    check_weights(directory, info)
    stored = load_file(directory / WEIGHTS)
    try:
        keys_C, tokens_CK, chances_CK = (stored[n] for n in ("keys", "tokens", "chances"))
        shares = {name: info.config["shares"][name] for name in ("greedy", "sampled")}
        table = NgramTable(keys_C, tokens_CK, chances_CK, shares)
        expected = (len(keys_C), NUM_SUCCESSORS)
        if not tuple(tokens_CK.shape) == tuple(chances_CK.shape) == expected:
            raise ValueError(f"tokens {[*tokens_CK.shape]} and chances {[*chances_CK.shape]}")
        if len(keys_C) and int(tokens_CK.to(torch.int64).max()) >= vocab_size:
            raise ValueError(f"a token is not below the vocabulary of {vocab_size}")
        if not all(0.0 < share < 1.0 for rows in shares.values() for row in rows for share in row):
            raise ValueError("a share is not between 0 and 1")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelLoadError(f"{directory} cannot be used: {error!r:.200}") from error
    return table


NUM_CLASSES = 10
"""Classes of probabilities, by tenths."""
ALONE, AGREED, PARTED = range(3)
"""Situations: only one of both names anything; both name the same token first; they do not."""
SITUATIONS = 3
NO_SHARES = dict.fromkeys(("greedy", "sampled"), [[0.5] * NUM_CLASSES] * SITUATIONS)
"""Hit rates of a table that was not measured."""
_COPY_WEIGHT = 2.0 / 3.0
"""Fitted to the share named right in held-out replies of a small chat model: 0.706 of greedy ones,
where the larger of both opinions named 0.691."""
_MOST = 0.99
_PRIOR_WEIGHT = 24.0
_REMEMBERED = 1024
"""Contexts whose successors a request keeps."""

TablePlace = tuple[SuffixPlace, Context]


@dataclass(frozen=True)
class Opinion:
    """About one place.

    Attributes:
        chances: of tokens, likeliest first, before they are corrected.
        places: cursors of the text's own matches, by the tokens that they name.
        situation: see `ALONE`.
    """

    chances: Sequence[tuple[int, float]]
    places: dict[int, SuffixPlace]
    situation: int

    @property
    def first(self) -> int:
        return self.chances[0][0]

    @property
    def chance_class(self) -> int:
        return min(NUM_CLASSES - 1, int(self.chances[0][1] * NUM_CLASSES))


class TableText(Guide):
    """One request's text with its likely successors.

    Args:
        is_sampled: whether tokens are drawn at a temperature above 0.

    Attributes:
        place: cursor at the end of the committed text.
    """

    def __init__(self, prompt: Sequence[int], table: NgramTable, is_sampled: bool) -> None:
        self._own, self._table = SuffixText(prompt), table
        shares = table.shares["sampled" if is_sampled else "greedy"]
        self._confidence = [MatchConfidence(row, _PRIOR_WEIGHT) for row in shares]
        self._named: dict[Context, list[tuple[int, float]]] = {}
        self.place: TablePlace = (self._own.place, tuple(prompt[-LONGEST:]))

    def opinion(self, place: TablePlace) -> Opinion:
        """Successors of a place, with their probabilities."""
        copied, named = list(self._own.successors(place[0])), self._named_after(place[1])
        places = {token: following for token, _, following in copied}
        if not copied or not named:
            return Opinion(named or [(token, chance) for token, chance, _ in copied], places, ALONE)
        chances = {token: (1.0 - _COPY_WEIGHT) * chance for token, chance in named}
        for token, chance, _ in copied:
            chances[token] = chances.get(token, 0.0) + _COPY_WEIGHT * chance
        ranked = sorted(chances.items(), key=lambda pair: -pair[1])
        return Opinion(ranked, places, AGREED if copied[0][0] == named[0][0] else PARTED)

    def _named_after(self, context: Context) -> list[tuple[int, float]]:
        """The table's successors, cached: a place is looked up as draft, root and committed."""
        named = self._named.get(context)
        if named is None:
            if len(self._named) >= _REMEMBERED:
                self._named.clear()
            named = self._named[context] = self._table.successors(context)
        return named

    def successors(self, place: TablePlace) -> Iterator[tuple[int, float, TablePlace]]:
        opinion = self.opinion(place)
        if not opinion.chances:
            return
        first = opinion.chances[0][1]
        share = self._confidence[opinion.situation].of_class(opinion.chance_class)
        factor = min(share / first, _MOST / sum(chance for _, chance in opinion.chances))
        for token, chance in opinion.chances:
            own = opinion.places.get(token)
            yield token, factor * chance, self._advanced(place, token, own)

    def advance(self, place: TablePlace, token: int) -> TablePlace:
        return self._advanced(place, token, None)

    def _advanced(self, place: TablePlace, token: int, own: SuffixPlace | None) -> TablePlace:
        following = self._own.advance(place[0], token) if own is None else own
        return following, (*place[1], token)[-LONGEST:]

    def commit(self, token: int) -> None:
        """Append a committed token, and record whether it was predicted."""
        opinion = self.opinion(self.place)
        if opinion.chances:
            confidence = self._confidence[opinion.situation]
            confidence.record_class(opinion.chance_class, opinion.first == token)
        self._own.commit(token)
        self.place = self._own.place, (*self.place[1], token)[-LONGEST:]


def new_text(row: DraftRow, table: NgramTable | None) -> Guide:
    """A row's text: its own repetitions, and a table if there is one."""
    if table is None:
        return SuffixText(row.tokens)
    return TableText(row.tokens, table, row.params.temperature > 0.0)


def found_table(context: DrafterContext, option: str) -> NgramTable | None:
    """The table that the user named, or that comes with the package; None: there is none.

    Args:
        option: the option that names its directory.

    Raises:
        ConfigError: it is not there, or of another target.
        ModelLoadError: it is damaged.
    """
    given = named_folder(context, KIND, option) or shipped_head(KIND, context.target)
    if given is None:
        return None
    identity = identify(context.target, None, context.fingerprint)
    return load_table(given, identity, context.target.vocab_size)


def _build(context: DrafterContext) -> Drafter:
    table = found_table(context, "head")
    if table is None:
        raise ConfigError(
            "drafter 'table' needs a table of the target's text. Make one with 'foredraft train "
            "table --target MODEL --out DIR', and name its directory with the drafter option head"
        )
    return GuidedDrafter(partial(new_text, table=table), context.target.capabilities.tree_attention)


DRAFTER = DrafterSpec(
    build=_build,
    summary="looks up successors of the last tokens in a table of the target's own text",
    copies=True,
    options={
        "head": "directory of the table (needed unless one comes with the model)",
    },
    num_draft_tokens=16,
    needs=("parts",),
    trained=KIND,
)
