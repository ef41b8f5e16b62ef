"""`foredraft serve`, from its start to its end."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.cli.conftest import Run

serving = pytest.importorskip("foredraft.server.serving")


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
