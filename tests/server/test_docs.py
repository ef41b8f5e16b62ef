"""docs/operate/server.md says what the server does: fields, settings, metrics, the dashboard."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from foredraft.server import messages_input as messages
from foredraft.server import responses_input as responses
from foredraft.server.dialects import fields as chat
from foredraft.server.settings import ServerSettings

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "operate" / "server.md"


def names(fields: Any) -> str:
    return ", ".join(f"`{name}`" for name in sorted(fields))


def refusals(table: Mapping[str, tuple[str, tuple[Any, ...]]]) -> Iterator[str]:
    for name, (reason, harmless) in sorted(table.items()):
        taken = ", ".join(f"`{json.dumps(value)}`" for value in harmless) or "none"
        yield f"| `{name}` | {reason} | {taken} |"


def fields() -> str:
    honoured = chat.HONOURED
    table = (
        "| refused | because | values that are taken, as they ask for nothing |\n|---|---|---|\n"
    )
    return "\n\n".join(
        [
            f"**Chat** honours {names(honoured['chat'])}.",
            f"**Completions** honour {names(honoured['completions'])}.",
            f"**Without effect** in both: {names(chat.HINTS)}.",
            table + "\n".join(refusals(chat.REFUSED)),
            "(`best_of` may equal `n`. `logprobs` is a flag in chat and a number in completions.)",
            f"**Responses** honour {names(responses.HONOURED)}, and as in chat "
            f"{names(responses.EXTRAS)}. Without effect: {names(responses.IGNORED)}.",
            table + "\n".join(refusals(responses.REFUSED)),
            f"**Messages** honour {names(messages.HONOURED)}, and as in chat "
            f"{names(messages.EXTRAS)}. Without effect: {names(messages.IGNORED)}.",
            table + "\n".join(refusals(messages.REFUSED)),
        ]
    )


def settings() -> str:
    rows = ["| variable | default |", "|---|---|"]
    for name, field in ServerSettings.model_fields.items():
        default = field.default
        shown = "none" if default in (None, (), False) else f"`{default}`"
        rows.append(f"| `FOREDRAFT_{name.upper()}` | {shown} |")
    return "\n".join(rows)


@pytest.mark.parametrize("part", [fields, settings], ids=["fields", "settings"])
def test_the_lists_are_those_of_the_code(part: Any) -> None:
    text = PAGE.read_text()
    found = re.search(
        rf"(<!-- {part.__name__}:.*?-->\n)(.*?)(<!-- /{part.__name__} -->)", text, re.S
    )
    assert found is not None
    written = f"{found[1]}{part()}\n{found[3]}"
    if os.environ.get("FOREDRAFT_WRITE"):
        PAGE.write_text(text.replace(found[0], written))
        return
    assert found[0] == written, "FOREDRAFT_WRITE=1 pytest tests/server/test_docs.py writes them"


def test_metrics_that_docs_and_dashboard_name_are_there(client: httpx.Client) -> None:
    text = client.get("/metrics").text
    there = set(re.findall(r"^# TYPE (foredraft:\w+) ", text, re.MULTILINE))
    dashboard = (DOCS / "operate" / "grafana.json").read_text()
    json.loads(dashboard)
    assert {"foredraft:num_preemptions", "foredraft:num_preemptions_total"} & there
    for name in set(re.findall(r"foredraft:\w+", dashboard)):
        assert name in there or re.sub("_(bucket|sum|count)$", "", name) in there, name
    for family in (
        *("spec_decode_num_drafts", "spec_decode_num_accepted_tokens_per_pos", "step_time_seconds"),
        *("estimated_time_saved", "ledger_balance", "num_requests_waiting", "kv_cache_usage_perc"),
    ):
        assert family in dashboard


def test_every_route_of_the_document_is_described(client: httpx.Client) -> None:
    page = PAGE.read_text()
    for path, methods in client.get("/openapi.json").json()["paths"].items():
        assert f"{next(iter(methods)).upper()} {path}`" in page, path
