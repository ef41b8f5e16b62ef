"""Indexes of a text that know successors without a forward, and the trees drafted from them."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from foredraft.core.choices import Choice
from foredraft.core.cost import price_of
from foredraft.core.tree import ROOT, TokenTree
from foredraft.drafters.base import DraftRow

Place = TypeVar("Place")
Successors = Callable[[Place], Iterable[tuple[int, float, Place]]]
"""From a place: each token that may follow, its probability there, and the place it leads to."""


def best_first(
    start: Place,
    successors: Successors[Place],
    row: DraftRow,
    branch: bool = True,
    num_drafted: int = 0,
    is_weighed: bool = False,
) -> TokenTree:
    """The tree with the most expected tokens per time, by the probabilities of `successors`.

    With P the expected number of accepted tokens and n nodes, a step commits 1 + P tokens in the
    time of n. Nodes come in falling order of their path's probability, and any number of them
    from the front is a tree: the number with the best ratio is taken.

    Args:
        start: cursor after the committed text and the tokens drafted already.
        row: its budget is the most nodes, its prices are theirs; its noise, if it has any, reweighs
            the successors.
        branch: whether nodes may have siblings; else the likeliest successor alone is followed.
        num_drafted: tokens between the committed text and ``start``.
        is_weighed: whether the probabilities include the row's noise already.
    """
    prices, tokens = row.prices, list[int]()
    parents: list[int] = []
    expected, best_rate, best_size = 1.0, 1.0 / prices[0], 0
    frontier: list[tuple[float, int, int, int, int, Place]] = []
    serial = 0  # breaks ties in the order of discovery, so that places are never compared
    place, path_prob, node, depth = start, 1.0, ROOT, num_drafted
    while len(tokens) < row.budget:
        is_over = node != ROOT and tokens[node] in row.stop_ids
        found = () if is_over else successors(place)
        for token, prob, following in found if is_weighed else _weighed(found, row, depth):
            heapq.heappush(frontier, (-path_prob * prob, serial, token, node, depth + 1, following))
            serial += 1
            if not branch:
                break
        if not frontier:
            break
        negated, _, token, parent, depth, place = heapq.heappop(frontier)
        path_prob, node = -negated, len(tokens)
        cost = price_of(prices, node + 1)
        if (expected + path_prob * (row.budget - node)) / cost <= best_rate:
            break  # not even if all that follow were as probable
        tokens.append(token)
        parents.append(parent)
        expected += path_prob
        if expected / cost > best_rate:
            best_rate, best_size = expected / cost, node + 1
    return TokenTree(tuple(tokens[:best_size]), tuple(parents[:best_size]))


def _weighed(
    found: Iterable[tuple[int, float, Place]], row: DraftRow, depth: int
) -> Iterable[tuple[int, float, Place]]:
    """Successors with their probabilities given the row's noise."""
    if row.params.temperature == 0.0 or row.params.coupling == "drawn":
        return found
    places = {token: (prob, place) for token, prob, place in found}
    weighed = row.weigh([Choice(token, prob) for token, (prob, _) in places.items()], depth)
    return [(token, chance, places[token][1]) for token, chance in weighed]


class Guide(ABC):
    """An index of a request's text that knows successors of any place without a forward.

    Attributes:
        place: cursor at the end of the committed text; opaque.
    """

    place: Any

    @abstractmethod
    def successors(self, place: Any) -> Iterable[tuple[int, float, Any]]:
        """Tokens that may follow, likeliest first, each with its probability and its place."""

    @abstractmethod
    def advance(self, place: Any, token: int) -> Any:
        """The cursor after ``token`` at ``place``."""

    @abstractmethod
    def commit(self, token: int) -> None:
        """Append a committed token, after seeing whether it was foreseen."""

    def end(self) -> None:  # noqa: B027 - most keep nothing
        """End the request; a guide may store its text."""
