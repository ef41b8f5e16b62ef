"""Clusters on one machine, and the server that they are compared with."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from foredraft.llm import LLM
from foredraft.server.settings import ServerSettings
from tests.cluster.models import MAX_BATCH_SIZE, load
from tests.server.conftest import (  # noqa: F401
    free_port,
    running,
    tokenizer_directory,
    wait_until,
)

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_agent_register_timeout_ms": "120000",  # a busy machine starts it slowly, and gates as well
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "PYTHONPATH": str(Path(__file__).parents[2]),
}
WITH_START = pytest.mark.timeout(900)
"""Of tests that start a cluster: Ray and its engines take a busy machine five minutes."""
_STARTED = 300.0
"""Seconds in which an engine has started on a busy machine."""
_STORE = 80 << 20
_NOTHING: Mapping[str, Any] = {}


def actors(deployment: str) -> set[str]:
    """Names of those of engines, or of gates."""
    import ray

    found = ray.util.list_named_actors(all_namespaces=True)
    return {each["name"] for each in found if f"#{deployment}#" in each["name"]}


def running_engines() -> dict[str, int]:
    """Process ids by name of the engines that answer; `actors` has those that start, too."""
    from ray.serve.context import _get_global_client

    details: Any = _get_global_client().get_serve_details()["applications"]["foredraft"]
    replicas = details["deployments"]["engine"]["replicas"]
    return {each["actor_name"]: each["pid"] for each in replicas if each["state"] == "RUNNING"}


def two_engines(but: Mapping[str, int] = _NOTHING) -> dict[str, int]:
    """`running_engines`, as soon as there are two, and others than ``but``."""
    found: dict[str, int] = {}

    def are_there() -> bool:
        found.clear()
        found.update(running_engines())
        return len(found) == 2 and found != but

    wait_until(are_there, _STARTED)
    return found


@dataclass
class Served:
    """A cluster that serves.

    Attributes:
        url: of its gates.
        death: where the number of events goes after which an engine is to die.
        single: a client of a server of one process with the same model.
        deploy: deploys anew, with other `ClusterOptions` or seconds that a forward takes.
    """

    url: str
    death: Path
    single: httpx.Client
    deploy: Callable[..., None]

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)

    def kill_after(self, num_events: int, how: str = "") -> None:
        """Let the next engine that gets so far with a reply die; see `Death`."""
        unborn = self.death.with_suffix(".new")
        unborn.write_text(f"{num_events} {how}")
        unborn.rename(self.death)

    def metric(self, name: str) -> float:
        """A counter of the gate."""
        with self.client() as client:
            lines = client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


@contextmanager
def serving(
    directory: Path, seconds: float = 0.0, server: Mapping[str, Any] = _NOTHING, **sizes: Any
) -> Iterator[Served]:
    """The application on the cluster that this process has joined.

    Args:
        seconds: that a forward takes.
        server: settings.
        sizes: `ClusterOptions`.
    """
    from ray import serve

    from foredraft.cluster.deploy import ClusterOptions, application

    port, death = free_port(), directory / "death"
    serve.shutdown()  # another may listen elsewhere
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    usual = {"request_timeout": 120, "served_model_names": ("tiny",)}
    settings = ServerSettings(**usual | server)

    def deploy(seconds: float = seconds, **changed: Any) -> None:
        quick = {"num_cpus": 0.4, "health_check_period": 1.0}
        options = ClusterOptions(**quick | sizes | changed)
        load_one: Callable[[], LLM] = partial(load, directory, death, seconds)
        app = application(load_one, MAX_BATCH_SIZE, settings, options, salt=b"of this test")
        serve.run(app, name="foredraft")

    deploy()
    with (
        running(lambda trace: load(directory), served_model_names=("tiny",)) as alone,
        alone.client() as single,
    ):
        try:
            yield Served(f"http://127.0.0.1:{port}", death, single, deploy)
        finally:
            serve.shutdown()


@pytest.fixture(scope="module")
def one_node(tokenizer_directory: Path) -> Iterator[Path]:  # noqa: F811
    """A cluster of one machine; the directory of the tokenizer."""
    ray = pytest.importorskip("ray", reason="clusters need foredraft[ray]")
    pytest.importorskip("ray.serve", reason="clusters need foredraft[ray]")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUIET.items():
            patch.setenv(name, value)
        patch.delenv("RAY_ADDRESS", raising=False)
        # Ray gives its agent 20 seconds, and a fresh environment compiles its modules in them.
        subprocess.run([sys.executable, "-c", "import ray.dashboard.agent, ray.serve"], check=True)
        if ray.is_initialized():  # Ray starts by itself where a test makes a replica alone
            ray.shutdown()
        ray.init(
            "local",
            num_cpus=4,
            object_store_memory=_STORE,
            include_dashboard=False,
            log_to_driver=bool(os.environ.get("FOREDRAFT_TEST_RAY_LOGS")),
            configure_logging=False,
        )
        try:
            yield tokenizer_directory
        finally:
            ray.shutdown()
