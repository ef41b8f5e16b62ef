"""`foredraft run-batch` end to end, on a tiny checkpoint."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from foredraft import LLM, SamplingParams
from foredraft.server.batch import AnswerFile, BatchSummary, in_process, run_batch
from tests.cli.conftest import Run

pytest.importorskip("foredraft.server.app")

PROMPTS = ["The ferry", "A draft is", "Straße"]


def write(path: Path, bodies: list[dict[str, Any]]) -> Path:
    lines = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body}
        for i, body in enumerate(bodies)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def answers(path: Path) -> dict[str, Any]:
    return {line["custom_id"]: line["response"] for line in map(json.loads, path.open())}


def test_answers_are_those_of_the_model(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    asked = {"model": "tiny", "max_tokens": 8, "temperature": 1.0, "ignore_eos": True}
    bodies = [asked | {"prompt": text, "seed": i} for i, text in enumerate(PROMPTS)]
    path = write(tmp_path / "in.jsonl", [*bodies, asked | {"prompt": "x", "top_p": 7}])
    done = run("run-batch", str(path), "--served-model-name", "tiny", "--json")
    summary = json.loads(done.stdout)
    assert (summary["answered"], summary["failed"], summary["skipped"]) == (3, 1, 0)
    assert summary["completion_tokens"] == 24
    assert done.exit_code == 1
    found = answers(tmp_path / "in.out.jsonl")
    llm = LLM.load(checkpoint, dtype="float32")
    for i, text in enumerate(PROMPTS):
        params = SamplingParams(max_tokens=8, temperature=1.0, ignore_eos=True, seed=i)
        expected = llm.generate(text, params)[0].text
        assert found[f"r{i}"]["body"]["choices"][0]["text"] == expected
    assert found["r3"]["status_code"] == 400
    assert "top_p" in found["r3"]["body"]["error"]["message"]
    again = run("run-batch", str(path), "--served-model-name", "tiny", "--json")
    summary = json.loads(again.stdout)
    assert (summary["skipped"], summary["failed_before"]) == (4, 1)
    assert again.exit_code == 1


def test_what_a_server_could_not_answer_is_asked_again(tmp_path: Path) -> None:
    """And an exception costs its own line."""
    path = write(tmp_path / "in.jsonl", [{"prompt": str(i)} for i in range(8)])
    codes = dict(enumerate([200, 400, 408, 409, 429, 500, 503]))

    def new_app(when_loaded: Any) -> FastAPI:
        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            app.state.context = SimpleNamespace(failure=None)
            when_loaded(None)
            yield

        app = FastAPI(lifespan=lifespan)

        @app.exception_handler(Exception)
        async def failed(request: Request, error: Exception) -> JSONResponse:
            return JSONResponse({}, 500)

        @app.post("/v1/completions")
        async def answer(body: dict[str, Any]) -> JSONResponse:
            if body["prompt"] == "7":
                raise ValueError
            return JSONResponse(body, codes[int(body["prompt"])])

        return app

    async def one_run() -> tuple[BatchSummary, int]:
        with AnswerFile(tmp_path / "out.jsonl") as file:
            async with in_process(new_app) as ask:
                return await run_batch(path, file, ask, 2), file.num_failed

    summary, _ = asyncio.run(one_run())
    assert (summary.answered, summary.failed, summary.skipped) == (1, 7, 0)
    codes |= dict.fromkeys(range(2, 7), 200)
    summary, num_failed = asyncio.run(one_run())
    assert (summary.answered, summary.failed, summary.skipped) == (5, 1, 2)
    assert num_failed == 1, "400 stays"
    assert answers(tmp_path / "out.jsonl")["r3"]["status_code"] == 200


def test_what_cannot_be_asked_is_said_before_a_model_is_loaded(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", [{}])
    same = run("run-batch", str(path), "--output", str(path))
    assert "same file" in str(same.exception)
    path.write_text("{}\n")
    assert "custom_id must be text" in str(run("run-batch", str(path)).exception)


@pytest.mark.slow
def test_a_cluster_gives_the_same_answers(
    run: Run, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines of Ray; what the file holds already is not asked again."""
    pytest.importorskip("ray", reason="clusters need foredraft[ray]")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # a token is read as Ray is imported: too late
    asked = {"model": "tiny", "max_tokens": 8, "temperature": 1.0, "ignore_eos": True}
    path = write(tmp_path / "in.jsonl", [asked | {"prompt": "The", "seed": i} for i in range(6)])
    here, there = str(tmp_path / "here.jsonl"), str(tmp_path / "there.jsonl")
    options = ("run-batch", str(path), "--served-model-name", "tiny", "--json")
    assert run(*options, "-o", here).exit_code == 0
    cluster = ("--ray", "--replicas", "2", "--threads", "1")
    done = run(*options, "-o", there, *cluster)
    assert done.exit_code == 0, done.output
    texts = [
        {key: value["body"]["choices"][0]["text"] for key, value in answers(Path(file)).items()}
        for file in (here, there)
    ]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 6
    summary = json.loads(run(*options, "-o", there, *cluster).stdout)
    assert (summary["answered"], summary["skipped"]) == (0, 6)
