"""Prompts of users: texts, token ids, conversations."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any

from foredraft.core.checks import checked_list, checked_text, field_of, shown, whole_number
from foredraft.core.errors import ConfigError, PromptError

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
"""``{"role": …, "content": …}``; the content is text, or a list of ``{"type": "text", …}``."""

ROLES = ("system", "developer", "user", "assistant", "tool")
_TEMPLATE_ROLES = {"developer": "system"}
_TEXT_PARTS = ("text", "refusal", "input_text", "output_text", "reasoning_text", "summary_text")
_NOT_LISTS = (bytes, bytearray, memoryview, Mapping, Set)
"""Can be iterated, and are neither a list of prompts nor a list of token ids."""


def as_batch(prompts: object) -> list[Any]:
    """The prompts one by one: a single text or a single list of ids is a batch of one.

    Raises:
        PromptError: it is neither a prompt nor a list of prompts.
    """
    if isinstance(prompts, str):
        return [prompts]
    batch = _items(prompts)
    # The rows of an array may pass for numbers, too.
    is_ids = all(getattr(item, "ndim", 0) == 0 and hasattr(item, "__index__") for item in batch)
    return [batch] if batch and is_ids else batch


def is_conversation(prompt: object) -> bool:
    """Whether it is a list of messages, rather than text or token ids."""
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], Mapping)


def prompt_ids(prompt: object, encode: Callable[[str], list[int]]) -> list[int]:
    """The token ids of one prompt.

    Special tokens are recognised in a text, as every tool does; a message of a conversation is
    content only (`Tokenizer.encode_chat`).

    Raises:
        PromptError: it is neither text nor token ids.
    """
    if isinstance(prompt, str):
        return encode(checked_text("the prompt", prompt, PromptError))
    items = _items(prompt)  # a million are looked at in one go: streams wait for what takes turns
    return items if {*map(type, items)} <= {int} else [*map(_token_id, items)]


def _items(value: object) -> list[Any]:
    if isinstance(value, Iterable) and not isinstance(value, _NOT_LISTS):
        with suppress(TypeError):  # an array without dimensions
            return list(value)
    raise PromptError(
        f"a prompt is text or token ids, not {shown(value)} (`chat` takes messages)",
        field="prompt",
    )


def _token_id(token: object) -> int:
    number = whole_number(token)
    if number is None:
        raise PromptError(f"prompt token {shown(token)} is not a token id", field="prompt")
    return number


def checked_messages(messages: object) -> list[dict[str, Any]]:
    """A conversation as plain data, in the form that chat templates take.

    Text parts of a content are joined, arguments of tool calls that come as JSON text become data,
    and the role "developer" becomes "system".

    Raises:
        ConfigError: it is no list of messages, or one of them is malformed.
        PromptError: a text in it is no valid Unicode.
    """
    if not isinstance(messages, Iterable) or isinstance(messages, str | bytes | Mapping):
        raise malformed("messages", f"must be a list of messages, not {shown(messages)}")
    try:
        checked = [_checked_message(f"messages[{i}]", each) for i, each in enumerate(messages)]
    except RecursionError:
        raise ConfigError("messages hold lists in lists without end", field="messages") from None
    if not checked:
        raise ConfigError(
            "the conversation is empty: there is nothing to reply to", field="messages"
        )
    return checked


def text_of(where: str, content: object) -> str:
    """Text, or the joined text of text parts.

    Args:
        where: its path for errors, such as "messages[3].content".

    Raises:
        ConfigError: something else, such as an image.
        PromptError: no valid Unicode.
    """
    if isinstance(content, str):
        return checked_text(where, content, PromptError)
    if not isinstance(content, list | tuple):
        raise malformed(where, f"must be text or a list of text parts, not {shown(content)}")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in _TEXT_PARTS:
            raise malformed(
                f"{where}[{number}]", f"is of type {shown(kind)}; text is all there is here"
            )
        error = PromptError if isinstance(text := part.get("text"), str) else ConfigError
        texts.append(checked_text(f"{where}[{number}].text", text, error))
    return "".join(texts)


def malformed(where: str, problem: str) -> ConfigError:
    """The error for a part of a conversation.

    Args:
        where: such as "messages[3].content".
    """
    return ConfigError(f"{where} {problem}", field=field_of(where))


def _checked_message(where: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        raise malformed(
            f"{where}:",
            f"a message needs a role ({', '.join(ROLES)}) and text content, not {shown(message)}",
        )
    fields = {**message, "content": ""}
    plain: dict[str, Any] = {str(k): _plain(f"{where}.{k}", v) for k, v in fields.items()}
    plain["role"] = _TEMPLATE_ROLES.get(plain["role"], plain["role"])
    content, calls = message.get("content"), message.get("tool_calls")
    if calls:
        plain["tool_calls"] = [
            _tool_call(f"{where}.tool_calls[{i}]", call)
            for i, call in enumerate(checked_list(f"{where}.tool_calls", calls))
        ]
    is_empty = content is None and (calls or plain["role"] == "assistant")
    plain["content"] = "" if is_empty else text_of(f"{where}.content", content)
    return plain


def _tool_call(where: str, call: object) -> dict[str, Any]:
    """Templates want the arguments as data; clients send them as JSON text.

    Text that is no JSON stays text: models write such arguments, and clients send them back.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise malformed(where, f"must hold a function, not {shown(call)}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(checked_text(f"{where}.function.arguments", arguments) or "{}")
    name = checked_text(f"{where}.function.name", function.get("name"))
    plain = {"name": name, "arguments": _plain(f"{where}.function.arguments", arguments)}
    return {"id": call.get("id"), "type": "function", "function": plain}


def _plain(where: str, value: object) -> Any:
    """``value`` in JSON's types; a chat template sees nothing else."""
    if isinstance(value, str):
        return checked_text(where, value, PromptError)
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, Mapping):
        return {_plain(where, key): _plain(f"{where}.{key}", each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(f"{where}[{number}]", each) for number, each in enumerate(value)]
    raise ConfigError(
        f"{where} is {shown(value)}; messages hold text, numbers, lists and mappings",
        field="messages",
    )
