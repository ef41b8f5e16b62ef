"""Sessions route requests that belong together to one engine: see `ServedEngine.open_all`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import Running

LONG = "the ferry and the sea " * 100


def sessions(shared: Running, patch: pytest.MonkeyPatch, *asked: tuple[str, Any]) -> list[Any]:
    """The engine's arguments for each request."""
    found, open_all = [], shared.context.engine.open_all

    async def told(*args: Any, **options: Any) -> Any:
        found.append(options["session"])
        return await open_all(*args, **options)

    patch.setattr(shared.context.engine, "open_all", told)
    with shared.client() as client:
        for path, body in asked:
            answer = client.post(path, json=body | {"max_tokens": 2})
            assert answer.status_code == 200, answer.text
    return found


def turn(*texts: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_chat_that_grows_stays_one(
    shared: Running, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    chats = [turn("hi"), turn("hi", "yes?", "go on"), turn("ho"), turn(f"{LONG}a"), turn(LONG)]
    asked = [(path, {"messages": messages}) for messages in chats]
    first, grown, other, *long = sessions(shared, monkeypatch, *asked)
    assert first == grown != other
    assert long[0] == long[1]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": turn("hi")}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/messages", {"messages": turn("hi")}),
    ],
)
def test_a_key_is_taken_as_it_is(
    shared: Running, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    assert sessions(shared, monkeypatch, (path, body | {"prompt_cache_key": "k"})) == ["k"]


def test_a_text_to_continue_is_told_by_its_tokens(
    shared: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sessions(shared, monkeypatch, ("/v1/completions", {"prompt": "hi"})) == [None]
