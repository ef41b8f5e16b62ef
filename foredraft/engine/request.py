"""A request inside the engine: its options, its state, its events and its result."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from foredraft.cache.paged import Cache
from foredraft.control.base import NOTHING_ALLOWED, Allowance
from foredraft.core.choices import DrawKey
from foredraft.core.errors import (
    CacheFullError,
    ConfigError,
    ForedraftError,
    NonFiniteScoresError,
)
from foredraft.core.logprobs import TokenLogprobs
from foredraft.core.params import SamplingParams
from foredraft.core.record import Drafts, FinishReason, SpeculationStats
from foredraft.core.rules import Rules
from foredraft.drafters.base import DraftRow, draft_choices
from foredraft.engine.policy import Policy
from foredraft.engine.prompt_logprobs import PromptLogprobs
from foredraft.engine.text import Piece, TextAssembler
from foredraft.models.base import Source

_log = logging.getLogger("foredraft")


@dataclass(frozen=True)
class ReplySoFar:
    """The tokens of a reply that another engine has committed, for this engine to continue.

    Together with the prompt, the parameters and the seed this is the whole state of a reply. The
    noise of a token depends on seed and position alone, and so do penalties, stop strings, a
    grammar and ``min_tokens`` on the text. So a seeded reply continues as if it had never been
    interrupted; a drawn one continues with fresh draws from the same distribution.

    Attributes:
        token_ids: what was committed, in order.
        logprobs: of each of these ids, where the request asks for them.
        index: which of several replies to one prompt it is. Each goes on alone, with ``n`` of 1 and
            the seed of its own (`SamplingParams.each`).
        stats: what speculation did for them.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    index: int = 0
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    @classmethod
    def of(cls, events: Iterable[Event]) -> ReplySoFar:
        """The state after all events of one reply, from its first on."""
        stats, index = SpeculationStats(), 0
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        for event in events:
            index = event.index
            token_ids += event.token_ids
            logprobs += event.logprobs
            if event.token_ids:
                taken = event.num_accepted, event.num_accepted, len(event.token_ids)
                stats.record(event.drafts, event.plain_reason, *taken)
        return cls(tuple(token_ids), tuple(logprobs), index, stats)


def owner_name(tenant: str | None) -> str | None:
    """The owner that a tenant names: the part before the first "/". None: no tenant is named."""
    return None if tenant is None else tenant.partition("/")[0]


@dataclass(frozen=True)
class GenerationResult:
    """The result of a request.

    Attributes:
        request_id: counts the requests of an engine.
        text: the generated text, without the stop string that ended it.
        token_ids: the generated ids; the last one is the one that completed the stop, if any.
        finish_reason: "stop" (end of text, stop id or stop string), "length" (max_tokens or the
            context is full), "cancelled", or "error" (see ``error``; committed tokens are kept).
        stats: drafted and accepted tokens, by drafter.
        seed: the seed in use, also when none was asked for.
        num_prompt_tokens: length of the prompt; of an encoder-decoder's, that of its source.
        num_cached_tokens: how many of them were still in the cache from an earlier turn.
        error: the message, for finish reason "error".
        error_code: a name of the error for programs, such as "grammar_too_complex", if the
            request's own rules caused it; else None.
        error_field: the sampling parameter that it is about, if it is one.
        stop_string: the one that ended the text; None: none did.
        parent_id: the id of the first of the replies to one prompt; its own where there is one.
        index: which of these replies it is.
        logprobs: of each generated id, where the request asks for them.
        prompt_logprobs: of each id of the prompt, where the request asks for them; None for the
            first, which has no text before it.
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
    error_code: str | None = None
    error_field: str | None = None
    stop_string: str | None = None


class Event(NamedTuple):
    """The new tokens and text of one reply after a step.

    Attributes:
        request_id: counts the replies of an engine.
        token_ids: newly committed ids.
        num_accepted: how many of them were drafted.
        pieces: text that is now final, marked as drafted or the target's own.
        num_prompt_read: tokens of the prompt that have been read by now.
        logprobs: of each of these ids, where the request asks for them; else empty.
        result: the final result, on the reply's last event.
        parent_id: the id of the first of the replies to one prompt; its own where there is one.
        index: which of these replies it is.
        drafts: draft tokens that the step sent to verification for it, by drafter.
        plain_reason: why there are none; "" if there are, or nothing was committed.
        prompt_logprobs: of the prompt, where the request asks for them, with the reply's first
            tokens; else None.
    """

    request_id: int
    token_ids: tuple[int, ...]
    num_accepted: int
    pieces: tuple[Piece, ...]
    num_prompt_read: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    result: GenerationResult | None = None
    parent_id: int = -1
    index: int = 0  # type: ignore[assignment]  # in place of the method of tuples
    drafts: Drafts = ()
    plain_reason: str = ""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


Reader = Callable[[Event], None]
"""Takes one request's events on the thread that steps. It must be quick and must not raise."""


@dataclass(eq=False)
class Request:
    """One reply to one prompt, from its arrival to its end.

    Between steps ``num_cached + num_pending == len(tokens)``, and ``num_pending`` is at least 1:
    the last token is always read by the next step.

    Attributes:
        tokens: prompt and committed tokens. It only grows.
        num_prompt: length of the prompt.
        seed: the resolved seed.
        policy: its controller and drafters.
        rules: its sampling rules.
        text: of the reply.
        stop_ids: ids that end it.
        tenant, priority: see `Engine.prepare`.
        source: the encoder's input of an encoder-decoder, whose decoder prompt ``tokens`` begin
            with.
        shares: whether it may use cached entries, and leave its own in the cache.
        leader: the first of several replies to one prompt, for the others, which share its
            prefilled prompt.
        index: which of these replies it is.
        first_key: key of its random numbers at the beginning of its text.
        draft_params: the ``params`` that drafters see: all but the seed.
        draft_source: the text of its source, for drafters.
        reader: called with its events, which the step also returns.
        slot: its slot in the target's cache; -1 while it waits.
        num_cached: how many of its tokens the cache holds.
        drafter: name of the drafter that drafts for it now; None: no drafter.
        excluded_drafters: drafters that must not draft for it, because the user chose otherwise,
            they raised an error, they are suspended, or they kept answering NOT_READY.
        num_not_ready: NOT_READY answers of its drafter in a row.
        room: the most nodes that it may draft in the next step.
        order: its position in every queue; see `Scheduler`.
        has_begun: whether it has ever been in the batch.
        num_published: published blocks of its text, which other requests can share.
        num_reused: tokens of the prompt that were in the cache when it began.
        num_prompt_read: the most tokens of the prompt that were in the cache after a step.
        casts_doubt: whether it ended with an error of which cached entries may be the cause.
        prompt_logprobs: of the prompt, where the request asks for them.
        logprobs: of the generated tokens, where the request asks for them.
        drafts, plain_reason: of the last step that committed tokens: see `Event`.
    """

    request_id: int
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    policy: Policy
    rules: Rules = field(default_factory=SamplingParams)
    text: TextAssembler = field(default_factory=lambda: TextAssembler(None))
    stop_ids: frozenset[int] = frozenset()
    tenant: str | None = None
    priority: int = 0
    source: Source | None = None
    shares: bool = True
    leader: Request | None = None
    index: int = 0
    reader: Reader | None = None

    slot: int = -1
    num_cached: int = 0
    drafter: str | None = None
    excluded_drafters: set[str] = field(default_factory=set)
    num_not_ready: int = 0
    room: int = 0
    order: tuple[int, int] = (0, 0)
    has_begun: bool = False
    num_published: int = 0
    num_reused: int = 0
    num_prompt_read: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    error_code: str | None = None
    error_field: str | None = None
    casts_doubt: bool = False
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    prompt_logprobs: PromptLogprobs | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    _tokens_now: tuple[int, ...] = ()
    drafts: Drafts = ()
    plain_reason: str = ""
    _sent: tuple[int, int] = (0, 0)  # ids and accepted ones in its events so far

    def __post_init__(self) -> None:
        self.draft_params = replace(self.params, seed=None)
        known = self.rules.filters_only
        self.first_key = DrawKey.of(self.params, self.seed, 0) if known else DrawKey(self.seed, 0)
        # drafters have encoders of their own
        self.draft_source = self.source and replace(self.source, states_SE=None)
        if self.params.speculation != "auto":
            self.excluded_drafters |= self.policy.drafters.keys() - {self.params.speculation}
        if self.leader is not None:
            self.prompt_logprobs = self.leader.prompt_logprobs
        elif self.params.prompt_logprobs is not None:
            self.prompt_logprobs = PromptLogprobs(self.params.prompt_logprobs, self.num_prompt)

    @property
    def tokens_now(self) -> tuple[int, ...]:
        """All tokens so far, as they are now: copied once after each step at most."""
        if len(self._tokens_now) != len(self.tokens):
            self._tokens_now = tuple(self.tokens)
        return self._tokens_now

    @property
    def num_pending(self) -> int:
        """Committed tokens that the cache does not hold yet."""
        return len(self.tokens) - self.num_cached

    @property
    def num_readable(self) -> int:
        """Most pending tokens that one step may read."""
        if self.prompt_logprobs is None:
            return self.num_pending
        return self.prompt_logprobs.num_readable(self.num_cached, self.num_pending)

    @property
    def num_remaining(self) -> int:
        """Tokens that max_tokens still allows."""
        return self.params.max_tokens - (len(self.tokens) - self.num_prompt)

    @property
    def salt(self) -> str | None:
        """The cache salt: only requests with the same salt share cached entries."""
        return self.tenant if self.source is None else f"{self.source.digest} of {self.tenant!r}"

    @property
    def owner(self) -> str | None:
        """The owner that the tenant names; None: no tenant is named."""
        return owner_name(self.tenant)

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None

    @property
    def has_read_prompt(self) -> bool:
        """Whether its slot holds the whole prompt."""
        return self.slot >= 0 and self.num_cached >= self.num_prompt

    @property
    def is_ready(self) -> bool:
        """Whether it may begin: it does not wait for its leader to prefill the prompt."""
        return self.leader is None or self.leader.is_over or self.leader.has_read_prompt

    @property
    def parent_id(self) -> int:
        return self.request_id if self.leader is None else self.leader.request_id

    def resume(self, so_far: ReplySoFar) -> None:
        """Append the tokens that another engine has committed. No event repeats them.

        Like a preempted request, it prefills them again.

        Raises:
            ConfigError: the reply is over with these tokens, or they lack log probabilities.
            GrammarError: they do not follow the request's grammar.
        """
        num_tokens = len(so_far.token_ids)
        wanted = 0 if self.params.logprobs is None else num_tokens
        if len(so_far.logprobs) != wanted:
            raise ConfigError(
                f"the reply so far has {num_tokens} tokens with {len(so_far.logprobs)} log "
                f"probabilities; the request asks for {wanted}"
            )
        for token in so_far.token_ids:
            self.tokens.append(token)
            if self.completes(token, False) or self.num_remaining <= 0:
                raise ConfigError(
                    f"the reply is over after {len(self.tokens) - self.num_prompt} of its "
                    f"{num_tokens} tokens: there is nothing to go on with"
                )
        self.text.take()
        self.index, self.logprobs = so_far.index, [*so_far.logprobs]
        self.stats = replace(deepcopy(so_far.stats), committed=num_tokens)
        self._sent = num_tokens, self.stats.accepted

    def completes(self, token: int, is_drafted: bool) -> bool:
        """Take in the text of the last token; True when it ends the reply."""
        if token in self.stop_ids:
            self.text.push_stop(token, is_drafted)
            return True
        return self.text.push(token, is_drafted) or self.rules.is_complete(self.tokens)

    def draft_row(
        self,
        budget: int = 0,
        allowance: Allowance = NOTHING_ALLOWED,
        num_cached: int | None = None,
    ) -> DraftRow:
        """The request as a drafter sees it.

        Args:
            budget: see `DraftRow`.
            allowance: prices, spare nodes and the time of a drafted token.
            num_cached: tokens that will not be observed; None: those that the cache holds.
        """
        tokens, params = self.tokens_now, self.draft_params
        return DraftRow(
            self.request_id,
            tokens,
            params,
            budget,
            self.rules,
            partial(draft_choices, params, self.seed, len(tokens)),
            allowance.prices,
            self.slot,
            self.tenant,
            self.num_cached if num_cached is None else num_cached,
            self.draft_source,
            self.stop_ids,
            allowance.spare,
            self.shares,
            allowance.token_share,
        )

    def fail(self, error: Exception) -> None:
        """End only this request with an error. Committed tokens stay; a finished request is not
        changed.

        An error with a code is the request's own fault, and the cache may be too small for it. Any
        other error is logged with its traceback.
        """
        if self.finish_reason is not None:
            return
        self.finish_reason = "error"
        is_foreseen = isinstance(error, ForedraftError)
        self.casts_doubt = not is_foreseen or isinstance(error, NonFiniteScoresError)
        if isinstance(error, ForedraftError) and error.code is not None:
            self.error, self.error_code, self.error_field = str(error), error.code, error.field
            _log.warning("request %d ends: %s", self.request_id, error)
        else:
            self.error = f"{type(error).__name__}: {error}"
            trail = None if isinstance(error, CacheFullError) else error
            _log.warning("request %d ends: %s", self.request_id, self.error, exc_info=trail)

    def check(self) -> None:
        """Assert the invariants between steps."""
        assert 0 <= self.num_cached < len(self.tokens), (self.num_cached, len(self.tokens))
        assert self.stats.drafted == (
            self.stats.accepted + self.stats.rejected + self.stats.discarded
        )
        assert self.stats.committed == len(self.tokens) - self.num_prompt

    def check_cache(self, cache: Cache) -> None:
        """Refuse to continue after an interrupt between commit and cache.

        Raises:
            RuntimeError: request and cache disagree, so the text would silently change.
        """
        num_held = cache.length(self.slot)
        if num_held != self.num_cached:
            raise RuntimeError(
                f"the cache holds {num_held} tokens of request {self.request_id}, which counts "
                f"{self.num_cached}: an earlier step was interrupted"
            )

    def take_event(self) -> Event:
        """The news since the last event. The last event of a finished request has its result."""
        (num_sent, num_accepted), stats = self._sent, self.stats
        ids = tuple(self.tokens[self.num_prompt + num_sent :])
        is_first = bool(ids) and not num_sent and self.prompt_logprobs is not None
        self._sent = num_sent + len(ids), stats.accepted
        return Event(
            self.request_id,
            ids,
            stats.accepted - num_accepted,
            tuple(self.text.take(final=self.is_over)),
            self.num_prompt_read,
            tuple(self.logprobs[-len(ids) :]) if ids and self.logprobs else (),
            self._result() if self.is_over else None,
            self.parent_id,
            self.index,
            self.drafts if ids else (),
            self.plain_reason if ids else "",
            self._logprobs_of_prompt() if is_first else None,
        )

    def _result(self) -> GenerationResult:
        assert self.finish_reason is not None
        return GenerationResult(
            request_id=self.request_id,
            text=self.text.text,
            token_ids=tuple(self.tokens[self.num_prompt :]),
            finish_reason=self.finish_reason,
            stats=self.stats,
            seed=self.seed,
            num_prompt_tokens=self.num_prompt if self.source is None else len(self.source),
            num_cached_tokens=self.num_reused,
            error=self.error,
            parent_id=self.parent_id,
            index=self.index,
            logprobs=None if self.params.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=self._logprobs_of_prompt(),
            error_code=self.error_code,
            error_field=self.error_field,
            stop_string=self.text.found_stop,
        )

    def _logprobs_of_prompt(self) -> tuple[TokenLogprobs | None, ...] | None:
        return tuple(self.prompt_logprobs.tokens) if self.prompt_logprobs else None
