"""The same server behind a certificate of its own."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from foredraft.llm import LLM
from tests.server.conftest import Running, running, wait_until
from tests.server.test_lifecycle import LONG, request_bytes

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not there")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for this machine that signs itself, and its key."""
    directory = tmp_path_factory.mktemp("tls")
    paths = directory / "certificate.pem", directory / "key.pem"
    asked = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1"
    named = ("-addext", "subjectAltName=IP:127.0.0.1", "-out", paths[0], "-keyout", paths[1])
    subprocess.run([*asked.split(), *named], check=True, capture_output=True)
    return paths


@pytest.fixture(scope="module")
def secured(load: Callable[..., LLM], certificate: tuple[Path, Path]) -> Iterator[Running]:
    limits = {"send_timeout": 0.5, "header_timeout": 0.5, "max_batch_size": 8}
    with running(load, ssl_certfile=certificate[0], ssl_keyfile=certificate[1], **limits) as server:
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


def test_a_client_that_never_reads_is_cut_off(
    secured: Running, trusting: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foredraft.server.run._SEND_BUFFER", 8192)  # it is full sooner
    connection = connect(secured, trusting)
    connection.sendall(request_bytes(LONG | {"stream": True, "n": 8}))
    wait_until(lambda: secured.context.engine.stats().running > 0)
    wait_until(secured.is_idle, 30)
    connection.close()
    aborted = re.search(r"request_aborted_total (\d+)", secured.context.metrics.render().decode())
    assert int(aborted[1] if aborted else 0) > 0, "it was not read to its end"


def test_headers_that_never_end(secured: Running, trusting: ssl.SSLContext) -> None:
    with connect(secured, trusting) as connection:
        connection.settimeout(5)
        connection.sendall(b"GET /health HTTP/1.1\r\nx-slow: ")
        with contextlib.suppress(ConnectionResetError, ssl.SSLEOFError):
            assert connection.recv(1000) == b""


def connect(server: Running, trusting: ssl.SSLContext) -> ssl.SSLSocket:
    """A connection with small buffers."""
    host, port = server.url.removeprefix("https://").split(":")
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    plain.connect((host, int(port)))
    return trusting.wrap_socket(plain, server_hostname=host)
