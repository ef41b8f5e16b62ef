"""Which slots of all rows are worth a step's time: one pool, the likeliest first.

All slots of all rows go into one pool, ordered by the chance that what fills them is accepted; a
row's slots keep their order. Of all prefixes of the pool the one with the most expected committed
tokens per millisecond is taken; the empty one is plain decoding (TETRIS, arXiv 2502.15197; DSpark's
confidence scheduling). A slot that a drafter leaves empty costs nothing: what is weighed is the
nodes that it is expected to fill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy.typing as npt


@dataclass(frozen=True)
class PooledRow:
    """A row that may draft.

    Attributes:
        room: most nodes.
        rates_2K: the chance of each slot to be filled, and to be filled and accepted.
    """

    room: int
    rates_2K: npt.NDArray[Any]


@dataclass(frozen=True)
class Pooled:
    """A prefix of the pool.

    Attributes:
        budgets: slots of each row.
        nodes: how many are expected to be filled.
        accepted: how many are expected to be accepted.
        ms: what the step is expected to take.
        worst_ms: what it takes if all slots are filled.
        rate: expected committed tokens a millisecond.
    """

    budgets: tuple[int, ...]
    nodes: float
    accepted: float
    ms: float
    worst_ms: float
    rate: float


class _Segment(NamedTuple):
    """Slots of one row that only come together, up to number ``end``."""

    share: float
    row: int
    end: int
    nodes: float
    accepted: float


def best_prefix(
    rows: Sequence[PooledRow],
    num_plain: int,
    step_ms: Callable[[float], float],
    asking_ms: Callable[[int, float], float],
    most_nodes: int,
    most_ms: float = float("inf"),
) -> Pooled:
    """The best prefix; an empty one if nothing pays.

    Args:
        rows: that may draft.
        num_plain: rows of the batch, each of which commits a token anyway.
        step_ms: the forward with so many nodes.
        asking_ms: what the drafter takes for so many rows and nodes of all of them together; what
            it takes to follow rows included.
        most_nodes: of all budgets together.
        most_ms: that the step may take if all slots are filled.
    """
    pool = sorted(
        (segment for i, row in enumerate(rows) for segment in _segments(i, row)),
        key=lambda segment: -segment.share,
    )
    budgets, asked, total = [0] * len(rows), 0, 0
    nodes = accepted = 0.0
    plain_ms = step_ms(0.0) + asking_ms(0, 0.0)
    nothing = (0,) * len(rows)
    best, taken = Pooled(nothing, 0.0, 0.0, plain_ms, plain_ms, num_plain / plain_ms), 0
    for count, segment in enumerate(pool, start=1):
        asked += budgets[segment.row] == 0
        total += segment.end - budgets[segment.row]
        budgets[segment.row] = segment.end
        nodes, accepted = nodes + segment.nodes, accepted + segment.accepted
        worst_ms = step_ms(total) + asking_ms(asked, total)
        if total > most_nodes or worst_ms > most_ms:
            break
        ms = step_ms(nodes) + asking_ms(asked, nodes)
        if (num_plain + accepted) / ms > best.rate:
            rate = (num_plain + accepted) / ms
            best, taken = Pooled((), nodes, accepted, ms, worst_ms, rate), count
    if not taken:
        return best
    final = [0] * len(rows)
    for segment in pool[:taken]:
        final[segment.row] = segment.end
    return replace(best, budgets=tuple(final))


def _segments(index: int, row: PooledRow) -> list[_Segment]:
    """A row's slots, joined where a later one is likelier than one it stands behind."""
    found: list[_Segment] = []
    filled, accepted = row.rates_2K[:, : row.room].tolist()
    for slot, (n, a) in enumerate(zip(filled, accepted, strict=True), start=1):
        segment = _Segment(a / max(n, 1e-9), index, slot, n, a)
        while found and segment.share >= found[-1].share:
            n, a = segment.nodes + found[-1].nodes, segment.accepted + found[-1].accepted
            segment = _Segment(a / max(n, 1e-9), index, slot, n, a)
            found.pop()
        found.append(segment)
    return found
