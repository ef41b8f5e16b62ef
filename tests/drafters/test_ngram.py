"""Prompt lookup: the longest suffix seen before, its latest occurrence, and what came after it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.drafters.base import DraftRow
from foredraft.drafters.text.ngram import NgramDrafter, NgramIndex


def reference(tokens: Sequence[int], count: int, min_size: int, max_size: int) -> list[int]:
    """The slow reading: look for each suffix, longest first, from the end backwards."""
    for size in range(min(max_size, len(tokens)), min_size - 1, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[-size:]:
                text = list(tokens)
                for i in range(count):
                    text.append(text[start + size + i])
                return text[len(tokens) :]
    return []


@pytest.mark.parametrize(
    ("text", "draft"),
    [
        ("abcXabc", "Xab"),
        ("abXcbXab", "Xcb"),  # the longest suffix wins over a later, shorter one
        ("abXabYab", "Yab"),  # the latest occurrence wins
        ("abcabc", "abc"),
        ("aaaa", "aaa"),
        ("xyzzy", ""),
        ("ab", ""),
        ("a", ""),
        ("ababab", "aba"),  # a copy that runs into the end goes on with itself
    ],
)
def test_copies_what_followed(text: str, draft: str) -> None:
    found = NgramIndex(2, 4).lookup([ord(c) for c in text], 3)
    assert "".join(map(chr, found)) == draft


@settings(max_examples=200)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    cuts=st.lists(st.integers(1, 30), max_size=5),
    sizes=st.tuples(st.integers(1, 3), st.integers(0, 3)),
    count=st.integers(1, 8),
)
def test_agrees_with_a_search_however_the_text_has_grown(
    tokens: list[int], cuts: list[int], sizes: tuple[int, int], count: int
) -> None:
    min_size, max_size = sizes[0], sizes[0] + sizes[1]
    index = NgramIndex(min_size, max_size)
    for length in sorted({min(cut, len(tokens)) for cut in cuts} | {len(tokens)}):
        grown = tokens[:length]
        assert index.lookup(grown, count) == reference(grown, count, min_size, max_size)


def test_requests_do_not_see_each_others_text() -> None:
    drafter, params = NgramDrafter(), SamplingParams()
    texts = {0: (1, 2, 3, 1, 2), 1: (1, 2)}
    for request_id, text in texts.items():
        drafter.begin(DraftRow.of(request_id, text))
    rows = [DraftRow.of(i, text, params, 2) for i, text in texts.items()]
    assert [proposal.tree.tokens for proposal in drafter.propose(rows)] == [(3, 1), ()]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_ngram_size": 0}, "min_ngram_size is 0; it must be at least 1"),
        ({"max_ngram_size": 1}, "max_ngram_size is 1; it must be at least 2"),
        ({"max_ngram_size": "4"}, "max_ngram_size must be a whole number"),
        ({"min_ngram_size": True}, "min_ngram_size must be a whole number"),
        ({"max_ngram_size": 3.0}, "max_ngram_size must be a whole number"),
    ],
)
def test_refuses_sizes_that_are_none(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NgramDrafter(**options)
