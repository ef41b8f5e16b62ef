"""`foredraft serve`, from its start to its end."""

from __future__ import annotations

import re
import socket
import sys
from typing import Any

import pytest

from foredraft.cli import options, serve
from foredraft.cli.cluster import ClusterAsked
from foredraft.core.errors import ConfigError
from foredraft.server.settings import ServerSettings
from tests.cli.conftest import Run

serving = pytest.importorskip("foredraft.server.run")


def test_port_0_names_the_port_that_was_found(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    new_server, greet, made = serving.new_server, serve._greet, list[Any]()

    def keep(app: Any) -> Any:
        made.append(new_server(app))
        return made[0]

    def then_end(context: Any, address: str) -> None:
        greet(context, address)
        made[0].end()

    monkeypatch.setattr(serving, "new_server", keep)
    monkeypatch.setattr(serve, "_greet", then_end)
    done = run("serve", "--port", "0", "--num-draft-tokens", "0")
    assert done.exit_code == 0, done.output
    named = re.findall(r"http://127\.0\.0\.1:(\d+)", done.stderr)
    assert named == [named[0]] * 3
    assert int(named[0]) > 0
    assert re.search(r"MB for weights and work, up to [\d.]+ .B for the cache", done.stderr)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--port", "99999"), "--port is 99999: input should be less than"),
        (("--per-request-spec-decode-metrics", "sumary"), "metrics is 'sumary': .* 'summary'"),
        (("--ssl-certfile", "nosuch.pem"), "^ssl_certfile nosuch.pem: No such file"),
        (("--ssl-certfile", __file__), "^ssl_certfile .*: .*PEM"),
        (("--ssl-keyfile", "nosuch.pem"), "^ssl_keyfile is of no use without ssl_certfile"),
        (("--set", "request_metrics=x"), "it is the option --per-request-spec-decode-metrics$"),
        (("--set", "allowed_hosts=x"), "it is the option --allowed-host$"),
        (("--set", "max_n=0"), "^--set max_n is 0: "),
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


def test_a_cluster_that_is_interrupted_is_all_that_is_served(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*asked: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ClusterAsked, "serving", interrupted)
    monkeypatch.setattr(options, "load_llm", None)
    done = run("serve", "--ray")
    assert done.exit_code == 0, done.exception


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


def test_threads_that_read_requests_let_the_engines_go_on_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step asks for the interpreter's lock often; beside a busy thread it took 5 ms each time."""
    seconds = list[float]()
    monkeypatch.setattr(sys, "setswitchinterval", seconds.append)
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(ConfigError, match="taken"):
        serve._run(lambda feed: pytest.fail("loaded"), ServerSettings(port=other.getsockname()[1]))
    assert seconds
    assert seconds[0] <= 1e-3
