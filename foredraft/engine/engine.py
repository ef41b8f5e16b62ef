"""The engine: requests in, events out. One call to `Engine.step` is one step for every row."""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from foredraft.cache.prefix import PrefixCache, Session
from foredraft.control.base import Controller
from foredraft.core.errors import CacheFullError, ConfigError, PromptError
from foredraft.core.params import SamplingParams
from foredraft.core.record import StepRecord
from foredraft.core.request import Request
from foredraft.core.rng import SEED_BITS
from foredraft.core.rules.book import RuleBook
from foredraft.drafters.base import Drafter
from foredraft.engine.detokenize import TextAssembler, TokenDecoder
from foredraft.engine.events import Event as Event
from foredraft.engine.events import Reader
from foredraft.engine.guard import GuardedDrafter
from foredraft.engine.guarded_controller import GuardedController
from foredraft.engine.places import Places
from foredraft.engine.row import GenerationResult, Row, Turn
from foredraft.engine.scheduler import MAX_STEP_TOKENS, Scheduler
from foredraft.engine.stats import EngineStats, Totals
from foredraft.engine.step import Parts, step
from foredraft.engine.turns import TurnLock
from foredraft.models.base import Target, check_taps

Trace = Callable[[StepRecord], None]
"""Told of every step. What it raises is said once in the log, and it is not told again.

One with an attribute `wants_evidence` that is true also gets each verdict's evidence.
"""

_log = logging.getLogger("foredraft")


class Engine:
    """Runs requests to their end. Safe to use from several threads: they take turns.

    Args:
        target: the model whose text it is.
        drafter: guesses ahead; watched, so that its faults cost speed only.
        controller: how much to draft.
        max_batch_size: most requests in one step; further ones wait.
        max_step_tokens: most prompt tokens read in one step.
        eos_token_ids: ids that end every request unless it ignores them.
        new_decoder: makes a token decoder for a request; None when there is no tokenizer.
        rule_book: what requests ask of a distribution; None: all but what needs a tokenizer.
        trace: told of each step.
        lock: held during each call; engines that share a target share it.
        prefix_caching: what was read of a text is kept for requests that begin likewise, as long
            as there is room.
        clock: seconds, for the times of steps.
        new_seed: the seed of a request that names none.

    Raises:
        ConfigError: a number that is none, or the drafter taps a layer that the target lacks.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        controller: Controller,
        *,
        max_batch_size: int = 8,
        max_step_tokens: int = MAX_STEP_TOKENS,
        eos_token_ids: Sequence[int] = (),
        new_decoder: Callable[[], TokenDecoder] | None = None,
        rule_book: RuleBook | None = None,
        trace: Trace | None = None,
        lock: TurnLock | None = None,
        prefix_caching: bool = True,
        clock: Callable[[], float] = time.perf_counter,
        new_seed: Callable[[], int] = lambda: secrets.randbits(SEED_BITS),
    ) -> None:
        check_taps(drafter.taps, target.capabilities)
        self._target, self._trace = target, trace
        self._controller = GuardedController(controller, target.max_context)
        self.max_batch_size = max_batch_size
        self._drafter = GuardedDrafter(drafter, target)
        self._parts = Parts(self._controller, self._drafter, target, self._report, clock)
        self._places = Places(target, self._drafter, prefix_caching)
        self._scheduler = Scheduler(max_batch_size, max_step_tokens, self._places.must_wait)
        self._is_full = False  # of memory: nobody begins before somebody else has ended
        self._eos = frozenset(eos_token_ids)
        self._new_decoder, self._new_seed = new_decoder, new_seed
        self._rule_book = rule_book or RuleBook(target.vocab_size)
        self._ids = itertools.count()
        self.lock = lock or TurnLock()
        self._readers: dict[int, Reader] = {}
        self._totals = Totals()
        self._is_stepping = False
        self._cancelled_meanwhile: list[int] = []

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        session: Session | None = None,
        tenant: str | None = None,
        *,
        priority: int = 0,
        reader: Reader | None = None,
    ) -> int:
        """Queue a request and return its id; `prepare` and `add` in one.

        Of several replies (`SamplingParams.n`) it is the first one's, which is their ``parent_id``.
        """
        rows = self.prepare(prompt, params, session, tenant, priority)
        self.add(rows, reader)
        return rows[0].request_id

    def prepare(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        session: Session | None = None,
        tenant: str | None = None,
        priority: int = 0,
    ) -> list[Row]:
        """A request that can be queued, a row a reply. Waits for nobody: a step may be under way.

        Args:
            session: a conversation, which takes one reply at a time.
            tenant: whose request it is; drafters keep what they learn of one from the others.
            priority: requests of higher numbers go first.

        Raises:
            PromptError: the prompt is empty, too long, or holds ids outside the vocabulary.
            ConfigError: stop strings without a tokenizer, or several replies in a conversation.
        """
        self.check_prompt(prompt)
        if params.stop and self._new_decoder is None:
            raise ConfigError("stop strings need a tokenizer, and this engine has none")
        if params.n > 1 and session is not None:
            raise ConfigError(f"n is {params.n}, and a conversation goes on with one reply")
        room = self._target.max_context - len(prompt)
        most = min(params.max_tokens, room)
        params = replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))
        if params.seed is None:
            params = replace(params, seed=self._new_seed())
        rows: list[Row] = []
        for index, own in enumerate(params.each()):
            assert own.seed is not None
            request = Request(next(self._ids), -1, list(prompt), len(prompt), own, own.seed)
            decode = self._new_decoder() if self._new_decoder else None
            text = TextAssembler(decode, tuple(own.stop), own.min_tokens, own.include_stop)
            stop_ids = (frozenset() if own.ignore_eos else self._eos) | set(own.stop_token_ids)
            rules = self._rule_book.rules(own, len(prompt), stop_ids)
            row = Row(request, text, stop_ids, rules, session, tenant, priority)
            row.follow(rows[0] if rows else None, index)
            row.keeps_evidence = bool(getattr(self._trace, "wants_evidence", False))
            rows.append(row)
        return rows

    def add(self, rows: Sequence[Row], reader: Reader | None = None) -> None:
        """Queue what `prepare` made.

        Args:
            reader: handed the request's events, beside whoever steps.

        Raises:
            ConfigError: its session is already in use.
        """
        with self.lock:
            for row in rows:
                if row.session is not None:
                    if row.session.busy:
                        raise ConfigError("this conversation already has a reply under way")
                    row.session.busy = True
                if reader is not None:
                    self._readers[row.request_id] = reader
                self._scheduler.add(row)

    @property
    def prefixes(self) -> PrefixCache:
        """What requests that begin alike share."""
        return self._places.prefixes

    @property
    def has_work(self) -> bool:
        return len(self._scheduler) > 0

    def is_live(self, request_id: int) -> bool:
        """Whether a request is running or waiting."""
        return self._scheduler.find(request_id) is not None

    def step(self) -> list[Event]:
        """One step: a token at least for each request whose prompt has been read.

        A failure costs the one request that it happened in: it ends with finish reason "error" and
        what it had committed. Where a forward of several rows fails, each is tried alone.
        """
        with self.lock:
            self._is_stepping = True
            try:
                self._admit()
                batch = [t for t in self._scheduler.next_batch() if not t.row.is_over]
                self._run(batch)
                self._places.note([turn.row for turn in batch if not turn.row.is_over])
                self.prefixes.check_now_and_then()
                changed = {turn.row for turn in batch}
                events = [
                    self._event(row)
                    for row in self._scheduler.running
                    if row in changed or row.is_over
                ]
            finally:
                self._is_stepping = False
            cancelled = [self._scheduler.find(number) for number in self._cancelled_meanwhile]
            self._cancelled_meanwhile.clear()
            return events + [self._cancel(row) for row in dict.fromkeys(cancelled) if row]

    def run(self) -> Iterator[Event]:
        """Step until no request is left."""
        while self.has_work:
            yield from self.step()

    def cancel(self, request_id: int) -> GenerationResult | None:
        """End a request now and return what it has; None when it is already over.

        From within a step (a stream that the garbage collector closes) it ends right after it.
        """
        with self.lock:
            if self._is_stepping:
                self._cancelled_meanwhile.append(request_id)
                return None
            row = self._scheduler.find(request_id)
            return self._cancel(row).result if row else None

    def stats(self) -> EngineStats:
        """What the engine has done and is doing. Waits for nobody: a step may be under way."""
        totals, running = self._totals, len(self._scheduler.running)
        usage, found = self._target.cache.usage, self.prefixes.stats
        return EngineStats(
            running=running,
            waiting=self._scheduler.num_waiting,
            finished=dict(totals.finished),
            steps=totals.steps,
            prompt_tokens=totals.prompt_tokens,
            committed=totals.committed,
            drafted=totals.drafted,
            accepted=totals.accepted,
            preemptions=totals.preemptions,
            cache_tokens=usage.used,
            cache_free_tokens=usage.available,
            prefix_tokens=found.tokens,
            prefix_cached_tokens=found.cached_tokens,
        )

    def close_session(self, session: Session) -> None:
        """A conversation is over.

        Raises:
            ConfigError: a reply is under way.
        """
        with self.lock:
            session.close()

    def check_prompt(self, prompt: Sequence[int]) -> None:
        """Refuse what cannot be generated from.

        Raises:
            PromptError: the prompt is empty, too long, or holds ids outside the vocabulary.
        """
        limit = self._target.max_context
        if not prompt:
            raise PromptError("the prompt is empty: there is nothing to continue", field="prompt")
        if len(prompt) >= limit:
            raise PromptError(
                f"the prompt has {len(prompt)} tokens and the context holds {limit}: shorten it "
                "so that at least one token fits behind it",
                field="prompt",
                code="context_length_exceeded",
            )
        for token in prompt:
            if type(token) is not int or not 0 <= token < self._target.vocab_size:
                raise PromptError(
                    f"prompt token {token!r} is not an id below {self._target.vocab_size}",
                    field="prompt",
                )

    def _admit(self) -> None:
        """Let rows into the batch while there is room, in the batch and in the cache.

        The first one that there is no memory for waits, and all others behind it; alone it ends.
        """
        while not self._is_full and (row := self._scheduler.next_waiting()) is not None:
            try:
                self._places.open(row)
            except CacheFullError as error:
                if self._scheduler.running:
                    self._is_full = True
                    return
                row.fail(error)
            except Exception as error:
                row.fail(error)
            self._scheduler.start(row)

    def _run(self, batch: Sequence[Turn]) -> None:
        """One step of these rows; of fewer without memory for it; of each alone where it fails."""
        if not batch:
            return
        starts = [turn.row.request.num_cached for turn in batch]
        try:
            step(self._parts, batch)
        except CacheFullError as error:
            self._run(self._with_room(batch, error))
        except Exception as error:
            if len(batch) == 1:
                batch[0].row.fail(error)
                return
            _log.debug("a step of %d rows failed; each is tried alone", len(batch), exc_info=error)
            for turn, start in zip(batch, starts, strict=True):
                request = turn.row.request
                if not turn.row.is_over and request.slot >= 0 and request.num_cached == start:
                    self._run([turn])

    def _with_room(self, batch: Sequence[Turn], error: CacheFullError) -> list[Turn]:
        """The turns that are left when something gives way: drafts first, then the last row."""
        if any(turn.may_draft for turn in batch):
            return [replace(turn, may_draft=False) for turn in batch]
        running = self._scheduler.running
        if any(row.is_over for row in running):
            return []  # their places are free after this step
        if len(running) == 1:
            running[0].fail(error)
            return []
        last = running[-1]
        self._preempt(last)
        return [turn for turn in batch if turn.row is not last]

    def _preempt(self, row: Row) -> None:
        """Let a row wait for memory. What it has committed it reads again, and goes on."""
        _log.debug("request %d waits for memory", row.request_id)
        self._places.close(row)
        self._scheduler.preempt(row)
        self._totals.preemptions += 1
        self._is_full = True

    def _report(self, record: StepRecord) -> None:
        """Tell controller and trace of a step; their faults are theirs."""
        waiting, preempted = self._scheduler.num_waiting, self._totals.untold_preemptions()
        record = replace(record, num_waiting=waiting, num_preempted=preempted)
        self._totals.add_step(record)
        self._controller.observe(record)
        if self._trace is None:
            return
        try:
            self._trace(record)
        except Exception as error:
            self._trace = None
            _log.warning("the trace failed and is switched off: %s", error, exc_info=error)

    def _cancel(self, row: Row) -> Event:
        row.request.finish_reason = "cancelled"
        return self._event(row)

    def _event(self, row: Row) -> Event:
        finished, is_first = row.is_over, not row.num_sent
        token_ids, num_accepted, num_drafted = row.take()
        pieces = tuple(row.text.take(final=finished))
        reader = self._readers.get(row.request_id)
        logprobs = row.last_logprobs(len(token_ids))
        result = self._finish(row) if finished else None
        event = Event(
            row.request_id,
            token_ids,
            num_accepted,
            pieces,
            row.num_prompt_read,
            logprobs,
            result,
            row.parent_id,
            row.index,
            num_drafted,
            row.found_of_prompt if is_first and token_ids else None,
        )
        if reader is not None:
            reader(event)
        return event

    def _finish(self, row: Row) -> GenerationResult:
        self._scheduler.remove(row)
        self._places.close(row)
        self._is_full = False
        self._controller.end(row.request_id)
        if row.session is not None:
            row.session.busy = False
        self._readers.pop(row.request_id, None)
        result = row.result()
        self._totals.add_finished(result.finish_reason)
        return result
