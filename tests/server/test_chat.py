"""`/v1/chat/completions`: whole and streamed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import pytest

from foredraft.core.params import SamplingParams
from foredraft.llm import LLM
from foredraft.models.text.tokenizer import Tokenizer
from tests.server.conftest import Running, running
from tests.server.events import data_of

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Where is the ferry?"}]
BODY: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 24, "seed": 7, "ignore_eos": True}
BODY |= {"temperature": 1.0}


def text_of(chunks: list[Any], index: int = 0) -> str:
    choices = [c for chunk in chunks[:-1] for c in chunk["choices"] if c["index"] == index]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def test_the_reply_is_the_engines_own(client: httpx.Client, shared: Running) -> None:
    params = SamplingParams(max_tokens=24, seed=7, temperature=1.0, ignore_eos=True)
    expected = shared.context.llm.chat(MESSAGES, params)
    answer = client.post(PATH, json=BODY).json()
    choice = answer["choices"][0]
    assert choice["message"]["content"] == expected.text
    assert (choice["finish_reason"], choice["index"]) == ("length", 0)
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny"
    assert answer["usage"]["completion_tokens"] == 24
    assert answer["usage"]["prompt_tokens"] == expected.num_prompt_tokens
    assert "cached_tokens" in answer["usage"]["prompt_tokens_details"]


def test_the_shape_of_a_stream(client: httpx.Client) -> None:
    body = BODY | {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, done = data_of(client.post(PATH, json=body))
    assert done == "[DONE]"
    assert {(c["id"], c["created"], c["model"], c["object"]) for c in chunks} == {
        (chunks[0]["id"], chunks[0]["created"], "tiny", "chat.completion.chunk")
    }
    *parts, finish, usage = chunks
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in part["choices"][0]["delta"] for part in parts[1:])
    assert all(part["choices"][0]["finish_reason"] is None for part in parts)
    assert all(part["usage"] is None for part in [*parts, finish])
    *unasked, _ = data_of(client.post(PATH, json=BODY | {"stream": True}))
    assert all("usage" not in chunk for chunk in unasked)
    assert finish["choices"][0] | {"logprobs": None} == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "length",
    }
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 24


def test_an_event_a_step(client: httpx.Client) -> None:
    body = BODY | {"stream": True, "temperature": 0, "max_tokens": 200}
    chunks = data_of(client.post(PATH, json=body | {"stream_options": {"include_usage": True}}))
    speculation = chunks[-2]["metrics"]["speculative_decoding"]
    accepted = speculation["num_accepted_draft_tokens"]
    assert accepted > 50
    assert len(chunks) <= 200 - accepted + 5, "each step has one token of its own, or none"


def test_usage_as_it_goes(client: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = data_of(client.post(PATH, json=BODY | {"stream": True, "stream_options": options}))
    counts = [c["usage"]["completion_tokens"] for c in chunks[1:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 24


@pytest.mark.parametrize("stream", [False, True])
def test_several_replies_have_seeds_of_their_own(client: httpx.Client, stream: bool) -> None:
    alone = [
        client.post(PATH, json=BODY | {"seed": 7 + i}).json()["choices"][0]["message"]["content"]
        for i in range(3)
    ]
    response = client.post(PATH, json=BODY | {"n": 3, "stream": stream})
    if stream:
        chunks = data_of(response)
        assert [text_of(chunks, index) for index in range(3)] == alone
    else:
        choices = response.json()["choices"]
        assert [choice["message"]["content"] for choice in choices] == alone
        assert response.json()["usage"]["completion_tokens"] == 72


def test_a_stop_string_cuts_text_and_stream_alike(client: httpx.Client) -> None:
    whole = client.post(PATH, json=BODY).json()["choices"][0]["message"]["content"]
    stop = next(c for c in whole[3:] if c not in whole[:3] and c.isprintable())
    body = BODY | {"stop": [stop]}
    choice = client.post(PATH, json=body).json()["choices"][0]
    assert choice["message"]["content"] == whole[: whole.index(stop)]
    assert choice["finish_reason"] == "stop"
    assert (
        text_of(data_of(client.post(PATH, json=body | {"stream": True})))
        == (whole[: whole.index(stop)])
    )


def test_a_request_chooses_who_drafts(client: httpx.Client) -> None:
    body = BODY | {"temperature": 0, "max_tokens": 60}
    usual, off = (
        client.post(PATH, json=body | more).json() for more in ({}, {"speculation": "off"})
    )
    assert off["choices"][0]["message"] == usual["choices"][0]["message"]
    assert usual["metrics"]["speculative_decoding"]["drafters"]
    assert off["metrics"]["speculative_decoding"]["drafters"] == {}
    reason = off["metrics"]["speculative_decoding"]["plain_reason"]
    assert reason == "plain decoding was asked for"
    assert off["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    few = client.post(PATH, json=body | {"max_draft_tokens": 1}).json()
    assert few["metrics"]["speculative_decoding"]["num_spec_tokens"] == 1
    refused = client.post(PATH, json=body | {"speculation": "medusa"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "speculation"
    assert "(here: auto, off, " in refused.json()["error"]["message"]


def test_what_speculation_did_is_told(load: Callable[..., LLM], client: httpx.Client) -> None:
    body = BODY | {"temperature": 0, "max_tokens": 100}
    usual = client.post(PATH, json=body).json()["metrics"]["speculative_decoding"]
    assert not [name for name in usual if name.startswith("per_step")]
    assert "metrics" not in client.post(PATH, json=BODY | {"n": 2}).json()
    with running(load, request_metrics="detailed") as server, server.client() as other:
        told = other.post(PATH, json=body).json()["metrics"]["speculative_decoding"]
    steps, histogram = told["num_spec_steps"], told["acceptance_histogram"]
    accepted, drafted = told["per_step_accepted"], told["per_step_drafted"]
    assert 0 < steps == sum(histogram) == len(accepted) == len(drafted)
    assert all(0 <= a <= d for a, d in zip(accepted, drafted, strict=True))
    assert min(drafted) > 0
    assert max(drafted) == told["num_spec_tokens"] == len(histogram) - 1
    assert sum(drafted) == told["num_draft_tokens"]
    assert sum(accepted) == told["num_accepted_draft_tokens"] <= 100 - steps
    assert sum(accepted) == sum(i * count for i, count in enumerate(histogram))
    assert told["draft_acceptance_rate"] == pytest.approx(sum(accepted) / sum(drafted))
    assert told["mean_acceptance_length"] == pytest.approx(1 + sum(accepted) / steps)
    with running(partial(load, drafter="none")) as server, server.client() as other:
        told = other.post(PATH, json=body).json()["metrics"]["speculative_decoding"]
    assert (told["num_spec_steps"], told["mean_acceptance_length"]) == (0, 1.0)
    assert told["acceptance_histogram"] == [0]


def test_a_prediction_is_drafted_from_and_counted(client: httpx.Client, shared: Running) -> None:
    plain = client.post(PATH, json=BODY).json()
    text = plain["choices"][0]["message"]["content"]
    assert "completion_tokens_details" not in plain["usage"]
    body = BODY | {"prediction": {"type": "content", "content": text + " and more"}}
    answer = client.post(PATH, json=body).json()
    assert answer["choices"][0]["message"]["content"] == text
    details = answer["usage"]["completion_tokens_details"]
    assert 0 < details["accepted_prediction_tokens"] <= plain["usage"]["completion_tokens"]
    assert details["rejected_prediction_tokens"] > 0


def test_the_developer_is_the_system(client: httpx.Client) -> None:
    counts = [
        client.post("/tokenize", json={"messages": [{"role": role, "content": "Be brief."}]}).json()
        for role in ("system", "developer")
    ]
    assert counts[0] == counts[1]


def test_hints_and_unknown_fields_are_named(client: httpx.Client) -> None:
    response = client.post(PATH, json=BODY | {"user": "me", "wibble": 1, "verbosity": "low"})
    assert response.status_code == 200
    assert response.headers["x-foredraft-ignored"] == "user, verbosity, wibble"


def test_logprobs_of_each_token(client: httpx.Client) -> None:
    body = BODY | {"logprobs": True, "top_logprobs": 2}
    entries = client.post(PATH, json=body).json()["choices"][0]["logprobs"]["content"]
    assert len(entries) == 24
    assert all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 2 for entry in entries)
    chunks = data_of(client.post(PATH, json=body | {"stream": True}))
    streamed = [
        each
        for chunk in chunks[:-1]
        for choice in chunk["choices"]
        if choice["logprobs"]
        for each in choice["logprobs"]["content"]
    ]
    assert streamed == entries


def test_long_texts_do_not_hold_the_others_up(
    client: httpx.Client, shared: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that grows with a body's size runs on the thread of the event loop."""
    threads: dict[str, set[threading.Thread]] = {}

    def watch(owner: Any, name: str) -> None:
        original, seen = getattr(owner, name), threads.setdefault(name, set())

        def watched(*arguments: Any, **options: Any) -> Any:
            seen.add(threading.current_thread())
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, watched)

    watch(Tokenizer, "encode")
    watch(Tokenizer, "encode_chat")
    watch(Tokenizer, "token_text")
    body = BODY | {"prediction": {"type": "content", "content": "the ferry " * 50}}
    assert client.post(PATH, json=body).status_code == 200
    prompt = {"prompt": "the ferry " * 50, "max_tokens": 2}
    assert client.post("/v1/completions", json=prompt).status_code == 200
    body = {"prompt": "the ferry " * 50, "return_token_strs": True}
    assert len(client.post("/tokenize", json=body).json()["token_strs"]) > 50
    assert all(threads.values())
    assert all(shared.thread not in seen for seen in threads.values())


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
            headers = body.pop("headers", {})
            answer = client.post(path, json=body | {"max_tokens": 2}, headers=headers)
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


def test_a_key_is_taken_as_it_is(shared: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    text, chat, key = {"prompt": "hi"}, {"messages": turn("hi")}, {"prompt_cache_key": "k"}
    named = key | {"headers": {"x-session-id": "s"}}
    asked = [("/v1/completions", text | more) for more in ({}, key, named)]
    asked += [("/v1/messages", chat | more) for more in (key, named)]
    assert sessions(shared, monkeypatch, *asked) == [None, "k", "s", "k", "s"]


USER = [{"role": "user", "content": "the ferry and the ferry and"}]
BODY_RESUME = {"stream": True, "temperature": 1.0}
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
    answer = client.post(
        path, json=BODY_RESUME | body, headers={"last-event-id": last} if last else {}
    )
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
    answer = client.post(path, json=BODY_RESUME | body | more, headers={"last-event-id": last})
    assert answer.status_code == 400
    assert part in answer.json()["error"]["message"]


def test_a_stream_without_drafts_has_a_token_an_event(client: httpx.Client) -> None:
    """The sizes of its events say nothing about what was drafted correctly."""
    said = [{"role": "user", "content": "one two three one two three one two"}]
    body = {"messages": said, "temperature": 0, "max_tokens": 60, "stream": True, "logprobs": True}
    sizes = []
    for more in ({}, {"max_draft_tokens": 0}):
        chunks = data_of(client.post(PATH, json=body | more))[:-1]
        told = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"]]
        sizes.append({len(each["content"]) for each in told if each})
    assert max(sizes[0]) > 1
    assert sizes[1] == {1}
