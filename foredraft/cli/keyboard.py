"""Reads what a person types: with arrow keys and history, and a pasted text as one message."""

from __future__ import annotations

import contextlib
import select
import sys

_PROMPT = "you> "
_BOLD_PROMPT = f"\001\x1b[1m\002{_PROMPT}\001\x1b[0m\002"
"""The marks tell readline which characters take no room."""
_PASTE_SECONDS = 0.05
"""Lines that follow each other faster were not typed."""


def read_message() -> str:
    """One message: a line, with those that were pasted with it.

    Raises:
        EOFError: there is no more input.
    """
    if not sys.stdin.isatty():
        return input(_PROMPT)
    has_readline = _use_readline()
    lines = [input(_BOLD_PROMPT if has_readline else _PROMPT)]
    while _is_more_waiting():  # terminals and line editors without bracketed paste
        lines.append(input())
    return "\n".join(lines)


def _use_readline() -> bool:
    """Importing it is all that `input` needs; whether it is there."""
    try:
        import readline
    except ImportError:  # Windows, whose console edits lines by itself
        return False
    with contextlib.suppress(Exception):  # libedit knows no such setting
        readline.parse_and_bind("set enable-bracketed-paste on")
    return True


def _is_more_waiting() -> bool:
    try:
        ready, _, _ = select.select([sys.stdin], [], [], _PASTE_SECONDS)
    except (OSError, ValueError):  # no such thing on this system
        return False
    return bool(ready)
