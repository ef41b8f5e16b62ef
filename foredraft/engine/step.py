"""The step. Everything the engine does is this loop body; plain decoding has empty trees."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from foredraft.cache.base import Cache
from foredraft.control.base import Allowance, Controller
from foredraft.core.record import StepRecord, StepTimes
from foredraft.drafters.base import Drafter
from foredraft.engine.commit import Commit, commit
from foredraft.engine.fetch import fetch
from foredraft.engine.places import NO_MEMORY, as_cache_full
from foredraft.engine.row import Turn
from foredraft.models.base import Target


@dataclass(frozen=True)
class Parts:
    """What a step talks to; ``report`` is told of it when it is over, ``clock`` is in seconds."""

    controller: Controller
    drafter: Drafter
    target: Target
    report: Callable[[StepRecord], None]
    clock: Callable[[], float] = time.perf_counter


def step(parts: Parts, batch: Sequence[Turn]) -> None:
    """Draft, score in one forward, verify, commit.

    At least one token for every row that reads all of its pending ones.

    Raises:
        CacheFullError: there is no room for the entries; nothing has been drafted or read.
    """
    laps = [parts.clock()]
    allowances = _allowances(parts.controller, batch)
    _reserve(parts.target.cache, batch, allowances)
    proposals = parts.drafter.propose([*map(Turn.draft_row, batch, allowances)])
    laps.append(parts.clock())
    taps = _taps_for(parts.drafter, allowances)
    scores = parts.target.score([*map(Turn.score_row, batch, proposals)], taps)
    fetched = fetch(scores, [turn.row.rules for turn in batch])
    laps.append(parts.clock())
    verdicts = [
        turn.row.verify(proposal, row) if turn.reads_all else None
        for turn, proposal, row in zip(batch, proposals, fetched, strict=True)
    ]
    commits = [*map(commit, batch, proposals, verdicts)]
    for done in commits:
        parts.target.cache.keep(done.row.request.slot, done.num_read, done.path)
    laps.append(parts.clock())
    parts.drafter.observe([*map(Commit.observation, commits, proposals, scores)])
    laps.append(parts.clock())
    rows = tuple(map(Commit.record, commits, allowances, proposals, verdicts))
    parts.report(StepRecord(rows, _times(laps)))


def _allowances(controller: Controller, batch: Sequence[Turn]) -> list[Allowance]:
    """The controller's, for rows that get to draft; nothing for chunks of prompts."""
    drafting = [turn for turn in batch if turn.reads_all and turn.may_draft]
    allowed = iter(controller.allow([turn.row.request for turn in drafting]))
    return [next(allowed) if t.reads_all and t.may_draft else Allowance(0) for t in batch]


def _reserve(cache: Cache, batch: Sequence[Turn], allowances: Sequence[Allowance]) -> None:
    """Room for what may be read and drafted: it is known before anything is drawn."""
    try:
        for turn, allowance in zip(batch, allowances, strict=True):
            turn.row.check(cache)
            cache.reserve(turn.row.request.slot, turn.num_read + allowance.budget)
    except NO_MEMORY as error:
        raise as_cache_full(error) from error


def _taps_for(drafter: Drafter, allowances: Sequence[Allowance]) -> Sequence[int]:
    """Hidden states are fetched for drafts to come, or where the drafter keeps all of them."""
    drafts = any(allowance.budget for allowance in allowances)
    return drafter.taps if drafts or drafter.layers else ()


def _times(laps: Sequence[float]) -> StepTimes:
    return StepTimes(*(1e3 * (end - start) for start, end in pairwise(laps)))
