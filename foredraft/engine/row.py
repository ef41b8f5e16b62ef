"""A request inside the engine: its tokens, its text, and what it came with."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from foredraft.cache.base import Cache
from foredraft.cache.prefix import Session
from foredraft.control.base import Allowance
from foredraft.core.choices import KeyedVerifyChoices
from foredraft.core.draws import DrawKey
from foredraft.core.errors import ForedraftError, NonFiniteScoresError
from foredraft.core.logprobs import TokenLogprobs
from foredraft.core.proposal import Proposal
from foredraft.core.request import FinishReason, Request, SpeculationStats
from foredraft.core.rules import Rules
from foredraft.core.rules.base import only_scale
from foredraft.core.sampling import Law
from foredraft.core.tree import ROOT, TokenTree
from foredraft.core.verify import Verdict, verify
from foredraft.core.verify.evidence import Evidence
from foredraft.drafters.base import DraftRow
from foredraft.engine.detokenize import TextAssembler
from foredraft.engine.fetch import FetchedRow
from foredraft.engine.prompt_logprobs import PromptLogprobs
from foredraft.models.base import ScoreRow

_log = logging.getLogger("foredraft")


@dataclass(frozen=True)
class GenerationResult:
    """What a request produced.

    Attributes:
        request_id: counts the requests of an engine.
        text: the generated text, without the stop string that ended it.
        token_ids: the generated ids; the last one is the one that completed the stop, if any.
        finish_reason: "stop" (end of text, stop id or stop string), "length" (max_tokens or the
            context is full), "cancelled", or "error" (see ``error``; what was committed is kept).
        stats: what speculation did.
        seed: the seed in use, also when none was asked for.
        num_prompt_tokens: length of the prompt.
        num_cached_tokens: how many of them were still in the cache from an earlier turn.
        error: what went wrong, for finish reason "error".
        parent_id: the id of the first of the replies to one prompt; its own where there is one.
        index: which of these replies it is.
        logprobs: of each generated id, where the request asks for them.
        prompt_logprobs: of each id of the prompt, likewise; None for the first, which nothing
            foretells.
    """

    request_id: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: SpeculationStats
    seed: int
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    error: str | None = None
    parent_id: int = -1
    index: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


@dataclass(eq=False)
class Row:
    """What the scheduler schedules.

    Attributes:
        rules: what the request asks of a distribution.
        priority: rows of higher numbers go first.
        leader: the first of several replies to one prompt, for the others, which begin with what
            it has read.
        index: which of these replies it is.
        order: its place in every queue; see `Scheduler`.
        has_begun: whether it has ever been in the batch.
        is_followed: whether the drafter follows it, or is to when it begins.
        has_read_nonsense: whether it ended because its logits were no numbers.
        num_begun_with: tokens that were in the cache when it was given its place.
        num_named: blocks of its text that others can find.
        num_reused: tokens of the prompt that were in the cache when it began.
        num_prompt_read: most tokens of the prompt that were in the cache after a step.
        num_sent: generated tokens that events have already carried.
        num_accepted_sent: how many of those were drafted.
        num_drafted_sent: draft tokens that events have told of, accepted or not.
        keeps_evidence: whether verdicts are to say what they were decided on.
        prompt_logprobs: of the prompt, where the request asks for them.
        logprobs: of the generated tokens, likewise.
    """

    request: Request
    text: TextAssembler
    stop_ids: frozenset[int]
    rules: Rules
    session: Session | None = None
    tenant: str | None = None
    priority: int = 0
    leader: Row | None = None
    index: int = 0
    order: tuple[int, int] = (0, 0)
    has_begun: bool = False
    is_followed: bool = True
    error: str | None = None
    has_read_nonsense: bool = False
    num_begun_with: int = 0
    num_named: int = 0
    num_reused: int = 0
    num_prompt_read: int = 0
    num_sent: int = 0
    num_accepted_sent: int = 0
    num_drafted_sent: int = 0
    keeps_evidence: bool = False
    prompt_logprobs: PromptLogprobs | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    _offered_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def __post_init__(self) -> None:
        count = self.request.params.prompt_logprobs
        if count is not None:
            self.prompt_logprobs = PromptLogprobs(count, self.request.num_prompt)

    @property
    def request_id(self) -> int:
        return self.request.request_id

    @property
    def num_pending(self) -> int:
        return len(self.request.tokens) - self.request.num_cached

    @property
    def num_readable(self) -> int:
        """How many of them one step may read."""
        if self.prompt_logprobs is None:
            return self.num_pending
        return self.prompt_logprobs.num_readable(self.request.num_cached, self.num_pending)

    @property
    def is_over(self) -> bool:
        return self.request.finish_reason is not None

    def follow(self, leader: Row | None, index: int) -> None:
        """Be reply number ``index`` to a prompt, of which ``leader`` is the first."""
        self.leader, self.index = leader, index
        if leader is not None:
            self.prompt_logprobs = leader.prompt_logprobs

    @property
    def has_read_prompt(self) -> bool:
        """Whether its place in the cache holds the whole prompt."""
        return self.request.slot >= 0 and self.request.num_cached >= self.request.num_prompt

    @property
    def is_ready(self) -> bool:
        """Whether it may begin: it does not wait for another to read its prompt."""
        return self.leader is None or self.leader.is_over or self.leader.has_read_prompt

    @property
    def parent_id(self) -> int:
        return self.request_id if self.leader is None else self.leader.request_id

    def verify(self, proposal: Proposal, scores: FetchedRow) -> Verdict:
        """Accept what the target would have written itself; by the row's own rules and noise."""
        verdict = self._decide(proposal, scores)
        self._offered_logprobs = self._logprobs_of(verdict, proposal, scores)
        return verdict

    def _decide(self, proposal: Proposal, scores: FetchedRow) -> Verdict:
        if scores.drawn is not None and not (proposal.tree.tokens or self.keeps_evidence):
            return Verdict((), scores.drawn, "bonus")
        request, num_tokens = self.request, len(self.request.tokens)
        choices = KeyedVerifyChoices(request.seed, num_tokens)
        if scores.drawn is not None:
            choices = replace(choices, first=scores.drawn)
        if self.keeps_evidence:
            laws = _RowLaws(proposal, scores, self.rules, tuple(request.tokens))
            evidence = Evidence(laws, choices, request.seed, num_tokens)
            return evidence.of(verify(proposal, evidence, evidence))
        return verify(proposal, _RowLaws(proposal, scores, self.rules, request.tokens), choices)

    def _logprobs_of(
        self, verdict: Verdict, proposal: Proposal, scores: FetchedRow
    ) -> list[TokenLogprobs]:
        """Of the tokens of a verdict, by the logits of the places that they follow."""
        count = self.request.params.logprobs
        if count is None:
            return []
        tokens = [proposal.tree.tokens[node] for node in verdict.path]
        tokens += [] if verdict.next_token is None else [verdict.next_token]
        places = zip((ROOT, *verdict.path), tokens, strict=False)
        return [
            TokenLogprobs.of(scores.logits_NV[node + 1], token, count) for node, token in places
        ]

    def keep_logprobs(self, num_taken: int) -> None:
        """Of the last verdict's tokens this many were committed."""
        self.logprobs += self._offered_logprobs[:num_taken]

    def fail(self, error: Exception) -> None:
        """End this row, and no other. What it committed stays; a row that is over stays so."""
        if self.request.finish_reason is not None:
            return
        self.request.finish_reason = "error"
        self.error = f"{type(error).__name__}: {error}"
        self.has_read_nonsense = isinstance(error, NonFiniteScoresError)
        _log.warning("request %d ends: %s", self.request_id, self.error, exc_info=error)

    def take(self) -> tuple[tuple[int, ...], int, int]:
        """Generated ids that were not taken before; how many of them were drafted, and how many
        were drafted for them. Notes how far the prompt has been read."""
        num_read = min(self.request.num_cached, self.request.num_prompt)
        self.num_prompt_read = max(self.num_prompt_read, num_read)
        ids = tuple(self.request.tokens[self.request.num_prompt + self.num_sent :])
        stats = self.request.stats
        num_accepted = stats.accepted - self.num_accepted_sent
        num_drafted = stats.drafted - self.num_drafted_sent
        self.num_sent += len(ids)
        self.num_accepted_sent += num_accepted
        self.num_drafted_sent += num_drafted
        return ids, num_accepted, num_drafted

    def last_logprobs(self, count: int) -> tuple[TokenLogprobs, ...]:
        """Of the last ``count`` tokens, where the request asks for them."""
        return tuple(self.logprobs[len(self.logprobs) - count :]) if self.logprobs else ()

    @property
    def found_of_prompt(self) -> tuple[TokenLogprobs | None, ...] | None:
        """Log probabilities of the prompt, where the request asks for them."""
        return tuple(self.prompt_logprobs.found) if self.prompt_logprobs else None

    def result(self) -> GenerationResult:
        """What it produced; it must be over."""
        request = self.request
        assert request.finish_reason is not None
        return GenerationResult(
            request_id=self.request_id,
            text=self.text.text,
            token_ids=tuple(request.generated),
            finish_reason=request.finish_reason,
            stats=request.stats,
            seed=request.seed,
            num_prompt_tokens=request.num_prompt,
            num_cached_tokens=self.num_reused,
            error=self.error,
            parent_id=self.parent_id,
            index=self.index,
            logprobs=None if request.params.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=self.found_of_prompt,
        )

    def check(self, cache: Cache) -> None:
        """Refuse to go on from a step that was interrupted between its commit and its cache.

        Raises:
            RuntimeError: request and cache disagree; the text would silently be another.
        """
        held, counted = cache.length(self.request.slot), self.request.num_cached
        if held != counted:
            raise RuntimeError(
                f"the cache holds {held} tokens of request {self.request_id} and its row counts "
                f"{counted}: an earlier step was interrupted"
            )


@dataclass(frozen=True)
class _RowLaws:
    """The target's law at each node of a row's proposal, looked up as verification gets there."""

    proposal: Proposal
    scores: FetchedRow
    rules: Rules
    text: Sequence[int]

    def __getitem__(self, node: int) -> Law:
        tree = self.proposal.tree
        path = () if node == ROOT else tree.paths[node]
        return self.scores.law(node, self.rules, self.text, [tree.tokens[i] for i in path])


@dataclass(frozen=True)
class Turn:
    """A row's part in one step: it reads the first ``num_read`` of its pending tokens.

    Only a row that reads all of them may draft, and commits something.

    Attributes:
        may_draft: False where there is no room for drafts.
    """

    row: Row
    num_read: int
    may_draft: bool = True

    @cached_property
    def reads_all(self) -> bool:
        """As the step found it."""
        return self.num_read == self.row.num_pending

    @property
    def pending(self) -> list[int]:
        """What is read."""
        request = self.row.request
        return request.tokens[request.num_cached : request.num_cached + self.num_read]

    @cached_property
    def forced(self) -> tuple[int, ...]:
        """What alone can follow, by the row's rules and committed text: a draft nobody need make.

        As far as it may draft.
        """
        if not (self.reads_all and self.may_draft):
            return ()
        request = self.row.request
        try:
            found = self.row.rules.forced(request.tokens)
        except ForedraftError as error:  # verification says so, too, if the text gets there
            _log.debug("nothing is forced for request %d: %s", self.row.request_id, error)
            return ()
        # The last token that a step commits is the target's own.
        return tuple(found[: max(0, request.num_remaining - 1)])

    def draft_row(self, allowance: Allowance) -> DraftRow:
        """What a drafter may know of it."""
        request = self.row.request
        return DraftRow.of(
            request.request_id,
            tuple(request.tokens),
            request.params,
            allowance.budget,
            request.seed,
            rules=self.row.rules,
            price=allowance.price,
            slot=request.slot,
            drafter=allowance.drafter,
        )

    @cached_property
    def draw_key(self) -> DrawKey | None:
        """What its next token is drawn with, where its law is nothing but scaled logits."""
        scale = only_scale(self.row.rules) if self.reads_all else None
        request = self.row.request
        return None if scale is None else DrawKey(request.seed, len(request.tokens), scale)

    @cached_property
    def reads_aloud(self) -> bool:
        """Whether each of the tokens read is asked about; see `PromptLogprobs`."""
        found = self.row.prompt_logprobs
        return found is not None and not found.is_complete

    def verify(self, proposal: Proposal, scores: FetchedRow) -> Verdict | None:
        """The row's verdict; None for a chunk of its prompt."""
        row, request = self.row, self.row.request
        if self.reads_aloud and row.prompt_logprobs is not None:
            row.prompt_logprobs.take(scores.logits_NV, request.num_cached, request.tokens)
        return row.verify(proposal, scores) if self.reads_all else None

    def score_row(self, proposal: Proposal) -> ScoreRow:
        """Its part of the forward."""
        slot = self.row.request.slot
        if self.reads_aloud:
            first, *others = self.pending
            return ScoreRow(slot, [first], TokenTree.chain(others))
        return ScoreRow(
            *(slot, self.pending, proposal.tree, self.reads_all, proposal.computed), self.draw_key
        )
