"""Convert a checked body to a `GenerationRequest` for the engine."""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import Field

from foredraft.core.checks import shown
from foredraft.core.errors import ConfigError
from foredraft.core.grammar import Grammar
from foredraft.core.params import SamplingParams
from foredraft.server.answers import Caller
from foredraft.server.context import ServerContext
from foredraft.server.dialects.fields import excluded
from foredraft.server.dialects.sampling import SamplingFields
from foredraft.server.errors import in_words_of
from foredraft.server.formats.base import Format, reply_grammar
from foredraft.server.generation import Generation
from foredraft.server.replies import ReplyParser, opens_thoughts
from foredraft.server.resume import StreamPlace, placed
from foredraft.server.spans import Operation
from foredraft.server.thinking import Thinking
from foredraft.server.tools import NO_TOOLS, ToolUse, read_tools
from foredraft.server.usage import ExpectedText, Thoughts

_OF_A_MESSAGE = (
    *("role", "content", "tool_calls", "name", "tool_call_id"),
    *("reasoning", "reasoning_content"),
)
"""Fields of a message that chat templates are given. Clients send others."""
_OPENING = 1024
"""Characters of a conversation's beginning that identify the engine that has it cached."""
_END = 8
"""Tokens at the end of a prompt that may open the thoughts of a reply."""


@dataclass(frozen=True)
class GenerationRequest:
    """The generation that one HTTP request asks for.

    Attributes:
        operation: what kind of request it is.
        model: the name to answer with.
        prompts: token ids of each prompt.
        params: of every reply; ``n`` replies to each prompt.
        tenant: the owner of the request.
        priority: requests of higher numbers go first.
        session: see `ServedEngine.open_all`.
        arrived: when it came, in seconds of `time.perf_counter`.
        names: by sampling parameter the field that it came from.
        model_defaults: sampling parameters that the model's makers name, where the request does
            not.
        ignored: fields without effect here.
        form: the model's form of thoughts and calls.
        prediction: the text that the reply is expected to repeat; None: none is named.
        tools: that a reply may call.
        thinks: whether a reply may begin with thoughts.
        in_thoughts: whether the prompt has opened them.
        scores_only: whether nothing is to be generated: the prompts are only scored.
        is_paced: whether events come one by one with a token each.
        place: in the stream of one reply; None: it cannot be resumed.
        reply_id: a part of the ids of the answer.
    """

    operation: Operation
    model: str
    prompts: tuple[list[int], ...]
    params: SamplingParams
    tenant: str | None
    priority: int
    session: str | None
    arrived: float
    names: Mapping[str, str] = field(default_factory=dict)
    model_defaults: Mapping[str, float] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    form: Format = field(default_factory=Format)
    prediction: ExpectedText | None = None
    tools: ToolUse = NO_TOOLS
    thinks: bool = False
    in_thoughts: bool = False
    scores_only: bool = False
    is_paced: bool = False
    place: StreamPlace | None = None

    @cached_property
    def reply_id(self) -> str:
        return secrets.token_hex(12) if self.place is None else self.place.now.reply_id

    def new_parser(self) -> ReplyParser:
        tools, is_one = self.tools.tools, not self.tools.parallel
        return ReplyParser(self.form, tools, self.thinks, self.in_thoughts, is_one)

    def thoughts(self, context: ServerContext) -> Thoughts | None:
        """The counter of reasoning tokens; None: the reply cannot have any."""
        if not self.thinks:
            return None
        return Thoughts(context.tokenizer, self.form, self.in_thoughts)

    @asynccontextmanager
    async def open(self, context: ServerContext) -> AsyncIterator[Generation]:
        """The replies under way; see `ServerContext.generation`."""
        async with AsyncExitStack() as stack:
            span = stack.enter_context(
                context.spans.request(self.operation, self.model, self.params)
            )
            stack.enter_context(in_words_of(self.names))  # only the engine compiles a grammar
            generation = await stack.enter_async_context(
                context.generation(
                    *(self.prompts, self.params, self.tenant, self.priority, self.session),
                    scores_only=self.scores_only,
                    arrived=self.arrived,
                )
            )
            span.watch(generation)
            if self.is_paced:
                generation.pace()
            elif self.place is not None:
                generation.follow(self.place)
            yield generation


class ConversationFields(SamplingFields):
    """A request for a reply to a conversation. Each API writes it in its own form.

    Attributes:
        conversation_field: where the conversation is.
    """

    conversation_field: ClassVar[str] = "messages"

    enable_thinking: bool | None = None
    thinking_token_budget: Annotated[int, Field(ge=0)] | None = None
    chat_template_kwargs: dict[str, bool | str] | None = None

    def asked_thinking(self) -> Thinking:
        """What the request says of the model's thoughts.

        Raises:
            ConfigError: it cannot be read.
        """
        variables = self.chat_template_kwargs or {}
        return Thinking(self.enable_thinking, None, self.thinking_token_budget, variables)

    @abstractmethod
    def chat_messages(self) -> list[dict[str, Any]]:
        """The messages in chat's form.

        Raises:
            ConfigError: one cannot be used.
        """

    @abstractmethod
    def chat_tools(self) -> dict[str, Any]:
        """``tools``, ``tool_choice`` and ``parallel_tool_calls`` in chat's form.

        Raises:
            ConfigError: one cannot be used.
        """

    def ignored(self) -> list[str]:
        return sorted([*super().ignored(), *self._unheeded_strict()])

    def _unheeded_strict(self) -> list[str]:
        """Forced calls follow their schema; otherwise the model's arguments are free."""
        chosen = self.chat_tools()
        if chosen.get("tool_choice") not in (None, "auto"):
            return []
        functions = [tool["function"] for tool in chosen.get("tools") or ()]
        return [
            f"tools[{number}].strict"
            for number, function in enumerate(functions)
            if function.get("strict")
        ]


def read_conversation(
    context: ServerContext, body: ConversationFields, caller: Caller
) -> GenerationRequest:
    """The generation that a conversation asks for.

    To be called on a thread: schemas, templates and texts may take long.

    Raises:
        ApiError, ConfigError, PromptError: something in it cannot be used.
    """
    model = context.check_model(body.model)
    body.check_limits(context.settings)
    tools, thinking = read_tools(body.chat_tools(), context.takes_tools), body.asked_thinking()
    given, names = body.sampling(context.llm.sampling_defaults)
    _check_replies(1, given.n, context)
    with in_words_of({"messages": body.conversation_field}):
        messages = body.chat_messages()
        known = context.tokenizer.template_variables(bool(tools.tools))
        prompt = encode_conversation(context, messages, tools, thinking.of_template(known))
    end = context.tokenizer.decode(prompt[-_END:], skip_special_tokens=False)
    in_thoughts = context.thinks and opens_thoughts(end, context.form)
    thinks = context.thinks and not end.rstrip().endswith(context.form.end_think)
    if tools.forced:
        if given.grammar is not None:
            raise excluded(names["grammar"], "tool_choice")
        names["grammar"] = "tools"
    defaults = context.llm.sampling_defaults or {}
    grammar = _grammar(context, given.grammar, tools, thinks, in_thoughts)
    params = replace(
        given.by(defaults),
        grammar=grammar,
        skip_special_tokens=not _shows_marks(context, tools, thinks),
        thinking=thinking.limit(context.tokenizer, context.form, in_thoughts, grammar is not None)
        if thinks
        else None,
    )
    params, place = _placed(body, params, (prompt,), caller)
    return GenerationRequest(
        "chat",
        model,
        (prompt,),
        params,
        context.tenant(caller.key_id, body.cache_salt),
        _priority(context, body),
        body.prompt_cache_key or _opening(messages),
        caller.arrived,
        names,
        given.left_to(defaults),
        (*body.ignored(), *((thinking.field,) if thinking.unheeded(known) else ())),
        context.form,
        _prediction(context, params),
        tools,
        thinks,
        in_thoughts,
        is_paced=_is_paced(body),
        place=place,
    )


def _grammar(
    context: ServerContext, answer: Grammar | None, tools: ToolUse, thinks: bool, is_open: bool
) -> Grammar | None:
    """The grammar of the whole reply: of its answer, and of the calls that it may or must make."""
    calls = tools.to_call if answer is None else tools.tools
    parallel = tools.parallel and not tools.forced
    return reply_grammar(
        *(context.form, context.spell, answer, calls),
        parallel=parallel,
        thinks=thinks,
        is_open=is_open,
    )


def _shows_marks(context: ServerContext, tools: ToolUse, thinks: bool) -> bool:
    """Whether special tokens must be read as text, because they mark calls or thoughts."""
    form = context.form
    marks = form.marks() if tools.tools else (form.think, form.end_think) if thinks else ()
    return any(map(context.spell.is_special, marks))


def _opening(messages: Sequence[Mapping[str, Any]]) -> str:
    """The stable beginning of a conversation: its messages up to the user's first."""
    opening = ""
    for message in messages:
        opening += f"{message.get('role')}: {message.get('content')!s:.{_OPENING}}\n"
        if message.get("role") == "user" or len(opening) > _OPENING:
            break
    return opening[:_OPENING]


def encode_conversation(
    context: ServerContext,
    messages: Sequence[Mapping[str, Any]],
    tools: ToolUse,
    variables: Mapping[str, bool | str] | None = None,
) -> list[int]:
    """The token ids of a conversation as the model is given it.

    Args:
        variables: of the chat template.

    Raises:
        ConfigError, PromptError: the template refuses it.
    """
    known = [{name: each[name] for name in _OF_A_MESSAGE if name in each} for each in messages]
    adapted = context.form.adapted(known, tools.tools)
    return context.tokenizer.encode_chat(adapted, list(tools.tools), variables)


def read_prompts(
    context: ServerContext,
    body: SamplingFields,
    prompts: Sequence[str | list[int]],
    add_special_tokens: bool,
    caller: Caller,
) -> GenerationRequest:
    """The generation that a request with prompts asks for. To be called on a thread.

    Raises:
        ApiError, ConfigError, PromptError: something in it cannot be used.
    """
    model = context.check_model(body.model)
    body.check_limits(context.settings)
    defaults = context.llm.sampling_defaults
    given, names = body.sampling(defaults)
    params = given.by(defaults)
    _check_replies(len(prompts), params.n, context)

    def encode(prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        return context.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)

    encoded = tuple(map(encode, prompts))
    for number, prompt in enumerate(encoded):
        if not prompt:
            raise ConfigError(
                f"prompt {number} is empty: there is nothing to continue", field="prompt"
            )
    params, place = _placed(body, params, encoded, caller)
    return GenerationRequest(
        "text_completion",
        model,
        encoded,
        params,
        context.tenant(caller.key_id, body.cache_salt),
        _priority(context, body),
        body.prompt_cache_key,
        caller.arrived,
        names,
        given.left_to(defaults or {}),
        tuple(body.ignored()),
        prediction=_prediction(context, params),
        is_paced=_is_paced(body),
        place=place,
    )


def _placed(
    body: SamplingFields, params: SamplingParams, prompts: Sequence[list[int]], caller: Caller
) -> tuple[SamplingParams, StreamPlace | None]:
    if not body.stream or body.paced_stream:
        return params, None
    return placed(params, prompts, caller.last_event)


def _is_paced(body: SamplingFields) -> bool:
    if body.paced_stream and not body.stream:
        raise ConfigError("paced_stream needs stream: true", field="paced_stream")
    return bool(body.paced_stream)


def _check_replies(num_prompts: int, n: int, context: ServerContext) -> None:
    most = context.settings.max_replies
    if num_prompts * n > most:
        raise ConfigError(
            f"{num_prompts} prompts times n of {n} are {num_prompts * n} replies; a request may "
            f"ask for {most}",
            field="prompt" if num_prompts > 1 else "n",
        )


def _priority(context: ServerContext, body: SamplingFields) -> int:
    """vLLM's: lower numbers go first; the engine's are the other way round."""
    priority = body.priority or 0
    if priority and not context.settings.allow_priority:
        raise ConfigError(
            f"priority is {shown(priority)}; this server serves in the order of arrival "
            "(setting allow_priority lets clients choose)",
            field="priority",
        )
    return -priority


def _prediction(context: ServerContext, params: SamplingParams) -> ExpectedText | None:
    text = params.prediction
    if text is None:
        return None
    return ExpectedText(context.tokenizer.encode(text, False))
