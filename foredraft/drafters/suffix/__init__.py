"""Suffix decoding: the longest suffix of the text that occurred before says what comes next.

A suffix automaton over the request's own tokens, and optionally one over earlier outputs, finds
the longest match of any length and counts what followed it. The longer the match, the likelier it
holds, so the draft grows with it. (G. Oliaro et al., "SuffixDecoding", arXiv 2411.04975.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from pathlib import Path

from foredraft.core.cost import Price
from foredraft.core.errors import ConfigError
from foredraft.core.tree import TokenTree
from foredraft.drafters.base import (
    DrafterContext,
    DrafterSpec,
    DraftRequest,
    DraftRow,
    Observation,
)
from foredraft.drafters.common.best_first import best_first
from foredraft.drafters.common.confidence import MatchConfidence
from foredraft.drafters.common.options import checked_count, checked_flag
from foredraft.drafters.common.per_request import PerRequestDrafter
from foredraft.drafters.common.per_tenant import PerTenant
from foredraft.drafters.common.price import asked_price
from foredraft.drafters.common.priors import priors
from foredraft.drafters.suffix.automaton import NO_MATCH, Match, SuffixAutomaton
from foredraft.drafters.suffix.past_outputs import PastOutputs, tenant_file

SuffixPlace = tuple[Match, ...]
"""Where a text stands in each source: its longest suffix there."""


class Source:
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


class SuffixText:
    """One request's text, and where it stands in every source.

    Attributes:
        place: where the committed text stands in each.
        output: the tokens committed behind the prompt.
        past: earlier outputs, to look things up in as well.
    """

    def __init__(self, prompt: Sequence[int], past: PastOutputs | None = None) -> None:
        self._own = SuffixAutomaton()
        for token in prompt:
            self._own.extend(token)
        self.output: list[int] = []
        self.past = past
        shared = past.automata if past else ()
        # Of equally likely candidates the first source's count: the own text is closest.
        self._sources = [
            Source(self._own, MatchConfidence(priors().repeated_text)),
            *(Source(automaton, MatchConfidence(priors().other_text)) for automaton in shared),
        ]
        self.place: SuffixPlace = (self._own.end, *(NO_MATCH for _ in shared))

    def commit(self, token: int) -> None:
        """Append a committed token, after seeing whether it was foreseen."""
        for source, match in zip(self._sources, self.place, strict=True):
            source.record(match, token)
        self.output.append(token)
        self._own.extend(token)
        self.place = (self._own.end, *self.advance(self.place, token)[1:])

    def successors(self, place: SuffixPlace) -> Iterator[tuple[int, float, SuffixPlace]]:
        """What the most promising source says comes after ``place``, for `best_first`."""
        pairs = zip(self._sources, place, strict=True)
        place = tuple(source.automaton.with_followers(match) for source, match in pairs)
        found = max(map(Source.candidates, self._sources, place), key=_probability)
        for token, prob in found:
            yield token, prob, self.advance(place, token)

    def advance(self, place: SuffixPlace, token: int) -> SuffixPlace:
        """Where ``token`` leads from ``place``."""
        pairs = zip(self._sources, place, strict=True)
        return tuple(source.automaton.advance(match, token) for source, match in pairs)


def _probability(candidates: list[tuple[int, float]]) -> float:
    """Of the likeliest candidate."""
    return candidates[0][1] if candidates else 0.0


class SuffixDrafter(PerRequestDrafter[SuffixText]):
    """See the module docstring.

    Args:
        price: what nodes cost; the controller's when None.
        past: outputs of earlier requests to look things up in as well, and to add to.
        tree: whether drafts may branch.
    """

    def __init__(
        self,
        price: Price | None = None,
        past: PerTenant[PastOutputs] | None = None,
        tree: bool = True,
    ) -> None:
        super().__init__()
        self._price, self._past, self._tree = price, past, tree

    def begin_request(self, request: DraftRequest) -> SuffixText:
        past = None if self._past is None else self._past.of(request.tenant)
        return SuffixText(request.tokens, past)

    def draft_tree(self, request: SuffixText, row: DraftRow, draft: Sequence[int]) -> TokenTree:
        place = reduce(request.advance, draft, request.place)
        return best_first(place, request.successors, row, self._tree, self._price, len(draft))

    def observe_request(self, request: SuffixText, seen: Observation) -> None:
        for token in seen.committed:
            request.commit(token)

    def end_request(self, request: SuffixText) -> None:
        if request.past is not None:
            request.past.add(request.output)


def _build(context: DrafterContext) -> SuffixDrafter:
    options = {k: v for k, v in context.options.items() if k != "node_cost"}
    return SuffixDrafter(
        asked_price(context),
        _past_outputs(context, **options),
        context.target.capabilities.tree_attention,
    )


def _past_outputs(
    context: DrafterContext,
    shared: object = False,
    shared_tokens: object = 100_000,
    shared_dir: object = None,
    tenant: object = None,
) -> PerTenant[PastOutputs] | None:
    max_tokens = checked_count("shared_tokens", shared_tokens)
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
    fingerprint = str(getattr(context.tokenizer, "fingerprint", "unknown"))

    def new(of_request: str | None) -> PastOutputs:
        # Names of tenants may be good for one process only: nobody would read their files again.
        file = path if of_request is None else None
        return PastOutputs(max_tokens, file, fingerprint, context.target.vocab_size)

    found = PerTenant(new, max_tokens)
    found.of(None)  # a file that cannot be used is refused before anything is generated
    return found


DRAFTER = DrafterSpec(
    build=_build,
    summary="copies what followed the longest earlier match, as far as such matches have held",
    copies=True,
    options={
        "node_cost": "time one more draft token adds to a step, in plain steps (measured)",
        "shared": "also look in outputs of earlier requests (false)",
        "shared_tokens": "most tokens of earlier outputs to keep (100000)",
        "shared_dir": "folder to keep them in between runs; memory only when not given",
        "tenant": "whose file it is, of requests that name no tenant of their own",
    },
    num_draft_tokens=16,
)
