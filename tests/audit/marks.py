"""Marks of tests that run always, and of those that only `make test-all` runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def few_now(things: Iterable[Any], now: Sequence[Any]) -> list[Any]:
    """Cases of `make test`; the others take minutes and run in `make test-all`."""
    return [
        pytest.param(
            each,
            marks=() if each in now else pytest.mark.slow,
            id=each if isinstance(each, str) else each.name,
        )
        for each in things
    ]
