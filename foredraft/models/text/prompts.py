"""What people hand in to be continued or answered: texts, token ids, conversations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from foredraft.core.checks import checked_text, shown, whole_number
from foredraft.core.errors import ConfigError, PromptError

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
"""``{"role": …, "content": …}``; the content is text, or a list of ``{"type": "text", …}``."""

ROLES = ("system", "user", "assistant", "tool")
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
    return [_token_id(token) for token in _items(prompt)]


def _items(value: object) -> list[Any]:
    if not isinstance(value, Iterable) or isinstance(value, _NOT_LISTS):
        raise PromptError(
            f"a prompt is text or token ids, not {shown(value)} (`chat` takes messages)",
            field="prompt",
        )
    try:
        return list(value)
    except TypeError:  # an array without dimensions
        raise PromptError(
            f"a prompt is text or token ids, not {shown(value)}", field="prompt"
        ) from None


def _token_id(token: object) -> int:
    number = whole_number(token)
    if number is None:
        raise PromptError(f"prompt token {shown(token)} is not a token id", field="prompt")
    return number


def checked_messages(messages: object) -> list[dict[str, Any]]:
    """A conversation as plain data, with the text parts of a content joined.

    Raises:
        ConfigError: it is no list of messages, or one of them is malformed.
        PromptError: a text in it is no valid Unicode.
    """
    if not isinstance(messages, Iterable) or isinstance(messages, str | bytes | Mapping):
        raise ConfigError(
            f"messages must be a list of messages, not {shown(messages)}", field="messages"
        )
    try:
        checked = [_checked_message(number, message) for number, message in enumerate(messages)]
    except RecursionError:
        raise ConfigError("messages hold lists in lists without end", field="messages") from None
    if not checked:
        raise ConfigError(
            "the conversation is empty: there is nothing to reply to", field="messages"
        )
    return checked


def _checked_message(number: int, message: object) -> dict[str, Any]:
    where = f"messages[{number}]"
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        raise _malformed(where, message)
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = "".join(_texts(f"{where}.content", content))
    if not isinstance(content, str):
        raise _malformed(where, message)
    plain = {str(key): _plain(f"{where}.{key}", value) for key, value in message.items()}
    return plain | {"content": checked_text(f"{where}.content", content, PromptError)}


def _malformed(where: str, message: object) -> ConfigError:
    return ConfigError(
        f"{where}: a message needs a role ({', '.join(ROLES)}) and text content, not "
        f"{shown(message)}",
        field="messages",
    )


def _texts(where: str, parts: Sequence[object]) -> Iterator[str]:
    for number, part in enumerate(parts):
        if not isinstance(part, Mapping) or part.get("type") != "text":
            raise ConfigError(
                f"{where}[{number}]: a message needs a role and text content; its parts must be "
                f'{{"type": "text", "text": …}}, not {shown(part)}',
                field="messages",
            )
        yield checked_text(f"{where}[{number}].text", part.get("text"), ConfigError)


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
