"""docs/operate says what the server does: fields, settings, metrics, the dashboard."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from foredraft.options import LoadOptions
from foredraft.server.dialects.chat import ChatRequest
from foredraft.server.dialects.completions import CompletionRequest
from foredraft.server.dialects.fields import Refused, RequestBody
from foredraft.server.dialects.messages import MessagesRequest
from foredraft.server.dialects.responses import ResponsesRequest
from foredraft.server.settings import ServerSettings
from foredraft.version import __version__
from tests.server.marks import honoured, refusals

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "operate" / "server.md"
API = DOCS / "operate" / "api.md"


MODELS: dict[str, type[RequestBody]] = {
    "chat": ChatRequest,
    "completions": CompletionRequest,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
}


def names(fields: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(fields))


def refusal_rows() -> Iterator[str]:
    """A row for each field and reason, with the APIs that it belongs to."""
    rows: list[tuple[str, Refused, list[str]]] = []
    for api, model in MODELS.items():
        for name, mark in refusals(model).items():
            where = next((where for n, m, where in rows if (n, m) == (name, mark)), None)
            if where is None:
                rows.append((name, mark, [api]))
            else:
                where.append(api)
    for name, mark, where in sorted(rows, key=lambda row: row[0]):
        values = [f"`{json.dumps(value)}`" for value in mark.harmless]
        yield f"| `{name}` | {', '.join(where)} | {mark.why} | {', '.join(values) or 'none'} |"


def fields() -> str:
    by_api = {api: set(honoured(model)) for api, model in MODELS.items()}
    everywhere = set.intersection(*by_api.values())
    lines = [f"**All** honour {names(everywhere)}."]
    for api in MODELS:
        lines.append(f"**{api.capitalize()}** also {names(by_api[api] - everywhere)}.")
    head = "| refused | in | because | values that are accepted |\n|---|---|---|---|\n"
    return "\n\n".join([*lines, head + "\n".join(refusal_rows())])


def settings() -> str:
    rows = ["| variable | default | |", "|---|---|---|"]
    for name, field in ServerSettings.model_fields.items():
        default = field.default
        shown = f"`{str(default).lower() if isinstance(default, bool) else default}`"
        shown = "none" if default is None or default == () else shown
        text = " ".join((field.description or "").split())
        rows.append(f"| `FOREDRAFT_{name.upper()}` | {shown} | {text} |")
    return "\n".join(rows)


@pytest.mark.parametrize(
    ("part", "page"), [(fields, API), (settings, PAGE)], ids=["fields", "settings"]
)
def test_the_lists_are_those_of_the_code(part: Any, page: Path) -> None:
    text = page.read_text()
    found = re.search(
        rf"(<!-- {part.__name__}:.*?-->\n)(.*?)(<!-- /{part.__name__} -->)", text, re.S
    )
    assert found is not None
    written = f"{found[1]}{part()}\n{found[3]}"
    if os.environ.get("FOREDRAFT_WRITE"):
        page.write_text(text.replace(found[0], written))
        return
    assert found[0] == written, "FOREDRAFT_WRITE=1 pytest tests/server/test_docs.py writes them"


def test_metrics_that_docs_and_dashboard_name_are_there(measured: httpx.Client) -> None:
    text = measured.get("/metrics").text
    there = set(re.findall(r"^# TYPE (foredraft:\w+) ", text, re.MULTILINE))
    dashboard = (DOCS / "operate" / "grafana.json").read_text()
    json.loads(dashboard)
    assert {"foredraft:num_preemptions", "foredraft:num_preemptions_total"} & there
    assert "vllm:spec_decode_num_drafts_total" in text
    alerts = (DOCS / "operate" / "deploy.md").read_text()
    for name in set(re.findall(r"foredraft:\w+", dashboard + alerts)):
        assert name in there or re.sub("_(bucket|sum|count)$", "", name) in there, name
    for family in (
        *("spec_decode_num_drafts", "spec_decode_num_accepted_tokens_per_pos", "step_time_seconds"),
        *("estimated_time_saved", "ledger_balance", "num_requests_waiting", "kv_cache_usage_perc"),
    ):
        assert family in dashboard


@pytest.mark.parametrize("name", ["Containerfile", "compose.yaml", "foredraft.service"])
def test_files_for_deploying_name_settings_and_options_that_exist(name: str) -> None:
    text = (DOCS.parent / "examples" / "deploy" / name).read_text()
    known = {f"FOREDRAFT_{name}".upper() for name in ServerSettings.model_fields}
    assert set(re.findall(r"FOREDRAFT_\w+", text)) <= known
    options = {f"--{name}".replace("_", "-") for name in ServerSettings.model_fields}
    options |= {f"--{each.name}".replace("_", "-") for each in dataclasses.fields(LoadOptions)}
    served = re.findall(r"(?:serve|\[serve),? ([^]\n]*)", text)
    for flag in re.findall(r"--[a-z-]+", " ".join(served)):
        assert flag in options | {"--log-requests"}, flag


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_container_image_is_built_and_runs() -> None:
    name, file = "foredraft-test", "examples/deploy/Containerfile"
    base = re.findall(r"^FROM (\S+)", (DOCS.parent / file).read_text(), re.MULTILINE)[-1]
    for tool in filter(shutil.which, ("podman", "docker")):
        trial = [tool, "run", "--rm", base, "true"]  # "info" succeeds where no container may run
        if subprocess.run(trial, capture_output=True, check=False).returncode == 0:
            break
    else:
        pytest.skip(f"neither podman nor docker runs a container of {base}")
    subprocess.run([tool, "build", "-f", file, "-t", name, "."], cwd=DOCS.parent, check=True)
    said = subprocess.check_output([tool, "run", "--rm", name, "--version"], text=True)
    assert __version__ in said
    writable = ["run", "--rm", "--entrypoint", "test", name, "-w", "/home/foredraft/.cache"]
    subprocess.run([tool, *writable], check=True)


def test_every_route_of_the_document_is_described(client: httpx.Client) -> None:
    page = PAGE.read_text()
    for path, methods in client.get("/openapi.json").json()["paths"].items():
        assert f"{next(iter(methods)).upper()} {path}`" in page, path
