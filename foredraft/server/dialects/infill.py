"""`POST /infill`: llama.cpp's route for editors."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from foredraft.core.checks import shown
from foredraft.core.errors import ConfigError
from foredraft.engine.request import GenerationResult
from foredraft.models.text.infill import Infill
from foredraft.server.answers import (
    AnswerWriter,
    Called,
    Context,
    error_responses,
    respond,
    streamed,
)
from foredraft.server.bodies import ParsedRoute
from foredraft.server.dialects.fields import Items, Sets, entries
from foredraft.server.dialects.request import read_prompts
from foredraft.server.dialects.sampling import Ignored, SamplingFields, Stops
from foredraft.server.generation import ReplyState
from foredraft.server.wire import data_event

router = APIRouter(route_class=ParsedRoute)

_NUM_PREDICTED = 128


class InfillRequest(SamplingFields):
    """A text with a hole."""

    default_max_tokens = _NUM_PREDICTED

    input_prefix: str = ""
    input_suffix: str = ""
    prompt: str = ""
    input_extra: Annotated[Items[dict[str, Any]] | None, entries("max_messages")] = None
    n_predict: Annotated[Annotated[int, Field(ge=1)] | None, Sets("max_tokens")] = None
    stop: Stops = None

    cache_prompt: Ignored = None
    n_indent: Ignored = None
    samplers: Ignored = None
    t_max_prompt_ms: Ignored = None
    t_max_predict_ms: Ignored = None

    def files(self) -> list[tuple[str, str]]:
        """Names and texts of other files.

        Raises:
            ConfigError: one is malformed.
        """
        found = []
        for number, each in enumerate(self.input_extra or ()):
            name, text = each.get("filename", ""), each.get("text")
            if not isinstance(name, str) or not isinstance(text, str):
                raise ConfigError(
                    f"input_extra[{number}] needs a filename and a text, not {shown(each)}",
                    field="input_extra",
                )
            found.append((name, text))
        return found


class Filled(BaseModel):
    """The text of the hole."""

    model_config = ConfigDict(extra="allow")

    content: str
    stop: bool
    tokens_predicted: int
    tokens_evaluated: int


@router.post(
    "/infill",
    responses={200: streamed("the text, whole or as events", Filled), **error_responses()},
)
async def infill(
    body: InfillRequest, request: Request, context: Context, caller: Called
) -> Response:
    """Fill a hole in, for models that have the tokens."""
    tokenizer = context.tokenizer
    marks = Infill.of(tokenizer)
    texts = body.input_prefix, body.input_suffix, body.prompt, body.files()
    whole = "".join([*texts[:3], *(text for _, text in texts[3])])
    await context.on_thread(caller.size, tokenizer.check_length, whole, context.llm.max_prompt)
    prompt = await context.on_thread(caller.size, marks.prompt, tokenizer, *texts)
    wanted = await context.on_thread(
        caller.size, read_prompts, context, body, [prompt], False, caller
    )
    params = replace(
        wanted.params, n=1, stop_token_ids=(*wanted.params.stop_token_ids, *marks.ends)
    )
    writer = InfillWriter(context, replace(wanted, params=params))
    return await respond(writer, body.stream, request)


class InfillWriter(AnswerWriter):
    """Writes the answer to an infill request."""

    async def whole(self) -> dict[str, Any]:
        async with self.context.generation(self.request) as generation:
            async for _ in generation:
                pass
            reply = generation.replies[0]
            assert reply.result is not None
            return _said(reply, reply.result.text, reply.result)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        async with self.context.generation(self.request) as generation:
            yield b""
            async for _, event in generation:
                text = "".join(piece.text for piece in event.pieces)
                yield data_event(_said(generation.replies[0], text, event.result))


def _said(reply: ReplyState, text: str, result: GenerationResult | None) -> dict[str, Any]:
    is_cut = result is not None and result.finish_reason == "length"
    return {
        "content": text,
        "stop": result is not None,
        "stop_type": "none" if result is None else "limit" if is_cut else "eos",
        "tokens_predicted": reply.num_tokens,
        "tokens_evaluated": reply.num_prompt_tokens,
        "tokens_cached": 0 if result is None else result.num_cached_tokens,
        "truncated": False,
    }
