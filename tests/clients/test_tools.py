"""Programs that people use, run as they are, against a server in this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.conftest import Running

BIN = Path(sys.executable).parent
_OPENAI_TESTS = "OPENAI_TESTS"
"""Names the unpacked source package of the openai SDK, whose tests are not in its wheel."""


def run(*arguments: str, timeout: int = 280, cwd: Path | None = None, **environment: str) -> str:
    """The output of a program of this environment; it must succeed."""
    if not (BIN / arguments[0]).exists():
        pytest.skip(f"{arguments[0]} is not installed")
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [str(BIN / arguments[0]), *arguments[1:]],
        env={**os.environ, **offline, **environment},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_llm(server: Running, tmp_path: Path) -> None:
    models = f"- model_id: ours\n  model_name: tiny\n  api_base: {server.url}/v1\n"
    (tmp_path / "extra-openai-models.yaml").write_text(models)
    text = run(
        *("llm", "-m", "ours", "-o", "max_tokens", "8", "Where is the ferry?"),
        LLM_USER_PATH=str(tmp_path),
        OPENAI_API_KEY="unused",
    )
    assert text


def test_schemathesis(server: Running, tmp_path: Path) -> None:
    run(
        *("st", "run", f"{server.url}/openapi.json", "--max-examples", "20", "--phases"),
        *(
            "examples,coverage,fuzzing",
            "--checks",
            "not_a_server_error,response_schema_conformance",
        ),
        *("--exclude-path-regex", "^/page|^/$", "--request-timeout", "30"),
        cwd=tmp_path,  # it keeps what it finds there
    )


def test_lm_eval(server: Running, tmp_path: Path, tokenizer_directory: Path) -> None:
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"q": f"The ferry {i}", "a": " crosses"}) + "\n" for i in range(4))
    )
    (tmp_path / "task.yaml").write_text(
        "task: ferry\ndataset_path: json\noutput_type: loglikelihood\ntest_split: train\n"
        f"dataset_kwargs:\n  data_files: {tmp_path}/data.jsonl\n"
        "doc_to_text: '{{q}}'\ndoc_to_target: '{{a}}'\n"
        "metric_list:\n  - metric: perplexity\n  - metric: acc\n"
    )
    arguments = (
        f"base_url={server.url}/v1/completions,model=tiny,tokenizer_backend=huggingface,"
        f"tokenizer={tokenizer_directory},num_concurrent=2,max_length=512"
    )
    text = run(
        *("lm_eval", "run", "--model", "local-completions", "--model_args", arguments),
        *("--tasks", "ferry", "--include_path", str(tmp_path)),
        HF_HOME=str(tmp_path / "hf"),
    )
    assert "perplexity" in text


def test_guidellm(server: Running, tmp_path: Path, tokenizer_directory: Path) -> None:
    run(
        *("guidellm", "run", "--backend", f"kind=openai_http,target={server.url},model=tiny"),
        *("--tokenizer", f"kind=hf_auto,model={tokenizer_directory}"),
        *("--data", "kind=synthetic_text,prompt_tokens=20,output_tokens=8"),
        *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=10"),
        *("--output", f"kind=json,path={tmp_path}/report.json"),
    )


def test_aiperf(server: Running, tmp_path: Path, tokenizer_directory: Path) -> None:
    """It reads accepted drafts of each request and of the whole run."""
    aiperf, out = os.environ.get("AIPERF", "aiperf"), tmp_path / "run" / "coding"
    # Offline it looks for tokenizers in the hub's cache alone, and not in folders.
    local = {"HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": ""}
    run(
        *(aiperf, "profile", "--model", "tiny", "--url", server.url, "--endpoint-type", "chat"),
        *("--streaming", "--tokenizer", str(tokenizer_directory), "--isl", "40", "--osl", "32"),
        *("--request-count", "4", "--ui", "none", "--output-artifact-dir", str(out)),
        **local,
    )
    lines = (out / "profile_export.jsonl").read_text().splitlines()
    steps = [json.loads(line)["metrics"]["spec_decode_steps"]["value"] for line in lines]
    assert len(steps) == 4
    assert sum(steps) > 0
    whole = json.loads((out / "server_metrics_export.json").read_text())["metrics"]
    assert "vllm:spec_decode_num_drafts" in whole


def test_the_openai_sdks_own_tests(server: Running) -> None:
    directory = os.environ.get(_OPENAI_TESTS)
    if directory is None:
        pytest.skip(f"{_OPENAI_TESTS} names no source package of openai")
    from tests.clients.openai_exceptions import DESELECTED, FILES

    pytest_arguments = ("-q", "-p", "no:benchmark", "-p", "no:xdist", "-o", "addopts=")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *pytest_arguments, *FILES, "-k", DESELECTED],
        cwd=directory,
        env={**os.environ, "TEST_API_BASE_URL": f"{server.url}/v1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
