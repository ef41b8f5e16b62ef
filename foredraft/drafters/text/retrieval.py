"""A datastore of token sequences on disk: which tokens followed a given sequence, and how often.

The ids of all documents lie in one memory-mapped file, each document ended by a separator; beside
it a suffix array, the positions of all suffixes in sorted order. The suffixes that start with a
sequence are neighbours there, so a match is an interval, and one more token narrows it by binary
search. (U. Manber, G. Myers, "Suffix arrays", 1993; drafting from one: REST, arXiv 2311.08252.)

Shape legend: T ids of all documents and their separators, V vocabulary.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from foredraft.core.errors import ConfigError
from foredraft.drafters.base import Drafter, DraftRow
from foredraft.drafters.guide import Guide
from foredraft.drafters.spec import DrafterContext, DrafterSpec
from foredraft.drafters.text.confidence import MatchConfidence, priors
from foredraft.drafters.text.id_files import SEPARATOR, kind_of, read_ids, write_ids
from foredraft.drafters.text.per_request import GuidedDrafter
from foredraft.models.files.progress import Progress, SilentProgress

_KIND, _TENSORS = "foredraft index 2", ("ids", "suffixes", "starts")
_SORTED_DEPTH = 64
"""Suffixes are sorted by this many tokens: no match or draft is longer."""
_SAMPLED = 32
"""Most suffixes of an interval that are looked at to count followers."""
_NUM_RANKED = 3


class Interval(NamedTuple):
    """The suffixes ``first <= i < end`` of the suffix array: they share ``length`` tokens."""

    first: int
    end: int
    length: int


class Datastore:
    """Token sequences that can be searched.

    Args:
        ids_T: int32 ids, each document followed by a separator (-1).
        suffixes_T: int32 or int64 positions in ``ids_T``, sorted by the text from there on.
        starts_V: int64; where the suffixes that start with each id begin, and one past the last.
    """

    def __init__(
        self, ids_T: NDArray[Any], suffixes_T: NDArray[Any], starts_V: NDArray[Any]
    ) -> None:
        # Single items come out of a memoryview several times faster than out of an array.
        self._ids, self._suffixes, self._starts = ids_T.data, suffixes_T.data, starts_V.data

    def __len__(self) -> int:
        return len(self._ids)

    @classmethod
    def of_documents(cls, documents: Iterable[Sequence[int]], vocab_size: int) -> Datastore:
        """A datastore in memory."""
        ids_T = _joined(documents)
        suffixes_T = _suffix_array(ids_T)
        return cls(ids_T, suffixes_T, _starts(ids_T, suffixes_T, vocab_size))

    @classmethod
    def open(cls, path: Path, fingerprint: str | None, vocab_size: int) -> Datastore:
        """Map the index that `build_index` wrote.

        Args:
            fingerprint: of the tokenizer in use; None skips the comparison.
            vocab_size: of the target.

        Raises:
            ConfigError: no index is there, it is damaged, or another tokenizer made it.
        """
        if not path.is_file():
            raise ConfigError(
                f"{path} is no index; make one with: foredraft drafters index FILES --output {path}"
            )
        stored = read_ids(path, _KIND, fingerprint, vocab_size, _TENSORS)
        ids_T, suffixes_T, starts_V = (stored[name].numpy() for name in _TENSORS)
        low, high = suffixes_T.min(initial=0), suffixes_T.max(initial=0)
        is_whole = len(suffixes_T) == len(ids_T) and 0 <= low <= high < max(1, len(ids_T))
        if not is_whole or len(starts_V) != vocab_size + 1 or starts_V[-1] > len(ids_T):
            raise ConfigError(f"{path} is damaged (its lengths); delete it and make it anew")
        return cls(ids_T, suffixes_T, starts_V)

    def starting_with(self, token: int) -> Interval | None:
        """All suffixes that start with ``token``."""
        if not 0 <= token < len(self._starts) - 1:
            return None
        first, end = self._starts[token], self._starts[token + 1]
        return Interval(first, end, 1) if first < end else None

    def narrow(self, interval: Interval, token: int) -> Interval | None:
        """Those suffixes of ``interval`` that go on with ``token``."""
        first, end, length = interval
        ids = self._ids

        def following(position: int) -> int:
            return ids[position + length]

        first = bisect_left(self._suffixes, token, first, end, key=following)
        if first == end or following(self._suffixes[first]) != token:
            return None
        if end - first > 1:
            end = bisect_right(self._suffixes, token, first, end, key=following)
        return Interval(first, end, length + 1)

    def ranked_followers(self, interval: Interval) -> list[tuple[int, float]]:
        """The few most frequent tokens after ``interval``, each with its share of the cases."""
        first, end, length = interval
        if length >= _SORTED_DEPTH:
            return []
        stride = max(1, (end - first) // _SAMPLED)
        counts = Counter(self._ids[self._suffixes[i] + length] for i in range(first, end, stride))
        total = sum(counts.values())
        ranked = counts.most_common(_NUM_RANKED)
        return [(token, count / total) for token, count in ranked if token != SEPARATOR]


def build_index(
    path: Path,
    documents: Iterable[Sequence[int]],
    fingerprint: str,
    vocab_size: int,
    progress: Progress,
) -> int:
    """Write an index of ``documents``; ``path`` appears when it is complete, or not at all.

    Args:
        documents: token ids of each, below ``vocab_size``.
        fingerprint: of the tokenizer that made the ids.

    Returns:
        The number of tokens.

    Raises:
        ConfigError: there are no tokens, or ``path`` is there and no index.
    """
    if path.exists() and kind_of(path) != _KIND:
        raise ConfigError(f"{path} is no index, and is not replaced; name another file")
    ids_T = _joined(documents)
    num_tokens = int((ids_T != SEPARATOR).sum())
    if not num_tokens:
        raise ConfigError("there is no text to index")
    progress.stage("Sorting suffixes")
    suffixes_T = _suffix_array(ids_T, progress)
    progress.stage("Writing")
    path.parent.mkdir(parents=True, exist_ok=True)
    starts_V = _starts(ids_T, suffixes_T, vocab_size)
    arrays = map(torch.from_numpy, (ids_T, suffixes_T, starts_V))
    write_ids(path, _KIND, fingerprint, dict(zip(_TENSORS, arrays, strict=True)))
    return num_tokens


def _joined(documents: Iterable[Sequence[int]]) -> NDArray[np.int32]:
    parts: list[NDArray[np.int32]] = []
    for document in documents:
        parts += [np.asarray(document, np.int32), np.array([SEPARATOR], np.int32)]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def _suffix_array(
    ids_T: NDArray[np.int32],
    progress: Progress = SilentProgress(),  # noqa: B008 - it has no state
) -> NDArray[Any]:
    """Positions sorted by the next `_SORTED_DEPTH` ids, by prefix doubling.

    Each round knows the order by the first d ids and finds that by the first 2d: position i goes
    by its own rank and that of position i + d.
    """
    num = ids_T.size
    _, ranks_T = np.unique(ids_T, return_inverse=True)
    order_T, depth = np.argsort(ranks_T, kind="stable"), 1
    while depth < _SORTED_DEPTH and num > 1:
        key_T = (ranks_T.astype(np.int64) + 1) * (num + 1)
        key_T[:-depth] += ranks_T[depth:] + 1 if depth < num else 0
        order_T = np.argsort(key_T, kind="stable")
        sorted_T = key_T[order_T]
        ranks_T = np.empty(num, np.int64)
        ranks_T[order_T] = np.concatenate(([0], np.cumsum(sorted_T[1:] != sorted_T[:-1])))
        depth *= 2
        progress.advance(depth / _SORTED_DEPTH)
        if int(ranks_T[order_T[-1]]) == num - 1:  # all different: sorted for good
            break
    return order_T.astype(np.int32 if num < 2**31 else np.int64)


def _starts(
    ids_T: NDArray[np.int32], suffixes_T: NDArray[Any], vocab_size: int
) -> NDArray[np.int64]:
    """The start of each id's suffixes, which are sorted by their first id."""
    counts_V = np.bincount(ids_T[ids_T != SEPARATOR], minlength=vocab_size)
    num_separators = suffixes_T.size - int(counts_V.sum())
    return np.concatenate(([0], np.cumsum(counts_V))).astype(np.int64) + num_separators


_LEAST_MATCH, _MAX_MATCH = 2, 16
"""Shortest and longest suffix looked for; longer ones are hardly more reliable."""


Matches = Sequence[Interval]
"""Matches of the last tokens in the datastore, longest first."""


class RetrievedText(Guide):
    """One request's text, and its matches in the datastore.

    Args:
        prior: how far matches there prove right; see `MatchConfidence`.

    Attributes:
        place: matches of the end of the committed text.
    """

    def __init__(self, datastore: Datastore, prior: Sequence[float], prompt: Sequence[int]) -> None:
        self._datastore = datastore
        self._confidence = MatchConfidence(prior)
        self.place: Matches = reduce(self.advance, prompt[-_MAX_MATCH:], ())

    def commit(self, token: int) -> None:
        longest = self.place[0] if self.place else None
        if longest and (ranked := self._datastore.ranked_followers(longest)):
            self._confidence.record(longest.length, ranked[0][0] == token)
        self.place = self.advance(self.place, token)

    def advance(self, place: Matches, token: int) -> Matches:
        """Every match is narrowed by ``token``, and a new one starts with it."""
        narrowed = (self._datastore.narrow(match, token) for match in place)
        kept = [match for match in narrowed if match and match.length <= _MAX_MATCH]
        first = self._datastore.starting_with(token)
        return [*kept, first] if first else kept

    def successors(self, place: Matches) -> Iterator[tuple[int, float, Matches]]:
        """Successors of the longest match."""
        if not place or place[0].length < _LEAST_MATCH:
            return
        trust = self._confidence[place[0].length]
        for token, share in self._datastore.ranked_followers(place[0]):
            if following := self._datastore.narrow(place[0], token):
                yield token, trust * share, (following,)


def _build(context: DrafterContext) -> Drafter:
    vocab_size, datastore = context.target.vocab_size, None
    if (index := context.options.get("index")) is not None:
        path = Path(str(index)).expanduser()
        datastore = Datastore.open(path, context.fingerprint, vocab_size)

    def new_text(row: DraftRow) -> RetrievedText:
        if datastore is not None:
            return RetrievedText(datastore, priors().other_text, row.tokens)
        # With its last token the prompt's end would match itself.
        own = Datastore.of_documents([row.tokens[:-1]], vocab_size)
        return RetrievedText(own, priors().repeated_text, row.tokens)

    return GuidedDrafter(new_text, context.target.capabilities.tree_attention)


DRAFTER = DrafterSpec(
    build=_build,
    summary="copies the tokens after the last ones in an index of your files",
    copies=True,
    options={
        "index": "file made by `foredraft drafters index`; without one the prompt is searched",
    },
    num_draft_tokens=16,
)
