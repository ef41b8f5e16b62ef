"""`POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`: vLLM's API."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from foredraft.core.checks import checked_text, shown
from foredraft.core.errors import ConfigError, PromptError
from foredraft.server.answers import CallerDep, ContextDep, error_responses
from foredraft.server.bodies import ParsedRoute
from foredraft.server.context import ServerContext
from foredraft.server.dialects.fields import Items, RequestBody, entries
from foredraft.server.dialects.request import encode_conversation
from foredraft.server.dialects.sampling import Tools
from foredraft.server.tools import read_tools
from foredraft.server.wire import JsonResponse

router = APIRouter(route_class=ParsedRoute)


class TokenizeRequest(RequestBody):
    """A text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[
        Annotated[list[dict[str, Any]], Field(min_length=1)] | None, entries("max_messages")
    ] = None
    tools: Tools = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestBody):
    """Token ids."""

    model: str | None = None
    tokens: Items[int]


@router.post("/tokenize", responses=error_responses())
async def tokenize(body: TokenizeRequest, context: ContextDep, caller: CallerDep) -> Response:
    """The token ids of a text, or of a conversation as the model is given it."""
    context.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ConfigError("give either prompt or messages", field="prompt")
    return await context.on_thread(caller.size, _tokenized, context, body)


@router.post("/detokenize", responses=error_responses())
async def detokenize(body: DetokenizeRequest, context: ContextDep, caller: CallerDep) -> Response:
    """The text of token ids, special tokens included."""
    context.check_model(body.model)
    tokenizer, size = context.tokenizer, context.tokenizer.vocab_size

    def answer() -> Response:  # there may be millions of tokens
        for token in body.tokens:
            if not 0 <= token < size:
                raise ConfigError(f"tokens: {shown(token)} is no id below {size}", field="tokens")
        return JsonResponse({"prompt": tokenizer.decode(body.tokens, False)})

    return await context.on_thread(caller.size, answer)


@router.get("/tokenizer_info", responses=error_responses())
async def tokenizer_info(context: ContextDep) -> Response:
    """Information for clients that count tokens themselves."""
    tokenizer = context.tokenizer
    return JsonResponse(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": context.llm.max_context,
            "chat_template": tokenizer.chat_template,
            "eos_token_ids": list(tokenizer.eos_token_ids),
            **tokenizer.named_tokens,
        }
    )


def _tokenized(context: ServerContext, body: TokenizeRequest) -> Response:
    """Runs on a thread, for a text may have millions of tokens."""
    body.check_limits(context.settings)
    tokenizer = context.tokenizer
    if body.messages is not None:
        tools = read_tools({"tools": body.tools}, context.takes_tools)
        tokens = encode_conversation(context, body.messages, tools)
    else:
        special = body.add_special_tokens is not False
        text = checked_text("prompt", body.prompt or "", PromptError)
        tokens = tokenizer.encode(text, add_special_tokens=special)
    answer: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": context.llm.max_context,
        "tokens": tokens,
        "token_strs": None,
    }
    if body.return_token_strs:
        answer["token_strs"] = [tokenizer.token_text(token) for token in tokens]
    return JsonResponse(answer)
