"""A request's part in one step: what it reads, drafts and commits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from foredraft.core.choices import KeyedVerifyChoices
from foredraft.core.cost import USUAL_PRICES, Prices
from foredraft.core.draws import DrawKey
from foredraft.core.errors import NonFiniteScoresError
from foredraft.core.logprobs import TokenLogprobs
from foredraft.core.proposal import Proposal
from foredraft.core.record import RowStep
from foredraft.core.rules import Rules
from foredraft.core.sampling import Law, check_finite
from foredraft.core.text_view import TextView
from foredraft.core.tree import ROOT, TokenTree
from foredraft.core.verify import Evidence, Verdict
from foredraft.drafters.base import DraftRow, Observation
from foredraft.engine.request import Request
from foredraft.models.base import RowScores, ScoreRow, Scores


class Turn(RowStep):
    """A request's part in one step: it reads the first ``num_read`` of its pending tokens.

    Only a request that reads all of them may draft, and commits something. When the step is over
    this is its record, too.

    Args:
        request: whose turn it is.
        num_read: how many of its pending tokens it reads.
        may_draft: False where there is no room for drafts.

    Attributes:
        reads_all: whether it reads all pending tokens.
        allowed: nodes that the controller allowed.
        spare: further nodes that the drafter may add.
        prices: what nodes cost in this step.
        forced: a draft that the row's rules force, which is verified without asking anybody.
        path: nodes of the proposal that stay in the cache.
    """

    def __init__(self, request: Request, num_read: int, may_draft: bool = True) -> None:
        super().__init__(request.request_id, request.num_cached, num_read, request.drafter)
        self.request, self.may_draft = request, may_draft
        self.reads_all = num_read == request.num_pending
        self.allowed = self.spare = 0
        self.prices: Prices = USUAL_PRICES
        self.forced: tuple[int, ...] = ()
        self.path: tuple[int, ...] = ()
        self._logprobs: list[TokenLogprobs] = []

    @property
    def most_tokens(self) -> int:
        """That the forward may read for it, drafted ones included."""
        return self.num_read + max(self.budget + self.spare, len(self.forced))

    @property
    def num_prefill(self) -> int:
        """Tokens of the prompt that it prefills, or of the reply after a preemption.

        The reply's last token is read for the first time: it has just been committed.
        """
        follows_prompt = self.context + self.num_read > self.request.num_prompt
        return self.num_read - (self.reads_all and follows_prompt)

    @cached_property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the log probabilities of the tokens it reads are wanted; see `PromptLogprobs`."""
        prompt = self.request.prompt_logprobs
        return prompt is not None and not prompt.is_complete

    @cached_property
    def draw_key(self) -> DrawKey | None:
        """The key of its next draw, if its distribution is nothing but scaled logits."""
        request = self.request
        scale = request.rules.scale if self.reads_all else None
        return None if scale is None else DrawKey(request.seed, len(request.tokens), scale)

    def draft_row(self, num_forced: int = 0) -> DraftRow:
        """The row as its drafter sees it, behind this many forced tokens."""
        row = self.request.draft_row(self.budget - num_forced, self.prices)
        return replace(row, spare=self.spare) if self.spare else row

    def score_row(self) -> ScoreRow:
        """Its part of the forward."""
        request, source = self.request, self.request.options.source
        pending = request.tokens[self.context : self.context + self.num_read]
        if self.wants_prompt_logprobs:
            return ScoreRow(request.slot, pending[:1], TokenTree.chain(pending[1:]))
        tree, computed = self.proposal.tree, self.proposal.computed
        return ScoreRow(
            request.slot, pending, tree, self.reads_all, computed, self.draw_key, source
        )

    def verify(self, scores: RowScores) -> None:
        """Accept what the target would have written itself, by the row's own rules and noise."""
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
        """Count what was read, and append the accepted tokens and the next one.

        Whatever ends the request ends it here: a stop, the limit, a verdict without a next token
        (what was accepted before it is kept), or a text that cannot be decoded.
        """
        request, verdict = self.request, self.verdict
        if verdict is not None:
            tokens = tuple(self.proposal.tree.tokens[node] for node in verdict.path)
            tokens += () if verdict.next_token is None else (verdict.next_token,)
            self.committed = tokens[: self._append(tokens, verdict.num_accepted)]
            num_taken = len(self.committed)
            self.num_accepted = min(num_taken, verdict.num_accepted)
            request.logprobs += self._logprobs[:num_taken]
            self._count(verdict.num_accepted, num_taken)
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

    def _count(self, num_verified: int, num_committed: int) -> None:
        """In the request's statistics."""
        stats, num_drafted = self.request.stats, len(self.proposal.tree)
        stats.record(num_drafted, num_verified, self.num_accepted, num_committed)
        stats.credit("rules", self.num_forced)
        if self.drafter is not None:
            stats.credit(self.drafter, num_drafted - self.num_forced)
        if not num_drafted:
            stats.note_plain(self.plain_reason or "no memory for drafts")

    @property
    def kept(self) -> tuple[int, Sequence[int]]:
        """Entries that stay in the cache: the number of pending tokens, and nodes behind them."""
        if self.wants_prompt_logprobs:
            return 1, range(self.num_read - 1)
        return self.num_read, self.path

    def observation(self, scores: Scores, index: int) -> Observation:
        """The observation for its drafter, from row number ``index`` of the forward."""
        row = scores[index]
        return Observation(
            request_id=self.request_id,
            committed=self.committed,
            num_accepted=self.num_accepted,
            proposal=self.proposal,
            path=self.path,
            logits_NV=row.logits_NV[:0] if self.wants_prompt_logprobs else row.logits_NV,
            taps=row.taps,
            start=self.context,
            num_read=self.num_read,
            tokens=TextView(self.request.tokens),
        )

    def _verdict(self, scores: RowScores) -> Verdict:
        request, proposal = self.request, self.proposal
        drawn = scores.draws[0] if scores.draws else None
        if drawn is not None and not (proposal.tree.tokens or request.keeps_evidence):
            return Verdict((), drawn.token, "bonus")
        num_tokens, rule = len(request.tokens), request.policy.rule
        choices = KeyedVerifyChoices(request.seed, num_tokens)
        if request.keeps_evidence:
            laws = _RowLaws(proposal, scores, request.rules, tuple(request.tokens))
            evidence = Evidence(laws, choices, request.seed, num_tokens)
            return evidence.of(rule(proposal, evidence, evidence))
        return rule(proposal, _RowLaws(proposal, scores, request.rules, request.tokens), choices)

    def _logprobs_by(self, verdict: Verdict, scores: RowScores) -> list[TokenLogprobs]:
        """Of the tokens of a verdict, by the logits of the nodes that they follow."""
        count = self.request.params.logprobs
        if count is None:
            return []
        tokens = [self.proposal.tree.tokens[node] for node in verdict.path]
        tokens += [] if verdict.next_token is None else [verdict.next_token]
        nodes = zip((ROOT, *verdict.path), tokens, strict=False)
        return [TokenLogprobs.of(scores.logits_NV[node + 1], token, count) for node, token in nodes]

    def _append(self, tokens: Sequence[int], num_drafted: int) -> int:
        """Append tokens until one ends the request; returns how many were taken."""
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


@dataclass(frozen=True)
class _RowLaws:
    """The target's law at each node of a row's proposal, looked up as verification gets there."""

    proposal: Proposal
    scores: RowScores
    rules: Rules
    text: Sequence[int]

    def __getitem__(self, node: int) -> Law:
        """The law after ``node``.

        Raises:
            NonFiniteScoresError: its logits are not finite.
            ForedraftError: the rules allow no token.
        """
        scores, logits_V = self.scores, self.scores.logits_NV[node + 1]
        draw = scores.draws[node + 1] if node + 1 < len(scores.draws) else None
        if draw is not None:  # else it is looked at alone, and found out what is wrong
            return Law(logits_V, self.rules.scale or None, draw.best, drawn=draw.token)
        if scores.best is not None:
            token, logit = scores.best[node + 1]
            check_finite(logit, logits_V.numel())
            return Law(logits_V, None, token)
        tree = self.proposal.tree
        path = () if node == ROOT else tree.paths[node]
        return self.rules.law(logits_V, self.text, [tree.tokens[i] for i in path])
