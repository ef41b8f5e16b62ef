"""The stages of a cascade, and what every cascade does with them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from foredraft.core.proposal import NO_PROPOSAL, Proposal
from foredraft.drafters.base import Drafter, DraftRequest, DraftRow, Observation
from foredraft.drafters.common.continuing import ContinuingDrafter

_log = logging.getLogger("foredraft")


@dataclass
class StageCounts:
    """What one stage has done.

    Attributes:
        asked: how often it was asked, once a row; for a draft model, the rows of its forwards.
        drafted: its tokens that the next one up looked at: the target, or in a vertical cascade
            the draft model.
        accepted: how many of them that one took.
    """

    asked: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass
class Stage:
    """A drafter in a cascade.

    Attributes:
        limit: most tokens to draft before it hands over to the next stage; None: no limit.
    """

    name: str
    drafter: Drafter
    limit: int | None = None
    counts: StageCounts = field(default_factory=StageCounts)

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[Proposal]:
        self.counts.asked += len(rows)
        return self.drafter.propose([self._limited(row) for row in rows])

    def propose_after(self, row: DraftRow, draft: Sequence[int]) -> Proposal:
        """Nothing, where the drafter cannot go on from a draft."""
        if not isinstance(self.drafter, ContinuingDrafter):
            return NO_PROPOSAL
        self.counts.asked += 1
        return self.drafter.propose_after(self._limited(row), draft)

    def hands_over(self, num_drafted: int) -> bool:
        return self.limit is not None and num_drafted >= self.limit

    def _limited(self, row: DraftRow) -> DraftRow:
        return row if self.limit is None else replace(row, budget=min(row.budget, self.limit))


class Cascade:
    """What both kinds share: every stage sees every request and every step.

    Args:
        stages: the cheapest first.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = tuple(stages)
        self._authors: dict[int, list[Stage]] = {}  # of each node under verification
        drafters = [stage.drafter for stage in stages]
        self.taps: Sequence[int] = sorted({tap for drafter in drafters for tap in drafter.taps})
        self.layers = tuple(layers for drafter in drafters for layers in drafter.layers)
        self.look_ahead = max((drafter.look_ahead for drafter in drafters), default=0)

    @property
    def stage_counts(self) -> Mapping[str, StageCounts]:
        """Counts since the drafter was built, by stage."""
        return {stage.name: stage.counts for stage in self._stages}

    def begin(self, request: DraftRequest) -> None:
        for stage in self._stages:
            stage.drafter.begin(request)

    def observe(self, observations: Sequence[Observation]) -> None:
        for seen in observations:
            authors = self._authors.pop(seen.request_id, [])
            for author in authors:
                author.counts.drafted += 1
            for node in seen.path if authors else ():  # none of them where it was not asked
                authors[node].counts.accepted += 1
        for stage in self._stages:
            stage.drafter.observe(observations)

    def end(self, request_id: int) -> None:
        self._authors.pop(request_id, None)
        with contextlib.ExitStack() as ends:  # all of them, whatever one of them raises
            for stage in self._stages:
                ends.callback(stage.drafter.end, request_id)
        _log.debug("cascade after request %d: %s", request_id, self.stage_counts)


def seeded(row: DraftRow, budget: int) -> DraftRow:
    """The same row for a stage whose tokens must be chosen."""
    if row.params.coupling == "seeded":
        return replace(row, budget=budget)
    return row.without_noise(budget)
