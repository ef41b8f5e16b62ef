"""Checks of drafter options: what is wrong, with which value, what to do."""

from __future__ import annotations

from foredraft.core.errors import ConfigError

_FLAGS = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}


def checked_flag(name: str, value: object) -> bool:
    """``value`` as a bool; the command line passes text.

    Raises:
        ConfigError: it is neither true nor false.
    """
    if isinstance(value, bool):
        return value
    flag = _FLAGS.get(str(value).lower())
    if flag is None:
        raise ConfigError(f"{name} is {value!r}; it must be true or false")
    return flag


def checked_count(name: str, value: object, low: int = 1) -> int:
    """``value`` as a whole number.

    Raises:
        ConfigError: it is not one, or below ``low``.
    """
    if type(value) is not int or value < low:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number, {low} or more")
    return value


def checked_ms(name: str, value: object) -> float:
    """``value`` as a time in milliseconds, 0 or more.

    Raises:
        ConfigError: it is not one.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < 1e6:
        raise ConfigError(f"{name} is {value!r}; it must be a time in milliseconds")
    return float(value)


def checked_cost(name: str, value: object) -> float:
    """``value`` as a cost: a finite number above 0.

    Raises:
        ConfigError: it is not one.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < 1e6:
        raise ConfigError(f"{name} is {value!r}; it must be a number above 0")
    return float(value)
