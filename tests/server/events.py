"""Server-sent events, read back."""

from __future__ import annotations

import json
from typing import Any

import httpx


def data_of(response: httpx.Response) -> list[Any]:
    """The data of each event; the final ``[DONE]`` as text."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n") if line.startswith("data: ")]
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


def names_of(response: httpx.Response) -> list[str]:
    """The names of the events."""
    return [line[7:] for line in response.text.split("\n") if line.startswith("event: ")]
