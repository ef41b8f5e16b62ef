"""State shared by all routes: the engine, the running requests, tenants and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from foredraft.engine.request import owner_name
from foredraft.models.text.tokenizer import Tokenizer
from foredraft.server.engine import LoadEngine, ServedEngine, ServedModel
from foredraft.server.errors import ApiError, naming_fields, too_many, unavailable
from foredraft.server.formats import format_of, takes_tools
from foredraft.server.formats.base import Format, Spell
from foredraft.server.gate import ApiKeys
from foredraft.server.generation import Generation, GenerationRequest
from foredraft.server.metrics import Metrics
from foredraft.server.settings import ServerSettings
from foredraft.server.spans import spans_to
from foredraft.system.priority import lower_priority

_log = logging.getLogger("foredraft.server")

End = Callable[[ApiError], Coroutine[Any, Any, None]]
"""Ends work for a client early."""
T = TypeVar("T")
P = ParamSpec("P")
LARGE = 64 << 10
"""Bytes of a request that is read within a millisecond or so."""
_NUM_READERS = 2


class ServerContext:
    """One running server.

    Args:
        settings: of the server.
        load: brings the engine up, on a thread of its own.
        salt: hashed with the names of tenants; servers of one engine must use the same. None: a
            fresh one.

    Attributes:
        failure: the exception if the model could not be loaded.
    """

    def __init__(
        self, settings: ServerSettings, load: LoadEngine, salt: bytes | None = None
    ) -> None:
        self.settings, self._load = settings, load
        self._salt = salt or secrets.token_bytes(32)
        self.keys = ApiKeys.of(settings)
        self.metrics = Metrics()
        self.spans = spans_to(settings.otlp_traces_endpoint)
        self.created = int(time.time())
        self.failure: BaseException | None = None
        self._engine: ServedEngine | None = None
        self._readers = ThreadPoolExecutor(_NUM_READERS, "foredraft-read", lower_priority)
        self._is_draining, self._is_hurried = False, False
        self._live: set[End] = set()
        self._num_live_of: Counter[str] = Counter()  # replies, by key

    async def start(self) -> None:
        """Load the model; if that fails, `failure` holds the exception."""
        try:
            engine = await _on_a_thread_that_may_be_left(lambda: self._load(self))
            self.metrics.watch(engine)
            self._engine = engine
        except Exception as error:
            self.failure = error
            _log.critical("the model could not be loaded: %s", error)

    async def stop(self) -> None:
        """End the engine's thread."""
        if self._engine is not None:
            await self._engine.aclose(drain=False)
        self._readers.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self.spans.close)

    async def on_thread(
        self, size: int, call: Callable[P, T], *given: P.args, **named: P.kwargs
    ) -> T:
        """Call a function on a thread, where the engine's threads go first if it takes long.

        Args:
            size: of the request that it reads, in bytes.
        """
        pool = self._readers if size > LARGE else None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(pool, partial(call, *given, **named))

    @property
    def is_ready(self) -> bool:
        return self.has_engine and not self._is_draining

    @property
    def has_engine(self) -> bool:
        """Whether a model is loaded that takes requests."""
        return self._engine is not None and self._engine.is_healthy

    @property
    def is_loading(self) -> bool:
        return self._engine is None and self.failure is None

    @property
    def is_live(self) -> bool:
        """Whether the process is healthy: a restart would not help."""
        return self.failure is None and (self._engine is None or self._engine.is_alive)

    @property
    def num_live(self) -> int:
        """Requests under way."""
        return len(self._live)

    @property
    def engine(self) -> ServedEngine:
        """The engine.

        Raises:
            ApiError: 503: it is still being loaded, or the server is ending.
        """
        if self._is_draining:
            raise unavailable("the server is shutting down", "draining")
        if self._engine is None:
            raise unavailable("the model is still being loaded", "loading")
        return self._engine

    @property
    def llm(self) -> ServedModel:
        """The model; raises as `engine`."""
        return self.engine.llm

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises as `engine`."""
        tokenizer = self.llm.tokenizer
        if tokenizer is None:
            raise ApiError(400, "this model has no tokenizer here; send token ids")
        return tokenizer

    @cached_property
    def model_names(self) -> tuple[str, ...]:
        """The names of the model, the main one first."""
        return self.settings.served_model_names or (served_name(self.llm.name),)

    @cached_property
    def form(self) -> Format:
        """How the model writes thoughts and tool calls."""
        return format_of(self.tokenizer.tool_template, self.settings.tool_format)

    @cached_property
    def spell(self) -> Spell:
        """Writes texts in grammars for the model's tokenizer."""
        return Spell(self.tokenizer.special_tokens)

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the chat template shows tools, and calls are read."""
        return takes_tools(self.form, self.tokenizer.tool_template)

    @cached_property
    def thinks(self) -> bool:
        """Whether replies may begin with thoughts."""
        return self.form.thinks(self.tokenizer.chat_template or "")

    def check_model(self, name: object) -> str:
        """The name to answer with.

        Raises:
            ApiError: 404: there is no such model here.
        """
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            raise ApiError(
                404,
                f"there is no model {name!r:.200} here; there is {', '.join(self.model_names)}",
                param="model",
                code="model_not_found",
            )
        return str(name)

    def tenant(self, key_id: str | None, salt: object) -> str | None:
        """The tenant of a request, which is its key with its salt; None for neither."""
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise ApiError(400, "cache_salt must be text, and not empty", param="cache_salt")
        owner = None if self.settings.share_between_keys else key_id
        if owner is None and salt is None:
            return None
        # The engine lets owners take turns: the part before "/" is the key's alone.
        return f"{self._digest(owner)}/{self._digest(owner, salt)}"

    def _digest(self, *parts: object) -> str:
        text = "\0".join(str(part or "") for part in parts)
        return hashlib.sha256(self._salt + text.encode("utf-8", "replace")).hexdigest()[:32]

    @contextlib.asynccontextmanager
    async def generation(self, request: GenerationRequest) -> AsyncIterator[Generation]:
        """Running replies; on exit, unfinished ones are aborted.

        Raises:
            ApiError: 503 while the server cannot serve, 429: its key has too many under way.
            QueueFullError, EngineStoppedError, PromptError, ConfigError: as
                `ServedEngine.open_all`.
        """
        with (
            self.spans.request(request) as watched,
            naming_fields(request.names),  # only the engine compiles a grammar
            self._counted(request.tenant, len(request.prompts) * request.params.n),
        ):
            engine = self.engine
            stream = await engine.open_all(
                [(prompt, request.params) for prompt in request.prompts],
                tenant=request.tenant,
                priority=request.priority,
                session=request.session,
            )
            watched.append(generation := Generation(stream, request))
            try:
                async with self.under_way(
                    *(generation.abort, generation.expire),
                    timed_from=lambda: generation.timed_from(engine.stats().steps),
                ):
                    yield generation
            finally:
                try:
                    await generation.aclose()
                finally:  # a client that left has cancelled this task
                    self.metrics.add_request(generation)

    @contextlib.contextmanager
    def _counted(self, tenant: str | None, num_replies: int) -> Iterator[None]:
        """Counts the live replies of a key."""
        owner, most = owner_name(tenant) or "", self.settings.max_live_per_key
        num_live = self._num_live_of[owner] + num_replies
        if owner and most and num_live > most:
            raise too_many(
                f"{num_live} replies of this key would be under way, and {most} are the most: try "
                "again when one has ended",
                "too_many_of_this_key",
            )
        self._num_live_of[owner] = num_live
        try:
            yield
        finally:
            self._num_live_of[owner] -= num_replies
            self._num_live_of += Counter()  # forgets those without any

    @contextlib.asynccontextmanager
    async def under_way(
        self, abort: End, expire: End, timed_from: Callable[[], float]
    ) -> AsyncIterator[None]:
        """Work that a drain waits for. It expires after `ServerSettings.request_timeout`.

        Args:
            abort: ends the work; its reader gets the error.
            expire: ends it because its time is over; its reader gets all that is there, or the
                error.
            timed_from: returns the start of its time-out, in seconds of `time.perf_counter`.
        """
        limit = self.settings.request_timeout

        async def watch() -> None:
            while (left := timed_from() + limit - time.perf_counter()) > 0:
                await asyncio.sleep(left)
            said = f"the reply was not over after {limit:g} seconds"
            headers = {"x-should-retry": "false"}
            await expire(ApiError(408, said, code="request_timeout", headers=headers))

        timer = asyncio.create_task(watch())
        self._live.add(abort)
        try:
            yield
        finally:
            timer.cancel()
            self._live.discard(abort)

    async def drain(self) -> None:
        """Refuse new requests and wait for those under way; after a time they are aborted."""
        self._is_draining = True
        until = time.monotonic() + self.settings.drain_timeout
        while self._live and time.monotonic() < until and not self._is_hurried:
            await asyncio.sleep(0.05)
        error = unavailable("the server shut down before the reply was over", "draining")
        for abort in [*self._live]:
            await abort(error)
        last = time.monotonic() + 2.0
        while self._live and time.monotonic() < last:
            await asyncio.sleep(0.02)

    def hurry(self) -> None:
        """End a drain: abort the requests under way."""
        self._is_hurried = True


async def _on_a_thread_that_may_be_left(call: Callable[[], T]) -> T:
    """Call a function on a thread. Nothing waits for the thread when the caller is cancelled, or
    when the process ends.

    `asyncio.to_thread` takes a thread of the pool, which the event loop joins when it closes.
    """
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # from now on only `run` can end it

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="foredraft-load", daemon=True).start()
    return await asyncio.wrap_future(done)


def served_name(name: str | None) -> str:
    """A model's name in answers; of a file or folder no more than its own name."""
    path = Path(name or "foredraft")
    if not path.is_absolute() and not path.exists():
        return str(name or "foredraft")
    return path.stem if path.suffix == ".gguf" else path.resolve().name
