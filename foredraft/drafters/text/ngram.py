"""Prompt lookup: copies the tokens after an earlier occurrence of the last few tokens.

Finds the most recent earlier occurrence of the longest suffix of the text and proposes the tokens
that came after it (Saxena 2023; "prompt lookup decoding"). Costs nothing, and pays where the
output repeats its input: summaries, edits, quotations, code.
"""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.core.checks import checked_int
from foredraft.core.tree import TokenTree
from foredraft.drafters.base import DraftRow
from foredraft.drafters.spec import DrafterContext, DrafterSpec
from foredraft.drafters.text.per_request import PerRequestDrafter


class NgramIndex:
    """Index of the last position after each n-gram of a growing text.

    An n-gram enters the index when the token after it is known, so the suffix of the text never
    finds itself. Extending by one token costs one dictionary entry per size.
    """

    def __init__(self, min_size: int, max_size: int) -> None:
        self._sizes = range(max_size, min_size - 1, -1)
        self._next: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def lookup(self, tokens: Sequence[int], count: int, draft: Sequence[int] = ()) -> list[int]:
        """Up to ``count`` tokens that followed the longest suffix seen before.

        A copy that runs into the end of the text goes on with what it has copied so far, as a
        repetition does.

        Args:
            draft: belongs to the suffix, and not to the text.
        """
        self._extend(tokens)
        ending = (*tokens[-self._sizes[0] :], *draft)
        for size in self._sizes:
            start = self._next.get(ending[-size:]) if size <= len(ending) else None
            if start is not None:
                copied = (*tokens[start : start + count], *draft)
                return [copied[i % len(copied)] for i in range(count)]
        return []

    def _extend(self, tokens: Sequence[int]) -> None:
        for follower in range(self._indexed, len(tokens)):
            for size in self._sizes:
                if size <= follower:
                    self._next[tuple(tokens[follower - size : follower])] = follower
        self._indexed = len(tokens)


class NgramDrafter(PerRequestDrafter[NgramIndex]):
    """See the module docstring.

    Args:
        max_ngram_size: longest suffix to look for.
        min_ngram_size: shortest suffix that counts as a match.
    """

    def __init__(self, max_ngram_size: int = 4, min_ngram_size: int = 2) -> None:
        super().__init__()
        shortest = checked_int("min_ngram_size", min_ngram_size, 1)
        self._sizes = (shortest, checked_int("max_ngram_size", max_ngram_size, shortest))

    def begin_request(self, row: DraftRow) -> NgramIndex:
        return NgramIndex(*self._sizes)

    def draft_tree(self, request: NgramIndex, row: DraftRow, draft: Sequence[int]) -> TokenTree:
        return TokenTree.chain(request.lookup(row.context, row.budget, draft))


def _build(context: DrafterContext) -> NgramDrafter:
    return NgramDrafter(**context.options)


DRAFTER = DrafterSpec(
    build=_build,
    summary="copies the tokens after an earlier occurrence of the last ones (prompt lookup)",
    copies=True,
    options={
        "max_ngram_size": "longest suffix to look for (4)",
        "min_ngram_size": "shortest suffix that counts (2)",
    },
    num_draft_tokens=4,
)
