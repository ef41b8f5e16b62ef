"""From a body of Anthropic's `/v1/messages` to one of chat."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from foredraft.core.checks import shown
from foredraft.server.dialects.fields import (
    Body,
    FieldError,
    Refusals,
    given,
    ignored_but,
    refuse_named,
)
from foredraft.server.dialects.prompts import text_of

HONOURED = (
    *("model", "messages", "max_tokens", "system", "stop_sequences", "temperature", "top_p"),
    *("top_k", "tools", "tool_choice", "stream", "output_config", "output_format"),
)
EXTRAS = (
    *("min_p", "seed", "stop_token_ids", "ignore_eos", "min_tokens", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "logit_bias", "cache_salt", "structured_outputs"),
    *("prediction", "priority", "coupling"),
)
"""Fields that Anthropic does not have; they mean what they mean in chat."""
NAMES = {"response_format": "output_config", "stop": "stop_sequences"}
"""Of fields that chat has under another name."""
IGNORED = ("metadata", "thinking", "service_tier", "context_management", "speed", "cache_control")
REFUSED: Refusals = {
    "container": ("nothing is kept between requests", ()),
    "mcp_servers": ("this server makes no requests of its own", ([],)),
    "inference_geo": ("there is one machine here", ()),
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def as_chat(body: Body) -> dict[str, Any]:
    """The same request in chat's dialect. Tools that Anthropic itself would run are left out.

    Raises:
        FieldError: something that cannot be honoured.
    """
    refuse_named(body, REFUSED)
    chat = {name: body[name] for name in EXTRAS if name in body}
    chat |= {name: body.get(name) for name in ("model", "temperature", "top_p", "top_k")}
    chat["max_tokens"] = body.get("max_tokens")
    chat["stop"] = given(body, "stop_sequences")
    chat["messages"] = [*_system(given(body, "system")), *_messages(given(body, "messages"))]
    chat["response_format"] = _format(body)
    tools = [_tool(tool) for tool in given(body, "tools", []) if _is_custom(tool)]
    if tools:
        chat["tools"] = tools
        chat |= _choice(given(body, "tool_choice", {"type": "auto"}))
    return chat


def ignored(body: Body) -> list[str]:
    """Fields without effect."""
    return ignored_but(body, {*HONOURED, *EXTRAS, *REFUSED})


def _system(system: object) -> Iterator[dict[str, Any]]:
    if system:
        yield {"role": "system", "content": text_of("system", system)}


def _messages(messages: object) -> Iterator[dict[str, Any]]:
    if not isinstance(messages, list):
        raise FieldError("messages", f"messages must be a list, not {shown(messages)}")
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, Mapping) or message.get("role") not in (
            *("user", "assistant", "system"),
        ):
            raise FieldError("messages", f"{where} needs a role, user or assistant")
        content = message.get("content")
        if isinstance(content, str):
            yield {"role": message["role"], "content": content}
        elif isinstance(content, list):
            yield from _blocks(f"{where}.content", str(message["role"]), content)
        else:
            raise FieldError("messages", f"{where}.content is {shown(content)}; it must be text")


def _blocks(where: str, role: str, blocks: list[Any]) -> Iterator[dict[str, Any]]:
    """Results of tools become messages of their own; text and calls stay together."""
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for number, block in enumerate(blocks):
        kind = block.get("type") if isinstance(block, Mapping) else None
        at = f"{where}[{number}]"
        if kind == "text":
            texts.append(text_of(at, [block]))
        elif kind == "tool_use":
            calls.append(_call(block))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind == "tool_result":
            content = text_of(f"{at}.content", block.get("content") or "")
            yield {"role": "tool", "content": content, "tool_call_id": block.get("tool_use_id")}
        elif kind != "redacted_thinking":
            raise FieldError(
                "messages", f"{at} is of type {shown(kind)}; text is all there is here"
            )
    if texts or calls or not blocks:
        message: dict[str, Any] = {"role": role, "content": "".join(texts)}
        message |= {"tool_calls": calls} if calls else {}
        yield message | ({"reasoning": "".join(thoughts)} if thoughts else {})


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(block.get("input") or {})
    function = {"name": block.get("name"), "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function}


def _is_custom(tool: object) -> bool:
    return isinstance(tool, Mapping) and tool.get("type", "custom") in ("custom", None)


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _choice(choice: object) -> dict[str, Any]:
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if not isinstance(choice, Mapping) or kind not in (*_CHOICES, "tool"):
        raise FieldError("tool_choice", f"tool_choice is {shown(choice)}")
    parallel = not choice.get("disable_parallel_tool_use", False)
    chosen: Any = _CHOICES.get(str(kind))
    if kind == "tool":
        chosen = {"type": "function", "function": {"name": choice.get("name")}}
    return {"tool_choice": chosen, "parallel_tool_calls": parallel}


def _format(body: Body) -> object:
    """JSON by a schema, in the newer or the older place."""
    config = given(body, "output_config", {})
    form = config.get("format") if isinstance(config, Mapping) else None
    return form if form is not None else given(body, "output_format")
