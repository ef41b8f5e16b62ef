"""Which draft positions of all rows are worth a step's time: one pool, the likeliest first.

Each row comes with the drafter that is to draft for it. All positions of all rows go into one pool,
ordered by the chance that what fills them is accepted; a row's positions keep their order. Of all
prefixes of the pool the one with the most expected committed tokens per millisecond is taken; the
empty one is plain decoding (TETRIS, arXiv 2502.15197; DSpark's confidence scheduling). A position
that a drafter leaves empty costs nothing: what is weighed is the nodes that it is expected to fill.
What a drafter takes whatever it drafts is charged once, with its first row; where it takes a
forward for each token, each depth is charged once for all rows that get there.

Shape legend: K positions; 2 for filled, and filled and accepted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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


class _Segment(NamedTuple):
    """Positions of one row that only come together, up to number ``end``."""

    share: float
    row: int
    end: int
    nodes: float
    accepted: float


@dataclass
class _Asked:
    """Drafting time for the rows that are in the prefix so far."""

    cost: DrafterCost
    num_rows: int = 0
    by_depth: Counter[int] = field(default_factory=Counter)

    def grow(self, filled_K: Sequence[float], before: int, after: int) -> tuple[float, float]:
        """A row drafts up to another position; returns the milliseconds that are added: what is
        expected, and at most.

        Args:
            filled_K: the chance that the row fills each position: else no forward is run for it.
        """
        cost, added_ms, most_ms = self.cost, 0.0, 0.0
        if not before:
            self.num_rows = n = self.num_rows + 1
            added_ms += cost.following[n] - cost.following[n - 1]
            if not cost.by_token:
                added_ms += cost.asking[n] - cost.asking[n - 1]
            most_ms = added_ms
        for depth in range(before, after) if cost.by_token else ():
            self.by_depth[depth] = n = self.by_depth[depth] + 1
            most_ms += cost.asking[n] - cost.asking[n - 1]
            added_ms += (cost.asking[n] - cost.asking[n - 1]) * filled_K[depth]
        return added_ms, most_ms


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
        (segment for i, row in enumerate(rows) for segment in _segments(i, row)),
        key=lambda segment: -segment.share,
    )
    asked = {row.drafter: _Asked(costs[row.drafter]) for row in rows}
    times, most_nodes = tuple(step_ms), len(step_ms) - 1
    budgets, total = [0] * len(rows), 0
    nodes = accepted = draft_ms = worst_draft_ms = best_rate = 0.0
    filled_RK = [row.rates_2K[0].tolist() for row in rows]
    plain_rate = num_plain / times[0]
    best, taken = Pooled((0,) * len(rows), 0.0, 0.0, times[0], times[0], plain_rate), 0
    for count, (_, index, end, more_nodes, more_accepted) in enumerate(pool, start=1):
        row, before = rows[index], budgets[index]
        added_ms, most_added_ms = asked[row.drafter].grow(filled_RK[index], before, end)
        join_ms = 0.0 if before else row.join_ms
        draft_ms, worst_draft_ms = (
            draft_ms + added_ms + join_ms,
            worst_draft_ms + most_added_ms + join_ms,
        )
        total, budgets[index] = total + end - before, end
        nodes, accepted = nodes + more_nodes, accepted + more_accepted
        if total > most_nodes:
            break
        worst_ms = price_of(times, total) + worst_draft_ms
        ms = price_of(times, nodes) + draft_ms
        rate = (num_plain + accepted) / ms
        best_rate = max(best_rate, rate)
        if rate > best.rate and worst_ms <= most_ms:
            best, taken = Pooled((), nodes, accepted, ms, worst_ms, rate), count
    final = [0] * len(rows)
    for segment in pool[:taken]:
        final[segment.row] = segment.end
    return replace(best, budgets=tuple(final), best_rate=best_rate)


def _segments(index: int, row: PooledRow) -> list[_Segment]:
    """A row's positions, joined where a later one is likelier than one it stands behind."""
    found: list[_Segment] = []
    filled, accepted = row.rates_2K[:, : row.room].tolist()
    for end, (n, a) in enumerate(zip(filled, accepted, strict=True), start=1):
        segment = _Segment(a / max(n, 1e-9), index, end, n, a)
        while found and segment.share >= found[-1].share:
            n, a = segment.nodes + found[-1].nodes, segment.accepted + found[-1].accepted
            segment = _Segment(a / max(n, 1e-9), index, end, n, a)
            found.pop()
        found.append(segment)
    return found
