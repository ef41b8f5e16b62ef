"""Numbers of a request that the server holds lower than the engine does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from foredraft.server.dialects.fields import Body, FieldError, given
from foredraft.server.settings import ServerSettings


def check_limits(body: Body, settings: ServerSettings) -> None:
    """Refuse what would take more than one request may.

    Raises:
        FieldError: a field is over its limit.
    """
    _check_number("n", given(body, "n", 1), settings.max_n)
    _check_length("messages", given(body, "messages", []), settings.max_messages)
    _check_length("tools", given(body, "tools", []), settings.max_tools)
    _check_length("logit_bias", given(body, "logit_bias", {}), settings.max_logit_bias)
    for name in ("stop", "bad_words"):
        stops = given(body, name, [])
        _check_length(name, [stops] if isinstance(stops, str) else stops, settings.max_stop)
        _check_number(
            f"{name} (characters)",
            sum(len(each) for each in stops if isinstance(each, str)),
            settings.max_stop_characters,
        )
    for name in ("response_format", "structured_outputs", "tools"):
        _check_schema(name, body.get(name), settings.max_schema_bytes)


def check_replies(num_prompts: int, n: int, settings: ServerSettings) -> None:
    """Refuse more replies than one request may ask for.

    Raises:
        FieldError: prompts times n is over the limit.
    """
    if num_prompts * n > settings.max_replies:
        raise FieldError(
            "prompt" if num_prompts > 1 else "n",
            f"{num_prompts} prompts times n of {n} are {num_prompts * n} replies; a request may "
            f"ask for {settings.max_replies}",
        )


def _check_number(name: str, value: Any, most: int) -> None:
    if isinstance(value, int) and value > most:
        param = name.partition(" ")[0]
        raise FieldError(param, f"{name} is {value}; this server allows {most}")


def _check_length(name: str, value: Any, most: int) -> None:
    if isinstance(value, list | Mapping) and len(value) > most:
        raise FieldError(name, f"{name} holds {len(value)} entries; this server allows {most}")


def _check_schema(name: str, value: Any, most: int) -> None:
    if value is not None and (size := len(json.dumps(value))) > most:
        raise FieldError(name, f"{name} has {size} characters; this server allows {most}")
