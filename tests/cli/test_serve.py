"""`foredraft serve`, from its start to its end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foredraft import LLM, SamplingParams
from foredraft.cli import options
from foredraft.core.errors import ConfigError
from tests.cli.conftest import Run

serving = pytest.importorskip("foredraft.server.run")


def test_port_0_names_the_port_that_was_found(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    listening = serving.GracefulServer.when_listening
    ports: list[int] = []

    def then_end(server: serving.GracefulServer, tell: Callable[[str], None]) -> None:
        def told(address: str) -> None:
            tell(address)
            ports.append(server.servers[0].sockets[0].getsockname()[1])
            server.end()

        listening(server, told)

    monkeypatch.setattr(serving.GracefulServer, "when_listening", then_end)
    done = run("serve", "--port", "0", "--num-draft-tokens", "0")
    assert done.exit_code == 0, done.output
    named = re.findall(r"http://127\.0\.0\.1:(\d+)", done.stderr)
    assert [*map(int, named)] == [*ports] * 3
    assert ports[0] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--port", "99999"), "--port is 99999: input should be less than"),
        (("--per-request-spec-decode-metrics", "sumary"), "metrics is 'sumary': .* 'summary'"),
        (("--ssl-certfile", "nosuch.pem"), "--ssl-certfile nosuch.pem: No such file"),
        (("--ssl-certfile", __file__), "--ssl-certfile .*: .*PEM"),
        (("--ssl-keyfile", "nosuch.pem"), "--ssl-keyfile is of no use without --ssl-certfile"),
        (("--replicas", "2"), "--replicas: of no use without --ray"),
        (("--ray", "--autoscale", "3"), "--autoscale is '3'; it must be MIN:MAX, such as 1:4"),
        (("--ray", "--autoscale", "3:2"), "--autoscale is '3:2'; it must be MIN:MAX"),
        (("--ray", "--replicas", "2", "--autoscale", "1:2"), "--replicas or --autoscale, not both"),
        (("--ray", "--log-requests"), "write where an engine runs: not with --ray"),
    ],
)
def test_what_cannot_be_served_with_is_named_as_it_was_given(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    """Before a model is loaded."""
    monkeypatch.setattr(options, "load_llm", None)
    refused = run("serve", *arguments).exception
    assert isinstance(refused, ConfigError)
    assert re.search(message, str(refused)), refused


def test_the_environment_is_named_likewise(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_MAX_N", "-3")
    assert str(run("serve").exception).startswith("FOREDRAFT_MAX_N is '-3': ")


def test_bad_keys_are_refused_before_a_cluster_is_asked(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray.serve", reason="clusters need foredraft[ray]")
    from foredraft.cluster import deploy

    monkeypatch.setattr(deploy, "application", None)
    monkeypatch.setenv("FOREDRAFT_API_KEY", "short")
    refused = run("serve", "--ray").exception
    assert isinstance(refused, ConfigError)
    assert "API key 1 is no secret that a header can carry" in str(refused)


pytest.importorskip("foredraft.server.app")

PROMPTS = ["The ferry", "A draft is", "Straße"]


def write(path: Path, bodies: list[dict[str, Any]]) -> Path:
    lines = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body}
        for i, body in enumerate(bodies)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def answers(path: Path) -> dict[str, Any]:
    return {line["custom_id"]: line["response"] for line in map(json.loads, path.open())}


def test_answers_are_those_of_the_model(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    asked = {"model": "tiny", "max_tokens": 8, "temperature": 1.0, "ignore_eos": True}
    bodies = [asked | {"prompt": text, "seed": i} for i, text in enumerate(PROMPTS)]
    path = write(tmp_path / "in.jsonl", [*bodies, asked | {"prompt": "x", "top_p": 7}])
    done = run("run-batch", str(path), "--served-model-name", "tiny", "--json")
    summary = json.loads(done.stdout)
    assert (summary["answered"], summary["failed"], summary["skipped"]) == (3, 1, 0)
    assert summary["completion_tokens"] == 24
    assert done.exit_code == 1
    found = answers(tmp_path / "in.out.jsonl")
    llm = LLM.load(checkpoint, dtype="float32")
    for i, text in enumerate(PROMPTS):
        params = SamplingParams(max_tokens=8, temperature=1.0, ignore_eos=True, seed=i)
        expected = llm.generate(text, params)[0].text
        assert found[f"r{i}"]["body"]["choices"][0]["text"] == expected
    assert found["r3"]["status_code"] == 400
    assert "top_p" in found["r3"]["body"]["error"]["message"]
    again = run("run-batch", str(path), "--served-model-name", "tiny", "--json")
    summary = json.loads(again.stdout)
    assert (summary["skipped"], summary["failed_before"]) == (4, 1)
    assert again.exit_code == 1


def test_what_cannot_be_asked_is_said_before_a_model_is_loaded(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", [{}])
    same = run("run-batch", str(path), "--output", str(path))
    assert "same file" in str(same.exception)
    path.write_text("{}\n")
    assert "custom_id must be text" in str(run("run-batch", str(path)).exception)


@pytest.mark.slow
def test_a_cluster_gives_the_same_answers(
    run: Run, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines of Ray; what the file holds already is not asked again."""
    pytest.importorskip("ray", reason="clusters need foredraft[ray]")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    asked = {"model": "tiny", "max_tokens": 8, "temperature": 1.0, "ignore_eos": True}
    path = write(tmp_path / "in.jsonl", [asked | {"prompt": "The", "seed": i} for i in range(6)])
    here, there = str(tmp_path / "here.jsonl"), str(tmp_path / "there.jsonl")
    options = ("run-batch", str(path), "--served-model-name", "tiny", "--json")
    assert run(*options, "-o", here).exit_code == 0
    cluster = ("--ray", "--replicas", "2", "--threads", "1")
    done = run(*options, "-o", there, *cluster)
    assert done.exit_code == 0, done.output
    texts = [
        {key: value["body"]["choices"][0]["text"] for key, value in answers(Path(file)).items()}
        for file in (here, there)
    ]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 6
    summary = json.loads(run(*options, "-o", there, *cluster).stdout)
    assert (summary["answered"], summary["skipped"]) == (0, 6)
