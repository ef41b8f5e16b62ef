"""`foredraft serve --ray` as a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.cluster.conftest import QUIET, free_port, wait_until
from tests.models.checkpoints import NATIVE_CONFIGS, save_checkpoint

pytest.importorskip("ray.serve", reason="clusters need foredraft[ray]")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BODY = {"prompt": "The ferry", "max_tokens": 60, "ignore_eos": True, "stream": True}


def test_sigterm_ends_replies_and_says_nothing(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "tiny", NATIVE_CONFIGS["llama-tied"]())
    port = free_port()
    options = ["--model", str(tmp_path / "tiny"), "--dtype", "float32", "--threads", "1"]
    code = "from foredraft.cli.main import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "serve", "--ray", "--port", str(port), *options],
        env=os.environ | QUIET,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:

            def is_ready() -> bool:
                assert process.poll() is None
                try:
                    return client.get("/ready").status_code == 200
                except httpx.TransportError:
                    return False

            wait_until(is_ready, 120)
            with client.stream("POST", "/v1/completions", json=BODY) as answer:
                lines = answer.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                assert "data: [DONE]" in lines
        assert process.wait(60) == 0
        assert process.stderr is not None
        said = process.stderr.read()
        assert "Traceback" not in said
        assert "SIGTERM" not in said
    finally:
        process.kill()
