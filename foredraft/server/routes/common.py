"""What routes need of a request."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from typing import Annotated, Any, Protocol

from fastapi import Depends
from starlette.requests import Request
from starlette.responses import Response

from foredraft.server.context import ServerContext
from foredraft.server.dialects.fields import Body, given
from foredraft.server.disconnect import unless_gone
from foredraft.server.errors import ApiError, as_api_error
from foredraft.server.wire import JsonResponse, event_stream

IGNORED_HEADER = "x-foredraft-ignored"
_MAX_IGNORED = 32


async def context_of(request: Request) -> ServerContext:  # FastAPI takes others to a thread
    context: ServerContext = request.app.state.context
    return context


Context = Annotated[ServerContext, Depends(context_of)]


async def key_id_of(request: Request) -> str | None:
    """Of the key that opened the gate."""
    key_id: str | None = request.state.key_id
    return key_id


KeyId = Annotated[str | None, Depends(key_id_of)]


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


def now() -> int:
    return int(time.time())


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Fields of the request without effect, named in the answer."""
    plain = [name for name in names if name.isascii() and name.isprintable()][:_MAX_IGNORED]
    return {IGNORED_HEADER: ", ".join(name[:64] for name in plain)} if plain else {}


class Work(Protocol):
    """One request of a dialect, on its way to an answer."""

    def whole(self) -> Coroutine[Any, Any, dict[str, Any]]:
        """The answer when all is there."""
        ...

    def stream(self) -> AsyncGenerator[bytes, None]:
        """The answer as it comes, an event a step."""
        ...

    def error_event(self, error: ApiError) -> bytes:
        """What ends a stream that failed."""
        ...


async def respond(
    work: Work, body: Body, without_effect: Sequence[str], context: ServerContext, request: Request
) -> Response:
    """Whole, or as a stream where the body asks for one.

    Args:
        without_effect: the body's fields that are.
    """
    headers = ignored_header(without_effect)
    if given(body, "stream", False):
        return await stream_of(context, work.stream(), work.error_event, headers)
    return JsonResponse(await unless_gone(request, work.whole()), headers=headers)


async def stream_of(
    context: ServerContext,
    events: AsyncGenerator[bytes, None],
    as_event: Callable[[ApiError], bytes],
    headers: dict[str, str],
) -> Response:
    """Events as a response; an error in their midst becomes an event, never a silent cut.

    Args:
        events: the first comes as soon as the request is accepted, and may be empty.

    Raises:
        Exception: what ``events`` raises before its first event: nothing has been sent by then.
    """
    first = await anext(events)

    async def guarded() -> AsyncIterator[bytes]:
        try:
            if first:
                yield first
            async for event in events:
                yield event
        except Exception as error:
            yield as_event(as_api_error(error))
        finally:
            await events.aclose()

    return event_stream(guarded(), context.settings.ping_interval, headers)
