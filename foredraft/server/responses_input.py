"""From a body of `/v1/responses` to one of chat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from foredraft.core.checks import shown
from foredraft.server.dialects.fields import (
    HINTS,
    Body,
    FieldError,
    Refusals,
    given,
    ignored_but,
    refuse_named,
)
from foredraft.server.dialects.prompts import text_of

HONOURED = (
    *("model", "input", "instructions", "max_output_tokens", "temperature", "top_p", "text"),
    *("tools", "tool_choice", "parallel_tool_calls", "stream", "top_logprobs", "include"),
)
EXTRAS = (
    *("top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "cache_salt"),
    *("structured_outputs", "prediction", "priority", "coupling"),
)
"""Fields that OpenAI does not have here; they mean what they mean in chat."""
IGNORED = (*HINTS, "store", "reasoning", "stream_options", "context_management", "client_metadata")
"""Without effect here: nothing is stored, and the answer says so."""
REFUSED: Refusals = {
    "previous_response_id": ("nothing is stored: send the conversation so far as input", ()),
    "conversation": ("nothing is stored: send the conversation so far as input", ()),
    "background": ("a reply lasts as long as its connection", (False,)),
    "prompt": ("there are no stored prompts", ()),
    "truncation": ("shorten the input yourself", ("disabled", "auto")),
    "max_tool_calls": ("the client runs the tools", ()),
    "moderation": ("there is none", ()),
}
NAMES = {
    "messages": "input",
    "response_format": "text",
    "max_completion_tokens": "max_output_tokens",
}
"""Of fields that chat has under another name."""
_LOGPROBS = "message.output_text.logprobs"
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")


def as_chat(body: Body) -> dict[str, Any]:
    """The same request in chat's dialect. Tools of unknown types are left out.

    Raises:
        FieldError: something that cannot be honoured.
    """
    refuse_named(body, REFUSED)
    chat = {name: body[name] for name in EXTRAS if name in body}
    chat |= {name: body.get(name) for name in ("model", "temperature", "top_p")}
    chat["messages"] = [*_instructions(body), *_messages(given(body, "input", ""))]
    if not chat["messages"]:
        chat["messages"] = [{"role": "user", "content": ""}]  # what agents send as a probe
    chat["max_completion_tokens"] = given(body, "max_output_tokens")
    chat["response_format"] = _format(given(body, "text", {}))
    if _LOGPROBS in given(body, "include", []):
        chat |= {"logprobs": True, "top_logprobs": given(body, "top_logprobs", 0)}
    choice = given(body, "tool_choice")
    tools = [_tool(tool) for tool in given(body, "tools", []) if _is_function(tool)]
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        tools, choice = _allowed(tools, choice), choice.get("mode", "auto")
    if tools:
        chat |= {"tools": tools, "parallel_tool_calls": given(body, "parallel_tool_calls")}
        chat["tool_choice"] = _choice(choice)
    return chat


def ignored(body: Body) -> list[str]:
    """Fields without effect."""
    return ignored_but(body, {*HONOURED, *EXTRAS, *REFUSED})


def _instructions(body: Body) -> Iterator[dict[str, Any]]:
    text = given(body, "instructions")
    if text is not None:
        yield {"role": "system", "content": text_of("instructions", text)}


def _messages(items: object) -> Iterator[dict[str, Any]]:
    if isinstance(items, str):
        yield {"role": "user", "content": items}
        return
    if not isinstance(items, list):
        raise FieldError("input", f"input must be text or a list of items, not {shown(items)}")
    calls: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        where = f"input[{number}]"
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if kind == "function_call" and isinstance(item, Mapping):
            calls.append(_call(item))
            continue
        if calls:  # calls that follow each other belong to one message
            yield {"role": "assistant", "content": None, "tool_calls": calls}
            calls = []
        if kind == "message" and isinstance(item, Mapping):
            content = text_of(f"{where}.content", item.get("content"), _TEXT_PARTS)
            yield {"role": item.get("role"), "content": content}
        elif kind == "function_call_output" and isinstance(item, Mapping):
            content = text_of(f"{where}.output", item.get("output"), _TEXT_PARTS)
            yield {"role": "tool", "content": content, "tool_call_id": item.get("call_id")}
        elif kind != "reasoning":  # thoughts of earlier turns are not shown again
            raise FieldError("input", f"{where} is of type {shown(kind)}, which is not supported")
    if calls:
        yield {"role": "assistant", "content": None, "tool_calls": calls}


def _call(item: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
    return {"id": item.get("call_id"), "type": "function", "function": function}


def _format(text: object) -> object:
    if not isinstance(text, Mapping):
        raise FieldError("text", f"text must be an object, not {shown(text)}")
    return text.get("format")


def _is_function(tool: object) -> bool:
    return isinstance(tool, Mapping) and tool.get("type") == "function"


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _allowed(tools: list[dict[str, Any]], choice: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Those of the tools that the choice names."""
    named = choice.get("tools")
    if not isinstance(named, list) or not all(isinstance(each, Mapping) for each in named):
        raise FieldError("tool_choice", f"tool_choice.tools must be a list, not {shown(named)}")
    names = {each.get("name") for each in named if _is_function(each)}
    return [tool for tool in tools if tool["function"].get("name") in names]


def _choice(choice: object) -> object:
    """Choices of hosted tools, which are left out, leave the model free."""
    if isinstance(choice, Mapping):
        if choice.get("type") != "function":
            return "auto"
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice
