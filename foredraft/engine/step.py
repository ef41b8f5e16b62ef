"""The step. Everything the engine does is this loop body; plain decoding has empty trees."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from foredraft.cache.base import NO_MEMORY, Cache
from foredraft.control.base import Allowance, Controller
from foredraft.core.proposal import NO_PROPOSAL, Proposal
from foredraft.core.record import StepRecord, StepTimes
from foredraft.core.tree import TokenTree
from foredraft.engine.commit import Commit, commit
from foredraft.engine.fetch import fetch
from foredraft.engine.guard import GuardedDrafter
from foredraft.engine.places import as_cache_full
from foredraft.engine.row import Turn
from foredraft.models.base import Scores, Target


@dataclass(frozen=True)
class Parts:
    """What a step talks to; ``report`` is told of it when it is over, ``clock`` is in seconds."""

    controller: Controller
    drafter: GuardedDrafter
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
    forced, asked = _forced(parts.controller, batch, allowances)
    _reserve(parts.target.cache, batch, asked, forced)
    proposals = _proposals(parts.drafter, batch, asked, forced)
    laps.append(parts.clock())
    taps = _taps_for(parts.drafter, allowances)
    scores = parts.target.score([*map(Turn.score_row, batch, proposals)], taps)
    fetched = fetch(scores, [t.row.rules for t in batch], [t.draw_key for t in batch])
    laps.append(parts.clock())
    verdicts = [*map(Turn.verify, batch, proposals, fetched)]
    commits = [*map(commit, batch, proposals, verdicts)]
    for done in commits:
        parts.target.cache.keep(done.row.request.slot, *done.kept)
    laps.append(parts.clock())
    _observe(parts.drafter, commits, proposals, scores)
    laps.append(parts.clock())
    rows = tuple(map(Commit.record, commits, asked, proposals, verdicts))
    parts.report(StepRecord(rows, _times(laps)))


def _allowances(controller: Controller, batch: Sequence[Turn]) -> list[Allowance]:
    """The controller's, for rows that get to draft; nothing for chunks of prompts."""
    drafting = [turn for turn in batch if turn.reads_all and turn.may_draft]
    allowed = iter(controller.allow([turn.row.request for turn in drafting]))
    return [next(allowed) if t.reads_all and t.may_draft else Allowance(0) for t in batch]


def _forced(
    controller: Controller, batch: Sequence[Turn], allowances: Sequence[Allowance]
) -> tuple[list[tuple[int, ...]], list[Allowance]]:
    """Drafts of rows whose rules leave no choice, and what is left for the drafter to do.

    Where as much is forced as a row may draft, or more, the drafter has nothing to add and is not
    asked. It follows from the committed text alone, as drafts that are drawn want it of budgets.
    """
    if not getattr(controller, "drafts_forced", False):
        return [()] * len(batch), [*allowances]
    pairs = [*zip((turn.forced for turn in batch), allowances, strict=True)]
    forced = [chain if len(chain) >= allowed.budget else () for chain, allowed in pairs]
    left = zip(forced, allowances, strict=True)
    return forced, [replace(a, budget=0) if chain else a for chain, a in left]


def _reserve(
    cache: Cache,
    batch: Sequence[Turn],
    allowances: Sequence[Allowance],
    forced: Sequence[Sequence[int]],
) -> None:
    """Room for what may be read and drafted: it is known before anything is drawn."""
    try:
        for turn, allowance, chain in zip(batch, allowances, forced, strict=True):
            turn.row.check(cache)
            size = turn.num_read + allowance.budget + len(chain)
            cache.reserve(turn.row.request.slot, size)
    except NO_MEMORY as error:
        raise as_cache_full(error) from error


def _proposals(
    drafter: GuardedDrafter,
    batch: Sequence[Turn],
    allowances: Sequence[Allowance],
    forced: Sequence[Sequence[int]],
) -> list[Proposal]:
    """One a row. Only what the drafter is asked about is described to it."""
    asked = [
        turn.draft_row(allowed)
        for turn, allowed in zip(batch, allowances, strict=True)
        if drafter.is_asked(turn.row.request_id, allowed.budget, allowed.drafter)
    ]
    found = drafter.propose(asked) if asked else {}
    return [
        Proposal.chosen(TokenTree.chain(chain))
        if chain
        else found.get(turn.row.request_id, NO_PROPOSAL)
        for turn, chain in zip(batch, forced, strict=True)
    ]


def _observe(
    drafter: GuardedDrafter,
    commits: Sequence[Commit],
    proposals: Sequence[Proposal],
    scores: Scores,
) -> None:
    """Tell the drafter of the rows that it watches."""
    watched = [i for i, done in enumerate(commits) if drafter.watches(done.row.request_id)]
    if watched:
        drafter.observe([commits[i].observation(proposals[i], scores[i]) for i in watched])


def _taps_for(drafter: GuardedDrafter, allowances: Sequence[Allowance]) -> Sequence[int]:
    """Hidden states are fetched for drafts to come, or where the drafter keeps all of them."""
    drafts = any(allowance.budget for allowance in allowances)
    return drafter.taps if drafts or drafter.layers else ()


def _times(laps: Sequence[float]) -> StepTimes:
    return StepTimes(*(1e3 * (end - start) for start, end in pairwise(laps)))
