"""Values with commas, as options take them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from foredraft.core.errors import ConfigError, unknown

_T = TypeVar("_T")


def names(text: str | None) -> list[str]:
    """Names; none where the option was not given."""
    return [name.strip() for name in text.split(",")] if text else []


def known_names(kind: str, text: str | None, known: Sequence[str]) -> list[str]:
    """Names out of those that are known.

    Raises:
        ConfigError: another one, with the nearest that is known.
    """
    found = names(text)
    for name in found:
        if name not in known:
            raise unknown(kind, name, known)
    return found


def whole_numbers(option: str, text: str) -> list[int]:
    """Whole numbers.

    Raises:
        ConfigError: something else is there.
    """
    return _parsed(option, text, int, "whole numbers with commas")


def counts(option: str, text: str) -> list[int]:
    """Whole numbers from 1 on.

    Raises:
        ConfigError: something else is there.
    """
    found = whole_numbers(option, text)
    if min(found) < 1:
        raise ConfigError(f"{option} {text!r} holds {min(found)}; counts start at 1")
    return found


def numbers(option: str, text: str) -> list[float]:
    """Numbers.

    Raises:
        ConfigError: something else is there.
    """
    return _parsed(option, text, float, "one or more numbers")


def _parsed(option: str, text: str, kind: Callable[[str], _T], what: str) -> list[_T]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} {text!r} is not {what}") from None
