"""The step. Everything the engine does is this loop body; plain decoding has empty trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foredraft.control.base import Controller
from foredraft.core.choices import KeyedDraftChoices, KeyedVerifyChoices
from foredraft.core.errors import NonFiniteScoresError
from foredraft.core.proposal import Proposal
from foredraft.core.sampling import TargetProbs
from foredraft.core.verify import Verdict, verify
from foredraft.drafters.base import Drafter, DraftRow, Observation
from foredraft.engine.commit import Commit, commit
from foredraft.engine.row import Row
from foredraft.engine.scheduler import Scheduler
from foredraft.models.base import RowScores, ScoreRow, Target

Trace = Callable[[Sequence[Proposal], Sequence[Commit]], None]


@dataclass(frozen=True)
class Parts:
    """The five things a step talks to."""

    scheduler: Scheduler
    controller: Controller
    drafter: Drafter
    target: Target
    trace: Trace


def step(parts: Parts) -> list[Commit]:
    """Draft, score in one forward, verify, commit; at least one token for every row."""
    batch = parts.scheduler.next_batch()
    for row in batch:
        row.check(parts.target.cache)
    budgets = parts.controller.budget([row.request for row in batch])
    proposals = parts.drafter.propose([*map(_draft_row, batch, budgets)])
    scores = parts.target.score([*map(_score_row, batch, proposals)], parts.drafter.taps)
    verdicts = [*map(_verify_row, batch, proposals, scores)]
    commits = [*map(commit, batch, proposals, verdicts)]
    for done in commits:
        parts.target.cache.keep(done.row.request.slot, done.num_pending, done.path)
    parts.drafter.observe(_observations(commits, proposals, scores))
    parts.controller.observe([row.request for row in batch])
    parts.trace(proposals, commits)
    return commits


def _draft_row(row: Row, budget: int) -> DraftRow:
    request = row.request
    choices = KeyedDraftChoices(request.seed, len(request.tokens))
    return DraftRow(
        row.request_id, tuple(request.tokens), request.params, budget, choices, request.slot
    )


def _score_row(row: Row, proposal: Proposal) -> ScoreRow:
    return ScoreRow(row.request.slot, row.request.pending, proposal.tree)


def _verify_row(row: Row, proposal: Proposal, scores: RowScores) -> Verdict | NonFiniteScoresError:
    request = row.request
    probs = TargetProbs(scores.logits_NV, request.params)
    try:
        return verify(proposal, probs, KeyedVerifyChoices(request.seed, len(request.tokens)))
    except NonFiniteScoresError as error:  # this row is lost; the others are not
        return error


def _observations(
    commits: Sequence[Commit], proposals: Sequence[Proposal], scores: Sequence[RowScores]
) -> list[Observation]:
    return [
        Observation(
            request_id=done.row.request_id,
            committed=done.tokens,
            num_accepted=done.num_accepted,
            proposal=proposal,
            path=done.path,
            logits_NV=score.logits_NV,
            taps=score.taps,
        )
        for done, proposal, score in zip(commits, proposals, scores, strict=True)
        if done.tokens  # a row that ended in an error has nothing to learn from
    ]
