"""Which draft tokens are worth scoring: a tree grown from the most probable node down.

A drafter says which tokens may follow a point of its structure, and how likely each is. The tree
takes the most probable node that is left, and the next, until another one would cost more time
than it is expected to save.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import TypeVar

from foredraft.core.tree import ROOT, TokenTree
from foredraft.drafters.common.step_cost import LINEAR_STEPS, StepCost

Place = TypeVar("Place")
Successors = Callable[[Place], Iterable[tuple[int, float, Place]]]
"""From a place: each token that may follow, its probability there, and the place it leads to."""


def best_first(
    start: Place,
    successors: Successors[Place],
    budget: int,
    cost: StepCost = LINEAR_STEPS,
    branch: bool = True,
) -> TokenTree:
    """The tree with the most expected tokens per time, by the probabilities of `successors`.

    With P the expected number of accepted tokens and n nodes, a step commits 1 + P tokens in the
    time of n + 1. Nodes come in falling order of their path's probability, and any number of them
    from the front is a tree: the number with the best ratio is taken.

    Args:
        start: where the committed text ends.
        budget: most nodes.
        cost: time of a step by its tokens.
        branch: whether nodes may have siblings; else the likeliest successor alone is followed.
    """
    tokens: list[int] = []
    parents: list[int] = []
    expected, best_rate, best_size = 1.0, 1.0 / cost.ms(1), 0
    frontier: list[tuple[float, int, int, int, Place]] = []
    serial = 0  # breaks ties in the order of discovery, so that places are never compared
    place, path_prob, node = start, 1.0, ROOT
    while len(tokens) < budget:
        for token, prob, following in successors(place):
            heapq.heappush(frontier, (-path_prob * prob, serial, token, node, following))
            serial += 1
            if not branch:
                break
        if not frontier:
            break
        negated, _, token, parent, place = heapq.heappop(frontier)
        path_prob, node = -negated, len(tokens)
        ms = cost.ms(node + 2)
        if (expected + path_prob * (budget - node)) / ms <= best_rate:
            break  # not even if all that follow were as probable
        tokens.append(token)
        parents.append(parent)
        expected += path_prob
        if expected / ms > best_rate:
            best_rate, best_size = expected / ms, node + 1
    return TokenTree(tuple(tokens[:best_size]), tuple(parents[:best_size]))
