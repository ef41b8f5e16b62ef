"""The page's endpoints: what runs is what it says, and nothing else gets in."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import SecretStr
from starlette.testclient import TestClient

from foredraft.core.params import SamplingParams
from foredraft.llm import LLM
from foredraft.options import LoadOptions
from foredraft.server.app import create_app
from foredraft.server.page_routes import MAX_RUNS
from foredraft.server.page_runs import Lanes, LaneSpec, Message, RunBody, run_lanes
from foredraft.server.settings import ServerSettings
from foredraft.trace.format import TracedRow
from tests.models.checkpoints import VOCAB_SIZE
from tests.page.conftest import page_client
from tests.server.conftest import loading, running, wait_until
from tests.server.events import data_of
from tests.server.test_lifecycle import SlowTarget

ASKED = [{"role": "user", "content": "the ferry and the ferry"}]


@pytest.fixture(scope="module")
def client(tiny: LLM) -> Iterator[TestClient]:
    with page_client(tiny) as client:
        yield client


def events(client: TestClient, **body: Any) -> list[dict[str, Any]]:
    return data_of(client.post("/page/run", json={"messages": ASKED, "max_tokens": 24, **body}))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("coupling", ["seeded", "drawn"])
def test_a_run_tells_every_step_and_ends_with_the_text(
    client: TestClient, tiny: LLM, temperature: float, coupling: str
) -> None:
    params = {"temperature": temperature, "coupling": coupling, "seed": 3}
    *steps, end = events(client, **params)
    [result] = tiny.generate(
        [tiny.tokenizer.encode_chat(ASKED)],  # type: ignore[union-attr]
        SamplingParams.of(max_tokens=24, **params),
    )
    rows = [TracedRow.model_validate(step["row"]) for step in steps]
    assert end["text"] == result.text
    assert end["sha256"] == hashlib.sha256(result.text.encode()).hexdigest()
    assert "".join(c.text for row in rows for c in row.committed) == result.text
    assert [step["clock_ms"] for step in steps] == sorted(step["clock_ms"] for step in steps)
    assert all(row.why for row in rows if row.kind)


def test_lanes_race_on_one_clock_to_one_text(client: TestClient) -> None:
    told = events(client, lanes=[{"drafter": "none"}, {}], temperature=1.0, seed=11)
    ends = {event["lane"]: event for event in told if event["type"] == "end"}
    assert ends[0]["sha256"] == ends[1]["sha256"]
    clocks = {0: 0.0, 1: 0.0}
    over: set[int] = set()
    for event in told:
        if event["type"] == "step":
            other = 1 - event["lane"]
            assert other in over or clocks[event["lane"]] <= clocks[other], "the one behind goes"
            clocks[event["lane"]] = event["clock_ms"]
        else:
            over.add(event["lane"])


def test_no_lane_of_a_race_finds_the_prompt_read(client: TestClient) -> None:
    asked = [{"role": "user", "content": "the ferry and the ferry " * 20}]

    def begins(*lanes: dict[str, str]) -> dict[int, int]:
        """By lane the tokens in the cache before its first step."""
        told = events(client, messages=asked, lanes=lanes, max_tokens=4)
        firsts = {e["lane"]: e["row"] for e in reversed(told) if e["type"] == "step"}
        return {lane: row["position"] - row["num_read"] for lane, row in firsts.items()}

    begins({})
    assert begins({})[0] > 0, "a chat does find what an earlier one has read"
    assert begins({"drafter": "none"}, {}) == {0: 0, 1: 0}
    assert begins({}, {"drafter": "none"}) == {0: 0, 1: 0}


def test_a_lane_drafts_with_what_was_asked_for(client: TestClient) -> None:
    told = events(client, lanes=[{"drafter": "ngram", "num_draft_tokens": 2}])
    sizes = [len(event["row"]["draft"]["tokens"]) for event in told if event["type"] == "step"]
    assert max(sizes) == 2


def test_a_lane_of_the_first_of_several_drafters_has_that_one_alone(tiny: LLM) -> None:
    served = LLM(tiny.target, tiny.tokenizer, LoadOptions(drafter="auto"))
    lane = Lanes(served).get(LaneSpec(drafter=served.drafter_name))
    assert lane.llm.options.drafter == served.drafter_name
    assert [*lane.llm.policy.drafters] == [served.drafter_name]


def test_info_says_what_runs_here(client: TestClient) -> None:
    told = client.get("/page/info").json()
    assert told["drafter"] == "suffix"
    assert told["active"] == ["suffix"], "with auto there may be several"
    assert set(told["drafters"]) >= {"suffix", "none", "ngram"}
    assert not {"eagle", "draft_model", "table"} & set(told["drafters"]), "they need something"
    assert [n for n, _ in told["curve"]] == sorted(n for n, _ in told["curve"])
    assert all(ms > 0 for _, ms in told["curve"])
    assert told["read_bytes"] is None, "a table has no weights to read"


def test_a_forward_is_timed(client: TestClient) -> None:
    assert client.post("/page/forward", json={"num_tokens": 8}).json()["ms"] > 0
    assert client.post("/page/forward", json={"num_tokens": 80}).json()["ms"] > 0, (
        "the tour asks it"
    )
    assert client.post("/page/forward", json={"num_tokens": 10**6}).status_code == 400


def test_a_reply_goes_on_from_how_it_begins(client: TestClient, tiny: LLM) -> None:
    *_, end = events(client, begin="ferry", max_tokens=4)
    tokenizer = tiny.tokenizer
    assert tokenizer is not None
    prompt = tokenizer.encode_chat(ASKED) + tokenizer.encode("ferry", add_special_tokens=False)
    [result] = tiny.generate([prompt], SamplingParams(max_tokens=4))
    assert end["text"] == result.text
    assert end["num_prompt_tokens"] == len(prompt)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": []},
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": ASKED, "temperature": 9},
        {"messages": ASKED, "max_tokens": 10**9},
        {"messages": ASKED, "seed": -1},
        {"messages": ASKED, "lanes": [{}] * 99},
        {"messages": ASKED, "lanes": [{"drafter": "x" * 10**4}]},
        {"messages": ASKED, "surprise": 1},
        {"messages": [{"role": "user", "content": "x" * 10**5}]},
    ],
)
def test_what_cannot_be_run_is_refused(client: TestClient, body: dict[str, Any]) -> None:
    text = json.dumps(body)
    headers = {"content-type": "application/json"}
    assert client.post("/page/run", content=text, headers=headers).status_code == 400


def test_an_unknown_drafter_is_named(client: TestClient) -> None:
    answer = client.post("/page/run", json={"messages": ASKED, "lanes": [{"drafter": "sufix"}]})
    assert answer.status_code == 400
    assert "suffix" in answer.json()["error"]["message"]


def test_a_run_that_is_left_ends_and_frees_its_place(tiny: LLM) -> None:
    lanes = Lanes(tiny)
    asked = RunBody(messages=(Message(role="user", content="x"),), max_tokens=400)
    for _ in range(MAX_RUNS + 2):
        running = run_lanes(lanes, asked)
        next(running)
        running.close()  # type: ignore[attr-defined]
    watched = lanes.get(LaneSpec())
    assert not watched.llm.engine.has_work
    assert not watched._steps


@pytest.fixture
def slow(tiny: LLM) -> Any:
    target = SlowTarget.random(VOCAB_SIZE, seed=5)
    target.seconds = 0.05
    return loading(target, tiny.tokenizer, drafter="none")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/page/run", {"messages": ASKED, "max_tokens": 20}),
        ("/page/forward", {"num_tokens": 80}),
    ],
)
def test_the_limit_of_the_page_holds_for_many_at_once(slow: Any, path: str, body: Any) -> None:
    """They are counted as they are accepted, not as their streams are first read."""
    with running(slow) as server:

        async def post_twelve() -> list[int]:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                posts = (client.post(path, json=body) for _ in range(12))
                return [answer.status_code for answer in await asyncio.gather(*posts)]

        statuses = asyncio.run(post_twelve())
        with server.client() as client:
            assert client.post(path, json=body).status_code == 200, "places are free again"
    assert 1 <= statuses.count(200) <= MAX_RUNS
    assert set(statuses) == {200, 429}


def test_a_run_that_takes_too_long_ends_with_an_error(slow: Any) -> None:
    body = {"messages": ASKED, "max_tokens": 400}
    with running(slow, request_timeout=0.5) as server, server.client() as client:
        last = client.post("/page/run", json=body).text.strip().split("\n")[-1]
    event = json.loads(last.removeprefix("data: "))
    assert event["type"] == "error"
    assert "not over after 0.5 seconds" in event["message"]


@pytest.mark.parametrize(("max_tokens", "kind"), [(20, "end"), (400, "error")])
def test_a_drain_waits_for_runs_and_ends_them_with_an_error(
    slow: Any, max_tokens: int, kind: str
) -> None:
    body = {"messages": ASKED, "max_tokens": max_tokens}
    limit = 20.0 if kind == "end" else 0.3
    with (
        running(slow, drain_timeout=limit) as server,
        server.client() as client,
        client.stream("POST", "/page/run", json=body) as reply,
    ):
        lines = reply.iter_lines()
        next(lines)
        assert server.context.num_live == 1
        server.loop.call_soon_threadsafe(server.server.end)
        last = [line for line in lines if line.startswith("data: ")][-1]
    assert json.loads(last.removeprefix("data: "))["type"] == kind


def test_runs_are_in_the_metrics(slow: Any) -> None:
    with running(slow) as server, server.client() as client:
        with client.stream("POST", "/page/run", json={"messages": ASKED}) as reply:
            lines = reply.iter_lines()  # kept: without it the connection is closed
            next(lines)
            assert "foredraft:num_page_runs 1.0" in client.get("/metrics").text
        wait_until(lambda: "foredraft:num_page_runs 0.0" in client.get("/metrics").text)


def test_behind_a_key_the_page_is_open_and_what_it_calls_is_not(tiny: LLM) -> None:
    settings = ServerSettings(api_key=SecretStr("a-secret-key"))
    with TestClient(create_app(lambda feed: tiny, settings), "http://localhost") as client:
        assert client.get("/").status_code == 200
        assert client.get("/page/files/js/main.js").status_code == 200
        assert client.get("/page/info").status_code == 401
        assert client.post("/page/run", json={"messages": ASKED}).status_code == 401
        key = {"authorization": "Bearer a-secret-key"}
        while client.get("/page/info", headers=key).status_code == 503:  # it is being loaded
            time.sleep(0.01)
        asked = {"messages": ASKED, "max_tokens": 4}
        answer = client.post("/page/run", json=asked, headers=key)
        assert answer.status_code == 200
        assert '"sha256"' in answer.text
        wrong = client.post("/page/run", json={"messages": [], "x": 1}, headers=key)
        assert wrong.status_code == 400
        assert "messages" in wrong.json()["error"]["message"]
