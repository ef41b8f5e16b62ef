"""`foredraft serve --ray` and `foredraft run-batch --ray` as processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.server_process import engines_of, processes_of
from foredraft.core.params import SamplingParams
from foredraft.llm import LLM
from tests.cluster.conftest import QUIET, WITH_START, free_port
from tests.models.checkpoints import NATIVE_CONFIGS, save_checkpoint
from tests.server.conftest import wait_until

pytest.importorskip("ray.serve", reason="clusters need foredraft[ray]")
pytestmark = [pytest.mark.slow, WITH_START]

ASKED = {"max_tokens": 60, "ignore_eos": True, "temperature": 1.0}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("commands") / "tiny"
    save_checkpoint(directory, NATIVE_CONFIGS["llama-tied"]())
    return directory


@contextmanager
def command(checkpoint: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command on a cluster of its own; killed when this is left."""
    options = ["--ray", "--model", str(checkpoint), "--dtype", "float32", "--threads", "1"]
    process = subprocess.Popen(
        [sys.executable, "-c", "from foredraft.cli.main import main; main()", *arguments, *options],
        env=os.environ | QUIET,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}


def listening(pid: int) -> set[str]:
    """Addresses, in hex, at which a process and those that it has started take connections."""
    places = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":  # LISTEN
                places[f"socket:[{fields[9]}]"] = fields[1].partition(":")[0]
    found = set()
    for each in processes_of(pid):
        for file in Path(f"/proc/{each}/fd").glob("*"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(file))
    return {address for socket, address in places.items() if socket in found}


def said_by(process: subprocess.Popen[str]) -> str:
    """All of it, when it has ended well."""
    _, said = process.communicate(timeout=100)
    assert process.returncode == 0, said
    assert "Traceback" not in said
    return said


def test_sigterm_lets_replies_end_and_says_nothing(checkpoint: Path) -> None:
    port = free_port()
    with (
        command(checkpoint, "serve", "--port", str(port)) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):

        def is_ready() -> bool:
            assert process.poll() is None
            try:
                return client.get("/ready").status_code == 200
            except httpx.TransportError:
                return False

        wait_until(is_ready, 120)
        assert listening(process.pid) <= LOOPBACK, "Ray's ports are for this machine alone"
        body = ASKED | {"prompt": "The ferry", "stream": True, "max_tokens": 400}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as other:
                wait_until(lambda: other.get("/ready").status_code == 503)
                assert other.get("/live").status_code == 200
                refused = other.post("/v1/completions", json={"prompt": "x"})
                assert refused.status_code == 503
                assert refused.headers["retry-after"]
                assert other.get("/-/routes").status_code == 404
                assert other.get("/-/healthz").status_code == 404
            assert "data: [DONE]" in lines
        assert "SIGTERM" not in said_by(process)


def test_a_batch_outlives_its_engine(checkpoint: Path, tmp_path: Path) -> None:
    bodies = [ASKED | {"prompt": f"{seed} ferries", "seed": seed} for seed in range(60)]
    lines = [
        {"custom_id": str(body["seed"]), "method": "POST", "url": "/v1/completions", "body": body}
        for body in bodies
    ]
    asked, answers = tmp_path / "in.jsonl", tmp_path / "in.out.jsonl"
    asked.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def found() -> dict[int, Any]:
        whole = answers.read_text().splitlines(keepends=True) if answers.exists() else []
        read = [json.loads(line) for line in whole if line.endswith("\n")]
        return {int(line["custom_id"]): line["response"]["body"] for line in read}

    with command(checkpoint, "run-batch", str(asked), "--concurrency", "4") as process:
        wait_until(lambda: len(found()) > 3, 120)
        for engine in engines_of(process.pid):
            os.kill(engine, signal.SIGKILL)
        assert len(found()) < len(bodies)
        said_by(process)
    llm = LLM.load(checkpoint, dtype="float32")
    for seed, body in found().items():
        (result,) = llm.generate(f"{seed} ferries", SamplingParams(**ASKED, seed=seed))
        assert body["choices"][0]["text"] == result.text
    assert len(found()) == len(bodies)
