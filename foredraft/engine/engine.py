"""The engine: requests in, events out. One call to `Engine.step` is one step for every row."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from foredraft.control.base import Controller
from foredraft.core.errors import ConfigError, PromptError
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import Proposal
from foredraft.core.request import Request
from foredraft.core.rng import SEED_BITS
from foredraft.drafters.base import Drafter
from foredraft.engine.commit import Commit
from foredraft.engine.detokenize import Piece, TextAssembler, TokenDecoder
from foredraft.engine.guard import GuardedDrafter
from foredraft.engine.row import GenerationResult, Row, Session
from foredraft.engine.scheduler import Scheduler
from foredraft.engine.step import Parts, Trace, step
from foredraft.models.base import Target


@dataclass(frozen=True)
class Event:
    """What a step brought one request.

    Attributes:
        token_ids: newly committed ids.
        num_accepted: how many of them were drafted.
        pieces: text that became certain, marked as drafted or the target's own.
        result: the final result, on the request's last event.
    """

    request_id: int
    token_ids: tuple[int, ...]
    num_accepted: int
    pieces: tuple[Piece, ...]
    result: GenerationResult | None = None


def _no_trace(proposals: Sequence[Proposal], commits: Sequence[Commit]) -> None:
    pass


class Engine:
    """Runs requests to their end.

    Args:
        target: the model whose text it is.
        drafter: guesses ahead; watched, so that its faults cost speed only.
        controller: how much to draft.
        max_batch_size: most requests in one step; further ones wait.
        eos_token_ids: ids that end every request unless it ignores them.
        new_decoder: makes a token decoder for a request; None when there is no tokenizer.
        trace: called after each step.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        controller: Controller,
        *,
        max_batch_size: int = 8,
        eos_token_ids: Sequence[int] = (),
        new_decoder: Callable[[], TokenDecoder] | None = None,
        trace: Trace = _no_trace,
    ) -> None:
        self._target = target
        self._scheduler = Scheduler(max_batch_size)
        self._drafter = GuardedDrafter(drafter, target)
        self._parts = Parts(self._scheduler, controller, self._drafter, target, trace)
        self._eos = frozenset(eos_token_ids)
        self._new_decoder = new_decoder
        self._ids = itertools.count()

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, session: Session | None = None
    ) -> int:
        """Queue a request and return its id.

        Raises:
            PromptError: the prompt is empty, too long, or holds ids outside the vocabulary.
            ConfigError: stop strings without a tokenizer, or a session that is already in use.
        """
        self.check_prompt(prompt)
        if params.stop and self._new_decoder is None:
            raise ConfigError("stop strings need a tokenizer, and this engine has none")
        if session is not None and session.busy:
            raise ConfigError("this conversation already has a reply under way")
        room = self._target.max_context - len(prompt)
        params = replace(params, max_tokens=min(params.max_tokens, room))
        seed = secrets.randbits(SEED_BITS) if params.seed is None else params.seed
        request = Request(next(self._ids), -1, list(prompt), len(prompt), params, seed)
        text = TextAssembler(self._new_decoder() if self._new_decoder else None, tuple(params.stop))
        eos = frozenset() if params.ignore_eos else self._eos
        if session is not None:
            session.busy = True
        self._scheduler.add(Row(request, text, eos | set(params.stop_token_ids), session))
        return request.request_id

    @property
    def has_work(self) -> bool:
        return len(self._scheduler) > 0

    def is_live(self, request_id: int) -> bool:
        """Whether a request is running or waiting."""
        return self._scheduler.find(request_id) is not None

    def step(self) -> list[Event]:
        """One step: at least one token for each running request.

        A failure of the target ends the running requests with finish reason "error"; what they
        had committed is in their results, and the engine goes on. A request that cannot begin (no
        memory for its cache, say) fails alone.
        """
        events = [event for row in self._scheduler.admit() if (event := self._begin(row))]
        if not self._scheduler.next_batch():
            return events
        try:
            commits = step(self._parts)
        except Exception as error:
            return events + [self._fail(row, error) for row in self._scheduler.next_batch()]
        return events + [self._event(done.row) for done in commits]

    def run(self) -> Iterator[Event]:
        """Step until no request is left."""
        while self.has_work:
            yield from self.step()

    def cancel(self, request_id: int) -> GenerationResult | None:
        """End a request now and return what it has; None when it is already over."""
        row = self._scheduler.find(request_id)
        if row is None:
            return None
        row.request.finish_reason = "cancelled"
        return self._finish(row)

    def close_session(self, session: Session) -> None:
        """Give a conversation's cache slot back.

        Raises:
            ConfigError: a reply is under way.
        """
        if session.busy:
            raise ConfigError("a reply of this conversation is under way; cancel it first")
        if session.slot is not None:
            self._target.cache.free(session.slot)
        session.slot, session.tokens = None, []

    def check_prompt(self, prompt: Sequence[int]) -> None:
        """Refuse what cannot be generated from.

        Raises:
            PromptError: the prompt is empty, too long, or holds ids outside the vocabulary.
        """
        limit = self._target.max_context
        if not prompt:
            raise PromptError("the prompt is empty: there is nothing to continue")
        if len(prompt) >= limit:
            raise PromptError(
                f"the prompt has {len(prompt)} tokens and the context holds {limit}: shorten it "
                "so that at least one token fits behind it"
            )
        for token in prompt:
            if type(token) is not int or not 0 <= token < self._target.vocab_size:
                raise PromptError(
                    f"prompt token {token!r} is not an id below {self._target.vocab_size}"
                )

    def _begin(self, row: Row) -> Event | None:
        """Give a new row its cache slot; its last event when that fails."""
        try:
            self._open_slot(row.request, row.session)
        except Exception as error:
            return self._fail(row, error)
        self._drafter.begin(row.request_id, tuple(row.request.tokens))
        return None

    def _open_slot(self, request: Request, session: Session | None) -> None:
        cache = self._target.cache
        if session is None or session.slot is None:
            request.slot = cache.allocate()
            return
        request.slot = session.slot
        request.num_cached = _common_prefix(session.tokens, request.tokens[:-1])
        cache.truncate(request.slot, request.num_cached)

    def _event(self, row: Row) -> Event:
        finished = row.request.finish_reason is not None
        (token_ids, num_accepted), pieces = row.take(), tuple(row.text.take(final=finished))
        result = self._finish(row) if finished else None
        return Event(row.request_id, token_ids, num_accepted, pieces, result)

    def _fail(self, row: Row, error: Exception) -> Event:
        """End a row that an exception cut short, unless it was already complete."""
        if row.request.finish_reason is None:
            row.request.finish_reason = "error"
            row.error = f"{type(error).__name__}: {error}"
        return self._event(row)

    def _finish(self, row: Row) -> GenerationResult:
        self._scheduler.remove(row)
        self._drafter.end(row.request_id)
        self._release(row.request, row.session)
        request = row.request
        assert request.finish_reason is not None
        return GenerationResult(
            request_id=row.request_id,
            text=row.text.text,
            token_ids=tuple(request.generated),
            finish_reason=request.finish_reason,
            stats=request.stats,
            seed=request.seed,
            num_prompt_tokens=request.num_prompt,
            error=row.error,
        )

    def _release(self, request: Request, session: Session | None) -> None:
        cache, slot = self._target.cache, request.slot
        if session is not None:
            session.busy = False
        if slot < 0:  # it never began
            return
        if session is None:
            cache.free(slot)
            return
        # What the cache counts, not the request: an interrupted step leaves it behind. After an
        # error its entries may be the cause, so the next turn reads everything again.
        num_kept = 0 if request.finish_reason == "error" else cache.length(slot)
        session.slot, session.tokens = slot, request.tokens[:num_kept]


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    for i, (mine, theirs) in enumerate(zip(left, right, strict=False)):
        if mine != theirs:
            return i
    return min(len(left), len(right))
