"""Conversations and prompts of a request body in OpenAI's dialect, as the tokenizer takes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from foredraft.core.checks import checked_list, checked_text, shown, whole_number
from foredraft.server.dialects.fields import Body, FieldError, given

_ROLES = {"developer": "system"}
_REASONING = ("reasoning", "reasoning_content")


def chat_messages(body: Body) -> list[dict[str, Any]]:
    """The conversation in the roles that chat templates know.

    Raises:
        FieldError: no list of messages, or a part that is no text.
    """
    messages = given(body, "messages")
    if not isinstance(messages, list) or not messages:
        raise FieldError("messages", f"messages must be a list of messages, not {shown(messages)}")
    return [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def completion_prompts(body: Body) -> list[str | list[int]]:
    """The prompts of a completions request: text, texts, token ids, or lists of token ids.

    Raises:
        FieldError: none of these.
    """
    prompt = given(body, "prompt")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(whole_number(token) is not None for token in prompt):
            return [prompt]
        if all(isinstance(each, str) for each in prompt):
            return list(prompt)
        if all(_are_ids(each) for each in prompt):
            return list(prompt)
    raise FieldError(
        "prompt",
        "prompt must be text, a list of texts, token ids, or a list of lists of token ids, not "
        f"{shown(prompt)}",
    )


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and all(whole_number(token) is not None for token in value)


def text_of(where: str, content: object, kinds: Sequence[str] = ("text",)) -> str:
    """Text, or the joined text of text parts.

    Raises:
        FieldError: something else, such as an image.
    """
    if isinstance(content, str):
        return checked_text(where, content)
    param = where.split("[")[0].split(".")[0]
    if not isinstance(content, list):
        raise FieldError(param, f"{where} must be text or a list of text parts: {shown(content)}")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in kinds:
            raise FieldError(
                param, f"{where}[{number}] is of type {shown(kind)}; text is all there is here"
            )
        texts.append(checked_text(f"{where}[{number}].text", part.get("text")))
    return "".join(texts)


def _message(where: str, message: object) -> dict[str, Any]:
    """One message with text content, as templates take it."""
    if not isinstance(message, Mapping):
        raise FieldError("messages", f"{where} must be a message, not {shown(message)}")
    role = message.get("role")
    if not isinstance(role, str):
        raise FieldError("messages", f"{where}.role must be text, not {shown(role)}")
    plain: dict[str, Any] = {"role": _ROLES.get(role, role)}
    content, calls = message.get("content"), message.get("tool_calls")
    has_calls = role == "assistant" and bool(calls)
    plain["content"] = "" if content is None and has_calls else _content(where, content)
    if has_calls:
        plain["tool_calls"] = [
            _tool_call(f"{where}.tool_calls[{i}]", call)
            for i, call in enumerate(checked_list(f"{where}.tool_calls", calls))
        ]
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            plain[name] = checked_text(f"{where}.{name}", message[name])
    thoughts = next((message[n] for n in _REASONING if message.get(n) is not None), None)
    if thoughts is not None:
        plain["reasoning_content"] = checked_text(f"{where}.reasoning", thoughts)
    return plain


def _content(where: str, content: object) -> str:
    if isinstance(content, list) and not content:
        return ""
    return text_of(f"{where}.content", content, ("text", "refusal", "input_text", "output_text"))


def _tool_call(where: str, call: object) -> dict[str, Any]:
    """Templates want the arguments as data; clients send them as JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise FieldError("messages", f"{where} must hold a function: {shown(call)}")
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise FieldError("messages", f"{where}.function.arguments is no JSON") from None
    named = {"name": checked_text(f"{where}.function.name", function.get("name"))}
    return {"id": call.get("id"), "type": "function", "function": named | {"arguments": arguments}}
