"""From a route of any API to its HTTP answer: whole, as a stream, or an error."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Depends
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from foredraft.engine.request import Event, GenerationResult
from foredraft.engine.text import Piece
from foredraft.server.context import ServerContext
from foredraft.server.errors import ApiError, as_api_error
from foredraft.server.generation import Generation, GenerationRequest
from foredraft.server.resume import StreamPlace
from foredraft.server.usage import speculation_of
from foredraft.server.wire import JsonResponse, SseResponse, data_event, until_gone

T = TypeVar("T")
DEFAULTS_HEADER = "x-foredraft-sampling-defaults"
IGNORED_HEADER = "x-foredraft-ignored"
_MAX_IGNORED = 32
_MAX_NAME = 64


async def context_of(request: Request) -> ServerContext:  # FastAPI takes others to a thread
    context: ServerContext = request.app.state.context
    return context


@dataclass(frozen=True)
class Caller:
    """The sender of a request.

    Attributes:
        key_id: of the key that the request was let in with.
        arrived: when its headers had come, in seconds of `time.perf_counter`.
        size: of its body, in bytes.
        headers: that came.
    """

    key_id: str | None
    arrived: float
    size: int
    headers: Headers


async def caller_of(request: Request) -> Caller:
    state = request.state
    return Caller(state.key_id, state.arrived, len(await request.body()), request.headers)


ContextDep = Annotated[ServerContext, Depends(context_of)]
CallerDep = Annotated[Caller, Depends(caller_of)]


def now() -> int:
    return int(time.time())


class AnswerWriter(ABC):
    """Writes the answer to one request in the form of its API.

    A stream is written as it comes. A whole answer is written at the end, as if each reply had come
    in one step.
    """

    def __init__(self, context: ServerContext, request: GenerationRequest) -> None:
        self.context, self.request = context, request
        self.tokenizer = context.tokenizer  # a server that drains has none for new requests

    def begin(self, generation: Generation) -> Iterable[bytes]:
        """The events of a stream that is accepted."""
        return ()

    @abstractmethod
    def step(self, generation: Generation, index: int, event: Event) -> Iterable[bytes]:
        """The events for a step of a reply."""

    def end(self, generation: Generation) -> Iterable[bytes]:
        """The events behind the last step."""
        return ()

    @abstractmethod
    def answer(self, generation: Generation) -> dict[str, Any]:
        """The whole answer."""

    async def whole(self) -> dict[str, Any]:
        async with self.context.generation(self.request) as generation:
            async for _ in generation:
                pass
            # Of a long reply with log probabilities it is a million numbers.
            return await asyncio.to_thread(self.answer, generation)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The first event is empty, and comes as soon as the request is accepted."""
        async with self.context.generation(self.request) as generation:
            yield b""
            for written in self.begin(generation):
                yield written
            async for index, event in generation:
                for written in await self._made(self.step(generation, index, event)):
                    yield written
            for written in await self._made(self.end(generation)):
                yield written

    async def _made(self, events: Iterable[bytes]) -> Iterable[bytes]:
        """The same; those with log probabilities are made on a thread, for there may be many."""
        if self.request.params.logprobs is None:
            return events
        return await asyncio.to_thread(lambda: [*events])

    def error_event(self, error: ApiError) -> bytes:
        """The last event of a stream that failed."""
        return data_event(error.for_openai)

    def metrics(self, generation: Generation) -> dict[str, Any]:
        """The field ``metrics`` of an answer, where it has one."""
        figures = speculation_of(generation.replies, self.context.settings.request_metrics)
        return {"metrics": figures} if figures else {}


def in_one_step(result: GenerationResult | None) -> Event:
    """A reply that is over, as one event."""
    assert result is not None
    return Event(
        result.request_id,
        result.token_ids,
        num_accepted=0,
        pieces=(Piece(result.text, drafted=False),),
        logprobs=result.logprobs or (),
        prompt_logprobs=result.prompt_logprobs,
        result=result,
    )


async def respond(writer: AnswerWriter, is_stream: bool | None, http: Request) -> Response:
    """The answer, whole or as a stream.

    Headers name the request's fields without effect, and the model's own sampling defaults that
    count.
    """
    request, headers = writer.request, dict[str, str]()
    names = [name for name in sorted(request.ignored) if name.isascii() and name.isprintable()]
    if names:
        headers[IGNORED_HEADER] = ", ".join(name[:_MAX_NAME] for name in names[:_MAX_IGNORED])
    if request.model_defaults:
        named = (f"{name}={value:g}" for name, value in request.model_defaults.items())
        headers[DEFAULTS_HEADER] = ", ".join(named)
    if is_stream:
        events = writer.stream(), writer.error_event
        begun = stream_of(writer.context, *events, headers, request.place)
        return await _unless_gone(http, begun)  # a grammar may take long before the first event
    answer = await _unless_gone(http, writer.whole())
    return await asyncio.to_thread(JsonResponse, answer, 200, headers)


async def stream_of(
    context: ServerContext,
    events: AsyncGenerator[bytes, None],
    error_event: Callable[[ApiError], bytes],
    headers: dict[str, str] | None = None,
    place: StreamPlace | None = None,
) -> Response:
    """Events as a response; an error in a stream becomes an event, never a silent cut.

    Args:
        events: the first comes as soon as the request is accepted, and may be empty.
        place: names the events, so that a client may resume the stream.

    Raises:
        Exception: what ``events`` raises before its first event: nothing has been sent by then.
    """
    first = await anext(events)

    def name(event: bytes) -> bytes:
        return event if place is None else place.named(event)

    async def guarded() -> AsyncGenerator[bytes, None]:
        try:
            if first and (named := name(first)):
                yield named
            async for event in events:
                if named := name(event):
                    yield named
        except Exception as error:
            yield error_event(as_api_error(error))
        finally:
            await events.aclose()

    return SseResponse(guarded(), context.settings.ping_interval, headers)


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client disconnects."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(until_gone(request.receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))


_TYPES = {str: "string", int: "integer", bool: "boolean", list: "array", dict: "object"}


def json_answer(description: str, **fields: type) -> dict[str, Any]:
    """An answer for the OpenAPI document: an object with these fields, and others."""
    properties = {name: {"type": _TYPES[kind]} for name, kind in fields.items()}
    schema = {"type": "object", "properties": properties, "required": [*fields]}
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def streamed(description: str, **fields: type) -> dict[str, Any]:
    """The good answer of a route that may stream, for the OpenAPI document."""
    answer = json_answer(description, **fields)
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    answer["content"]["text/event-stream"] = {"schema": event}
    return answer


def error_responses(**fields: type) -> dict[int | str, dict[str, Any]]:
    """The error answers of a route, for the OpenAPI document; OpenAI's unless fields are given."""
    fields = fields or {"error": dict}
    return {
        "4XX": json_answer("the request cannot be answered as it is: `error` says why", **fields),
        "5XX": json_answer("the server cannot answer, or the reply failed", **fields),
    }
