"""The step. Everything the engine does is this loop body; plain decoding has empty trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from foredraft.cache.base import NO_MEMORY, Cache
from foredraft.core.record import StepRecord, StepTimes
from foredraft.engine.drafting import Drafting
from foredraft.engine.fetch import fetch
from foredraft.engine.places import as_cache_full
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
        drafting.allow(batch)
        _reserve(target.cache, batch)
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
        return StepRecord(tuple(batch), _times(laps))


def _reserve(cache: Cache, batch: Sequence[Turn]) -> None:
    """Reserve cache entries for pending and drafted tokens, before any token is drawn."""
    try:
        for turn in batch:
            turn.request.check_cache(cache)
            cache.reserve(turn.request.slot, turn.most_tokens)
    except NO_MEMORY as error:
        raise as_cache_full(error) from error


def _times(laps: Sequence[float]) -> StepTimes:
    return StepTimes(*(1e3 * (end - start) for start, end in pairwise(laps)))
