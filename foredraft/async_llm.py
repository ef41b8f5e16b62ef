"""One engine thread, and any number of asyncio tasks and threads that ask things of it."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Self

from foredraft.core.errors import ConfigError, EngineStoppedError, QueueFullError
from foredraft.core.params import SamplingParams, checked_params
from foredraft.engine.engine import Engine, Event
from foredraft.engine.row import GenerationResult, Row
from foredraft.engine.stats import EngineStats
from foredraft.llm import LLM
from foredraft.models.progress import Progress
from foredraft.plan import DEFAULT_MODEL
from foredraft.prompts import Message, Prompt

_log = logging.getLogger("foredraft")

MAX_WAITING = 256
"""Requests beyond those in the batch that may wait, unless somebody says otherwise."""

Command = Callable[[], None]


class EventStream:
    """The events of one request, the last of which carries the result.

    Closing it early aborts the request within one step; so does dropping it. It belongs to the
    event loop in which it was opened.
    """

    def __init__(self, request_id: int, abort: Command) -> None:
        self._is_over = False
        self.request_id = request_id
        self._abort, self._mailbox = abort, _Mailbox()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._is_over:
            raise StopAsyncIteration
        try:
            event = await self._mailbox.take()
        except EngineStoppedError:
            self._is_over = True
            raise
        self._is_over = event.result is not None
        return event

    async def aclose(self) -> None:
        """Abort what is unfinished."""
        self._close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._close()

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._abort()


class _Mailbox:
    """Events on their way from the engine's thread to an event loop.

    The engine never waits: what nobody has read yet is kept here.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._events: deque[Event | EngineStoppedError] = deque()

    def put(self, event: Event | EngineStoppedError) -> None:
        """Hand an event over, from any thread.

        Raises:
            RuntimeError: the loop is closed; nobody will read it.
        """
        self._events.append(event)
        self._loop.call_soon_threadsafe(self._arrived.set)

    async def take(self) -> Event:
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        event = self._events.popleft()
        if isinstance(event, EngineStoppedError):
            raise event
        return event


class AsyncLLM:
    """An `LLM` that a thread of its own runs, for asyncio.

    Requests join and leave the batch at any step. Coroutines of any number of event loops and
    threads may use one; ``llm`` itself can be used beside it, and takes turns with it.

    Args:
        llm: what runs the requests. It is not closed with this one.
        max_waiting: most requests that wait beside those in the batch; further ones are refused.

    Attributes:
        llm: the same.

    Raises:
        ConfigError: ``max_waiting`` is not a whole number, 0 or more.
    """

    def __init__(self, llm: LLM, *, max_waiting: int = MAX_WAITING) -> None:
        if type(max_waiting) is not int or max_waiting < 0:
            raise ConfigError(
                f"max_waiting is {max_waiting!r}; it must be a whole number, 0 or more"
            )
        self.llm = llm
        self._max_waiting = max_waiting
        self._worker = _Worker(llm.engine)
        # Also when the interpreter ends: a thread in the middle of a step would be cut off.
        self._stop = weakref.finalize(self, self._worker.stop)

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
        return self._worker.problem is None

    def stats(self) -> EngineStats:
        """What the engine has done and is doing. Never waits."""
        return self.llm.engine.stats()

    async def open(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tenant: str | None = None,
        priority: int = 0,
    ) -> EventStream:
        """Submit a request, and return its events to come.

        Args:
            prompt: text, token ids, or the messages of a conversation.
            tenant: whose request it is: nothing of it is shared with other tenants' requests.
            priority: requests of higher numbers go first.

        Raises:
            QueueFullError: too many requests are waiting.
            EngineStoppedError: it was closed, or its thread has failed.
            PromptError, ConfigError: the prompt or what is asked for cannot be used.
        """
        worker, engine = self._worker, self.llm.engine
        worker.enter(engine.max_batch_size + self._max_waiting)
        try:
            row = await asyncio.to_thread(self._prepare, prompt, params, tenant, priority)
            stream = EventStream(row.request_id, lambda: self._worker.abort(row.request_id))
            worker.add(row, stream._mailbox)
        except BaseException:
            worker.leave()
            raise
        return stream

    async def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tenant: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[Event]:
        """The events of a request; the last one carries the result.

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
        """The result of a request. Cancelling the call aborts it.

        Raises:
            QueueFullError, EngineStoppedError, PromptError, ConfigError: as `open`.
        """
        async with await self.open(prompt, params, tenant=tenant, priority=priority) as events:
            async for event in events:
                if event.result is not None:
                    return event.result
        raise AssertionError("a stream ends with a result or an error")

    async def drain(self) -> None:
        """Take no further requests, and wait until those under way are over."""
        self._worker.refuse("it is being closed")
        await asyncio.to_thread(self._worker.wait_until_idle)

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

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose(drain=error is None)

    def _prepare(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None,
        tenant: str | None,
        priority: int,
    ) -> Row:
        tokens = self.llm.encode(prompt)
        return self.llm.engine.prepare(
            tokens, checked_params(params), tenant=tenant, priority=priority
        )


class _Worker:
    """The engine's thread. It steps while there is work, and sleeps while there is none.

    What others want of the engine goes through one queue and happens between two steps.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()  # safe in finalizers
        self._mailboxes: dict[int, _Mailbox] = {}  # of the requests under way; the thread's own
        self._changed = threading.Condition()
        self._num_live = 0  # requests taken and not over
        self._stopping = self._is_over = False
        self.problem: str | None = None
        self._thread = threading.Thread(target=self._run, name="foredraft-engine", daemon=True)
        self._thread.start()

    def enter(self, limit: int) -> None:
        """Count a request in, or refuse it."""
        with self._changed:
            if self.problem is not None:
                raise EngineStoppedError(f"the engine takes no more requests: {self.problem}")
            if self._num_live >= limit:
                raise QueueFullError(
                    f"{self._num_live} requests are under way and {limit} are the most: try again "
                    "later, or raise max_waiting"
                )
            self._num_live += 1

    def leave(self) -> None:
        """Count it out."""
        with self._changed:
            self._num_live -= 1
            self._changed.notify_all()

    def add(self, row: Row, mailbox: _Mailbox) -> None:
        """Queue a request that was counted in."""
        with self._changed:
            if self._is_over:
                raise EngineStoppedError(f"the engine has stopped: {self.problem}")
            self._commands.put(lambda: self._add(row, mailbox))

    def abort(self, request_id: int) -> None:
        self._commands.put(lambda: self._drop(request_id))

    def refuse(self, problem: str) -> None:
        """Take no further requests."""
        with self._changed:
            self.problem = self.problem or problem

    def wait_until_idle(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or not self._num_live)

    def stop(self) -> None:
        """Abort what is under way, and end the thread."""
        self.refuse("it was closed")
        self._stopping = True
        self._commands.put(lambda: None)  # wakes it
        if threading.current_thread() is not self._thread:  # as a finalizer may find itself
            self._thread.join()

    def _run(self) -> None:
        fault: EngineStoppedError | None = None
        try:
            while not self._stopping:
                self._obey(wait=not self._mailboxes)
                if self._mailboxes:
                    self._engine.step()
        except BaseException as error:
            _log.critical("the engine's thread has failed: %s", error, exc_info=error)
            self.refuse(f"its thread failed ({type(error).__name__}: {error})")
            fault = EngineStoppedError(f"the engine has stopped: {self.problem}")
        self._end(fault)

    def _obey(self, wait: bool) -> None:
        """What others have asked for by now; the first of it waited for, if there is no work."""
        try:
            while True:
                self._commands.get(block=wait)()
                wait = False
        except queue.Empty:
            return

    def _add(self, row: Row, mailbox: _Mailbox) -> None:
        self._mailboxes[row.request_id] = mailbox
        self._engine.add(row, self._deliver)

    def _deliver(self, event: Event) -> None:
        self._put(event.request_id, event, event.result is not None)

    def _put(self, request_id: int, event: Event | EngineStoppedError, is_last: bool) -> None:
        mailbox = self._mailboxes.get(request_id)
        if mailbox is None:  # it was told of the engine's fault
            return
        if is_last:
            del self._mailboxes[request_id]
            self.leave()
        try:
            mailbox.put(event)
        except RuntimeError:  # its loop is closed: nobody listens any more
            self.abort(request_id)

    def _drop(self, request_id: int) -> None:
        if request_id in self._mailboxes:
            self._engine.cancel(request_id)

    def _end(self, fault: EngineStoppedError | None) -> None:
        """Nobody is left waiting, and nothing in the engine."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._obey(wait=False)
        for request_id in [*self._mailboxes]:
            if fault is not None:
                self._put(request_id, fault, is_last=True)
            try:
                self._engine.cancel(request_id)
            except Exception as error:  # of an engine that has failed already
                _log.debug("request %d could not be cancelled", request_id, exc_info=error)
