"""`POST /v1/messages` and `POST /v1/messages/count_tokens`, in Anthropic's dialect."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from foredraft.server.asks import Ask, read_chat
from foredraft.server.blocks import Block, Blocks, Change
from foredraft.server.context import ServerContext
from foredraft.server.errors import ApiError
from foredraft.server.finishing import finish_reason, stop_string
from foredraft.server.generation import Reply
from foredraft.server.messages_input import NAMES, as_chat, ignored
from foredraft.server.routes.common import Context, KeyId, new_id, respond
from foredraft.server.schemas.common import AnthropicErrorBody, error_responses, streamed
from foredraft.server.schemas.messages import Count, CountRequest, Message, MessagesRequest
from foredraft.server.usage import num_cached, speculation_of
from foredraft.server.wire import JsonResponse, named_event

router = APIRouter()
_ERRORS = error_responses(AnthropicErrorBody)
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


@router.post(
    "/v1/messages", responses={200: streamed("a reply, whole or as events", Message), **_ERRORS}
)
async def create_message(
    body: MessagesRequest, request: Request, context: Context, key_id: KeyId
) -> Response:
    """Reply to a conversation."""
    plain = body.plain()
    ask = await read_chat(context, as_chat(plain), key_id, NAMES)
    work = Messages(context, ask)
    return await respond(work, plain, ignored(plain), context, request)


@router.post("/v1/messages/count_tokens", response_model=Count, responses=_ERRORS)
async def count_tokens(body: CountRequest, context: Context, key_id: KeyId) -> Response:
    """How many tokens a conversation has as the model is given it, system and tools included."""
    ask = await read_chat(context, as_chat(body.plain()), key_id, NAMES)
    return JsonResponse({"input_tokens": len(ask.prompts[0])})


class Messages:
    """One messages request, on its way to an answer."""

    def __init__(self, context: ServerContext, ask: Ask) -> None:
        self._context, self._ask = context, ask
        self._id = new_id("msg_")
        self._blocks = Blocks()

    async def whole(self) -> dict[str, Any]:
        """The answer when all is there: what the last events of a stream add up to."""
        async for _ in self.stream():
            pass
        return self._message

    def error_event(self, error: ApiError) -> bytes:
        """What ends a stream that failed."""
        return named_event(error.for_anthropic)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The answer as it comes."""
        ask, parser = self._ask, self._ask.new_parser()
        async with ask.open(self._context) as generation:
            reply = generation.replies[0]
            self._message = self._begun(reply)
            yield named_event({"type": "message_start", "message": self._message})
            async for _, event in generation:
                for change in self._blocks.add(parser.take(event)):
                    yield self._event(*change)
            for change in self._blocks.close():
                yield self._event(*change)
            for event_of_end in self._end(reply, parser.num_calls):
                yield named_event(event_of_end)

    def _end(self, reply: Reply, num_calls: int) -> Iterator[dict[str, Any]]:
        result = reply.result
        assert result is not None
        stop = stop_string(result, list(self._ask.params.stop), self._context.tokenizer)
        reason = _REASONS[finish_reason(result, num_calls)]
        delta = {"stop_reason": "stop_sequence" if stop else reason, "stop_sequence": stop}
        usage = _usage(reply)
        self._message |= delta | {"usage": usage}
        self._message["content"] = [_content(block) for block in self._blocks.all]
        if metrics := speculation_of([reply], self._context.settings.request_metrics):
            self._message["metrics"] = metrics
        yield {"type": "message_delta", "delta": delta, "usage": usage}
        yield {"type": "message_stop"}

    def _begun(self, reply: Reply) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._ask.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(reply),
        }

    def _event(self, change: Change, block: Block, text: str) -> bytes:
        event: dict[str, Any] = {"index": block.number}
        if change == "open":
            event |= {"type": "content_block_start", "content_block": _content(block)}
        elif change == "close":
            event |= {"type": "content_block_stop"}
        else:
            event |= {"type": "content_block_delta", "delta": _delta(block, text)}
        return named_event(event)


def _delta(block: Block, text: str) -> dict[str, str]:
    if block.kind == "call":
        return {"type": "input_json_delta", "partial_json": text}
    if block.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "text_delta", "text": text}


def _content(block: Block) -> dict[str, Any]:
    if block.kind == "call":
        return {
            "type": "tool_use",
            "id": f"toolu_{block.id}",
            "name": block.name,
            "input": _input(block),
        }
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}


def _input(block: Block) -> dict[str, Any]:
    """Arguments as data; what is no JSON object (a reply that was cut) is kept as text."""
    try:
        value = json.loads(block.text or "{}")
    except (ValueError, RecursionError):
        return {"_unparsed": block.text}
    return value if isinstance(value, dict) else {"_unparsed": block.text}


def _usage(reply: Reply) -> dict[str, int]:
    cached = num_cached([reply])
    return {
        "input_tokens": reply.num_prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": reply.num_tokens,
    }
