"""`POST /infill`: llama.cpp's route for editors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from foredraft.core.checks import shown
from foredraft.core.errors import ConfigError
from foredraft.engine.request import Event
from foredraft.models.text.infill import Infill
from foredraft.server.answers import (
    AnswerWriter,
    CallerDep,
    ContextDep,
    error_responses,
    in_one_step,
    respond,
    streamed,
)
from foredraft.server.bodies import ParsedRoute
from foredraft.server.dialects.fields import Items, Sets, entries
from foredraft.server.dialects.request import read_prompts
from foredraft.server.dialects.sampling import SamplingFields, Stops
from foredraft.server.generation import Generation, ReplyState
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

    def files(self) -> list[tuple[str, str]]:
        """Names and texts of other files."""
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


@router.post(
    "/infill",
    responses={
        200: streamed("the text, whole or as events", content=str, stop=bool),
        **error_responses(),
    },
)
async def infill(
    body: InfillRequest, request: Request, context: ContextDep, caller: CallerDep
) -> Response:
    """Fill a hole in, for models that have the tokens."""
    tokenizer = context.tokenizer
    marks = Infill.of(tokenizer)
    texts = body.input_prefix, body.input_suffix, body.prompt, body.files()
    whole = "".join([*texts[:3], *(text for _, text in texts[3])])
    await context.on_thread(caller.size, tokenizer.check_length, whole, context.llm.max_prompt)
    prompt = await context.on_thread(caller.size, marks.prompt, tokenizer, *texts)
    wanted = await context.on_thread(
        caller.size, read_prompts, context, body, [prompt], False, caller, marks.ends
    )
    return await respond(InfillWriter(context, wanted), body.stream, request)


class InfillWriter(AnswerWriter):
    """Writes the answer to an infill request."""

    def step(self, generation: Generation, index: int, event: Event) -> Iterator[bytes]:
        yield data_event(_said(generation.replies[0], event))

    def answer(self, generation: Generation) -> dict[str, Any]:
        reply = generation.replies[0]
        return _said(reply, in_one_step(reply.result))


def _said(reply: ReplyState, event: Event) -> dict[str, Any]:
    result = event.result
    is_cut = result is not None and result.finish_reason == "length"
    return {
        "content": "".join(piece.text for piece in event.pieces),
        "stop": result is not None,
        "stop_type": "none" if result is None else "limit" if is_cut else "eos",
        "tokens_predicted": reply.num_tokens,
        "tokens_evaluated": reply.num_prompt_tokens,
        "tokens_cached": 0 if result is None else result.num_cached_tokens,
        "truncated": False,
    }
