"""The step. Everything the engine does is this loop body; plain decoding has empty trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from foredraft.cache.base import NO_MEMORY
from foredraft.cache.paged import Cache
from foredraft.core.record import NO_TIMES, StepRecord, StepTimes
from foredraft.engine import drafting
from foredraft.engine.guard import LoadedDrafter
from foredraft.engine.slots import as_cache_full
from foredraft.engine.turn import Turn
from foredraft.models.base import Target


def step(
    target: Target, batch: Sequence[Turn], most_tokens: int, clock: Callable[[], float]
) -> StepRecord:
    """Draft, score in one forward, verify, commit.

    At least one token for every row that reads all of its pending ones.

    Args:
        most_tokens: the most tokens that drafters prefill.
        clock: seconds.

    Raises:
        CacheFullError: there is no room for the entries; nothing has been drafted or read.
    """
    laps, loaded = [clock()], drafting.loaded_for(batch)
    begun_before_ms = sum(each.times.begin_ms for each in loaded)
    drafting.allow(batch)
    _reserve(target.cache, batch)
    drafting.read(batch, most_tokens)
    drafting.propose(batch)
    laps.append(clock())
    rows = [turn.score_row() for turn in batch]
    scores = target.score(rows, drafting.taps(batch))
    fetched = scores.fetch(rows)
    laps.append(clock())
    for turn, row in zip(batch, fetched, strict=True):
        turn.verify(row)
    for turn in batch:
        turn.commit()
        target.cache.keep(turn.request.slot, *turn.kept)
    laps.append(clock())
    drafting.observe(batch, scores)
    laps.append(clock())
    times = _times(laps, begun_before_ms, loaded)
    return StepRecord(tuple(turn.record() for turn in batch), times)


def _reserve(cache: Cache, batch: Sequence[Turn]) -> None:
    """Reserve cache entries for pending and drafted tokens, before any token is drawn."""
    try:
        for turn in batch:
            turn.request.check_cache(cache)
            cache.reserve(turn.request.slot, turn.most_tokens)
    except NO_MEMORY as error:
        raise as_cache_full(error) from error


def _times(
    laps: Sequence[float], begun_before_ms: float, loaded: Sequence[LoadedDrafter]
) -> StepTimes:
    """Milliseconds of each part of a step; the drafters' own times are reset, and left in `taken`.

    Args:
        laps: seconds at the start of the step and at the end of each part.
        begun_before_ms: time of `Drafter.begin` calls before the step.
    """
    for each in loaded:
        each.taken, each.times = each.times, NO_TIMES
    draft_ms, score_ms, verify_ms, learn_ms = (1e3 * (end - start) for start, end in pairwise(laps))
    begin_ms = sum(each.taken.begin_ms for each in loaded)
    read_ms = sum(each.taken.read_ms for each in loaded)
    draft_ms -= begin_ms - begun_before_ms + read_ms
    num_read = sum(each.taken.num_read for each in loaded)
    spent = max(0.0, draft_ms), score_ms, verify_ms, learn_ms, read_ms, begin_ms
    return StepTimes(*spent, num_read=num_read)
