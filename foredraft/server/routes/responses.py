"""`POST /v1/responses`: stateless."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from foredraft.core.logprobs import TokenLogprobs
from foredraft.server.asks import Ask, read_chat
from foredraft.server.blocks import Block, Blocks, Change
from foredraft.server.context import ServerContext
from foredraft.server.dialects.fields import Body, given
from foredraft.server.errors import ApiError, as_api_error
from foredraft.server.generation import Generation, Reply
from foredraft.server.logprobs import chat_logprobs
from foredraft.server.responses_input import NAMES, as_chat, ignored
from foredraft.server.routes.common import Context, KeyId, new_id, now, respond
from foredraft.server.schemas.common import error_responses, streamed
from foredraft.server.schemas.responses import ResponseObject, ResponsesRequest
from foredraft.server.usage import Thoughts, num_cached, speculation_of
from foredraft.server.wire import named_event

router = APIRouter()


@router.post(
    "/v1/responses",
    responses={200: streamed("a reply, whole or as events", ResponseObject), **error_responses()},
)
async def create_response(
    body: ResponsesRequest, request: Request, context: Context, key_id: KeyId
) -> Response:
    """Reply to a conversation. Nothing is stored."""
    plain = body.plain()
    ask = await read_chat(context, as_chat(plain), key_id, NAMES)
    work = Responses(context, ask, plain)
    return await respond(work, plain, ignored(plain), context, request)


class Responses:
    """One request for a response, on its way to an answer."""

    def __init__(self, context: ServerContext, ask: Ask, body: Body) -> None:
        self._context, self._ask = context, ask
        self._numbers = itertools.count()
        self._blocks = Blocks()
        self._untold: list[TokenLogprobs] = []  # of text that is still to come
        self._logprobs: dict[int, list[TokenLogprobs]] = {}  # of text that has come, by block
        self._response = _begun(ask, body)

    async def whole(self) -> dict[str, Any]:
        """The answer when all is there: what the events of a stream add up to."""
        async with self._ask.open(self._context) as generation:
            async for _ in self._events(generation):
                pass
        return self._response

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The answer as it comes."""
        async with self._ask.open(self._context) as generation:
            events = self._events(generation)
            try:
                async for event in events:
                    yield self._numbered(event)
            except Exception as error:
                known = as_api_error(error)
                failed = {"code": "server_error", "message": known.message}
                response = self._response | {"status": "failed", "error": failed}
                yield self._numbered({"type": "response.failed", "response": response})
                raise known from error

    def error_event(self, error: ApiError) -> bytes:
        """What ends a stream that failed."""
        named = {"code": error.code, "message": error.message, "param": error.param}
        return self._numbered({"type": "error", **named})

    def _numbered(self, event: Mapping[str, Any]) -> bytes:
        return named_event({**event, "sequence_number": next(self._numbers)})

    async def _events(self, generation: Generation) -> AsyncGenerator[dict[str, Any], None]:
        parser = self._ask.new_parser()
        for kind in ("response.created", "response.in_progress"):
            yield {"type": kind, "response": self._response}
        async for _, event in generation:
            self._untold += event.logprobs
            for change in self._blocks.add(parser.take(event)):
                for each in self._changed(*change):
                    yield each
        for change in self._blocks.close():
            for each in self._changed(*change):
                yield each
        self._finish(generation.replies[0])
        yield {"type": f"response.{self._response['status']}", "response": self._response}

    def _finish(self, reply: Reply) -> None:
        assert reply.result is not None
        is_cut = reply.result.finish_reason == "length"
        self._response |= {
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "completed_at": None if is_cut else now(),
            "output": [self._item(block, is_over=True) for block in self._blocks.all],
            "usage": _usage(reply, self._ask.thoughts(self._context)),
        }
        if metrics := speculation_of([reply], self._context.settings.request_metrics):
            self._response["metrics"] = metrics

    def _changed(self, change: Change, block: Block, text: str) -> Iterator[dict[str, Any]]:
        at: dict[str, Any] = {"output_index": block.number, "item_id": self._item_id(block)}
        is_over = change == "close"
        if block.kind != "text":
            self._untold = []  # tokens of thoughts and calls
        item = {"output_index": block.number, "item": self._item(block, is_over)}
        if change == "open":
            yield {"type": "response.output_item.added", **item}
        if block.kind == "call":
            yield from _call_events(change, block, text, at)
        else:
            yield from self._part_events(change, block, text, at | {"content_index": 0})
        if is_over:
            yield {"type": "response.output_item.done", **item}

    def _part_events(
        self, change: Change, block: Block, text: str, at: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        kind = "output_text" if block.kind == "text" else "reasoning_text"
        extra: dict[str, Any] = {}
        if block.kind == "text":
            extra = {"logprobs": self._formatted(self._told_with(change, block))}
        if change == "open":
            yield {"type": "response.content_part.added", **at, "part": self._part(block, False)}
        elif change == "delta":
            yield {"type": f"response.{kind}.delta", **at, "delta": text, **extra}
        else:
            yield {"type": f"response.{kind}.done", **at, "text": block.text, **extra}
            yield {"type": "response.content_part.done", **at, "part": self._part(block, True)}

    def _told_with(self, change: Change, block: Block) -> Sequence[TokenLogprobs]:
        """The log probabilities that go with a change of a text: new ones, and at its end all."""
        told = self._logprobs.setdefault(block.number, [])
        if change == "open":
            return ()
        new, self._untold = self._untold, []
        told += new
        return told if change == "close" else new

    def _formatted(self, entries: Sequence[TokenLogprobs]) -> list[Any]:
        return chat_logprobs(self._context.tokenizer, entries)["content"] if entries else []

    def _item_id(self, block: Block) -> str:
        prefix = {"text": "msg_", "reasoning": "rs_", "call": "fc_"}[block.kind]
        return prefix + block.id

    def _item(self, block: Block, is_over: bool) -> dict[str, Any]:
        item: dict[str, Any] = {
            "id": self._item_id(block),
            "status": "completed" if is_over else "in_progress",
        }
        content = [self._part(block, is_over)] if is_over else []
        if block.kind == "text":
            return item | {"type": "message", "role": "assistant", "content": content}
        if block.kind == "reasoning":
            return item | {"type": "reasoning", "summary": [], "content": content}
        named = {"call_id": f"call_{block.id}", "name": block.name, "arguments": block.text}
        return item | {"type": "function_call", **named}

    def _part(self, block: Block, is_over: bool) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        told = self._logprobs.get(block.number, []) if is_over else []
        return {
            "type": "output_text",
            "text": block.text,
            "annotations": [],
            "logprobs": self._formatted(told),
        }


def _call_events(
    change: Change, block: Block, text: str, at: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    kind = "response.function_call_arguments"
    if change == "delta":
        yield {"type": f"{kind}.delta", **at, "delta": text}
    elif change == "close":
        yield {"type": f"{kind}.done", **at, "name": block.name, "arguments": block.text}


def _begun(ask: Ask, body: Body) -> dict[str, Any]:
    params = ask.params
    return {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": now(),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": given(body, "instructions"),
        "max_output_tokens": given(body, "max_output_tokens"),
        "model": ask.model,
        "output": [],
        "parallel_tool_calls": ask.tools.parallel,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": params.temperature,
        "text": given(body, "text", {"format": {"type": "text"}}),
        "tool_choice": given(body, "tool_choice", "auto"),
        "tools": given(body, "tools", []),
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": given(body, "user"),
        "metadata": given(body, "metadata", {}),
    }


def _usage(reply: Reply, thoughts: Thoughts | None) -> dict[str, Any]:
    return {
        "input_tokens": reply.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": num_cached([reply]), "cache_write_tokens": 0},
        "output_tokens": reply.num_tokens,
        "output_tokens_details": {"reasoning_tokens": thoughts(reply) if thoughts else 0},
        "total_tokens": reply.num_prompt_tokens + reply.num_tokens,
    }
