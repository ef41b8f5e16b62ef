"""What one step did, as plain data: for the controller, traces and benches."""

from __future__ import annotations

from dataclasses import dataclass

from foredraft.core.proposal import Proposal
from foredraft.core.request import FinishReason
from foredraft.core.verify import Verdict


@dataclass(frozen=True)
class RowRecord:
    """One row's part of a step.

    Attributes:
        context: tokens in the cache before the step.
        num_read: pending tokens that the step read.
        budget: nodes that its drafter might have drafted; 0 where it was not asked.
        proposal: what was drafted, by the drafter or by the row's rules.
        verdict: what verification said; None after a chunk of a prompt.
        committed: the tokens that were committed, in order.
        num_accepted: how many of them were drafted.
        finish_reason: why the request is over, or None.
        drafter: of several that are loaded the one that drafted; None where there is no choice.
    """

    request_id: int
    context: int
    num_read: int
    budget: int
    proposal: Proposal
    verdict: Verdict | None
    committed: tuple[int, ...]
    num_accepted: int
    finish_reason: FinishReason | None
    drafter: str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that the forward read for this row, drafted ones included."""
        return self.num_read + len(self.proposal.tree)


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of a step by what was done.

    Attributes:
        draft_ms: the drafter proposed.
        score_ms: the target's forward, until what verification needs of it was there.
        verify_ms: verification, commits, and the cache.
        learn_ms: the drafter observed.
    """

    draft_ms: float
    score_ms: float
    verify_ms: float
    learn_ms: float

    @property
    def total_ms(self) -> float:
        return self.draft_ms + self.score_ms + self.verify_ms + self.learn_ms


@dataclass(frozen=True)
class StepRecord:
    """A step.

    Attributes:
        rows: the rows that took part, in the order of the batch.
        times: how long its parts took.
        num_waiting: requests that were waiting for room in the batch.
        num_preempted: requests that gave their place in the cache away since the record before.
    """

    rows: tuple[RowRecord, ...]
    times: StepTimes
    num_waiting: int = 0
    num_preempted: int = 0

    @property
    def is_decoding(self) -> bool:
        """Whether all rows read one pending token: no prompt was read."""
        return all(row.num_read == 1 for row in self.rows)

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """(tokens, context) of each row, as `CostModel` takes them."""
        return tuple((row.num_tokens, row.context) for row in self.rows)
