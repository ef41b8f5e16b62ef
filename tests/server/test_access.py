"""Keys: who gets in, and what is kept apart."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from starlette.routing import Route

from foredraft.core.errors import ConfigError
from foredraft.llm import LLM
from foredraft.server.app import create_app
from foredraft.server.gate import ApiKeys
from foredraft.server.settings import ServerSettings, local_settings
from tests.server.conftest import Running, running, wait_until

KEYS = ["first-key-12345", "second-key-12345"]
OPEN = {"/health", "/ready", "/live"}


@pytest.fixture(scope="module")
def guarded(
    load: Callable[..., LLM], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    path = tmp_path_factory.mktemp("keys") / "keys.txt"
    path.write_text(f"# two of them\n{KEYS[0]}\n\n{KEYS[1]}\n")
    with running(load, api_key_file=path) as server:
        yield server


def test_every_route_wants_a_key_but_health(guarded: Running) -> None:
    app = guarded.server.config.app
    assert isinstance(app, FastAPI)
    paths = {route.path for route in app.routes if isinstance(route, Route)}
    paths |= {"/nothing", "/health/x"}
    with guarded.client() as client:
        for path in sorted(paths):
            for method in ("GET", "POST", "DELETE", "OPTIONS"):
                status = client.request(method, path.replace("{model:path}", "x")).status_code
                is_open = path in OPEN or path == "/" or path.startswith("/page/files/")
                assert (status == 401) is not is_open, (method, path, status)


def test_the_openapi_document_names_keys_where_there_are_some(
    guarded: Running, load: Callable[..., LLM]
) -> None:
    with guarded.client(headers={"x-api-key": KEYS[0]}) as client:
        told = client.get("/openapi.json").json()
    assert told["paths"]["/v1/chat/completions"]["post"]["security"] == [{"HTTPBearer": []}]
    assert told["paths"]["/version"]["get"]["security"] == [{"HTTPBearer": []}]
    assert "security" not in told["paths"]["/health"]["get"]
    app = create_app(lambda steps: load(trace=steps), ServerSettings())
    assert "securitySchemes" not in app.openapi()["components"]


def test_probes_may_ask_for_the_head_only(guarded: Running) -> None:
    with guarded.client() as client:
        for path in sorted(OPEN):
            response = client.head(path)
            assert (response.status_code, response.content) == (200, b"")


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {KEYS[0]}"},
        {"authorization": f"bearer {KEYS[1]}"},
        {"x-api-key": KEYS[1]},
        {"api-key": KEYS[0]},  # Azure's
        {"authorization": "Bearer", "x-api-key": KEYS[0]},  # an empty token beside the key
    ],
)
def test_a_key_opens(guarded: Running, headers: dict[str, str]) -> None:
    with guarded.client(headers=headers) as client:
        assert client.get("/v1/models").status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong-key-12345"},
        {"authorization": f"Bearer {KEYS[0][:-1]}"},
        {"authorization": f"Bearer {KEYS[0]}x"},
        {"authorization": KEYS[0]},
        {"authorization": f"Basic {KEYS[0]}"},
        {"authorization": "Bearer"},
        {"authorization": "Bearer # two of them"},
        {"x-api-key": ""},
    ],
)
def test_nothing_else_does(guarded: Running, headers: dict[str, str]) -> None:
    with guarded.client(headers=headers) as client:
        response = client.post("/v1/chat/completions", json={})
    assert response.status_code == 401
    assert response.json()["error"]["type"] == "authentication_error"
    assert "key-12345" not in response.text


def test_every_key_is_compared_and_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is learnt from how long it takes: not how much was right, nor which key it was."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return left == right

    monkeypatch.setattr("foredraft.server.gate.hmac.compare_digest", compare)
    keys = ApiKeys([*KEYS, "third-key-12345"])
    for key in (KEYS[0], "third-key-12345", "wrong-key-12345", "x"):
        compared.clear()
        keys.id_of(key)
        assert len(compared) == 3
        assert {len(side) for pair in compared for side in pair} == {32}, "digests, not keys"


def test_other_machines_need_a_key_unless_somebody_insists() -> None:
    with pytest.raises(ConfigError, match="--api-key-file"):
        ApiKeys.of(ServerSettings(host="0.0.0.0"))
    assert not ApiKeys.of(ServerSettings(host="0.0.0.0", allow_no_key=True))
    assert not ApiKeys.of(ServerSettings())


PREFLIGHT = {"access-control-request-method": "POST", "origin": "http://ours.example"}


def test_pages_of_other_origins_are_let_in_by_name_only(
    load: Callable[..., LLM], shared: Running
) -> None:
    def allowed(client: httpx.Client, **headers: str) -> str | None:
        asked = PREFLIGHT | headers
        answer = client.options("/v1/chat/completions", headers=asked)
        plain = client.get("/health", headers={"origin": asked["origin"]}).headers
        assert plain.get("access-control-allow-origin") == answer.headers.get(
            "access-control-allow-origin"
        )
        assert "access-control-allow-credentials" not in answer.headers
        return answer.headers.get("access-control-allow-origin")

    with shared.client() as client:
        assert allowed(client) is None
    names = ("http://ours.example",)
    with running(load, cors_origins=names, api_key=KEYS[0]) as server, server.client() as client:
        assert allowed(client) == names[0]
        assert allowed(client, origin="http://theirs.example") is None
        post = client.post("/v1/chat/completions", json={}, headers={"origin": names[0]})
        assert post.status_code == 401
        # The official SDKs send a dozen headers of their own, and read some of ours.
        headers = PREFLIGHT | {"access-control-request-headers": "x-stainless-arch,authorization"}
        said = client.options("/v1/chat/completions", headers=headers).headers
        assert "x-stainless-arch" in said["access-control-allow-headers"].lower()
        assert "x-foredraft-ignored" in post.headers["access-control-expose-headers"]


def test_ids_of_keys_reveal_nothing_of_them_and_outlive_the_process() -> None:
    ids = [[ApiKeys([KEYS[0], f"ann:{KEYS[1]}"]).id_of(key) for key in KEYS] for _ in range(2)]
    assert ids == [["key-1", "ann"]] * 2
    with pytest.raises(ConfigError, match="two API keys are named 'ann'"):
        ApiKeys([f"ann:{KEYS[0]}", f"ann:{KEYS[1]}"])


VALUES = {
    "host": "0.0.0.0",
    "port": "81",
    "api_key": "one-key-123,two-key-123",
    "page": "off",
    "api_key_file": "keys.txt",
    "ssl_certfile": "c.pem",
    "ssl_keyfile": "k.pem",
    "request_metrics": "detailed",
    "otlp_traces_endpoint": "http://127.0.0.1:4318",
}
"""Values of settings for the environment, where neither 1 nor a list of names is one."""


@pytest.mark.parametrize("name", ServerSettings.model_fields)
def test_every_setting_comes_from_the_environment(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    field = ServerSettings.model_fields[name]
    is_list = isinstance(field.default, tuple)
    text = VALUES.get(name, "a.example, b.example" if is_list else "1")
    monkeypatch.setenv(f"FOREDRAFT_{name}".upper(), text)
    value = getattr(ServerSettings(), name)
    if name == "api_key":
        value = value.get_secret_value()
    elif is_list:
        value = ", ".join(value)
    assert str(value) in (text, "True", "1.0")
    monkeypatch.setenv(f"FOREDRAFT_{name}".upper(), "")
    assert getattr(ServerSettings(), name) == field.default, "an empty variable sets nothing"


def test_names_are_checked_only_where_no_key_is_needed(guarded: Running, shared: Running) -> None:
    """A web page that points its own name at the server has no key."""
    host = {"host": "foredraft.default.svc"}
    with shared.client(headers=host) as client:
        assert client.get("/health").status_code == 403
    with guarded.client(headers=host) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models").status_code == 401


def test_an_answer_and_its_line_of_the_log_have_one_id(
    guarded: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "foredraft.server.access")
    with guarded.client(headers={"x-api-key": KEYS[1]}) as client:
        made = client.get("/v1/models").headers["request-id"]
        sent = client.get("/v1/models", headers={"x-request-id": "mine-7"}).headers["x-request-id"]
        odd = client.get("/v1/models", headers={"x-request-id": "a b"}).headers["x-request-id"]
    assert sent == "mine-7"
    assert made != odd != "a b"

    def found() -> dict[str, str]:
        lines = [json.loads(each.message) for each in caplog.records if "access" in each.name]
        return {line["request_id"]: line["key"] for line in lines}

    wait_until(lambda: len(found()) == 3)  # a line comes after its answer
    assert found() == {made: "key-2", sent: "key-2", odd: "key-2"}


def test_one_key_may_have_only_so_many_replies(load: Callable[..., LLM]) -> None:
    with running(load, api_key=",".join(KEYS), max_live_per_key=2) as server:
        for key, n, status in [(KEYS[0], 3, 429), (KEYS[0], 2, 200), (KEYS[1], 2, 200)]:
            with server.client(headers={"x-api-key": key}) as client:
                body = {"prompt": "a", "max_tokens": 2, "n": n}
                answer = client.post("/v1/completions", json=body)
                assert answer.status_code == status, answer.text
        assert not server.context._num_live_of


@pytest.mark.parametrize(
    ("host", "page", "status"),
    [("127.0.0.1", "auto", 200), ("127.0.0.1", "off", 404), ("0.0.0.0", "auto", 404)],
)
def test_the_page_is_for_this_machine(
    load: Callable[..., LLM], host: str, page: str, status: int
) -> None:
    with (
        running(load, host=host, page=page, allow_no_key=True) as server,
        server.client() as client,
    ):
        assert client.get("/").status_code == status


@pytest.mark.parametrize("kind", [ServerSettings, local_settings])
def test_a_service_of_kubernetes_named_foredraft(
    kind: Callable[[], ServerSettings],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("FOREDRAFT_PORT", "tcp://10.0.0.1:8000")
    monkeypatch.setenv("FOREDRAFT_SERVICE_HOST", "10.0.0.1")
    assert kind().port == 8000
    if kind is ServerSettings:
        assert "Kubernetes" in caplog.text


def test_what_its_own_process_calls_is_not_set_by_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"HOST": "0.0.0.0", "MAX_N": "-3", "API_KEY": "a-secret-key"}.items():
        monkeypatch.setenv(f"FOREDRAFT_{name}", value)
    settings = local_settings()
    assert not ApiKeys.of(settings)
    assert settings.max_n > 1000


def test_keys_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_API_KEY", "one-key-123, other-key-123")
    keys = ApiKeys.of(ServerSettings())
    assert keys.id_of("one-key-123") != keys.id_of("other-key-123")
    assert keys.id_of("one-key-123,") is None
    assert "one-key" not in repr(ServerSettings())


@pytest.mark.parametrize("content", ["", "# nothing\n", "short\n", "with space 123\n"])
def test_key_files_that_hold_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys"
    path.write_text(content)
    with pytest.raises(ConfigError, match="key"):
        ApiKeys.of(ServerSettings(api_key_file=path))


def test_keys_and_salts_keep_state_apart(guarded: Running) -> None:
    context = guarded.context
    tenants = [context.tenant(key, salt) for key in ("a", "b", None) for salt in (None, "x", "y")]
    assert len(set(tenants)) == len(tenants)
    assert context.tenant(None, None) is None


def test_logs_hold_neither_keys_nor_prompts(
    guarded: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "foredraft")
    body = {"messages": [{"role": "user", "content": "a ferry at night"}], "max_tokens": 2}
    with guarded.client(headers={"authorization": f"Bearer {KEYS[0]}"}) as client:
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        client.get("/%0d%0aforged-line")
    assert "/v1/chat/completions" in caplog.text
    for text in ("ferry at night", KEYS[0], "forged-line"):
        assert text not in caplog.text
