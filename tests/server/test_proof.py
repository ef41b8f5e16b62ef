"""Live proof in service: `/metrics` counts what was made again, and what came out otherwise."""

from __future__ import annotations

import re
from typing import Any

import pytest

from foredraft.audit.faults import FAULTS
from foredraft.llm import LLM
from foredraft.models.table import TableModel
from foredraft.options import LoadOptions
from tests.page.conftest import tiny  # noqa: F401
from tests.server.conftest import running
from tests.server.test_lifecycle import wait_until

ACCEPT_ALL = next(fault for fault in FAULTS if fault.name == "accept all")
ASKED = {"prompt": "the ferry and the ferry and the ferry", "max_tokens": 160, "seed": 3}


def figures(client: Any) -> tuple[float, float]:
    text = client.get("/metrics").text
    steps, differences = (
        float(re.search(rf"^foredraft:proof_{name}_total (\S+)$", text, re.M)[1])  # type: ignore[index]
        for name in ("steps", "differences")
    )
    return steps, differences


@pytest.mark.parametrize("is_faulty", [False, True], ids=["exact", "faulty"])
def test_metrics_and_page_count_proofs_and_differences(
    tiny: LLM,  # noqa: F811
    is_faulty: bool,
) -> None:
    target = TableModel.random(tiny.target.vocab_size, seed=5, order=1, sharpness=6.0)
    llm = LLM(target, tiny.tokenizer, LoadOptions(drafter="suffix"))
    if is_faulty:
        llm.policy.rule = ACCEPT_ALL.rule
    with running(lambda feed: llm, prove_every=1) as server, server.client() as client:
        client.post("/v1/completions", json={**ASKED, "temperature": 1.0}).raise_for_status()
        wait_until(lambda: figures(client)[0] >= 3)
        wait_until(lambda: llm.engine.num_live == 0)
        steps, differences = figures(client)
        told = client.get("/page/info").json()["proof"]
    assert bool(differences) is is_faulty
    assert differences <= steps
    assert told["every"] == 1
    assert bool(told["differences"]) is is_faulty


def test_without_the_option_nothing_is_proven(tiny: LLM) -> None:  # noqa: F811
    with running(lambda feed: tiny) as server, server.client() as client:
        client.post("/v1/completions", json=ASKED).raise_for_status()
        assert figures(client) == (0.0, 0.0)
        assert client.get("/page/info").json()["proof"] is None
