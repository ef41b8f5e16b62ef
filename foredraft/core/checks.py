"""Checks of user input; errors name the field, the value and the valid ones."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

from foredraft.core.errors import ConfigError, ForedraftError


def checked_int(name: str, value: object, low: int, high: int | None = None) -> int:
    """``value`` as a plain whole number; numpy's are taken, flags are not.

    Raises:
        ConfigError: it is none, or not between ``low`` and ``high``.
    """
    number = whole_number(value)
    if number is None:
        raise _refused(name, f"must be a whole number, not {shown(value)}")
    if number < low or (high is not None and number > high):
        raise _refused(name, f"is {shown(number)}; it must be {_range(low, high)}")
    return number


def whole_number(value: Any) -> int | None:
    """``value`` as a plain int if it is a whole number of any kind, else None."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError):  # no number; numpy's flags; tensors of several numbers
        return None


def checked_real(name: str, value: object, low: float, high: float = math.inf) -> float:
    """``value`` as a plain float; whole numbers and numpy's are taken, flags are not.

    Raises:
        ConfigError: it is no finite number, or not between ``low`` and ``high``.
    """
    number = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:  # a whole number beyond the largest float
            number = math.inf
    if not math.isfinite(number):
        raise _refused(name, f"must be a finite number, not {shown(value)}")
    if not low <= number <= high:
        raise _refused(name, f"is {number}; it must be {_range(low, high)}")
    return number


def checked_flag(name: str, value: object) -> bool:
    """``value`` as a plain bool. Text such as "false" would count as true: it is refused.

    Raises:
        ConfigError: it is not True or False.
    """
    # By name, because numpy is not loaded here; its flags are no subclass of Python's.
    if type(value).__name__ not in ("bool", "bool_"):
        raise _refused(name, f"must be True or False, not {shown(value)}")
    return bool(value)


def checked_list(name: str, values: Any) -> tuple[Any, ...]:
    """``values`` as a tuple.

    Raises:
        ConfigError: it is no list: a single value, bytes, or a mapping.
    """
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | bytearray | Mapping):
        raise _refused(name, f"must be a list, not {shown(values)}")
    return tuple(values)


def checked_text(name: str, value: object, error: type[ForedraftError] = ConfigError) -> str:
    """``value`` if it is text that can be written down.

    Raises:
        ForedraftError: of the kind ``error``: it is no text, or holds half a surrogate pair.
    """
    if not isinstance(value, str):
        raise _refused(name, f"must be text, not {shown(value)}", error)
    at = broken_at(value)
    if at is not None:
        raise _refused(
            name,
            f"is no valid Unicode text: {value[at]!r} at character {at} is half a surrogate pair",
            error,
        )
    return str(value)


def broken_at(text: str) -> int | None:
    """Index of half a surrogate pair in ``text``, which no encoding can write; None: no such."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def shown(value: object) -> str:
    """``value`` for a message: recognisable, and never long."""
    try:
        text = repr(value)
    except ValueError:  # whole numbers of thousands of digits
        text = f"a {type(value).__name__} too large to write down"
    return text if len(text) <= 100 else f"{text[:100]}…"


def field_of(name: str) -> str | None:
    """The option or field that a checked value belongs to: "messages" of "messages[3].role"."""
    found = re.fullmatch(r"([A-Za-z_]\w*)([.\[].*| \(.*\))?", name, re.DOTALL)
    return found[1] if found else None


def _refused(name: str, problem: str, error: type[ForedraftError] = ConfigError) -> ForedraftError:
    return error(f"{name} {problem}", field=field_of(name))


def _range(low: float, high: float | None) -> str:
    return f"at least {low}" if high is None or high == math.inf else f"between {low} and {high}"
