"""The same server behind a certificate of its own."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from foredraft.llm import LLM
from tests.server.conftest import Running, running


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for this machine that signs itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not there")
    directory = tmp_path_factory.mktemp("tls")
    paths = directory / "certificate.pem", directory / "key.pem"
    asked = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1"
    named = ("-addext", "subjectAltName=IP:127.0.0.1", "-out", paths[0], "-keyout", paths[1])
    subprocess.run([*asked.split(), *named], check=True, capture_output=True)
    return paths


@pytest.fixture(scope="module")
def secured(load: Callable[..., LLM], certificate: tuple[Path, Path]) -> Iterator[Running]:
    with running(load, ssl_certfile=certificate[0], ssl_keyfile=certificate[1]) as server:
        yield server


@pytest.fixture(scope="module")
def trusting(certificate: tuple[Path, Path]) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate[0]))


def test_replies_whole_and_streamed(secured: Running, trusting: ssl.SSLContext) -> None:
    assert secured.url.startswith("https://")
    body = {"prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": True, "seed": 1}
    with secured.client(verify=trusting) as client:
        whole = client.post("/v1/completions", json=body)
        assert whole.json()["usage"]["completion_tokens"] == 8
        with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


def test_who_does_not_trust_it_or_speaks_plainly_gets_nothing(secured: Running) -> None:
    with secured.client() as client, pytest.raises(httpx.ConnectError):
        client.get("/health")
    with pytest.raises(httpx.HTTPError):
        httpx.get(secured.url.replace("https", "http") + "/health")
