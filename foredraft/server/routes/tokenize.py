"""`POST /tokenize`, `POST /detokenize`, `GET /tokenizer_info`."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from foredraft.core.checks import shown
from foredraft.server.answers import Context, error_responses
from foredraft.server.context import ServerContext
from foredraft.server.dialects.fields import FieldError
from foredraft.server.dialects.prompts import chat_messages
from foredraft.server.dialects.tokenize import DetokenizeRequest, TokenizeRequest
from foredraft.server.logprobs import token_text
from foredraft.server.tools import read_tools
from foredraft.server.wire import JsonResponse

router = APIRouter()


@router.post("/tokenize", responses=error_responses())
async def tokenize(body: TokenizeRequest, context: Context) -> Response:
    """The token ids of a text, or of a conversation as the model is given it."""
    context.check_model(body.model)
    tokens = await asyncio.to_thread(_encode, context, body)
    answer: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": context.llm.target.max_context,
        "tokens": tokens,
        "token_strs": None,
    }
    if body.return_token_strs:
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


def _encode(context: ServerContext, body: TokenizeRequest) -> list[int]:
    body.check_one()
    body.check_limits(context.settings)
    if body.messages is not None:
        tools = read_tools({"tools": body.tools}, context.takes_tools).tools
        return context.tokenizer.encode_chat(chat_messages(body.messages), list(tools))
    special = body.add_special_tokens is not False
    return context.tokenizer.encode(body.prompt or "", add_special_tokens=special)
