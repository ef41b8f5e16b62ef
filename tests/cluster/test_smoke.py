"""The way of a reply whose engine is killed, through all of the cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from foredraft.core.errors import ConfigError
from tests.cluster.conftest import WITH_START, Served, serving
from tests.server.events import data_of

pytestmark = WITH_START
EXAMPLES = Path(__file__).parents[2] / "examples" / "cluster"
BODY = {
    "messages": [{"role": "user", "content": "The ferry"}],
    "max_tokens": 40,
    "seed": 11,
    "temperature": 1.0,
}


@pytest.fixture(scope="module")
def served(one_node: Path) -> Iterator[Served]:
    with serving(one_node, replicas=2) as cluster:
        yield cluster


def streamed_text(client: httpx.Client, **body: Any) -> str:
    *chunks, end = data_of(client.post("/v1/chat/completions", json=BODY | {"stream": True} | body))
    assert end == "[DONE]"
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert choices[-1]["finish_reason"] == "length"
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def test_a_killed_engine_costs_no_reply(served: Served) -> None:
    with served.client() as client:
        expected = streamed_text(served.single)
        assert streamed_text(client) == expected
        served.kill_after(5)
        assert streamed_text(client) == expected
        assert not served.death.exists()
        two = BODY | {"n": 2}
        answers = [each.post("/v1/chat/completions", json=two) for each in (client, served.single)]
        texts = [[c["message"]["content"] for c in a.json()["choices"]] for a in answers]
        assert texts[0] == texts[1]
        refused = client.post("/v1/chat/completions", json=BODY | {"max_tokens": -1})
        assert refused.status_code == 400
    assert served.metric("foredraft:resumed_total") == 1
    assert served.metric("foredraft:lost_total") == 0


def test_the_examples_are_what_serve_reads(one_node: Path) -> None:
    """By the schema of Serve, and by that of the application's arguments."""
    yaml = pytest.importorskip("yaml")
    from ray.serve.schema import ServeDeploySchema

    from foredraft.cluster import app

    written = yaml.safe_load((EXAMPLES / "serve.yaml").read_text())
    manifest = yaml.safe_load((EXAMPLES / "rayservice.yaml").read_text())
    assert manifest["kind"] == "RayService"
    spec = manifest["spec"]
    workers = spec["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]
    for config in (written, yaml.safe_load(spec["serveConfigV2"])):
        (read,) = ServeDeploySchema.model_validate(config).applications
        assert read.import_path == "foredraft.cluster:app"
        keys = one_node / "keys.txt"
        keys.write_text("a-key-of-this-test\n")
        load = read.args["load"] | {"threads": 1}
        server = read.args["server"] | {"api_key_file": str(keys)}
        assert app(read.args | {"load": load, "server": server}) is not None
        assert workers["terminationGracePeriodSeconds"] > read.args["server"]["request_timeout"]


@pytest.mark.parametrize(
    "args", [{"replica": 2}, {"load": {"modle": "x"}}, {"server": {"port": -1}}, {"gates": 0}]
)
def test_arguments_that_mean_nothing_are_refused(one_node: Path, args: dict[str, Any]) -> None:
    from foredraft.cluster import app

    with pytest.raises(ConfigError):
        app(args)
