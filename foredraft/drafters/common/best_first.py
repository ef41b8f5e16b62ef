"""Which draft tokens are worth scoring: a tree grown from the most probable node down.

A drafter says which tokens may follow a point of its structure, and how likely each is. The tree
takes the most probable node that is left, and the next, until another one would cost more time
than it is expected to save.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import TypeVar

from foredraft.core.choices import Choice
from foredraft.core.cost import Price
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
    price: Price | None = None,
    num_drafted: int = 0,
    is_weighed: bool = False,
) -> TokenTree:
    """The tree with the most expected tokens per time, by the probabilities of `successors`.

    With P the expected number of accepted tokens and n nodes, a step commits 1 + P tokens in the
    time of n. Nodes come in falling order of their path's probability, and any number of them
    from the front is a tree: the number with the best ratio is taken.

    Args:
        start: where the committed text ends, and what is drafted already.
        row: its budget is the most nodes; its noise, where it has some, reweighs what may follow.
        branch: whether nodes may have siblings; else the likeliest successor alone is followed.
        price: of the nodes; the row's when None.
        num_drafted: tokens between the committed text and ``start``.
        is_weighed: the probabilities are what the row's noise leaves already.
    """
    price = price or row.price
    tokens: list[int] = []
    parents: list[int] = []
    expected, best_rate, best_size = 1.0, 1.0 / price.ms(0), 0
    frontier: list[tuple[float, int, int, int, int, Place]] = []
    serial = 0  # breaks ties in the order of discovery, so that places are never compared
    place, path_prob, node, depth = start, 1.0, ROOT, num_drafted
    while len(tokens) < row.budget:
        found = successors(place)
        for token, prob, following in found if is_weighed else _weighed(found, row, depth):
            heapq.heappush(frontier, (-path_prob * prob, serial, token, node, depth + 1, following))
            serial += 1
            if not branch:
                break
        if not frontier:
            break
        negated, _, token, parent, depth, place = heapq.heappop(frontier)
        path_prob, node = -negated, len(tokens)
        ms = price.ms(node + 1)
        if (expected + path_prob * (row.budget - node)) / ms <= best_rate:
            break  # not even if all that follow were as probable
        tokens.append(token)
        parents.append(parent)
        expected += path_prob
        if expected / ms > best_rate:
            best_rate, best_size = expected / ms, node + 1
    return TokenTree(tuple(tokens[:best_size]), tuple(parents[:best_size]))


def _weighed(
    found: Iterable[tuple[int, float, Place]], row: DraftRow, depth: int
) -> Iterable[tuple[int, float, Place]]:
    """What may follow, as likely as the row's noise leaves it."""
    if row.params.temperature == 0.0 or row.params.coupling == "drawn":
        return found
    places = {token: (prob, place) for token, prob, place in found}
    weighed = row.weigh([Choice(token, prob) for token, (prob, _) in places.items()], depth)
    return [(token, chance, places[token][1]) for token, chance in weighed]
