"""Options of a cluster, without one."""

from __future__ import annotations

from typing import Any

import pytest

from foredraft.cli.cluster import ClusterAsked
from foredraft.core.errors import ConfigError
from foredraft.options import LoadOptions
from foredraft.server.metrics import Metrics
from foredraft.server.settings import ServerSettings

pytest.importorskip("ray.serve", reason="clusters need foredraft[ray]")


def test_what_a_cluster_does_not_do_is_refused() -> None:
    from foredraft.cluster.deploy import ClusterOptions, application

    settings = ServerSettings(prove_every=3)
    with pytest.raises(ConfigError, match="--prove-every"):
        application(lambda: None, 1, settings, ClusterOptions())  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("asked", "threads"),
    [({}, None), ({"replicas": 2}, 3), ({"autoscale": "1:3"}, 2), ({"address": "auto"}, None)],
)
def test_engines_of_a_machine_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], threads: int | None
) -> None:
    for module in ("foredraft.cli.cluster", "foredraft.options"):
        monkeypatch.setattr(f"{module}.available_cpus", lambda: 6)
    cluster = ClusterAsked(True, **asked)
    assert cluster._shared(LoadOptions()).threads == threads
    assert cluster._shared(LoadOptions(threads=1)).threads == 1


def test_the_time_of_silence_is_an_option() -> None:
    assert ClusterAsked(True, engine_timeout=9.0).sizes()["engine_timeout"] == 9.0
    with pytest.raises(ConfigError, match="--engine-timeout"):
        ClusterAsked(False, engine_timeout=9.0)


def test_a_gate_shows_no_figures_that_it_does_not_have() -> None:
    metrics = Metrics()
    assert b"spec_decode" in metrics.render()
    metrics.leave_steps_out()
    assert b"spec_decode" not in metrics.render()
    assert b"time_to_first_token" in metrics.render()
