"""A suffix automaton that counts: every substring of a growing text, in two states a token.

A state stands for substrings that end at the same places. Its transitions are the tokens that
follow there; its link leads to the longest suffix that also occurs elsewhere. (A. Blumer et al.,
"The smallest automaton recognizing the subwords of a text", 1985.)
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from foredraft.core.checks import checked_flag, checked_int
from foredraft.core.errors import ConfigError
from foredraft.drafters.base import Drafter, DraftRow
from foredraft.drafters.guide import Guide
from foredraft.drafters.spec import DrafterContext, DrafterSpec
from foredraft.drafters.text.confidence import MatchConfidence, priors
from foredraft.drafters.text.id_files import SEPARATOR, read_ids, write_ids
from foredraft.drafters.text.per_request import GuidedDrafter, PerTenant

_ROOT = 0
_MAX_COUNTED = 16
"""Most suffixes counted per token, longest first: "aaaa…" has as many as it has tokens."""

_MAX_FOLLOWERS = 64
_NUM_RANKED = 3


class Match(NamedTuple):
    """A substring of the automaton's text: the state it belongs to and its length.

    It stays usable while the text grows: at worst a state is split meanwhile, and the followers of
    longer substrings are counted with its own.
    """

    state: int
    length: int


NO_MATCH = Match(_ROOT, 0)


class SuffixAutomaton:
    """A suffix automaton, extended by one token at a time in amortised constant time.

    `end` is the longest suffix of the text that has occurred before, and so the best place to
    look for the next token.
    """

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._count = [0]
        self._seen = [0]  # where the state was last reached, to prefer recent followers
        self._last = _ROOT

    def __len__(self) -> int:
        """Tokens in the text."""
        return self._length[self._last]

    @property
    def end(self) -> Match:
        state = self._link[self._last]
        return Match(state, self._length[state]) if state > _ROOT else NO_MATCH

    def extend(self, token: int) -> None:
        """Append ``token`` to the text."""
        state = self._new_state(self._length[self._last] + 1, {})
        before = self._last
        while before >= 0 and token not in self._next[before]:
            self._next[before][token] = state
            before = self._link[before]
        self._link[state] = self._suffix_of(before, token)
        self._last = state
        self._count_suffixes(state)

    def _suffix_of(self, before: int, token: int) -> int:
        """The state of the longest suffix of the new text that occurred before."""
        if before < 0:
            return _ROOT
        found = self._next[before][token]
        length = self._length[before] + 1
        if self._length[found] == length:
            return found
        # ``found`` also stands for longer substrings, which do not end here: split it.
        split = self._new_state(length, dict(self._next[found]))
        self._link[split], self._link[found] = self._link[found], split
        self._count[split], self._seen[split] = self._count[found], self._seen[found]
        while before >= 0 and self._next[before].get(token) == found:
            self._next[before][token] = split
            before = self._link[before]
        return split

    def _new_state(self, length: int, transitions: dict[int, int]) -> int:
        self._next.append(transitions)
        self._link.append(_ROOT)
        self._length.append(length)
        self._count.append(0)
        self._seen.append(0)
        return len(self._next) - 1

    def _count_suffixes(self, state: int) -> None:
        count, seen, link = self._count, self._seen, self._link
        now = self._length[state]
        for _ in range(_MAX_COUNTED):
            if state <= _ROOT:
                return
            count[state] += 1
            seen[state] = now
            state = link[state]

    def advance(self, match: Match, token: int) -> Match:
        """The longest suffix of ``match`` and ``token`` that occurs in the text."""
        state, length = match
        while token not in self._next[state]:
            if state == _ROOT:
                return NO_MATCH
            state = self._link[state]
            length = min(length, self._length[state])
        return Match(self._next[state][token], length + 1)

    def with_followers(self, match: Match) -> Match:
        """``match``, or its longest suffix that is followed by something."""
        state, length = match
        while state != _ROOT and not self._next[state]:
            state = self._link[state]
            length = min(length, self._length[state])
        return Match(state, length)

    def ranked_followers(self, match: Match) -> list[tuple[int, float]]:
        """The few most frequent tokens that follow ``match``, each with its share of the cases.

        Equally frequent ones come most recent first. Nothing where very many different tokens
        follow: none of them is likely then.
        """
        followers = self._next[match.state]
        if len(followers) == 1:
            (token,) = followers
            return [(token, 1.0)] if token != SEPARATOR else []
        if len(followers) > _MAX_FOLLOWERS:
            return []
        count, seen = self._count, self._seen
        counted = [(count[s], seen[s], token) for token, s in followers.items()]
        total = sum(item[0] for item in counted)
        counted.sort(reverse=True)
        return [(token, n / total) for n, _, token in counted[:_NUM_RANKED] if token != SEPARATOR]


_KIND = "foredraft past outputs 2"


class PastOutputs:
    """Outputs of earlier requests of one tenant.

    Args:
        max_tokens: most tokens kept, over both generations.
        path: the file they are kept in between processes; None keeps them in memory only.
        fingerprint: of the tokenizer whose ids they are.
        vocab_size: ids must lie below it.

    Raises:
        ConfigError: the file holds something else, or its folder cannot be written.
    """

    def __init__(
        self, max_tokens: int, path: Path | None, fingerprint: str, vocab_size: int
    ) -> None:
        self._max_tokens = max_tokens
        self._path, self._fingerprint = path, fingerprint
        self._texts: list[list[int]] = [[], []]  # old, young; outputs end in a separator
        self._automata = [SuffixAutomaton(), SuffixAutomaton()]
        if path is not None:
            _check_writable(path.parent)
        if path is not None and path.exists():
            self._append(read_ids(path, _KIND, fingerprint, vocab_size)["ids"].tolist())

    @property
    def automata(self) -> tuple[SuffixAutomaton, ...]:
        """The young generation, then the old one; replaced when one is dropped."""
        return (self._automata[1], self._automata[0])

    def __len__(self) -> int:
        """Tokens kept."""
        return sum(map(len, self._texts))

    def add(self, output: Sequence[int]) -> None:
        """Remember one output, and save."""
        if not output:
            return
        self._append([*output, SEPARATOR])
        if self._path is not None:
            ids_T = torch.tensor([*self._texts[0], *self._texts[1]], dtype=torch.int32)
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_ids(self._path, _KIND, self._fingerprint, {"ids": ids_T}, mode=0o600)

    def _append(self, text: Sequence[int]) -> None:
        half = max(1, self._max_tokens // 2)
        for token in text[-self._max_tokens :]:
            if len(self._texts[1]) >= half:
                self._texts = [self._texts[1], []]
                self._automata = [self._automata[1], SuffixAutomaton()]
            self._texts[1].append(token)
            self._automata[1].extend(token)


def tenant_file(directory: Path, tenant: str) -> Path:
    """Path of a tenant's outputs. The name reveals nothing about the tenant."""
    digest = hashlib.sha256(tenant.encode()).hexdigest()[:32]
    return directory / f"past-outputs-{digest}.safetensors"


def _check_writable(directory: Path) -> None:
    """Find out before anything is generated whether outputs can be kept there."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"shared_dir {directory} cannot be written ({error}); choose another folder"
        ) from error


SuffixPlace = tuple[Match, ...]
"""Cursor of a text in each source: its longest suffix there."""


class SearchedText:
    """One automaton that a request looks things up in, and how far it has proved right."""

    def __init__(self, automaton: SuffixAutomaton, confidence: MatchConfidence) -> None:
        self.automaton, self._confidence = automaton, confidence

    def candidates(self, match: Match) -> list[tuple[int, float]]:
        """Tokens that may come next, likeliest first, each with its probability."""
        if not match.length:
            return []
        trust = self._confidence[match.length]
        return [(t, trust * share) for t, share in self.automaton.ranked_followers(match)]

    def record(self, match: Match, token: int) -> None:
        """``token`` came after ``match``: was it the one foreseen?"""
        if match.length and (ranked := self.automaton.ranked_followers(match)):
            self._confidence.record(match.length, ranked[0][0] == token)


class SuffixText(Guide):
    """One request's text, and where it stands in every source.

    Args:
        past: earlier outputs to look things up in as well, and to add this one to.

    Attributes:
        place: cursor of the committed text in each source.
    """

    def __init__(self, prompt: Sequence[int], past: PastOutputs | None = None) -> None:
        self._own = SuffixAutomaton()
        for token in prompt:
            self._own.extend(token)
        self._output: list[int] = []
        self._past = past
        shared = past.automata if past else ()
        # Of equally likely candidates the first source's count: the own text is closest.
        self._sources = [
            SearchedText(self._own, MatchConfidence(priors().repeated_text)),
            *(
                SearchedText(automaton, MatchConfidence(priors().other_text))
                for automaton in shared
            ),
        ]
        self.place: SuffixPlace = (self._own.end, *(NO_MATCH for _ in shared))

    def commit(self, token: int) -> None:
        for source, match in zip(self._sources, self.place, strict=True):
            source.record(match, token)
        self._output.append(token)
        self._own.extend(token)
        self.place = (self._own.end, *self.advance(self.place, token)[1:])

    def successors(self, place: SuffixPlace) -> Iterator[tuple[int, float, SuffixPlace]]:
        """Successors of ``place`` in the most promising source."""
        pairs = zip(self._sources, place, strict=True)
        place = tuple(source.automaton.with_followers(match) for source, match in pairs)
        found = max(map(SearchedText.candidates, self._sources, place), key=_probability)
        for token, prob in found:
            yield token, prob, self.advance(place, token)

    def advance(self, place: SuffixPlace, token: int) -> SuffixPlace:
        pairs = zip(self._sources, place, strict=True)
        return tuple(source.automaton.advance(match, token) for source, match in pairs)

    def end(self) -> None:
        if self._past is not None:
            self._past.add(self._output)


def _probability(candidates: list[tuple[int, float]]) -> float:
    """Probability of the likeliest candidate."""
    return candidates[0][1] if candidates else 0.0


def _build(context: DrafterContext) -> Drafter:
    past = _past_outputs(context, **context.options)

    def new_text(row: DraftRow) -> SuffixText:
        return SuffixText(row.context, None if past is None else past.of(row.tenant))

    return GuidedDrafter(new_text, context.target.capabilities.tree_attention)


def _past_outputs(
    context: DrafterContext,
    shared: object = False,
    shared_tokens: object = 100_000,
    shared_dir: object = None,
    tenant: object = None,
) -> PerTenant[PastOutputs] | None:
    max_tokens = checked_int("shared_tokens", shared_tokens, 1)
    if not checked_flag("shared", shared):
        if shared_dir is not None or tenant is not None:
            raise ConfigError("shared_dir and tenant are for shared=true, which was not given")
        return None
    if tenant is not None and shared_dir is None:
        raise ConfigError("tenant names a file in shared_dir, which was not given")
    path = None
    if shared_dir is not None:
        path = tenant_file(
            Path(str(shared_dir)).expanduser(), "" if tenant is None else str(tenant)
        )
    fingerprint = context.fingerprint or "unknown"

    def new(of_request: str | None) -> PastOutputs:
        # Names of tenants may be valid in one process only: no other would read their files.
        file = path if of_request is None else None
        return PastOutputs(max_tokens, file, fingerprint, context.target.vocab_size)

    found = PerTenant(new, max_tokens)
    found.of(None)  # a file that cannot be used is refused before anything is generated
    return found


DRAFTER = DrafterSpec(
    build=_build,
    summary="copies the tokens after the longest earlier match, while such matches are reliable",
    copies=True,
    options={
        "shared": "also look in outputs of earlier requests (false)",
        "shared_tokens": "most tokens of earlier outputs to keep (100000)",
        "shared_dir": "folder to keep them in between runs; memory only when not given",
        "tenant": "whose file it is, of requests that name no tenant of their own",
    },
    num_draft_tokens=16,
)
