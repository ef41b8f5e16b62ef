"""The audit of another engine's server: llama-cpp-python's, drafting by copies of the prompt."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from benchmarks.gguf import write_gguf
from foredraft.audit.options import AuditOptions, ServerOptions
from foredraft.audit.report import EXIT_DIFFERENT, Finding
from foredraft.audit.servers import Endpoint, ServerAudit, connect
from foredraft.models.files.store import resolve_model
from foredraft.options import DEFAULT_MODEL

pytest.importorskip("gguf")
pytest.importorskip("llama_cpp.server.app")
pytestmark = pytest.mark.slow

DRAFTS = ("--draft_model", "prompt-lookup-decoding", "--draft_model_num_pred_tokens", "4")
OPTIONS = AuditOptions(detect=0.25, alpha=1e-3, power=0.9, time_limit=170.0)
SERVER = ServerOptions(endpoint="http://127.0.0.1", max_requests=700, reply_tokens=32)
SECONDS_TO_START = 120


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("foreign") / "model.gguf"
    write_gguf(Path(resolve_model(DEFAULT_MODEL)), path, "q8_0")
    return path


@contextmanager
def llama_server(weights: Path) -> Iterator[Endpoint]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    keeps = ("--logits_all", "true", "--interrupt_requests", "false", "--n_ctx", "1024")
    command = [sys.executable, "-m", "llama_cpp.server", "--model", str(weights), "--port", port]
    process = subprocess.Popen([*command, *keeps, *DRAFTS], stderr=subprocess.DEVNULL)
    client = connect(f"http://127.0.0.1:{port}", None)
    try:
        for _ in range(SECONDS_TO_START):
            assert process.poll() is None, "the server did not start"
            try:
                client.get("/v1/models").raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(1.0)
        yield Endpoint(client)
    finally:
        process.kill()
        process.wait()


def test_llama_cpp_is_audited_and_found_to_keep_its_law(weights: Path) -> None:
    with llama_server(weights) as endpoint:
        report = ServerAudit(endpoint, None, OPTIONS, SERVER).report()
    assert report.exit_code != EXIT_DIFFERENT, report.sentence
    greedy, law = report.levels
    assert greedy.verdict in (Finding.SAME_BITS, Finding.NEAR_TIES), greedy.said
    assert law.verdict in (Finding.SAME_LAW, Finding.INCONCLUSIVE), law.said
    assert law.figures["tokens"] > 50, law.said
