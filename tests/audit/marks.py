"""What is tested always, and what only by `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def few_now(things: Iterable[Any], now: Sequence[Any]) -> list[Any]:
    """Those that `make test` runs; the others take minutes and are left to `make test-all`."""
    return [
        pytest.param(
            each,
            marks=() if each in now else pytest.mark.slow,
            id=each if isinstance(each, str) else each.name,
        )
        for each in things
    ]
