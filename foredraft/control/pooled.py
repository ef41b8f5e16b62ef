"""Which draft positions of all rows are worth a step's time: one pool, the likeliest first.

Each row comes with the drafter that is to draft for it. All positions of all rows go into one pool,
ordered by the chance that what fills them is accepted; a row's positions keep their order. Of all
prefixes of the pool the one with the most expected committed tokens per millisecond is taken; the
empty one is plain decoding (TETRIS, arXiv 2502.15197; DSpark's confidence scheduling). A position
that a drafter leaves empty costs nothing: what is weighed is the nodes that it is expected to fill.
A drafter's fixed time is charged once, with its first row; where it takes a forward for each token,
each depth is charged once for all rows that get there.

Shape legend: K positions; 2 for filled, and filled and accepted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any, NamedTuple

import numpy.typing as npt

from foredraft.core.cost import price_of


@dataclass(frozen=True)
class PooledRow:
    """A row that may draft.

    Attributes:
        room: most nodes.
        rates_2K: the chance of each position to be filled, and to be filled and accepted.
        drafter: drafts for it.
        join_ms: what beginning to follow it takes the drafter, for each of the steps to come.
    """

    room: int
    rates_2K: npt.NDArray[Any]
    drafter: str = ""
    join_ms: float = 0.0


@dataclass(frozen=True)
class DrafterCost:
    """Drafting time of a step, in milliseconds by the number of rows: 0, 1, 2, …

    Attributes:
        asking: to propose, or one of its forwards where it takes one for each token.
        following: to follow texts, where it drafts for so many rows.
        by_token: whether each token of a draft takes a forward.
    """

    asking: Sequence[float]
    following: Sequence[float]
    by_token: bool = False

    def ms(self, num_rows: int, depth: float) -> float:
        """For so many rows that draft to this depth."""
        asking = self.asking[num_rows] * (depth if self.by_token else 1.0)
        return asking + self.following[num_rows]


@dataclass(frozen=True)
class Pooled:
    """A prefix of the pool.

    Attributes:
        budgets: positions of each row.
        nodes: how many are expected to be filled.
        accepted: how many are expected to be accepted.
        ms: what the step is expected to take.
        worst_ms: what it takes if all positions are filled.
        rate: expected committed tokens a millisecond.
        best_rate: of the best prefix that drafts anything, also where it is below plain decoding or
            may not be taken; 0: there is none.
    """

    budgets: tuple[int, ...]
    nodes: float
    accepted: float
    ms: float
    worst_ms: float
    rate: float
    best_rate: float = 0.0


class _Position(NamedTuple):
    """A draft position of a row, and the chances that it is filled, and filled and accepted.

    Attributes:
        share: of what fills it, so much is accepted; where later positions are likelier than it, of
            all of them together.
    """

    share: float
    row: int
    filled: float
    accepted: float


@dataclass
class _Asked:
    """Drafting time for the rows that are in the prefix so far."""

    cost: DrafterCost
    num_rows: int = 0
    by_depth: Counter[int] = field(default_factory=Counter)

    def grow(self, depth: int, filled: float) -> tuple[float, float]:
        """A row drafts one position more; the milliseconds that are added, expected and at most.

        Args:
            depth: positions that it has so far.
            filled: the chance that this one is filled: else the forward for it is not run.
        """
        cost, added_ms = self.cost, 0.0
        if not depth:
            self.num_rows = n = self.num_rows + 1
            added_ms += cost.following[n] - cost.following[n - 1]
            if not cost.by_token:
                added_ms += cost.asking[n] - cost.asking[n - 1]
        if not cost.by_token:
            return added_ms, added_ms
        self.by_depth[depth] = n = self.by_depth[depth] + 1
        forward_ms = cost.asking[n] - cost.asking[n - 1]
        return added_ms + filled * forward_ms, added_ms + forward_ms


def best_prefix(
    rows: Sequence[PooledRow],
    num_plain: int,
    step_ms: Sequence[float],
    costs: Mapping[str, DrafterCost],
    most_ms: float = float("inf"),
) -> Pooled:
    """The best prefix; an empty one if nothing pays.

    Args:
        rows: that may draft.
        num_plain: rows of the batch, each of which commits a token anyway.
        step_ms: the forward with 0, 1, … nodes; no more may be drafted.
        costs: of the drafters.
        most_ms: that the step may take if all positions are filled.
    """
    pool = sorted(
        (each for i, row in enumerate(rows) for each in _positions(i, row)),
        key=lambda position: -position.share,  # in order where equal: a row's stay so
    )[: len(step_ms) - 1]
    asked = {row.drafter: _Asked(costs[row.drafter]) for row in rows}
    times, budgets = tuple(step_ms), [0] * len(rows)
    nodes = accepted = draft_ms = most_draft_ms = best_rate = 0.0
    plain_rate = num_plain / times[0]
    best, taken = Pooled((0,) * len(rows), 0.0, 0.0, times[0], times[0], plain_rate), 0
    for total, (_, index, filled, right) in enumerate(pool, start=1):
        row, depth = rows[index], budgets[index]
        added_ms, most_added_ms = asked[row.drafter].grow(depth, filled)
        join_ms = 0.0 if depth else row.join_ms
        draft_ms += join_ms + added_ms
        most_draft_ms += join_ms + most_added_ms
        nodes, accepted, budgets[index] = nodes + filled, accepted + right, depth + 1
        worst_ms = price_of(times, total) + most_draft_ms
        ms = price_of(times, nodes) + draft_ms
        rate = (num_plain + accepted) / ms
        best_rate = max(best_rate, rate)
        if rate > best.rate and worst_ms <= most_ms:
            best, taken = Pooled((), nodes, accepted, ms, worst_ms, rate), total
    given = Counter(position.row for position in pool[:taken])
    return replace(best, budgets=tuple(given[i] for i in range(len(rows))), best_rate=best_rate)


def _positions(index: int, row: PooledRow) -> list[_Position]:
    """A row's positions, their shares falling: a likelier one lends its share to those before."""
    blocks: list[tuple[int, float, float]] = []
    filled_K, right_K = row.rates_2K[:, : row.room].tolist()
    for filled, right in zip(filled_K, right_K, strict=True):
        count = 1
        while blocks and right * blocks[-1][1] >= blocks[-1][2] * filled:
            more, more_filled, more_right = blocks.pop()
            count, filled, right = count + more, filled + more_filled, right + more_right
        blocks.append((count, filled, right))
    shares = [right / max(filled, 1e-9) for count, filled, right in blocks for _ in range(count)]
    return [_Position(*each) for each in zip(shares, repeat(index), filled_K, right_K)]
