"""The engine: requests in, events out. One call to `Engine.step` is one step for every row."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from foredraft.core.cost import CostModel
from foredraft.core.errors import (
    CacheFullError,
    ConfigError,
    EngineStoppedError,
    PromptError,
    nearest,
)
from foredraft.core.params import SamplingParams
from foredraft.core.record import StepRecord
from foredraft.core.rng import SEED_BITS
from foredraft.core.rules.book import NewRules, new_rules
from foredraft.engine import drafting, slots
from foredraft.engine.policy import Policy, Trace
from foredraft.engine.proof import LiveProof
from foredraft.engine.request import Event, GenerationResult, Reader, ReplySoFar, Request
from foredraft.engine.scheduler import MAX_STEP_TOKENS, Scheduler
from foredraft.engine.stats import EngineStats
from foredraft.engine.step import step
from foredraft.engine.text import NewDecoder, TextAssembler
from foredraft.engine.turn import Turn
from foredraft.models.base import Source, Target
from foredraft.system.fair_lock import FairLock

CHECK_VARIABLE = "FOREDRAFT_CHECK"
"""Environment variable: if set, the accounts of the cache are checked after each step."""
_CHECK_EVERY = 1000
"""Steps between two checks when the variable is not set."""

_log = logging.getLogger("foredraft")


@dataclass(frozen=True)
class EngineOptions:
    """How an engine runs.

    Attributes:
        max_batch_size: most requests in one step; further ones wait.
        max_step_tokens: most prompt tokens read in one step.
        prefix_caching: whether the KV entries of a text stay cached for requests with the same
            beginning, while there is room.
        eos_token_ids: ids that end every request unless it ignores them.
        new_decoder: makes the decoder of a reply; None when there is no tokenizer.
        new_rules: makes the sampling rules of requests; None: all but those that need a tokenizer.
        cost: the model of step times on this machine, updated by each step. None: not tracked.
        trace: called with the record of each step.
        clock: seconds, for the times of steps.
        new_seed: the seed of a request that names none.
    """

    max_batch_size: int = 8
    max_step_tokens: int = MAX_STEP_TOKENS
    prefix_caching: bool = True
    eos_token_ids: Sequence[int] = ()
    new_decoder: NewDecoder | None = None
    new_rules: NewRules | None = None
    cost: CostModel | None = None
    trace: Trace | None = None
    clock: Callable[[], float] = time.perf_counter
    new_seed: Callable[[], int] = lambda: secrets.randbits(SEED_BITS)


class Engine:
    """Runs requests to their end. Safe to use from several threads: they take turns.

    There is one engine for a target and its cache: it alone decides who gets their memory.

    Args:
        target: the model whose text it is.
        policy: drafts for requests without a policy of their own.
        options: how it runs.

    Attributes:
        lock: held during each call.
        target: the same.
        proof: repeats some steps without drafts, to compare; None: live proof is off.

    Raises:
        ConfigError: an option has a value that cannot be used.
    """

    def __init__(
        self, target: Target, policy: Policy, options: EngineOptions | None = None
    ) -> None:
        self._options = options = options or EngineOptions()
        self.target, self._policy = target, policy
        self._encoder = target.capabilities.encoder
        self._trace = options.trace
        self._headroom = slots.HEADROOM
        self._check_every = 1 if os.environ.get(CHECK_VARIABLE) else _CHECK_EVERY
        self._steps = itertools.count(1)
        self._scheduler = Scheduler(
            options.max_batch_size,
            options.max_step_tokens,
            partial(slots.must_wait, target.cache),
        )
        # set after the cache refused memory: admit no request until a running one ends
        self._is_full = False
        self._eos_token_ids = frozenset(options.eos_token_ids)
        self._new_rules = options.new_rules or partial(new_rules, vocab_size=target.vocab_size)
        self._ids = itertools.count()
        self.lock = FairLock()
        self.proof: LiveProof | None = None
        self._stats, self._num_reported = EngineStats(), 0  # preemptions
        self._is_stepping = self._was_interrupted = False
        self._cancelled_meanwhile: list[int] = []

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        reader: Reader | None = None,
        **options: Any,
    ) -> int:
        """Queue a request and return its id; `prepare`, with these options, and `add` in one.

        Of several replies (`SamplingParams.n`) it is the first one's, which is their ``parent_id``.
        """
        requests = self.prepare(prompt, params, **options)
        self.add(requests, reader)
        return requests[0].request_id

    def prepare(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        policy: Policy | None = None,
        tenant: str | None = None,
        priority: int = 0,
        source: Source | None = None,
        so_far: ReplySoFar | None = None,
    ) -> list[Request]:
        """Make the requests for a prompt, one a reply, ready to be queued. Never waits for a step.

        Args:
            policy: the controller and drafters for it; None: the engine's own policy.
            tenant: whose request it is; tenants share no cached text. The part before the first "/"
                names its owner, and owners take turns in the queue: see `Scheduler`.
            priority: requests of higher numbers go first.
            source: the encoder's input of an encoder-decoder; its prompt is then the decoder
                prompt. None: the prompt is the source.
            so_far: the tokens that another engine has committed of the reply; None: it begins here.

        Raises:
            PromptError: the prompt, with the resumed part of the reply, is empty, too long, or
                holds ids outside the vocabulary.
            ConfigError: stop strings without a tokenizer, a drafter that is not loaded, a reply
                that cannot go on (`Request.resume`), or something that an encoder-decoder has not.
        """
        policy = policy or self._policy
        prompt, source = self._begin_reply(prompt, params, source)
        if so_far is not None:
            self._check_beginning([*prompt, *so_far.token_ids])
            _check_resumable(params)
        _check_speculation(params, policy)
        if params.stop and self._options.new_decoder is None:
            raise ConfigError("stop strings need a tokenizer, and this engine has none")
        room = self.target.max_context - len(prompt)
        params = params.of_length(min(params.max_tokens, room))
        if params.seed is None:
            params = replace(params, seed=self._options.new_seed())
        requests: list[Request] = []
        for index, own in enumerate(params.each()):
            request = self._new_request(
                list(prompt),
                own,
                policy,
                tenant=tenant,
                priority=priority,
                source=source,
                leader=requests[0] if requests else None,
                index=index,
            )
            requests.append(request)
        if so_far is not None:
            requests[0].resume(so_far)
        return requests

    def add(self, requests: Sequence[Request], reader: Reader | None = None) -> None:
        """Queue what `prepare` made.

        Args:
            reader: called with the requests' events, which `step` also returns.
        """
        with self.lock:
            for request in requests:
                request.reader = reader
                self._scheduler.add(request)

    @property
    def max_batch_size(self) -> int:
        """Most requests in one step."""
        return self._options.max_batch_size

    @property
    def has_work(self) -> bool:
        return len(self._scheduler) > 0

    @property
    def num_live(self) -> int:
        """Requests that run or wait."""
        return len(self._scheduler)

    def step(self, policy: Policy | None = None) -> list[Event]:
        """One step: a token at least for each request whose prompt has been read.

        A failure ends only the request that it happened in, with finish reason "error" and its
        committed tokens. Where a forward of several rows fails, each is tried alone.

        Args:
            policy: the policy to step, if its requests stay apart (`Policy.is_apart`); requests of
                all other policies take part in any step.
        """
        with self.lock:
            self._is_stepping = True
            try:
                if self._was_interrupted:
                    self._end_drafting()
                self._admit()
                batch = [t for t in self._scheduler.next_batch(policy) if not t.request.is_over]
                self._run(batch)
                cache = self.target.cache
                slots.publish(cache, [t.request for t in batch if not t.request.is_over])
                if not next(self._steps) % self._check_every:
                    slots.check(cache, must_be_right=self._check_every == 1)
                changed = {turn.request for turn in batch}
                events = [
                    self._event(request)
                    for request in self._scheduler.running
                    if request in changed or request.is_over
                ]
            except BaseException:  # such as Ctrl-C
                self._was_interrupted = True
                raise
            finally:
                self._is_stepping = False
            cancelled = [self._scheduler.find(number) for number in self._cancelled_meanwhile]
            self._cancelled_meanwhile.clear()
            return events + [self._cancel(each) for each in dict.fromkeys(cancelled) if each]

    def run(self) -> Iterator[Event]:
        """Step until no request is left."""
        while self.has_work:
            yield from self.step()

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        policy: Policy | None = None,
        tenant: str | None = None,
        so_far: ReplySoFar | None = None,
    ) -> Iterator[Event]:
        """Submit requests and yield their events until all are over: the reader drives the engine.

        Closing the iterator early cancels the unfinished requests. Requests are submitted when the
        first event is asked for, and none is generated unless every prompt is accepted. Several
        threads may read: they take turns at stepping, and events of other streams wait for their
        readers.

        Raises:
            PromptError, ConfigError: as `submit`.
        """
        inbox, live = deque[Event](), set[int]()
        try:
            # Compiling a grammar may take long: do it before taking the lock.
            prepared = [
                self.prepare(each, params, policy=policy, tenant=tenant, so_far=so_far)
                for each in prompts
            ]
            with self.lock:
                for requests in prepared:
                    live.update(request.request_id for request in requests)
                    self.add(requests, inbox.append)
            while live:
                self._drive(inbox, live, policy)
                if not inbox:  # an interrupt swallowed the last event
                    break
                while inbox:
                    event = inbox.popleft()
                    if event.result is not None:
                        live.discard(event.request_id)
                    yield event
        finally:
            # A stream that is still open when the interpreter ends: nothing is there to be tidy in.
            if not sys.is_finalizing():
                for request_id in live:
                    self.cancel(request_id)

    def _drive(self, inbox: deque[Event], live: Set[int], policy: Policy | None) -> None:
        """Step until an event has arrived (another thread may bring it), or no more can."""
        while not inbox:
            with self.lock:
                if inbox or not any(map(self._scheduler.find, live)):
                    return
                self.step(policy)

    def cancel(self, request_id: int) -> GenerationResult | None:
        """End a request now and return what it has; None when it is already over.

        If called within a step (a stream that the garbage collector closes), it ends right after
        the step.
        """
        with self.lock:
            if self._is_stepping:
                self._cancelled_meanwhile.append(request_id)
                return None
            request = self._scheduler.find(request_id)
            return self._cancel(request).result if request else None

    def stats(self) -> EngineStats:
        """Counts of the engine's work so far and of its live requests. Never waits for a step."""
        usage = self.target.cache.usage
        return replace(
            self._stats,
            running=sum(not self._is_proof(request) for request in self._scheduler.running),
            waiting=self._scheduler.num_waiting,
            finished=dict(self._stats.finished),
            cache_tokens=usage.used,
            cache_free_tokens=usage.available,
        )

    def forget_prefixes(self) -> None:
        """Give up the cached entries of texts that no request uses."""
        with self.lock:
            self.target.cache.forget()

    def check_prompt(self, prompt: Sequence[int]) -> None:
        """Refuse a prompt that cannot be generated from.

        Raises:
            PromptError: the prompt is empty, too long, or holds ids outside the vocabulary.
        """
        if self._encoder is not None:
            most = self._encoder.max_source
            check_ids(prompt, self.target.vocab_size, most, "the encoder reads no more")
        else:
            self._check_beginning(prompt)

    def _check_beginning(self, prompt: Sequence[int]) -> None:
        """Refuse a decoder prompt that a reply cannot continue."""
        most = self.target.max_context
        limit = f"this model's maximum context length is {most} tokens"
        check_ids(prompt, self.target.vocab_size, most - 1, limit)

    def _begin_reply(
        self, prompt: Sequence[int], params: SamplingParams, source: Source | None
    ) -> tuple[Sequence[int], Source | None]:
        """Tokens that the reply continues: the prompt, or an encoder-decoder's decoder prompt.

        The prompt of an encoder-decoder is its source, unless another source is given.
        """
        if self._encoder is None:
            if source is not None:
                raise ConfigError("source is for encoder-decoders, and this model is none")
            self._check_beginning(prompt)
            return prompt, None
        if params.prompt_logprobs is not None:
            raise ConfigError(
                "prompt_logprobs is not offered here: an encoder-decoder does not say how likely "
                "its prompt is",
                field="prompt_logprobs",
            )
        if source is None:
            self.check_prompt(prompt)
            prompt, source = self._encoder.decoder_prompt, Source(tuple(prompt))
        self._check_beginning(prompt)
        return prompt, source

    def _new_request(
        self, prompt: list[int], params: SamplingParams, policy: Policy, **more: Any
    ) -> Request:
        assert params.seed is not None
        new_decoder, eos = self._options.new_decoder, self._eos_token_ids
        shown = {} if params.skip_special_tokens else {"skip_special_tokens": False}
        decode = new_decoder(prompt, **shown) if new_decoder else None
        stop_ids = (frozenset() if params.ignore_eos else eos) | set(params.stop_token_ids)
        return Request(
            next(self._ids),
            prompt,
            len(prompt),
            params,
            params.seed,
            policy,
            self._new_rules(params, len(prompt), stop_ids),
            TextAssembler(decode, tuple(params.stop), params.min_tokens, params.include_stop),
            stop_ids,
            shares=self._options.prefix_caching and policy.prefix_caching,
            **more,
        )

    def _admit(self) -> None:
        """Admit requests while there is room in the batch and in the cache.

        A request without memory waits, with all behind it; if no other runs, it ends with an error.
        """
        while not self._is_full and (request := self._scheduler.next_waiting()) is not None:
            running = self._scheduler.running
            try:
                self._open(request)
                # One of many that come at once drafts as one of many.
                drafting.begin(request, [*running, *self._scheduler.coming(request)])
            except CacheFullError as error:
                if running:
                    self._is_full = True
                    return
                request.fail(error)
            except Exception as error:
                request.fail(error)
            except BaseException:
                self._close(request)
                raise
            self._scheduler.start(request)

    def _run(self, batch: Sequence[Turn]) -> None:
        """Step these rows; fewer if memory is short; each alone if the forward fails."""
        while batch:
            try:
                options = self._options
                record = step(self.target, batch, options.max_step_tokens, options.clock)
            except CacheFullError as error:
                batch = self._with_room(batch, error)
            except EngineStoppedError:  # of the target itself: retrying rows alone cannot help
                raise
            except Exception as error:
                self._run_each(batch, error)
                return
            else:
                self._report(batch, record)
                return

    def _run_each(self, batch: Sequence[Turn], error: Exception) -> None:
        """Step each row of a failed step alone; end the request of a row that fails alone."""
        if len(batch) == 1:
            batch[0].request.fail(error)
            return
        _log.debug("a step of %d rows failed; each is tried alone", len(batch), exc_info=error)
        for turn in batch:
            request = turn.request
            is_unread = request.slot >= 0 and request.num_cached == turn.context
            if is_unread and not request.is_over:
                self._run([Turn(request, turn.num_read, turn.may_draft)])

    def _with_room(self, batch: Sequence[Turn], error: CacheFullError) -> list[Turn]:
        """The turns that remain when memory ran out: drop the drafts first, then the last row."""
        if any(turn.may_draft for turn in batch):
            return [Turn(turn.request, turn.num_read, may_draft=False) for turn in batch]
        running = self._scheduler.running
        if any(request.is_over for request in running):
            return []  # their slots are free after this step
        if len(running) == 1:
            running[0].fail(error)
            return []
        last = running[-1]
        self._preempt(last)
        return [Turn(t.request, t.num_read, False) for t in batch if t.request is not last]

    def _preempt(self, request: Request) -> None:
        """Preempt a request: it waits, prefills its committed tokens again, and continues."""
        _log.debug("request %d waits for memory", request.request_id)
        self._close(request)
        self._scheduler.preempt(request)
        self._stats.preemptions += 1
        self._is_full = True

    def _end_drafting(self) -> None:
        """Detach all drafters of running requests: a broken step leaves their state unknown.

        Controllers may attach a drafter again.
        """
        for request in self._scheduler.running:
            drafting.end(request)
        self._was_interrupted = False

    def _open(self, request: Request) -> None:
        slots.begin(self.target.cache, request, self._headroom)
        if request.shares or request.num_cached:
            self._stats.prefix_tokens += len(request.tokens)
            self._stats.prefix_cached_tokens += request.num_cached

    def _close(self, request: Request) -> None:
        drafting.end(request)
        slots.end(self.target.cache, request)

    def _report(self, batch: Sequence[Turn], record: StepRecord) -> None:
        """Report a step to costs, totals, traces and controllers, without a proof's own row."""
        if self.proof is not None:
            self.proof.see(batch)
            pairs = zip(batch, record.rows, strict=True)
            record = replace(
                record, rows=tuple(row for turn, row in pairs if not self._is_proof(turn.request))
            )
            batch = [turn for turn in batch if not self._is_proof(turn.request)]
            if not batch:
                return
        stats, num_waiting = self._stats, self._scheduler.num_waiting
        num_preempted = stats.preemptions - self._num_reported
        self._num_reported = stats.preemptions
        if num_waiting or num_preempted:
            record = replace(record, num_waiting=num_waiting, num_preempted=num_preempted)
        stats.steps += 1
        for turn in batch:
            stats.prompt_tokens += turn.num_prefill
            stats.committed += len(turn.committed)
            stats.drafted += len(turn.proposal.tree)
            stats.accepted += turn.num_accepted
        if self._options.cost is not None and record.is_decoding:
            self._options.cost.observe(record.sizes, record.times.score_ms)
        drafting.report(batch, record)
        self._trace = drafting.call_trace(self._trace, record)

    def _cancel(self, request: Request) -> Event:
        request.finish_reason = "cancelled"
        return self._event(request)

    def _event(self, request: Request) -> Event:
        """The new event of a request; its reader gets it, too.

        A finished request is removed last: if this is interrupted, the next step does it again.
        """
        if request.is_over:
            self._finish(request)
        event = request.take_event()
        if request.reader is not None:
            request.reader(event)
        if request.is_over:
            self._scheduler.remove(request)
        return event

    def _finish(self, request: Request) -> None:
        assert request.finish_reason is not None
        if self._scheduler.runs(request):  # one that waits leaves no memory
            self._is_full = False
        self._close(request)
        drafting.forget(request)
        if not self._is_proof(request):
            finished, reason = self._stats.finished, request.finish_reason
            finished[reason] = finished.get(reason, 0) + 1

    def _is_proof(self, request: Request) -> bool:
        return self.proof is not None and self.proof.owns(request)


def check_ids(prompt: Sequence[int], vocab_size: int, most: int, limit: str) -> None:
    """Refuse token ids that cannot be generated from.

    Args:
        most: most ids allowed.
        limit: where it comes from, for the error message.

    Raises:
        PromptError: there are none, too many, or some that are outside the vocabulary.
    """
    if not prompt:
        raise PromptError("the prompt is empty: there is nothing to continue", field="prompt")
    if len(prompt) > most:
        raise PromptError.too_long(len(prompt), most, limit)
    for token in prompt:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise PromptError(
                f"prompt token {token!r} is not an id below {vocab_size}", field="prompt"
            )


def _check_resumable(params: SamplingParams) -> None:
    """Raises a `ConfigError` if the parameters do not determine how a reply continues."""
    if params.n > 1:
        raise ConfigError(f"n is {params.n}, and each reply goes on alone: see SamplingParams.each")
    if params.seed is None and params.temperature > 0.0:
        raise ConfigError("a reply goes on with the seed that it began with: name it", field="seed")


def _check_speculation(params: SamplingParams, policy: Policy) -> None:
    known = ("auto", "off", *policy.drafters)
    if params.speculation not in known:
        hint = nearest(params.speculation, known)
        raise ConfigError(
            f"speculation is {params.speculation!r}{hint} (here: {', '.join(known)})",
            field="speculation",
        )
