"""A request's part in one step: what it reads, drafts and commits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from foredraft.control.base import NOTHING_ALLOWED
from foredraft.core.errors import NonFiniteScoresError
from foredraft.core.logprobs import TokenLogprobs
from foredraft.core.proposal import NO_PROPOSAL, DrawnProposal, Proposal
from foredraft.core.record import FinishReason, RowStep
from foredraft.core.rules import Rules
from foredraft.core.sampling import Law
from foredraft.core.tree import ROOT, TokenTree
from foredraft.core.verify import Verdict, verify
from foredraft.drafters.base import DraftRow
from foredraft.engine.request import Request
from foredraft.models.base import ScoreRow, Scores


class Turn:
    """A request's part in one step: it reads the first ``num_read`` of its pending tokens.

    Only a request that reads all of them may draft, and commits something. `record` is what is left
    of a turn when the step is over.

    Args:
        request: whose turn it is.
        num_read: how many of its pending tokens it reads.
        may_draft: False where there is no room for drafts.

    Attributes:
        context, drafter, proposal, num_forced, verdict, committed, num_accepted, finish_reason,
            plain_reason: as in `RowStep`.
        reads_all: whether it reads all pending tokens.
        allowance: the controller's, clipped to the room that there is.
        budget: nodes that its drafter is asked for: 0 where rules force as many, or the drafter
            cannot draft now.
        forced: the tokens that the row's rules force, a draft that needs no drafter.
        key: the key of its random numbers in this step.
        wants_prompt_logprobs: whether the log probabilities of the tokens that it reads are wanted;
            see `PromptLogprobs`.
        path: nodes of the proposal that stay in the cache.
    """

    def __init__(self, request: Request, num_read: int, may_draft: bool = True) -> None:
        self.request, self.num_read, self.may_draft = request, num_read, may_draft
        self.request_id, self.context = request.request_id, request.num_cached
        self.reads_all = num_read == request.num_pending
        self.drafter, self.allowance, self.plain_reason = request.drafter, NOTHING_ALLOWED, ""
        self.budget = 0
        self.forced: tuple[int, ...] = ()
        self.proposal: Proposal = NO_PROPOSAL
        self.num_forced = self.num_accepted = 0
        self.verdict: Verdict | None = None
        self.finish_reason: FinishReason | None = None
        self.committed: tuple[int, ...] = ()
        self.path: tuple[int, ...] = ()
        self._logprobs: list[TokenLogprobs] = []
        prompt = request.prompt_logprobs
        self.wants_prompt_logprobs = prompt is not None and not prompt.is_complete
        self.key = request.first_key.ahead(len(request.tokens))

    def record(self) -> RowStep:
        """The row's part of the step's record: plain data."""
        return self._row(self.proposal.without_tensors())

    def observation(self, scores: Scores, index: int) -> RowStep:
        """The step for its drafter, with tensors, from row ``index`` of the forward."""
        row = scores[index]
        logits_NV = row.logits_NV[:0] if self.wants_prompt_logprobs else row.logits_NV
        return self._row(self.proposal, self.request.tokens_now, logits_NV, row.taps)

    def _row(self, proposal: Proposal, *of_the_step: Any) -> RowStep:
        return RowStep(
            self.request_id,
            self.context,
            self.num_read,
            self.drafter,
            self.budget,
            proposal,
            self.verdict,
            self.committed,
            self.num_accepted,
            self.finish_reason,
            self.num_forced,
            self.plain_reason,
            self.path,
            *of_the_step,
        )

    @property
    def most_tokens(self) -> int:
        """The most tokens that the forward may read for the request, drafted ones included."""
        most = self.budget + self.allowance.spare if self.budget else 0
        return self.num_read + max(most, len(self.forced))

    @property
    def num_prefill(self) -> int:
        """Tokens of the prompt that it prefills, or of the reply after a preemption.

        The reply's last token is read for the first time: it has just been committed.
        """
        follows_prompt = self.context + self.num_read > self.request.num_prompt
        return self.num_read - (self.reads_all and follows_prompt)

    def draft_row(self, num_forced: int = 0) -> DraftRow:
        """The row as its drafter sees it, behind this many forced tokens."""
        return self.request.draft_row(self.budget - num_forced, self.allowance)

    def draft_nothing(self, why: str) -> None:
        """Its drafter cannot draft for it now: the step goes on without a draft."""
        self.budget, self.plain_reason = 0, why

    def score_row(self) -> ScoreRow:
        """The request's row of the forward."""
        request = self.request
        pending = request.tokens[self.context : self.context + self.num_read]
        if self.wants_prompt_logprobs:
            return ScoreRow(request.slot, pending[:1], TokenTree.chain(pending[1:]))
        tree = self.proposal.tree
        if not self.reads_all:
            return ScoreRow(request.slot, pending, tree, False, source=request.source)
        draw = None if request.rules.scale is None else self.key
        is_drawn = isinstance(self.proposal, DrawnProposal) and self.key.scale > 0.0
        needs_logits = request.params.logprobs is not None or is_drawn
        device_draw = self.key if request.rules.filters_only and not needs_logits else None
        row = request.slot, pending, tree, True, draw, request.source, device_draw
        return ScoreRow(*row)

    def verify(self, scores: Scores) -> None:
        """Verify the draft, by the row's own rules and noise.

        Args:
            scores: of this row alone.
        """
        request = self.request
        if self.wants_prompt_logprobs and request.prompt_logprobs is not None:
            try:
                request.prompt_logprobs.take(scores.logits_NV, self.context, request.tokens)
            except NonFiniteScoresError as error:
                request.fail(error)
        if self.reads_all:
            self.verdict = self._verdict(scores)
            self._logprobs = self._logprobs_by(self.verdict, scores)

    def commit(self) -> None:
        """Append the accepted tokens and the next one, and count the tokens that were read.

        A request ends here: at a stop, at its limit, at a verdict without a next token (after the
        accepted ones), or at text that cannot be decoded.
        """
        request, verdict = self.request, self.verdict
        if verdict is not None:
            tokens, num_verified = self._tokens_of(verdict), len(verdict.path)
            self.committed = tokens[: self._append(tokens, num_verified)]
            num_taken = len(self.committed)
            self.num_accepted = min(num_taken, num_verified)
            request.logprobs += self._logprobs[:num_taken]
            self._count(num_verified, num_taken)
            # The last committed token stays pending, also when a stop made it a drafted one.
            self.path = verdict.path[: max(0, min(self.num_accepted, num_taken - 1))]
            if verdict.error is not None:
                request.fail(verdict.error)
        request.num_cached += self.num_read + len(self.path)
        num_read = min(request.num_cached, request.num_prompt)
        request.num_prompt_read = max(request.num_prompt_read, num_read)
        if request.finish_reason != "error":
            request.check()
        self.finish_reason = request.finish_reason

    @property
    def kept(self) -> tuple[int, Sequence[int]]:
        """Entries that stay in the cache: the number of pending tokens, and nodes behind them."""
        if self.wants_prompt_logprobs:
            return 1, range(self.num_read - 1)
        return self.num_read, self.path

    def _verdict(self, scores: Scores) -> Verdict:
        request, proposal, rule = self.request, self.proposal, self.request.policy.rule
        law = scores.drawn[0] if scores.drawn else None
        if law is not None and not proposal.tree.tokens and rule is verify:
            return Verdict((), law.drawn, "bonus")  # as `verify` would say, sooner
        laws = partial(_law, proposal.tree, scores, request.rules, request.tokens_now)
        return rule(proposal, laws, self.key)

    def _tokens_of(self, verdict: Verdict) -> tuple[int, ...]:
        tokens = self.proposal.tree.tokens
        own = () if verdict.next_token is None else (verdict.next_token,)
        return (*[tokens[node] for node in verdict.path], *own) if verdict.path else own

    def _logprobs_by(self, verdict: Verdict, scores: Scores) -> list[TokenLogprobs]:
        """Log probabilities of a verdict's tokens, by the logits of the nodes that they follow."""
        count = self.request.params.logprobs
        if count is None:
            return []
        nodes = zip((ROOT, *verdict.path), self._tokens_of(verdict), strict=False)
        return [TokenLogprobs.of(scores.logits_NV[node + 1], token, count) for node, token in nodes]

    def _append(self, tokens: Sequence[int], num_drafted: int) -> int:
        request = self.request
        for num_taken, token in enumerate(tokens, start=1):
            request.tokens.append(token)
            try:
                is_stop = request.completes(token, num_taken <= num_drafted)
            except Exception as error:  # its own decoder's: the others go on
                request.fail(error)
                return num_taken
            if is_stop:
                request.finish_reason = "stop"
            elif request.num_remaining <= 0:
                request.finish_reason = "length"
            if request.finish_reason:
                return num_taken
        return len(tokens)

    def _count(self, num_verified: int, num_committed: int) -> None:
        request, num_drafted, forced = self.request, len(self.proposal.tree), self.num_forced
        counts = ("rules", forced), (self.drafter or "rules", num_drafted - forced)
        request.drafts = tuple((drafter, count) for drafter, count in counts if count)
        reason = "" if num_drafted else self.plain_reason or "no memory for drafts"
        request.plain_reason = reason
        taken = num_verified, self.num_accepted, num_committed
        request.stats.record(request.drafts, reason, *taken)


def _law(tree: TokenTree, scores: Scores, rules: Rules, text: Sequence[int], node: int) -> Law:
    """The target's law after a node of a row's draft, looked up as verification gets there.

    Args:
        scores: of the row.
        text: all tokens that were committed before the step.

    Raises:
        NonFiniteScoresError: its logits are not finite.
        ForedraftError: the rules allow no token.
    """
    drawn = scores.drawn or ()
    law = drawn[node + 1] if node + 1 < len(drawn) else None
    if law is not None:  # else it is looked at alone, and found out what is wrong
        return law
    path = () if node == ROOT else tree.paths[node]
    return rules.law(scores.logits_NV[node + 1], text, [tree.tokens[i] for i in path])
