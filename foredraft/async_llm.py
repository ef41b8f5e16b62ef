"""One engine thread, and any number of asyncio tasks and threads that ask things of it."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from os import PathLike
from typing import Any, Self

from foredraft.control.fixed import FixedBudget
from foredraft.core.checks import checked_int
from foredraft.core.errors import ConfigError, EngineStoppedError
from foredraft.core.grammar import Grammar
from foredraft.core.params import SamplingParams, checked_params
from foredraft.engine.drive import EngineThread
from foredraft.engine.engine import Engine
from foredraft.engine.policy import Policy
from foredraft.engine.proof import LiveProof
from foredraft.engine.request import Event, GenerationResult, ReplySoFar, Request, owner_name
from foredraft.engine.stats import EngineStats
from foredraft.llm import LLM
from foredraft.models.files.progress import Progress
from foredraft.models.text.prompts import Message, Prompt
from foredraft.options import DEFAULT_MODEL

MAX_WAITING = 256
"""By default, most requests that wait beside those in the batch."""


class EventStream:
    """The events of replies as they come; the last one of each reply carries its result.

    Closing it early aborts the replies within one step; so does dropping it. It belongs to the
    event loop in which it was opened.

    Attributes:
        request_ids: of the replies: prompts one after the other, ``n`` replies to each.
    """

    def __init__(
        self,
        request_ids: Sequence[int],
        abort: Callable[[], None],
        mailbox: _Mailbox | None = None,
    ) -> None:
        self._num_live = len(request_ids)
        self.request_ids = request_ids
        self._abort, self._mailbox = abort, mailbox or _Mailbox(deque())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if not self._num_live:
            raise StopAsyncIteration
        try:
            event = await self._mailbox.take()
        except Exception:
            self._close()
            raise
        self._num_live -= event.result is not None
        return event

    def put(self, item: Event | Exception) -> None:
        """Add an event, or the error that ends the stream."""
        self._mailbox.put(item)
        _send(self._mailbox.post)

    async def cut(self) -> None:
        """End unfinished replies. Their last events come, with finish reason "cancelled"."""
        if self._num_live:
            self._abort()

    async def aclose(self) -> None:
        """Abort unfinished requests."""
        self._close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._close()

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        if self._num_live:
            self._num_live = 0
            self._abort()


class _Mailbox:
    """Events on their way from the engine's thread to an event loop.

    The engine never waits: unread events are kept here.

    Args:
        post: mailboxes with events of which their readers have not heard; see `_send`.
    """

    def __init__(self, post: deque[_Mailbox]) -> None:
        self.loop, self.post = asyncio.get_running_loop(), post
        self.arrived = asyncio.Event()
        self._events: deque[Event | Exception] = deque()

    def put(self, event: Event | Exception) -> None:
        """Keep an event, from any thread.

        Raises:
            RuntimeError: the loop is closed, so its reader is gone.
        """
        if self.loop.is_closed():
            raise RuntimeError("the event loop is closed")
        self._events.append(event)
        self.post.append(self)

    async def take(self) -> Event:
        if self._events:
            await asyncio.sleep(0)  # a reader who lags behind must not keep the others waiting
        while not self._events:
            self.arrived.clear()
            await self.arrived.wait()
        event = self._events.popleft()
        if isinstance(event, Exception):
            raise event
        return event


def _send(post: deque[_Mailbox]) -> None:
    """Wake the readers of new events: one call to each loop for all that a step brought.

    A call wakes the loop's thread, which then asks for the interpreter that the engine needs.
    """
    waiting: dict[asyncio.AbstractEventLoop, list[_Mailbox]] = {}
    with suppress(IndexError):
        while True:
            mailbox = post.popleft()
            waiting.setdefault(mailbox.loop, []).append(mailbox)
    for loop, mailboxes in waiting.items():
        with suppress(RuntimeError):  # closed by now; the next event's `put` says so
            loop.call_soon_threadsafe(_wake, mailboxes)


def _wake(mailboxes: Sequence[_Mailbox]) -> None:
    for mailbox in mailboxes:
        mailbox.arrived.set()


def _idle_work(
    llm: LLM, proof: LiveProof | None, give_back_after: float | None
) -> Callable[[float], float | None]:
    has_given_back = False

    def work(seconds: float) -> float | None:
        nonlocal has_given_back
        wanted = proof.advance() if proof else None
        if give_back_after is None:
            return wanted
        if seconds < give_back_after:
            has_given_back, left = False, give_back_after - seconds
            return left if wanted is None else min(wanted, left)
        if not has_given_back:
            llm.give_memory_back()
            has_given_back = True
        return wanted

    return work


class AsyncLLM:
    """An `LLM` that a thread of its own runs, for asyncio.

    Requests join and leave the batch at any step. Coroutines of any number of event loops and
    threads may use one; ``llm`` itself can be used beside it, and takes turns with it.

    Args:
        llm: runs the requests. It is not closed with this one.
        max_waiting: most requests that wait beside those in the batch; further ones are refused.
        prove_every: one of this many steps with drafts is run again without drafts while the engine
            is idle; see `LiveProof`. 0: none.
        on_proof: called after each of these proofs, on the engine's thread; True: nothing differs.
        give_back_after: seconds without a request after which cached prompts are given up and their
            memory is returned to the system; None: never.

    Attributes:
        llm: the same.
        worker: the engine's thread.
        proof: results of the proofs so far; None: no proofs are made.

    Raises:
        ConfigError: ``max_waiting`` or ``prove_every`` is not a whole number, 0 or more, another
            `AsyncLLM` proves the steps of this LLM, or its texts are not exact.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        max_waiting: int = MAX_WAITING,
        prove_every: int = 0,
        on_proof: Callable[[bool], None] = lambda is_same: None,
        give_back_after: float | None = None,
    ) -> None:
        self.llm = llm
        self._max_waiting = checked_int("max_waiting", max_waiting, 0)
        self._post: deque[_Mailbox] = deque()
        self.proof: LiveProof | None = None
        if prove_every:
            if llm.engine.proof is not None:
                raise ConfigError("another AsyncLLM proves the steps of this LLM; close it first")
            if not llm.is_exact:
                raise ConfigError(
                    "prove_every would count near-ties as faults: this model's bits depend on what "
                    "is scored together; load it with exact=True, or prove nothing"
                )
            plain = Policy(FixedBudget(0, drafter=None), is_apart=True)
            self.proof = llm.engine.proof = LiveProof(llm.engine, plain, prove_every, on_proof)
        idle = _idle_work(llm, self.proof, give_back_after)
        self.worker = EngineThread(llm.engine, llm.policy, partial(_send, self._post), idle)
        if self.proof is not None:
            self.proof.wake = self.worker.wake
        # Also when the interpreter ends: a thread in the middle of a step would be cut off.
        self._stop = weakref.finalize(self, _stop, self.worker, llm.engine, self.proof)

    @classmethod
    def load(
        cls,
        model: str | PathLike[str] = DEFAULT_MODEL,
        *,
        max_waiting: int = MAX_WAITING,
        progress: Progress | None = None,
        **options: Any,
    ) -> AsyncLLM:
        """Load a model as `LLM.load` does, which takes a while."""
        return cls(LLM.load(model, progress=progress, **options), max_waiting=max_waiting)

    @property
    def is_healthy(self) -> bool:
        """Whether it takes requests and its thread is well."""
        return self.worker.problem is None

    is_alive = is_healthy

    def stats(self) -> EngineStats:
        """Counters and state of the engine. Never waits."""
        return self.llm.engine.stats()

    async def open(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tenant: str | None = None,
        priority: int = 0,
        policy: Policy | None = None,
        so_far: ReplySoFar | None = None,
    ) -> EventStream:
        """Submit a request, and return its events to come.

        Args:
            prompt: text, token ids, or the messages of a conversation.
            tenant: owner of the request: nothing of it is shared with other tenants' requests.
            priority: requests of higher numbers go first.
            policy: chooses its drafters: the policy of `LLM.with_drafter`, of the same LLM. None:
                ``llm``'s, or, if that does not read the request's prediction, a drafter that does.
            so_far: the part of the reply that another engine has committed; the reply continues it.
                ``params`` are those that it began with, and name its seed.

        Raises:
            QueueFullError: too many requests are waiting.
            EngineStoppedError: it was closed, or its thread has failed.
            PromptError, ConfigError: the prompt or a parameter cannot be used, or the reply cannot
                be continued.
        """
        asked = [(prompt, checked_params(params))]
        return await self.open_all(
            asked, tenant=tenant, priority=priority, policy=policy, so_far=so_far
        )

    async def open_all(
        self,
        asked: Sequence[tuple[Prompt | Sequence[Message], SamplingParams]],
        *,
        tenant: str | None = None,
        priority: int = 0,
        session: str | None = None,
        **options: Any,
    ) -> EventStream:
        """Submit several requests, or none of them; raises as `open`.

        Args:
            asked: prompts, each with its parameters.
            session: without effect: there is one engine (see `ServedEngine.open_all`).
            **options: others of `Engine.prepare`.
        """
        options |= {"tenant": tenant, "priority": priority}
        worker, num_replies = self.worker, sum(params.n for _, params in asked)
        worker.enter(num_replies, self.llm.engine.max_batch_size + self._max_waiting)
        try:
            for grammar in {params.grammar for _, params in asked if params.grammar is not None}:
                await self._compiled(grammar, owner_name(tenant))
            requests = await asyncio.to_thread(self._prepare, asked, **options)
            ids = [request.request_id for request in requests]
            mailbox = _Mailbox(self._post)
            stream = EventStream(ids, partial(worker.abort, ids), mailbox)
            worker.add(requests, mailbox.put)
        except BaseException:
            worker.leave(num_replies)
            raise
        return stream

    async def _compiled(self, grammar: Grammar, owner: str | None) -> None:
        """Wait until a grammar is compiled, by a thread that keeps no other request waiting."""
        if (grammars := self.llm.grammars) is None:
            return
        compiled = grammars.compile(grammar, owner)
        try:
            await asyncio.shield(asyncio.wrap_future(compiled))  # others may wait for it, too
        except asyncio.CancelledError:
            grammars.give_up(compiled, owner)
            raise

    async def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tenant: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[Event]:
        """The events of a request; the last one of each reply carries the result.

        It is submitted when the first event is asked for (`open` submits at once). Closing the
        iterator early aborts it within one step.

        Raises:
            QueueFullError, EngineStoppedError, PromptError, ConfigError: as `open`.
        """
        async with await self.open(prompt, params, tenant=tenant, priority=priority) as events:
            async for event in events:
                yield event

    async def generate(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tenant: str | None = None,
        priority: int = 0,
    ) -> GenerationResult:
        """The result of a request for one reply. Cancelling the call aborts it.

        Raises:
            QueueFullError, EngineStoppedError, PromptError: as `open`.
            ConfigError: as `open`, or more than one reply is asked for.
        """
        if checked_params(params).n > 1:
            raise ConfigError("generate gives one reply and n asks for more: use stream")
        async with await self.open(prompt, params, tenant=tenant, priority=priority) as events:
            async for event in events:
                if event.result is not None:
                    return event.result
        raise EngineStoppedError("the request has no result")

    async def drain(self) -> None:
        """Take no further requests, and wait until those under way are over."""
        self.worker.refuse("it is being closed")
        await asyncio.to_thread(self.worker.wait_until_idle)

    async def aclose(self, *, drain: bool = True) -> None:
        """Stop the engine's thread.

        Args:
            drain: let the requests under way come to their end; else they are aborted.
        """
        if drain:
            await self.drain()
        await asyncio.to_thread(self._stop)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: object, traceback: object) -> None:
        await self.aclose(drain=error is None)

    def _prepare(
        self,
        asked: Sequence[tuple[Prompt | Sequence[Message], SamplingParams]],
        policy: Policy | None = None,
        **options: Any,
    ) -> list[Request]:
        """Without a policy each request gets the one that suits it."""
        requests: list[Request] = []
        for prompt, given in asked:
            params = given.by(self.llm.sampling_defaults)
            own = policy or self.llm.policy_for(params)
            tokens = self.llm.encode(prompt)
            requests += self.llm.engine.prepare(tokens, params, policy=own, **options)
        return requests


def _stop(worker: EngineThread, engine: Engine, proof: LiveProof | None) -> None:
    """End the thread. Without it nothing is proven, and nothing may be queued for it."""
    if proof is not None and engine.proof is proof:
        engine.proof = None
    worker.stop()
