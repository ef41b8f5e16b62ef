"""From a checked body to what the engine is asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from foredraft.core.checks import shown, whole_number
from foredraft.core.params import SamplingParams
from foredraft.server.context import ServerContext
from foredraft.server.dialects.fields import Body, FieldError, given
from foredraft.server.dialects.params import chat_params, completion_params
from foredraft.server.dialects.prompts import chat_messages, completion_prompts
from foredraft.server.errors import in_words_of
from foredraft.server.generation import Generation
from foredraft.server.limits import check_limits, check_replies
from foredraft.server.replies import THINK, ReplyParser
from foredraft.server.spans import Operation
from foredraft.server.tools import NO_TOOLS, ToolUse, read_tools
from foredraft.server.usage import Thoughts

_MAX_PRIORITY = 1 << 31


@dataclass(frozen=True)
class Ask:
    """One HTTP request for replies.

    Attributes:
        operation: what kind of it.
        model: the name to answer with.
        prompts: token ids of each.
        params: of every reply; ``n`` replies to each prompt.
        tenant: whose it is.
        prediction: ids of the text that was expected.
        tools: that a reply may call.
        thinks: whether a reply may begin with thoughts; in_thoughts: the prompt has opened them.
        grammar_of: the field that the grammar came with, as the client wrote it.
    """

    operation: Operation
    model: str
    prompts: tuple[list[int], ...]
    params: SamplingParams
    tenant: str | None
    priority: int
    prediction: tuple[int, ...] = ()
    tools: ToolUse = NO_TOOLS
    thinks: bool = False
    in_thoughts: bool = False
    grammar_of: str = "response_format"

    def new_parser(self) -> ReplyParser:
        tools = self.tools
        return ReplyParser(self.thinks, bool(tools.tools), self.in_thoughts, not tools.parallel)

    def thoughts(self, context: ServerContext) -> Thoughts | None:
        """What counts the tokens of thoughts; None: there cannot be any."""
        return Thoughts(context.tokenizer, self.in_thoughts) if self.thinks else None

    @asynccontextmanager
    async def open(self, context: ServerContext) -> AsyncIterator[Generation]:
        """The replies under way; see `ServerContext.generation`."""
        asked = self.prompts, self.params, self.tenant, self.priority
        async with AsyncExitStack() as stack:
            span = stack.enter_context(
                context.spans.request(self.operation, self.model, self.params)
            )
            with in_words_of({"grammar": self.grammar_of}):  # only the engine compiles it
                generation = await stack.enter_async_context(context.generation(*asked))
            span.watch(generation)
            yield generation


async def read_chat(
    context: ServerContext,
    body: Body,
    key_id: str | None,
    names: Mapping[str, str] = MappingProxyType({}),
) -> Ask:
    """What a chat body asks for.

    Args:
        names: of fields that another dialect calls otherwise, by their names in chat.

    Raises:
        ApiError, ConfigError, PromptError: something in it cannot be used.
    """
    with in_words_of(names):
        ask = await _read_chat(context, body, key_id)
    return replace(ask, grammar_of=names.get(ask.grammar_of, ask.grammar_of))


async def _read_chat(context: ServerContext, body: Body, key_id: str | None) -> Ask:
    """As `read_chat`, in chat's own names.

    Raises:
        ApiError, ConfigError, PromptError: something in it cannot be used.
    """
    model = context.check_model(body.get("model"))
    check_limits(body, context.settings)
    tools = read_tools(body, context.takes_tools)
    params = chat_params(body, tools.grammar)
    check_replies(1, params.n, context.settings)
    messages, tokenizer = chat_messages(body), context.tokenizer
    # Templates are programs, and texts may be long: neither is to hold the others up.
    prompt = await asyncio.to_thread(tokenizer.encode_chat, messages, list(tools.tools))
    end = tokenizer.decode(prompt[-8:], skip_special_tokens=False).rstrip()
    return Ask(
        "chat",
        model,
        (prompt,),
        params,
        context.tenant(key_id, given(body, "cache_salt")),
        _priority(body),
        _prediction(context, params),
        tools,
        context.thinks,
        context.thinks and end.endswith(THINK),
        _grammar_of(body, tools),
    )


async def read_completion(context: ServerContext, body: Body, key_id: str | None) -> Ask:
    """What a completions body asks for.

    Raises:
        ApiError, ConfigError, PromptError: something in it cannot be used.
    """
    model = context.check_model(body.get("model"))
    check_limits(body, context.settings)
    params, asked = completion_params(body), completion_prompts(body)
    check_replies(len(asked), params.n, context.settings)
    special = given(body, "add_special_tokens", True)

    def encode(prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        return context.tokenizer.encode(prompt, add_special_tokens=bool(special))

    prompts = await asyncio.to_thread(lambda: tuple(map(encode, asked)))
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise FieldError("prompt", f"prompt {number} is empty: there is nothing to continue")
    return Ask(
        "text_completion",
        model,
        prompts,
        params,
        context.tenant(key_id, given(body, "cache_salt")),
        _priority(body),
        _prediction(context, params),
        grammar_of=_grammar_of(body, NO_TOOLS),
    )


def _grammar_of(body: Body, tools: ToolUse) -> str:
    """The field that a reply's grammar comes from."""
    if tools.forced:
        return "tools"
    asked = given(body, "structured_outputs") is not None
    return "structured_outputs" if asked else "response_format"


def _priority(body: Body) -> int:
    """vLLM's: lower numbers go first; the engine's are the other way round."""
    value: Any = given(body, "priority", 0)
    number = whole_number(value)
    if number is None or abs(number) > _MAX_PRIORITY:
        raise FieldError("priority", f"priority must be a whole number, not {shown(value)}")
    return -number


def _prediction(context: ServerContext, params: SamplingParams) -> tuple[int, ...]:
    if params.prediction is None:
        return ()
    return tuple(context.tokenizer.encode(params.prediction, add_special_tokens=False))
