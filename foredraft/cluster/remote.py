"""An engine for the server that runs its replies in other processes and survives their loss."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from foredraft.async_llm import EventStream
from foredraft.cluster.replica import AskedReply, RemoteModel
from foredraft.cluster.watch import EngineWatch
from foredraft.core.errors import EngineStoppedError, ForedraftError, QueueFullError
from foredraft.core.params import SamplingParams
from foredraft.core.rng import SEED_BITS
from foredraft.engine.request import Event, ReplySoFar
from foredraft.engine.stats import EngineStats
from foredraft.server.metrics import Metrics

_log = logging.getLogger("foredraft.cluster")
_KEY_TOKENS = 256
_AT_ONCE = 0.5
"""Seconds in which a request may be refused with an HTTP status; then its headers are sent."""
_MOST_LOST = 4
"""Replicas that a reply may lose in a row without a token in between."""
_PAUSE = 0.2
"""Seconds before another replica is asked, times the number of lost ones."""
_LOST = (RayError, EngineStoppedError)
"""Errors that mean that a replica is gone or unusable."""


def affinity_key(prompt: Sequence[int], tenant: str | None, session: str | None = None) -> str:
    """Equal for requests that should meet in one replica, where what they share is cached.

    It is the session, or else the beginning of the prompt, which stays the same as a chat grows.
    """
    text = array("q", prompt[:_KEY_TOKENS]).tobytes() if session is None else session.encode()
    return blake2b((tenant or "").encode() + b"\0" + text, digest_size=16).hexdigest()


@dataclass(eq=False)
class _Reply:
    """One reply, on one replica after another if they fail.

    Attributes:
        asked: from its beginning.
        key: see `affinity_key`.
        number: its id in this gate.
        parent: that of the first reply to its prompt.
        accepted: done when a replica has taken it, or refused it.
        events: so far.
    """

    asked: AskedReply
    key: str
    number: int
    parent: int
    accepted: asyncio.Future[None]
    events: list[Event] = field(default_factory=list)

    def ask(self, handle: DeploymentHandle, num_lost: int) -> Any:
        """Ask a replica for the rest of the reply; after each loss another one."""
        so_far = replace(ReplySoFar.of(self.events), index=self.asked.so_far.index)
        key = f"{self.key}#{num_lost}" if num_lost else self.key
        options = handle.options(method_name="open", stream=True, session_id=key)
        return options.remote(replace(self.asked, so_far=so_far))

    def take(self, event: Event) -> Event:
        """The event under the ids of this gate."""
        self.events.append(event)
        number, parent, result = self.number, self.parent, event.result
        if result is not None:
            result = replace(result, request_id=number, parent_id=parent)
        return event._replace(request_id=number, parent_id=parent, result=result)


def _new_stream(request_ids: Sequence[int]) -> tuple[EventStream, list[asyncio.Task[None]]]:
    """A stream, and the tasks that bring its events, which are cancelled when it is closed."""
    tasks: list[asyncio.Task[None]] = []

    def abort() -> None:
        stream.put(StopAsyncIteration())  # an engine elsewhere sends no result of what is cancelled
        for task in tasks:
            task.cancel()

    stream = EventStream(request_ids, abort)
    return stream, tasks


async def _all_taken(
    answers: Iterable[asyncio.Future[None]], seconds: float
) -> set[asyncio.Future[None]]:
    """Those still waiting after a time, or as soon as one is refused, which raises."""
    done, waiting = await asyncio.wait(
        [*answers], timeout=seconds, return_when=asyncio.FIRST_EXCEPTION
    )
    for answer in done:
        answer.result()
    return waiting


class RemoteEngine:
    """Stands where a server has its `AsyncLLM`: see `ServedEngine`.

    A reply whose replica dies goes on in another, from its prompt, the tokens that have come, and
    its seed. On machines of one kind the text is the same bit for bit; elsewhere its law is.

    Args:
        handle: of the deployment of `EngineReplica`.
        metrics: of the gate, which counts fail-overs in place of an engine's steps.
        patience: seconds that a request may wait for an engine.

    Attributes:
        is_alive: a gate's process has nothing that a restart would mend.
    """

    is_alive = True

    def __init__(
        self,
        handle: DeploymentHandle,
        model: RemoteModel,
        metrics: Metrics,
        patience: float,
        watch: EngineWatch,
    ) -> None:
        self._handle, self.llm = handle, model
        self._patience, self.watch = patience, watch
        metrics.leave_steps_out()
        self._resumed = metrics.counter("resumed", "How often a reply went on in another replica.")
        self._lost = metrics.counter("lost", "Replies that ended as their replica died.")
        self._ids = itertools.count()
        self._live: set[_Reply] = set()

    @property
    def is_healthy(self) -> bool:
        """Whether an engine takes requests."""
        return self.watch.has_engine

    def stats(self) -> EngineStats:
        """Counts of this gate's replies alone."""
        waiting = sum(not reply.accepted.done() for reply in [*self._live])
        return EngineStats(len(self._live) - waiting, waiting, {}, 0, 0, 0, 0, 0)

    async def open_all(
        self,
        asked: Sequence[tuple[Sequence[int], SamplingParams]],
        *,
        tenant: str | None = None,
        priority: int = 0,
        session: str | None = None,
    ) -> EventStream:
        """Submit several requests, or none of them; see `ServedEngine.open_all`."""
        replies = [
            reply
            for prompt, params in asked
            for reply in self._replies(prompt, params, tenant, priority, session)
        ]
        stream, tasks = _new_stream([reply.number for reply in replies])
        for reply in replies:
            # Ray takes the id of a call from the context, and its router holds calls apart by their
            # ids: those of one HTTP request need contexts of their own.
            bringing = self._run(reply, stream.put)
            tasks.append(asyncio.create_task(bringing, context=Context()))
        try:
            waiting = await _all_taken((reply.accepted for reply in replies), _AT_ONCE)
        except BaseException:
            await stream.aclose()
            raise
        if waiting:  # the client gets headers, and hears later what comes of it
            tasks.append(asyncio.create_task(self._wait(waiting, stream)))
        return stream

    async def _wait(self, waiting: Iterable[asyncio.Future[None]], stream: EventStream) -> None:
        """Pass on that an engine refuses a reply, or that none has room in time."""
        try:
            if await _all_taken(waiting, self._patience):
                stream.put(QueueFullError(f"no engine had room within {self._patience:g} seconds"))
        except Exception as error:
            stream.put(error)

    async def aclose(self, *, drain: bool = True) -> None:
        """Watch engines no more; closing a reply's stream ends it."""
        self.watch.close()

    def _replies(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        tenant: str | None,
        priority: int,
        session: str | None,
    ) -> list[_Reply]:
        if params.seed is None:  # a replica that goes on must draw as the one before
            params = replace(params, seed=secrets.randbits(SEED_BITS))
        key = affinity_key(prompt, tenant, session)
        numbers = [next(self._ids) for _ in range(params.n)]
        loop = asyncio.get_running_loop()
        return [
            _Reply(
                AskedReply([*prompt], own, tenant, priority, ReplySoFar((), index=index)),
                *(key, numbers[index], numbers[0], loop.create_future()),
            )
            for index, own in enumerate(params.each())
        ]

    async def _run(self, reply: _Reply, put: Callable[[Event | Exception], None]) -> None:
        """Run a reply to its end. An early error is passed to its opener or reader."""
        self._live.add(reply)
        try:
            await self._bring(reply, put)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if not reply.accepted.done():
                reply.accepted.set_exception(error)
                return
            self._lost.inc()
            _log.error("a reply is lost after %d events: %s", len(reply.events), error)
            put(EngineStoppedError(f"the reply could not be brought to its end: {error}"))
        finally:
            self._live.discard(reply)

    async def _bring(self, reply: _Reply, put: Callable[[Event | Exception], None]) -> None:
        num_lost = 0
        while True:
            num_events = len(reply.events)
            try:
                await self._try(reply, num_lost, put)
                return
            except BackPressureError as error:
                if not reply.accepted.done():
                    raise QueueFullError("too many requests wait: try again later") from error
            except DeploymentUnavailableError as error:
                raise EngineStoppedError(f"no engine can be reached: {error}") from error
            except (*_LOST, asyncio.CancelledError) as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():  # by who reads it
                    raise
                num_lost = 1 if len(reply.events) > num_events else num_lost + 1
                if num_lost > _MOST_LOST:
                    raise EngineStoppedError(f"{num_lost} replicas were lost: {error}") from error
                self._resumed.inc()
                _log.warning("a replica is lost; its reply goes on elsewhere: %s", error)
            await asyncio.sleep(_PAUSE * num_lost)

    async def _try(
        self, reply: _Reply, num_lost: int, put: Callable[[Event | Exception], None]
    ) -> None:
        """One replica's part of a reply.

        Raises:
            Exception: the replica is lost, or refuses.
        """
        items = reply.ask(self._handle, num_lost)
        try:
            async for item in items:
                if isinstance(item, ForedraftError):
                    raise item
                if item is None:
                    if not reply.accepted.done():
                        reply.accepted.set_result(None)
                    continue
                put(reply.take(item))
                if item.result is not None:
                    return
            raise EngineStoppedError("the replica has ended the reply without its result")
        finally:
            items.cancel()
