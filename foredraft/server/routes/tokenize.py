"""`POST /tokenize`, `POST /detokenize`, `GET /tokenizer_info`."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from foredraft.core.checks import shown
from foredraft.server.context import ServerContext
from foredraft.server.dialects.fields import FieldError, given
from foredraft.server.dialects.prompts import chat_messages
from foredraft.server.limits import check_limits
from foredraft.server.logprobs import token_text
from foredraft.server.routes.common import Context
from foredraft.server.schemas.common import error_responses
from foredraft.server.schemas.tokenize import DetokenizeRequest, TokenizeRequest
from foredraft.server.tools import read_tools
from foredraft.server.wire import JsonResponse

router = APIRouter()


@router.post("/tokenize", responses=error_responses())
async def tokenize(body: TokenizeRequest, context: Context) -> Response:
    """The token ids of a text, or of a conversation as the model is given it."""
    plain = body.plain()
    context.check_model(plain.get("model"))
    tokens = await asyncio.to_thread(_encode, context, plain)
    answer: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": context.llm.target.max_context,
        "tokens": tokens,
        "token_strs": None,
    }
    if given(plain, "return_token_strs", False):
        answer["token_strs"] = [token_text(context.tokenizer, token) for token in tokens]
    return JsonResponse(answer)


@router.post("/detokenize", responses=error_responses())
async def detokenize(body: DetokenizeRequest, context: Context) -> Response:
    """The text of token ids, special tokens included."""
    context.check_model(body.model)
    size = context.tokenizer.vocab_size
    for token in body.tokens:
        if not 0 <= token < size:
            raise FieldError("tokens", f"tokens: {shown(token)} is no id below {size}")
    text = await asyncio.to_thread(context.tokenizer.decode, body.tokens, False)
    return JsonResponse({"prompt": text})


@router.get("/tokenizer_info", responses=error_responses())
async def tokenizer_info(context: Context) -> Response:
    """What clients that count tokens themselves want to know."""
    tokenizer = context.tokenizer
    return JsonResponse(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": context.llm.target.max_context,
            "chat_template": tokenizer.chat_template,
            "eos_token_ids": list(tokenizer.eos_token_ids),
            **tokenizer.named_tokens,
        }
    )


def _encode(context: ServerContext, plain: dict[str, Any]) -> list[int]:
    has_prompt, has_messages = "prompt" in plain, "messages" in plain
    if has_prompt == has_messages:
        raise FieldError("prompt", "give either prompt or messages")
    check_limits(plain, context.settings)
    if has_messages:
        tools = read_tools(plain, context.takes_tools).tools
        return context.tokenizer.encode_chat(chat_messages(plain), list(tools))
    prompt = given(plain, "prompt", "")
    special = bool(given(plain, "add_special_tokens", True))
    return context.tokenizer.encode(prompt, add_special_tokens=special)
