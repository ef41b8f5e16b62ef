"""Record of one step as plain data, for controllers, traces, metrics and benches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from foredraft.core.proposal import NO_PROPOSAL, Proposal
from foredraft.core.verify import Verdict

FinishReason = Literal["stop", "length", "error", "cancelled"]
Drafts = tuple[tuple[str, int], ...]
"""Names of drafters, each with the draft tokens of a step that are its own: at least one."""
_NOTHING = torch.empty(0, 0)


@dataclass
class SpeculationStats:
    """Counts of one request. ``drafted == accepted + rejected + discarded`` always holds.

    Attributes:
        steps: target forwards that committed tokens.
        drafted: draft tokens sent to verification, in all branches of trees and those that rules
            force.
        accepted: draft tokens committed.
        rejected: draft tokens that verification did not accept.
        discarded: draft tokens accepted by verification but past the stop.
        committed: all tokens committed, drafted or the target's own.
        drafters: draft tokens by drafter; "rules" for tokens that rules force.
        plain_steps: steps without a draft, by the kind of the reason.
        plain_reason: why most of them had none, such as "nothing pays: best 0.98"; None: all steps
            drafted.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0
    discarded: int = 0
    committed: int = 0
    drafters: dict[str, int] = field(default_factory=dict)
    plain_steps: dict[str, int] = field(default_factory=dict)
    plain_reason: str | None = None

    @property
    def committed_per_step(self) -> float:
        """Tokens committed a step, 1.0 for plain decoding; 0.0 before the first step."""
        return self.committed / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of the draft tokens that were committed; 0.0 if there were none."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def record(
        self, drafts: Drafts, reason: str, verified: int, accepted: int, committed: int
    ) -> None:
        """Add one step: ``verified`` nodes passed verification, ``accepted`` of them were kept.

        Args:
            drafts: draft tokens by drafter.
            reason: why there are none, else "". Reasons of one kind differ after the colon.
        """
        drafted = sum(count for _, count in drafts)
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted
        self.rejected += drafted - verified
        self.discarded += verified - accepted
        self.committed += committed
        for drafter, count in drafts:
            self.drafters[drafter] = self.drafters.get(drafter, 0) + count
        if not reason:
            return
        kind = reason.partition(":")[0]
        self.plain_steps[kind] = self.plain_steps.get(kind, 0) + 1
        if self.plain_steps[kind] == max(self.plain_steps.values()):
            self.plain_reason = reason


class RowStep(NamedTuple):
    """One row's part of a step, or of a chunk of its prompt.

    Drafters get it with the tensors and the text of the step. Controllers and traces get plain
    data: a trace that collects records keeps no request, and no tensor unless evidence was asked
    for (`foredraft.core.verify.recorded`).

    Attributes:
        context: tokens in the cache before the step.
        num_read: pending tokens that the step reads.
        drafter: name of the row's current drafter; None: the row has none.
        budget: nodes that this drafter was asked for; 0 if it was not asked or not ready.
        proposal: the draft, from the drafter or from the row's rules; for controllers and traces
            `Proposal.without_tensors`.
        verdict: result of verification; None after a chunk of a prompt.
        committed: the tokens that were committed, in order; none after a chunk.
        num_accepted: how many of them were drafted.
        finish_reason: why the request has finished; None while it runs.
        num_forced: leading nodes of the proposal that the row's rules force.
        plain_reason: why nothing was drafted, if so; "" if the row was not to draft.
        path: nodes of the proposal that were committed, and stay in the cache.
        tokens: all committed tokens, prompt included.
        logits_NV: the target's logits at the root (row 0) and at each node; no rows after a chunk.
        taps: hidden states of the layers the drafter asked for, [T, E] over the tokens read and
            the nodes; empty where the step did not fetch them. See `hidden`.
    """

    request_id: int
    context: int
    num_read: int
    drafter: str | None = None
    budget: int = 0
    proposal: Proposal = NO_PROPOSAL
    verdict: Verdict | None = None
    committed: Sequence[int] = ()
    num_accepted: int = 0
    finish_reason: FinishReason | None = None
    num_forced: int = 0
    plain_reason: str = ""
    path: Sequence[int] = ()
    tokens: Sequence[int] = ()
    logits_NV: Tensor = _NOTHING
    taps: Mapping[int, Tensor] = MappingProxyType({})

    @property
    def num_tokens(self) -> int:
        """Tokens that the forward read for this row, drafted ones included."""
        return self.num_read + len(self.proposal.tree)

    @property
    def end(self) -> int:
        """The position after the last token that the target's cache now holds."""
        return self.context + self.num_read + len(self.path)

    def hidden(self, layer: int) -> Tensor:
        """Outputs [end - context, E] of a tapped layer for the tokens that stay: read, accepted."""
        return self.hidden_of((layer,))[0]

    def hidden_of(self, layers: Sequence[int]) -> list[Tensor]:
        """`hidden` of several layers, which need the tokens' numbers once on their device."""
        nodes = [self.num_read + node for node in self.path]
        end, taps = self.num_read + len(nodes), [self.taps[layer] for layer in layers]
        if nodes == [*range(self.num_read, end)]:
            return [tap_TE[:end] for tap_TE in taps]
        kept_T = torch.tensor([*range(self.num_read), *nodes])
        if taps:
            kept_T = kept_T.to(taps[0].device)
        return [tap_TE.index_select(0, kept_T) for tap_TE in taps]


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of a step by phase, or of one drafter's share of it.

    Attributes:
        draft_ms: planning, reserving memory, and drafting.
        score_ms: the target's forward, until its results for verification were available.
        verify_ms: verification, commits, and the cache.
        learn_ms: `observe` of the drafters.
        read_ms: prefill by drafters with a model of their own.
        begin_ms: drafters began to follow texts, those included that began since the step before.
        drafters: by drafter, in records for a controller: its own drafters' times.
        num_read: tokens of texts that were read in `read_ms`; else it only looked for some.
    """

    draft_ms: float = 0.0
    score_ms: float = 0.0
    verify_ms: float = 0.0
    learn_ms: float = 0.0
    read_ms: float = 0.0
    begin_ms: float = 0.0
    drafters: Mapping[str, StepTimes] = field(default_factory=dict)
    num_read: int = 0

    @property
    def total_ms(self) -> float:
        parts = self.draft_ms, self.score_ms, self.verify_ms, self.learn_ms
        return sum(parts) + self.read_ms + self.begin_ms


NO_TIMES = StepTimes()


@dataclass(frozen=True)
class StepRecord:
    """A step.

    Attributes:
        rows: the rows that took part, in the order of the batch.
        times: how long its parts took.
        num_waiting: requests that were waiting for room in the batch.
        num_preempted: requests that gave their slot away since the record before.
    """

    rows: tuple[RowStep, ...]
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
