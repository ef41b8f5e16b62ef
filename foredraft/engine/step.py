"""The step. Everything the engine does is this loop body; plain decoding has empty trees."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from foredraft.cache.base import NO_MEMORY, Cache
from foredraft.core.record import DrafterTimes, StepRecord, StepTimes
from foredraft.engine.drafting import Drafting
from foredraft.engine.fetch import fetch
from foredraft.engine.slots import as_cache_full
from foredraft.engine.turn import Turn
from foredraft.models.base import Target


@dataclass(frozen=True)
class Stepper:
    """Runs steps.

    Args:
        target: the model whose text it is.
        drafting: asks controllers and drafters.
        clock: seconds, for the times of steps.
    """

    target: Target
    drafting: Drafting
    clock: Callable[[], float]

    def step(self, batch: Sequence[Turn]) -> StepRecord:
        """Draft, score in one forward, verify, commit.

        At least one token for every row that reads all of its pending ones.

        Raises:
            CacheFullError: there is no room for the entries; nothing has been drafted or read.
        """
        target, drafting, laps = self.target, self.drafting, [self.clock()]
        begun_before_ms = drafting.begin_ms
        drafting.allow(batch)
        _reserve(target.cache, batch)
        drafting.read(batch)
        drafting.propose(batch)
        laps.append(self.clock())
        scores = target.score([turn.score_row() for turn in batch], drafting.taps(batch))
        rules = [turn.request.rules for turn in batch]
        fetched = fetch(scores, rules, [turn.draw_key for turn in batch])
        laps.append(self.clock())
        for turn, row in zip(batch, fetched, strict=True):
            turn.verify(row)
        for turn in batch:
            turn.commit()
        for turn in batch:
            target.cache.keep(turn.request.slot, *turn.kept)
        laps.append(self.clock())
        drafting.observe(batch, scores)
        laps.append(self.clock())
        return StepRecord(tuple(batch), _times(laps, begun_before_ms, drafting.take_times()))


def _reserve(cache: Cache, batch: Sequence[Turn]) -> None:
    """Reserve cache entries for pending and drafted tokens, before any token is drawn."""
    try:
        for turn in batch:
            turn.request.check_cache(cache)
            cache.reserve(turn.request.slot, turn.most_tokens)
    except NO_MEMORY as error:
        raise as_cache_full(error) from error


def _times(
    laps: Sequence[float], begun_before_ms: float, drafters: Mapping[str, DrafterTimes]
) -> StepTimes:
    """Times of the parts of a step.

    Args:
        laps: seconds at which they ended; the first part is drafting.
        begun_before_ms: what beginning to follow texts took before the step.
    """
    draft_ms, score_ms, verify_ms, learn_ms = (1e3 * (end - start) for start, end in pairwise(laps))
    begin_ms = sum(taken.begin_ms for taken in drafters.values())
    read_ms = sum(taken.read_ms for taken in drafters.values())
    draft_ms -= begin_ms - begun_before_ms + read_ms
    return StepTimes(
        *(max(0.0, draft_ms), score_ms, verify_ms, learn_ms, read_ms, begin_ms), drafters=drafters
    )
