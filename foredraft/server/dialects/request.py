"""Convert a checked body to a `GenerationRequest` for the engine."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar

from pydantic import Field

from foredraft.core.checks import checked_text, shown
from foredraft.core.errors import ConfigError, PromptError
from foredraft.core.params import SamplingParams
from foredraft.server.answers import Caller
from foredraft.server.context import ServerContext
from foredraft.server.dialects.fields import excluded
from foredraft.server.dialects.sampling import SamplingFields
from foredraft.server.errors import naming_fields
from foredraft.server.formats.base import reply_grammar
from foredraft.server.generation import GenerationRequest
from foredraft.server.resume import placed
from foredraft.server.thinking import Thinking
from foredraft.server.tools import ToolUse, read_tools

_OF_A_MESSAGE = (
    *("role", "content", "tool_calls", "name", "tool_call_id"),
    *("reasoning", "reasoning_content"),
)
"""Fields of a message that chat templates are given. Clients send others."""
_OPENING = 1024
"""Characters of a conversation's beginning that identify the engine that has it cached."""
_END = 8
"""Tokens at the end of a prompt that may open the thoughts of a reply."""


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
        """The request's settings of reasoning."""
        variables = self.chat_template_kwargs or {}
        return Thinking(self.enable_thinking, None, self.thinking_token_budget, variables)

    @abstractmethod
    def chat_messages(self) -> list[dict[str, Any]]:
        """The messages in chat's form."""

    @abstractmethod
    def chat_tools(self) -> dict[str, Any]:
        """``tools``, ``tool_choice`` and ``parallel_tool_calls`` in chat's form."""

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
    with naming_fields({"messages": body.conversation_field}):
        messages = body.chat_messages()
        known = context.tokenizer.template_variables(bool(tools.tools))
        variables, most = thinking.of_template(known), context.llm.max_prompt
        prompt = encode_conversation(context, messages, tools, variables, most)
    end = context.tokenizer.decode(prompt[-_END:], skip_special_tokens=False)
    in_thoughts = context.thinks and end.rstrip().endswith(context.form.think.rstrip())
    thinks = context.thinks and not end.rstrip().endswith(context.form.end_think)
    if tools.forced:
        if given.grammar is not None:
            raise excluded(names["grammar"], "tool_choice")
        names["grammar"] = "tools"
    defaults = context.llm.sampling_defaults or {}
    grammar = reply_grammar(
        *(context.form, context.spell, given.grammar),
        tools.to_call if given.grammar is None else tools.tools,
        parallel=tools.parallel and not tools.forced,
        thinks=thinks,
        is_open=in_thoughts,
    )
    params = replace(
        given.by(defaults),
        grammar=grammar,
        skip_special_tokens=not _shows_marks(context, tools, thinks),
        thinking=thinking.limit(context.tokenizer, context.form, in_thoughts, grammar is not None)
        if thinks
        else None,
    )
    return _new_request(
        *(context, body, caller, model, (prompt,), params),
        operation="chat",
        opening=_opening(messages),
        names=names,
        model_defaults=given.left_to(defaults),
        ignored=(*body.ignored(), *((thinking.field,) if thinking.unheeded(known) else ())),
        form=context.form,
        tools=tools,
        thinks=thinks,
        in_thoughts=in_thoughts,
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
    most: int | None = None,
) -> list[int]:
    """The token ids of a conversation as the model is given it.

    Args:
        variables: of the chat template.
        most: tokens allowed; None: any number.

    Raises:
        ConfigError, PromptError: the template refuses it.
    """
    known = [{name: each[name] for name in _OF_A_MESSAGE if name in each} for each in messages]
    adapt = partial(context.form.adapted, tools=tools.tools)
    return context.tokenizer.encode_chat(known, list(tools.tools), variables, most, adapt)


def read_prompts(
    context: ServerContext,
    body: SamplingFields,
    prompts: Sequence[str | list[int]],
    add_special_tokens: bool,
    caller: Caller,
    stops: Sequence[int] = (),
) -> GenerationRequest:
    """The generation that a request with prompts asks for. To be called on a thread.

    Args:
        stops: ids that end a reply, beside those that the request names.

    Raises:
        ApiError, ConfigError, PromptError: something in it cannot be used.
    """
    model = context.check_model(body.model)
    body.check_limits(context.settings)
    defaults = context.llm.sampling_defaults
    given, names = body.sampling(defaults)
    params = given.by(defaults)
    params = replace(params, stop_token_ids=(*params.stop_token_ids, *stops))
    _check_replies(len(prompts), params.n, context)

    def encode(prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        checked_text("prompt", prompt, PromptError)
        context.tokenizer.check_length(prompt, context.llm.max_prompt)
        return context.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)

    encoded = tuple(map(encode, prompts))
    for number, prompt in enumerate(encoded):
        if not prompt:
            raise ConfigError(
                f"prompt {number} is empty: there is nothing to continue", field="prompt"
            )
    return _new_request(
        *(context, body, caller, model, encoded, params),
        operation="text_completion",
        names=names,
        model_defaults=given.left_to(defaults or {}),
        ignored=tuple(body.ignored()),
    )


def _new_request(
    context: ServerContext,
    body: SamplingFields,
    caller: Caller,
    model: str,
    prompts: tuple[list[int], ...],
    params: SamplingParams,
    opening: str | None = None,
    **more: Any,
) -> GenerationRequest:
    """A request with the fields that all APIs share.

    Args:
        opening: names the session if the client does not.
        **more: other fields of `GenerationRequest`.
    """
    place, headers = None, caller.headers
    if body.stream:
        params, place = placed(params, prompts, headers.get("last-event-id"))
    tenant, priority = context.tenant(caller.key_id, body.cache_salt), _priority(context, body)
    expected = context.tokenizer.encode(params.prediction, False) if params.prediction else []
    return GenerationRequest(
        model=model,
        prompts=prompts,
        params=params,
        tenant=tenant,
        priority=priority,
        session=headers.get("x-session-id") or body.prompt_cache_key or opening,
        arrived=caller.arrived,
        prediction=Counter(expected),
        place=place,
        headers=headers,
        **more,
    )


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
