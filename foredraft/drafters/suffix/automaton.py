"""A suffix automaton that counts: every substring of a growing text, in two states a token.

A state stands for substrings that end at the same places. Its transitions are the tokens that
follow there; its link leads to the longest suffix that also occurs elsewhere. (A. Blumer et al.,
"The smallest automaton recognizing the subwords of a text", 1985.)
"""

from __future__ import annotations

from typing import NamedTuple

SEPARATOR = -1
"""Goes between texts that share an automaton; never drafted, never matched."""

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
    """Extended by one token at a time, in amortised constant time.

    `end` is the longest suffix of the text that has occurred before, and so the best place to
    look for what comes next.
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
