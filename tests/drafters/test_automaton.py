"""The counting suffix automaton against what a search by hand finds."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from foredraft.drafters.text.id_files import SEPARATOR
from foredraft.drafters.text.suffix import NO_MATCH, SuffixAutomaton

TEXTS = st.lists(st.integers(0, 2), max_size=14)


def automaton_of(text: list[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for token in text:
        automaton.extend(token)
    return automaton


def ends(text: list[int], part: list[int]) -> list[int]:
    return [i for i in range(len(part), len(text) + 1) if text[i - len(part) : i] == part]


@given(TEXTS)
def test_end_is_the_longest_suffix_that_occurred_before(text: list[int]) -> None:
    repeated = [n for n in range(1, len(text) + 1) if len(ends(text, text[-n:])) > 1]
    assert automaton_of(text).end.length == max(repeated, default=0)


@given(TEXTS)
def test_followers_are_counted(text: list[int]) -> None:
    automaton = automaton_of(text)
    match = automaton.end
    if not match.length:
        return
    suffix = text[-match.length :]
    counts = Counter(text[i] for i in ends(text, suffix) if i < len(text))
    ranked = automaton.ranked_followers(match)
    assert {token: round(share * counts.total(), 9) for token, share in ranked} == dict(counts)
    assert [share for _, share in ranked] == sorted((s for _, s in ranked), reverse=True)


@given(TEXTS, TEXTS)
def test_advancing_keeps_the_longest_suffix_that_occurs(text: list[int], other: list[int]) -> None:
    automaton, match = automaton_of(text), NO_MATCH
    for i, token in enumerate(other, start=1):
        match = automaton.advance(match, token)
        found = [n for n in range(1, i + 1) if ends(text, other[i - n : i])]
        assert match.length == max(found, default=0)


def test_equally_frequent_followers_come_most_recent_first() -> None:
    automaton = automaton_of([1, 2, 1, 3, 1])
    assert [token for token, _ in automaton.ranked_followers(automaton.end)] == [3, 2]


def test_separators_are_never_proposed() -> None:
    automaton = automaton_of([1, 2, SEPARATOR, 1, 2, 3, SEPARATOR])
    match = automaton.advance(automaton.advance(NO_MATCH, 1), 2)
    assert automaton.ranked_followers(match) == [(3, 0.5)]


def test_a_match_survives_the_growth_of_the_text() -> None:
    automaton = automaton_of([1, 2, 3, 4])
    match = automaton.advance(automaton.advance(NO_MATCH, 2), 3)
    for token in (9, 3, 5):
        automaton.extend(token)
    assert automaton.advance(match, 4).length == 3
    assert automaton.advance(match, 7) == NO_MATCH
