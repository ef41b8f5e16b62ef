"""From a verdict to committed tokens: what stops a request cuts text, ids and counts alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.control.base import Allowance
from foredraft.core.proposal import Proposal
from foredraft.core.record import RowRecord
from foredraft.core.request import FinishReason
from foredraft.core.verify import Verdict
from foredraft.drafters.base import Observation
from foredraft.engine.row import Row, Turn
from foredraft.models.base import RowScores


@dataclass(frozen=True)
class Commit:
    """What one step did to one row.

    Attributes:
        tokens: committed tokens, in order; none after a chunk of a prompt, or an error.
        num_accepted: how many of them were drafted.
        start: where in the cache the tokens read begin.
        num_read: pending tokens that entered the cache.
        path: tree nodes that stay in the cache.
        finish_reason: why the request is over, or None.
        is_aloud: what was read went in as nodes; see `PromptLogprobs`.
    """

    row: Row
    tokens: tuple[int, ...]
    num_accepted: int
    start: int
    num_read: int
    path: tuple[int, ...]
    finish_reason: FinishReason | None
    is_aloud: bool = False

    @property
    def kept(self) -> tuple[int, Sequence[int]]:
        """What stays in the cache: so many pending tokens, and these nodes behind them."""
        return (1, range(self.num_read - 1)) if self.is_aloud else (self.num_read, self.path)

    def observation(self, proposal: Proposal, scores: RowScores) -> Observation:
        """What the drafter learns of it."""
        return Observation(
            request_id=self.row.request_id,
            committed=self.tokens,
            num_accepted=self.num_accepted,
            proposal=proposal,
            path=self.path,
            logits_NV=scores.logits_NV[:0] if self.is_aloud else scores.logits_NV,
            taps=scores.taps,
            start=self.start,
            num_read=self.num_read,
            tokens=tuple(self.row.request.tokens),
        )

    def record(
        self, allowance: Allowance, proposal: Proposal, verdict: Verdict | None
    ) -> RowRecord:
        """What everyone else does."""
        return RowRecord(
            request_id=self.row.request_id,
            context=self.start,
            num_read=self.num_read,
            budget=allowance.budget,
            proposal=proposal,
            verdict=verdict,
            committed=self.tokens,
            num_accepted=self.num_accepted,
            finish_reason=self.finish_reason,
            drafter=allowance.drafter or None,
        )


def commit(turn: Turn, proposal: Proposal, verdict: Verdict | None) -> Commit:
    """Count what was read, and append the accepted tokens and the next one.

    Whatever ends the request ends it here: a stop, the limit, a verdict without a next token (what
    was accepted before it is kept), or a text that cannot be decoded.

    Args:
        verdict: None for a chunk of a prompt.
    """
    row, request = turn.row, turn.row.request
    start = request.num_cached
    offered: tuple[int, ...] = ()
    if verdict is not None:
        offered = tuple(proposal.tree.tokens[node] for node in verdict.path)
        offered += () if verdict.next_token is None else (verdict.next_token,)
    taken = _append(row, offered, 0 if verdict is None else verdict.num_accepted)
    row.keep_logprobs(taken)
    path: tuple[int, ...] = ()
    num_accepted = 0
    if verdict is not None:
        num_accepted = min(taken, verdict.num_accepted)
        request.stats.record(len(proposal.tree), verdict.num_accepted, num_accepted, taken)
        # The last committed token stays pending, also when a stop made it a drafted one.
        path = verdict.path[: max(0, min(num_accepted, taken - 1))]
        if verdict.error is not None:
            row.fail(verdict.error)
    request.num_cached += turn.num_read + len(path)
    if request.finish_reason != "error":
        request.check()
    tokens = offered[:taken]
    why = request.finish_reason
    return Commit(row, tokens, num_accepted, start, turn.num_read, path, why, turn.reads_aloud)


def _append(row: Row, offered: tuple[int, ...], num_drafted: int) -> int:
    """Append tokens until one ends the request; returns how many were taken."""
    request = row.request
    for taken, token in enumerate(offered, start=1):
        request.tokens.append(token)
        try:
            stopped = _read(row, token, taken <= num_drafted)
        except Exception as error:  # its own decoder's: the others go on
            row.fail(error)
            return taken
        if stopped:
            request.finish_reason = "stop"
        elif request.num_remaining <= 0:
            request.finish_reason = "length"
        if request.finish_reason:
            return taken
    return len(offered)


def _read(row: Row, token: int, drafted: bool) -> bool:
    """Add a token's text; True when it ends the request."""
    if token in row.stop_ids:
        row.text.push_stop(token, drafted)
        return True
    return row.text.push(token, drafted) or row.rules.is_complete(row.request.tokens)
