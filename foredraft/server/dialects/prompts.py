"""Conversations of a request in OpenAI's form, as chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from foredraft.core.checks import checked_list, checked_text, field_of, shown
from foredraft.core.errors import ConfigError

_ROLES = {"developer": "system"}
_REASONING = ("reasoning", "reasoning_content")
_TEXT_PARTS = ("text", "refusal", "input_text", "output_text")


def chat_messages(messages: object) -> list[dict[str, Any]]:
    """The conversation in the roles that chat templates know.

    Raises:
        ConfigError: no list of messages, or a part that is no text.
    """
    if not isinstance(messages, list) or not messages:
        raise ConfigError(
            f"messages must be a list of messages, not {shown(messages)}", field="messages"
        )
    return [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def text_of(where: str, content: object, kinds: Sequence[str] = ("text",)) -> str:
    """Text, or the joined text of text parts.

    Raises:
        ConfigError: something else, such as an image.
    """
    if isinstance(content, str):
        return checked_text(where, content)
    if not isinstance(content, list):
        raise malformed(where, f"must be text or a list of text parts: {shown(content)}")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in kinds:
            raise malformed(
                f"{where}[{number}]", f"is of type {shown(kind)}; text is all there is here"
            )
        texts.append(checked_text(f"{where}[{number}].text", part.get("text")))
    return "".join(texts)


def malformed(where: str, problem: str) -> ConfigError:
    """The error for a part of a conversation.

    Args:
        where: such as "messages[3].content".
    """
    return ConfigError(f"{where} {problem}", field=field_of(where))


def _message(where: str, message: object) -> dict[str, Any]:
    """One message with text content, as templates take it."""
    if not isinstance(message, Mapping):
        raise malformed(where, f"must be a message, not {shown(message)}")
    role = message.get("role")
    if not isinstance(role, str):
        raise malformed(f"{where}.role", f"must be text, not {shown(role)}")
    plain: dict[str, Any] = {"role": _ROLES.get(role, role)}
    content, calls = message.get("content"), message.get("tool_calls")
    has_calls = role == "assistant" and bool(calls)
    is_empty = content == [] or (content is None and has_calls)
    plain["content"] = "" if is_empty else text_of(f"{where}.content", content, _TEXT_PARTS)
    if has_calls:
        plain["tool_calls"] = [
            _tool_call(f"{where}.tool_calls[{i}]", call)
            for i, call in enumerate(checked_list(f"{where}.tool_calls", calls))
        ]
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            plain[name] = checked_text(f"{where}.{name}", message[name])
    reasoning = next((message[n] for n in _REASONING if message.get(n) is not None), None)
    if reasoning is not None:
        plain["reasoning_content"] = checked_text(f"{where}.reasoning", reasoning)
    return plain


def _tool_call(where: str, call: object) -> dict[str, Any]:
    """Templates want the arguments as data; clients send them as JSON text.

    Text that is no JSON stays text: models write such arguments, and clients send them back.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise malformed(where, f"must hold a function: {shown(call)}")
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        arguments = _parsed(checked_text(f"{where}.function.arguments", arguments))
    name = checked_text(f"{where}.function.name", function.get("name"))
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
