"""Streams that break and go on: the events that a client has not got, of the same text."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

USER = [{"role": "user", "content": "the ferry and the ferry and"}]
BODY = {"stream": True, "temperature": 1.0}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": USER, "max_tokens": 40, "logprobs": True}),
    "greedy": ("/v1/chat/completions", {"messages": USER, "max_tokens": 40, "temperature": 0}),
    "stop": ("/v1/chat/completions", {"messages": USER, "max_tokens": 60, "stop": ["zz", "e e"]}),
    "usage": (
        *("/v1/chat/completions",),
        {"messages": USER, "max_tokens": 20, "stream_options": {"include_usage": True}},
    ),
    "calls": (
        *("/v1/chat/completions",),
        {"messages": USER, "max_tokens": 60, "tools": [TOOL], "tool_choice": "required"},
    ),
    "completions": ("/v1/completions", {"prompt": "the ferry", "max_tokens": 40, "logprobs": 2}),
    "messages": ("/v1/messages", {"messages": USER, "max_tokens": 40}),
    "responses": ("/v1/responses", {"input": USER, "max_output_tokens": 40}),
}
Seen = list[tuple[str, dict[str, Any] | None]]
"""Ids of events, with what they say."""


def events(client: httpx.Client, path: str, body: dict[str, Any], last: str = "") -> Seen:
    answer = client.post(path, json=BODY | body, headers={"last-event-id": last} if last else {})
    assert answer.status_code == 200, answer.text
    found: Seen = []
    event_id = ""
    for line in answer.text.splitlines():
        if line.startswith("id: "):
            event_id = line[4:]
        elif line.startswith("data: "):
            found.append((event_id, None if line == "data: [DONE]" else json.loads(line[6:])))
    return found


def said(seen: Seen) -> tuple[str, list[Any], list[str]]:
    """The text of events, their log probabilities, and how they end."""
    text, logprobs, kinds = "", [], []
    for _, event in seen:
        if event is None:
            kinds.append("done")
            continue
        kinds += [event["type"]] if event.get("type", "").endswith(("stop", "completed")) else []
        for choice in event.get("choices", ()):
            delta = choice.get("delta", {})
            text += choice.get("text") or delta.get("content") or ""
            for call in delta.get("tool_calls", ()):
                text += call["function"].get("name", "") + call["function"]["arguments"]
            found = choice["logprobs"] or {}
            logprobs += found.get("content") or found.get("token_logprobs") or []
            kinds += [choice["finish_reason"]] if choice["finish_reason"] else []
        delta = event.get("delta")
        if isinstance(delta, str):
            text += delta
        elif isinstance(delta, dict):
            text += delta.get("text", "")
    return text, logprobs, kinds


@pytest.mark.parametrize("name", ASKED)
def test_a_broken_stream_goes_on(client: httpx.Client, name: str) -> None:
    path, body = ASKED[name]
    whole = events(client, path, body)
    ids = [event_id for event_id, _ in whole]
    assert len(set(ids)) == len(ids)
    for number in sorted({0, 1, 2, len(whole) // 2, len(whole) - 2, len(whole) - 1}):
        rest = events(client, path, body, ids[number])
        before, after, wanted = said(whole[: number + 1]), said(rest), said(whole)
        assert (before[0] + after[0], before[1] + after[1]) == wanted[:2]
        assert before[2] + after[2] == wanted[2]
        for event in (each for _, each in rest if each and "id" in each):
            assert event["id"] == whole[0][1]["id"]  # type: ignore[index]
        if rest:
            # Its place in the text; the last two numbers but one are of its step.
            assert rest[-1][0].split("-")[:5] == ids[-1].split("-")[:5]


def test_it_can_break_again(client: httpx.Client) -> None:
    path, body = ASKED["chat"]
    whole = events(client, path, body)
    first = events(client, path, body, whole[3][0])
    second = events(client, path, body, first[2][0])
    assert said(whole[:4])[0] + said(first[:3])[0] + said(second)[0] == said(whole)[0]


@pytest.mark.parametrize(
    ("last", "more", "part"),
    [
        ("7", {}, "no id of an event"),
        ("", {"messages": [{"role": "user", "content": "another"}]}, "another prompt"),
        ("", {"n": 2}, "several or drawn"),
        ("", {"coupling": "drawn"}, "several or drawn"),
    ],
)
def test_what_cannot_be_resumed_is_refused(
    client: httpx.Client, last: str, more: dict[str, Any], part: str
) -> None:
    path, body = ASKED["chat"]
    last = last or events(client, path, body)[2][0]
    answer = client.post(path, json=BODY | body | more, headers={"last-event-id": last})
    assert answer.status_code == 400
    assert part in answer.json()["error"]["message"]
