"""Engines, machines and gates that go away while replies are under way: `make test-cluster`."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.conftest import QUIET, Served, actors, serving, two_engines
from tests.cluster.models import MAX_BATCH_SIZE
from tests.server.conftest import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PROMPT = "The ferry"
USER = [{"role": "user", "content": PROMPT}]
CHAT = {"messages": USER, "max_tokens": 30, "seed": 11, "temperature": 1.0}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "seed": None, "repetition_penalty": 1.2},
    "seeded": {},
    "penalties": {"presence_penalty": 0.6, "frequency_penalty": 0.8},
    "grammar": {"structured_outputs": {"regex": "[a-f ]{15,40}"}},
    "stop string": {"stop": ["e  ", "zz"], "max_tokens": 60},
    "n": {"n": 2},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
}
DIALECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": (
        "/v1/completions",
        {"prompt": PROMPT, "max_tokens": 30, "seed": 3, "logprobs": 1},
    ),
    "messages": ("/v1/messages", {"messages": USER, "max_tokens": 30, "temperature": 0}),
    "responses": ("/v1/responses", {"input": PROMPT, "max_output_tokens": 30, "temperature": 0}),
}  # fmt: skip
CASES = {name: ("/v1/chat/completions", CHAT | body) for name, body in KINDS.items()} | DIALECTS
_CHANGING = {
    *("id", "created", "created_at", "completed_at", "item_id", "metrics", "usage", "obfuscation"),
    *("system_fingerprint", "timings", "spec_decode_metrics", "ignored"),
}


@pytest.fixture(scope="module")
def machines(tokenizer_directory: Path) -> Iterator[Any]:
    """A machine with room for two engines; ``new_node`` adds another like it."""
    ray = pytest.importorskip("ray", reason="clusters need foredraft[ray]")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUIET.items():
            patch.setenv(name, value)
        node = {"num_cpus": 1, "object_store_memory": 80 << 20}
        cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
        ray.init(address=cluster.address, log_to_driver=False)
        cluster.new_node = lambda: cluster.add_node(**node)
        try:
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


@pytest.fixture(scope="module")
def served(machines: Any, tokenizer_directory: Path) -> Iterator[Served]:
    """Two engines. Serve would not end a frozen one within a test: only the gate does."""
    sizes = {"replicas": 2, "health_check_timeout": 3600.0}
    with serving(tokenizer_directory, seconds=0.02, **sizes) as cluster:
        yield cluster


def lasting(value: Any) -> Any:
    """An answer without what differs from one request to the next."""
    if isinstance(value, dict):
        return {k: lasting(v) for k, v in value.items() if k not in _CHANGING}
    return [lasting(each) for each in value] if isinstance(value, list) else value


def ask(client: httpx.Client, path: str, body: dict[str, Any], stream: bool) -> Any:
    """The text of an answer, or the sum of a stream's deltas."""
    answer = client.post(path, json=body | ({"stream": True} if stream else {}))
    assert answer.status_code == 200, answer.text
    if not stream:
        return lasting(answer.json())
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    assert not [event for event in events if "error" in event]
    assert (lines[-1] == "[DONE]") or events[-1]["type"] in (
        *("message_stop", "response.completed", "response.incomplete"),
    )
    texts: dict[Any, str] = {}
    ends, logprobs = {}, []
    for event in events:
        for choice in event.get("choices", ()):
            place = choice["index"]
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            texts[place] = texts.get(place, "") + text
            ends[place] = choice["finish_reason"] or ends.get(place)
            logprobs += (choice.get("logprobs") or {}).get("content") or []
        delta = event.get("delta")
        if "choices" not in event and delta is not None:
            text = delta if isinstance(delta, str) else delta.get("text", "")
            texts[0] = texts.get(0, "") + text
            ends[0] = delta.get("stop_reason") if isinstance(delta, dict) else None
    return texts, ends, logprobs


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", CASES)
def test_an_engine_dies(served: Served, name: str, stream: bool) -> None:
    path, body = CASES[name]
    expected = ask(served.single, path, body, stream)
    resumed = served.metric("foredraft:resumed_total")
    served.kill_after(5)
    with served.client() as client:
        assert ask(client, path, body, stream) == expected
    assert not served.death.exists()
    assert served.metric("foredraft:resumed_total") > resumed
    assert served.metric("foredraft:lost_total") == 0


@pytest.mark.parametrize("how", ["stops", "freezes"])
def test_an_engine_stops_or_freezes(served: Served, how: str) -> None:
    """Its thread ends, or its process stands still: its replies go on, and it is replaced.

    How long that takes of simulated time is in test_remote.py.
    """
    path, body = CASES["seeded"]
    expected, before = ask(served.single, path, body, True), two_engines()
    served.kill_after(5, how)
    with served.client() as client:
        assert ask(client, path, body, True) == expected
    assert not served.death.exists()
    two_engines(but=before)
    assert served.metric("foredraft:lost_total") == 0


def test_an_idle_engine_freezes(served: Served) -> None:
    """Requests that are routed to it go elsewhere, though it never had one."""
    served.deploy(seconds=0.022)  # engines that have had none
    before = two_engines()
    os.kill(next(iter(before.values())), signal.SIGSTOP)
    for found, expected in together(served, 6):
        assert found == expected
    two_engines(but=before)
    assert served.metric("foredraft:lost_total") == 0


def together(served: Served, number: int) -> list[Any]:
    """Many chats at once; returns what each says beside what a single process says."""
    bodies = [
        CHAT | {"messages": [{"role": "user", "content": f"{i} ferries"}], "seed": i}
        for i in range(number)
    ]

    def one(body: dict[str, Any]) -> Any:
        with served.client() as client:
            return ask(client, "/v1/chat/completions", body, True)

    expected = [ask(served.single, "/v1/chat/completions", body, True) for body in bodies]
    with ThreadPoolExecutor(number) as pool:
        found = list(pool.map(one, bodies))
    return list(zip(found, expected, strict=True))


def test_a_machine_goes_away(served: Served, machines: Any) -> None:
    gates = actors("gate")
    with ThreadPoolExecutor(1) as pool:
        deployed = pool.submit(served.deploy, replicas=3)  # more than fit on one machine
        # A gate is started anew with them: on the machine that stays, while it is the only one.
        wait_until(lambda: bool(actors("gate") - gates))
        node = machines.new_node()
        deployed.result()
    timer = threading.Timer(0.6, lambda: machines.remove_node(node, allow_graceful=False))
    timer.start()
    for found, expected in together(served, 6):
        assert found == expected
    timer.join()
    served.deploy()
    assert served.metric("foredraft:lost_total") == 0


def test_random_deaths(served: Served) -> None:
    """``FOREDRAFT_KILLS``: how many, such as 200, or which of them, such as 50:100."""
    first, _, end = os.environ.get("FOREDRAFT_KILLS", "10").rpartition(":")
    lost, path = served.metric("foredraft:lost_total"), "/v1/chat/completions"
    for kill in range(int(first or 0), int(end)):
        drawn = random.Random(kill)
        body = CHAT | drawn.choice([*KINDS.values()]) | {"seed": kill, "max_tokens": 24}
        stream = drawn.random() < 0.5
        expected = ask(served.single, path, body, stream)
        served.kill_after(drawn.randrange(1, 20))
        with served.client() as client:
            assert ask(client, path, body, stream) == expected
        served.death.unlink(missing_ok=True)
    assert served.metric("foredraft:lost_total") == lost


@contextmanager
def replies_under_way(served: Served) -> Iterator[None]:
    """Replies begin, go on meanwhile, and come whole."""
    replies: list[Any] = []
    worker = threading.Thread(target=lambda: replies.extend(together(served, 6)))
    worker.start()
    threading.Event().wait(0.5)
    yield
    worker.join()
    assert len(replies) == 6
    for found, expected in replies:
        assert found == expected


def test_fewer_engines_end_their_replies_first(served: Served) -> None:
    """Deploying anew with fewer of them waits for replies: nothing is resumed or lost."""
    resumed = served.metric("foredraft:resumed_total")
    with replies_under_way(served):
        served.deploy(replicas=1)
    assert served.metric("foredraft:resumed_total") in (0, resumed)  # of a new gate, or the old one


def test_a_new_version_ends_replies_first(served: Served) -> None:
    """All engines are replaced while replies are under way."""
    before = actors("engine")
    with replies_under_way(served):
        served.deploy(seconds=0.021)
    wait_until(lambda: not before & actors("engine"))
    assert served.metric("foredraft:lost_total") == 0


def test_gates_agree_on_whose_is_what(machines: Any, tokenizer_directory: Path) -> None:
    """A key finds its cached text through every gate, and no other key does."""
    body = CHAT | {"messages": [{"role": "user", "content": "the ferry and the sea " * 30}]}

    def cached(client: httpx.Client, key: str) -> int:
        headers = {"authorization": f"Bearer {key}", "connection": "close"}
        answer = client.post("/v1/chat/completions", json=body | {"max_tokens": 2}, headers=headers)
        found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    with (
        serving(
            tokenizer_directory, server={"api_key": "the-first-key,the-second-key"}, gates=2
        ) as cluster,
        cluster.client() as client,
    ):
        assert client.get("/v1/models").status_code == 401
        assert cached(client, "the-first-key") == 0
        assert min(cached(client, "the-first-key") for _ in range(12)) > 0
        assert cached(client, "the-second-key") == 0


def test_a_full_queue_is_429(machines: Any, tokenizer_directory: Path) -> None:
    """A full batch goes on, two requests wait, and the others are refused."""
    path, endless = "/v1/chat/completions", {"max_tokens": 4000, "ignore_eos": True, "stream": True}
    with (
        serving(tokenizer_directory, seconds=0.05, server={"max_waiting": 2}) as cluster,
        cluster.client() as client,
        ThreadPoolExecutor(12) as pool,
    ):

        def one(seed: int) -> httpx.Response:
            with cluster.client() as other:
                return other.post(path, json=CHAT | {"seed": seed})

        with contextlib.ExitStack() as batch:
            live = []  # a generator that is dropped closes its stream
            for _ in range(MAX_BATCH_SIZE):
                stream = batch.enter_context(client.stream("POST", path, json=CHAT | endless))
                live.append(stream.iter_lines())
                while not has_content(next(live[-1])):
                    pass
            asked = [pool.submit(one, seed) for seed in range(12)]
            wait_until(lambda: sum(each.done() for each in asked) == 10)
            refused = [each.result() for each in asked if each.done()]
            assert {answer.status_code for answer in refused} == {429}
            assert all(answer.headers["retry-after"] for answer in refused)
        codes = [each.result().status_code for each in asked]
        assert (codes.count(200), codes.count(429)) == (2, 10)
        assert one(1).status_code == 200


def has_content(line: str) -> bool:
    """Whether a line of a chat's stream has text of the reply."""
    event = json.loads(line[6:]) if line.startswith("data: {") else {"choices": ()}
    return any(choice["delta"].get("content") for choice in event["choices"])


def test_a_gate_dies(machines: Any, tokenizer_directory: Path) -> None:
    """Its connections break, which clients see; the other gate goes on."""
    import ray

    with serving(tokenizer_directory, seconds=0.05, gates=2) as cluster:
        actors = ray.util.list_named_actors(all_namespaces=True)
        gates = [each for each in actors if "#gate#" in each["name"]]
        assert len(gates) == 2
        with (
            cluster.client() as client,
            client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as answer,
        ):
            seen: list[str] = []
            with contextlib.suppress(httpx.RemoteProtocolError):  # where it was this gate's
                for line in answer.iter_lines():
                    seen.append(line)
                    if len(seen) == 12:
                        for gate in gates[:1]:
                            ray.kill(ray.get_actor(gate["name"], gate["namespace"]))

        def serves() -> bool:
            with cluster.client() as client:
                return client.post("/v1/chat/completions", json=CHAT).status_code == 200

        wait_until(serves)
        # What the client has by whole events, and the rest from any gate: one text.
        ids = [number for number, line in enumerate(seen) if line.startswith("id: ")]
        have = seen[: ids[-1]] if "data: [DONE]" not in seen else seen
        last = [line[4:] for line in have if line.startswith("id: ")][-1]
        with cluster.client(headers={"last-event-id": last}) as client:
            answer = client.post("/v1/chat/completions", json=CHAT | {"stream": True})
            have += answer.text.splitlines()
        events = [json.loads(line[6:]) for line in have if line.startswith("data: {")]
        text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events)
        whole = ask(cluster.single, "/v1/chat/completions", CHAT, True)
        assert text == whole[0][0]
        assert have[-2:].count("data: [DONE]") == 1
