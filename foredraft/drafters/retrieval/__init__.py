"""Retrieval: what followed the last few tokens in an index of texts.

`foredraft index build` makes a datastore of files: manuals, earlier answers, a code base. The
longest suffix of the text that occurs in it is found, and the continuations of all its
occurrences form a tree, the more frequent ones first. (Z. He et al., "REST: Retrieval-Based
Speculative Decoding", arXiv 2311.08252.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from pathlib import Path

from foredraft.core.cost import Price
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
from foredraft.drafters.common.options import checked_count
from foredraft.drafters.common.per_request import PerRequestDrafter
from foredraft.drafters.common.price import asked_price
from foredraft.drafters.common.priors import priors
from foredraft.drafters.retrieval.datastore import Datastore, Interval

_MAX_MATCH = 16
"""Longest suffix looked for; longer ones are hardly more reliable."""


class _Request:
    """One request: the datastore, and the matches of its last tokens there, longest first."""

    def __init__(self, datastore: Datastore, confidence: MatchConfidence, min_match: int) -> None:
        self._datastore, self._confidence, self._min_match = datastore, confidence, min_match
        self._matches: list[Interval] = []

    def longest_after(self, draft: Sequence[int]) -> Interval | None:
        """The longest match of the text and ``draft``."""
        matches = reduce(self._advance, draft, self._matches)
        return matches[0] if matches else None

    def read(self, token: int) -> None:
        """Append a token."""
        self._matches = self._advance(self._matches, token)

    def commit(self, token: int) -> None:
        """Append a token of the output, after seeing whether it was foreseen."""
        longest = self.longest_after(())
        if longest and (ranked := self._datastore.ranked_followers(longest)):
            self._confidence.record(longest.length, ranked[0][0] == token)
        self.read(token)

    def _advance(self, matches: list[Interval], token: int) -> list[Interval]:
        """Every match is narrowed by ``token``, and a new one starts with it."""
        narrowed = (self._datastore.narrow(match, token) for match in matches)
        kept = [match for match in narrowed if match and match.length <= _MAX_MATCH]
        first = self._datastore.starting_with(token)
        return [*kept, first] if first else kept

    def successors(self, match: Interval | None) -> Iterator[tuple[int, float, Interval]]:
        """What comes after a match, for `best_first`."""
        if match is None or match.length < self._min_match:
            return
        trust = self._confidence[match.length]
        for token, share in self._datastore.ranked_followers(match):
            if following := self._datastore.narrow(match, token):
                yield token, trust * share, following


class RetrievalDrafter(PerRequestDrafter[_Request]):
    """See the module docstring.

    Args:
        datastore: what to look things up in; None searches each request's prompt instead.
        vocab_size: of the target.
        min_match: shortest suffix that counts as a match.
        price: what nodes cost; the controller's when None.
        tree: whether drafts may branch.
    """

    def __init__(
        self,
        datastore: Datastore | None,
        vocab_size: int,
        min_match: int = 2,
        price: Price | None = None,
        tree: bool = True,
    ) -> None:
        super().__init__()
        self._datastore, self._vocab_size = datastore, vocab_size
        self._min_match, self._price, self._tree = min_match, price, tree

    def begin_request(self, request: DraftRequest) -> _Request:
        prompt = request.tokens
        datastore, prior = self._datastore, priors().other_text
        if datastore is None:
            earlier = prompt[:-1]  # with the last token its end would match itself
            datastore, prior = (
                Datastore.of_documents([earlier], self._vocab_size),
                priors().repeated_text,
            )
        found = _Request(datastore, MatchConfidence(prior), self._min_match)
        for token in prompt[-_MAX_MATCH:]:
            found.read(token)
        return found

    def draft_tree(self, request: _Request, row: DraftRow, draft: Sequence[int]) -> TokenTree:
        start = request.longest_after(draft)
        return best_first(start, request.successors, row, self._tree, self._price, len(draft))

    def observe_request(self, request: _Request, seen: Observation) -> None:
        for token in seen.committed:
            request.commit(token)


def _build(context: DrafterContext) -> RetrievalDrafter:
    options, vocab_size, datastore = context.options, context.target.vocab_size, None
    if (index := options.get("index")) is not None:
        fingerprint = getattr(context.tokenizer, "fingerprint", None)
        datastore = Datastore.open(Path(str(index)).expanduser(), fingerprint, vocab_size)
    return RetrievalDrafter(
        datastore,
        vocab_size,
        checked_count("min_match", options.get("min_match", 2)),
        asked_price(context),
        context.target.capabilities.tree_attention,
    )


DRAFTER = DrafterSpec(
    build=_build,
    summary="copies what followed the last tokens in an index of your files",
    copies=True,
    options={
        "index": "folder made by `foredraft index build`; without one the prompt is searched",
        "min_match": "shortest suffix that counts as a match (2)",
        "node_cost": "time one more draft token adds to a step, in plain steps (measured)",
    },
    num_draft_tokens=16,
)
