"""From a verdict to committed tokens: what stops a request cuts text, ids and counts alike."""

from __future__ import annotations

from dataclasses import dataclass

from foredraft.core.errors import NonFiniteScoresError
from foredraft.core.proposal import Proposal
from foredraft.core.request import FinishReason
from foredraft.core.verify import Verdict
from foredraft.engine.row import Row


@dataclass(frozen=True)
class Commit:
    """What one step did to one row.

    Attributes:
        tokens: committed tokens, in order; empty only after an error.
        num_accepted: how many of them were drafted.
        num_pending: tokens that entered the cache as committed text.
        path: tree nodes that stay in the cache.
        finish_reason: why the request is over, or None.
    """

    row: Row
    tokens: tuple[int, ...]
    num_accepted: int
    num_pending: int
    path: tuple[int, ...]
    finish_reason: FinishReason | None


def commit(row: Row, proposal: Proposal, verdict: Verdict | NonFiniteScoresError) -> Commit:
    """Append the accepted tokens and the next one, up to whatever ends the request."""
    request = row.request
    num_pending = len(request.tokens) - request.num_cached
    if isinstance(verdict, NonFiniteScoresError):
        row.error, request.finish_reason = str(verdict), "error"
        return Commit(row, (), 0, 0, (), "error")
    offered = (*(proposal.tree.tokens[node] for node in verdict.path), verdict.next_token)
    taken = _append(row, offered)
    num_accepted = min(taken, verdict.num_accepted)
    request.stats.record(len(proposal.tree), verdict.num_accepted, num_accepted, taken)
    # The last committed token stays pending, also when a stop made it a drafted one.
    path = verdict.path[: min(num_accepted, taken - 1)]
    request.num_cached += num_pending + len(path)
    request.check()
    return Commit(row, offered[:taken], num_accepted, num_pending, path, request.finish_reason)


def _append(row: Row, offered: tuple[int, ...]) -> int:
    """Append tokens until one ends the request; returns how many were taken."""
    request = row.request
    for taken, token in enumerate(offered, start=1):
        request.tokens.append(token)
        drafted = taken < len(offered)
        if token in row.stop_ids or row.text.push(token, drafted):
            request.finish_reason = "stop"
        elif request.num_remaining <= 0:
            request.finish_reason = "length"
        if request.finish_reason:
            return taken
    return len(offered)
