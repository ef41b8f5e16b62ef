"""Batch files: what is refused before anything is asked, and that a run goes on where it was."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from foredraft.core.errors import ConfigError
from foredraft.server.batch import (
    Answer,
    AnswerFile,
    BatchRequest,
    BatchSummary,
    check_requests,
    read_requests,
    run_batch,
)

URL = "/v1/chat/completions"


def request(custom_id: str, **more: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": custom_id}]}
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": body} | more


def write(path: Path, values: list[Any]) -> Path:
    texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
    path.write_text("\n".join(texts) + "\n")
    return path


async def echo(asked: BatchRequest) -> Answer:
    await asyncio.sleep(0)
    if "bad" in asked.custom_id:
        return Answer(400, {"error": {"message": "no"}})
    return Answer(200, {"id": "x", "usage": {"prompt_tokens": 3, "completion_tokens": 2}})


def run(path: Path, output: Path, ask: Any = echo, concurrency: int = 3) -> BatchSummary:
    with AnswerFile(output) as answers:
        return asyncio.run(run_batch(path, answers, ask, concurrency))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_request_gets_one_answer(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", [request("a"), "", request("bad"), request("é\ud83d")])
    assert check_requests(path) == ["a", "bad", "é\ud83d"]
    summary = run(path, tmp_path / "out.jsonl")
    assert summary == BatchSummary(
        answered=2, failed=1, skipped=0, prompt_tokens=6, completion_tokens=4
    )
    found = {line["custom_id"]: line for line in lines(tmp_path / "out.jsonl")}
    assert found["a"] == {
        "id": "batch_req_a",
        "custom_id": "a",
        "response": {
            "status_code": 200,
            "request_id": "x",
            "body": {"id": "x", "usage": {"prompt_tokens": 3, "completion_tokens": 2}},
        },
        "error": None,
    }
    assert found["bad"]["response"]["status_code"] == 400
    assert len(found) == 3


def test_a_request_that_the_server_could_not_answer_is_asked_again(tmp_path: Path) -> None:
    path, output = write(tmp_path / "in.jsonl", [request("a"), request("bad")]), tmp_path / "out"

    async def busy(asked: BatchRequest) -> Answer:
        return Answer(400 if "bad" in asked.custom_id else 503, {})

    assert run(path, output, busy).failed == 2
    with AnswerFile(output) as answers:
        assert (answers.answered, answers.num_failed) == ({"bad"}, 1)
    summary = run(path, output)
    assert (summary.answered, summary.failed, summary.skipped) == (1, 0, 1)
    statuses = {line["custom_id"]: line["response"]["status_code"] for line in lines(output)}
    assert statuses == {"a": 200, "bad": 400}, "the later answer counts"
    with AnswerFile(output) as answers:
        assert answers.answered == {"a", "bad"}


def test_so_many_at_a_time_and_no_more(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", [request(str(i)) for i in range(20)])
    running, most = 0, 0

    async def ask(asked: BatchRequest) -> Answer:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return Answer(200, {})

    assert run(path, tmp_path / "out.jsonl", ask, concurrency=4).answered == 20
    assert most == 4


@pytest.mark.parametrize("torn", ["", '{"id"', '{"id": "batch_req_7", "custom_id": "7", "resp'])
def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path, torn: str) -> None:
    path = write(tmp_path / "in.jsonl", [request(str(i)) for i in range(9)])
    output = tmp_path / "out.jsonl"

    async def dies(asked: BatchRequest) -> Answer:
        if asked.custom_id == "5":
            raise KeyboardInterrupt
        return Answer(200, {})

    with pytest.raises(BaseException):
        run(path, output, dies, concurrency=1)
    with output.open("a") as file:
        file.write(torn)
    summary = run(path, output)
    assert (summary.skipped, summary.answered) == (5, 4)
    assert sorted(line["custom_id"] for line in lines(output)) == [str(i) for i in range(9)]
    assert run(path, output).skipped == 9


def test_two_runs_do_not_write_to_one_file(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with AnswerFile(output) as first:
        first.add(BatchRequest("a", URL, {}), Answer(400, {"error": {"message": "no"}}))
        with pytest.raises(ConfigError, match="another run is writing"):
            AnswerFile(output)
    with AnswerFile(output) as later:
        assert (later.answered, later.num_failed) == ({"a"}, 1)


@pytest.mark.parametrize("content", ["my novel", "my novel\n", "[1]\n", '{"a": 1}\n'])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, content: str) -> None:
    output = tmp_path / "novel.txt"
    output.write_text(content)
    with pytest.raises(ConfigError, match="no answer of a batch"):
        AnswerFile(output)
    assert output.read_text() == content


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "line 2 is not JSON"),
        ([1], "line 2 must be a JSON object"),
        (request(""), "custom_id must be text"),
        (request("a"), "custom_id 'a' is that of line 1"),
        (request("b", method="GET"), "method must be POST"),
        (request("b", url="/v1/chat/completion"), "did you mean '/v1/chat/completions'"),
        (request("b", body=[]), "body must be an object"),
        (request("b", body={"stream": True}), "stream is of no use"),
    ],
)
def test_a_line_that_is_no_request_is_named_before_anything_is_asked(
    tmp_path: Path, value: Any, message: str
) -> None:
    path = write(tmp_path / "in.jsonl", [request("a"), value, request("c")])
    with pytest.raises(ConfigError, match="nothing was asked") as refused:
        check_requests(path)
    assert message in str(refused.value)


def test_many_bad_lines_are_not_all_listed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="and 7 more"):
        check_requests(write(tmp_path / "in.jsonl", ["?"] * 12))


def test_requests_are_read_one_at_a_time(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", [request("a"), request("b")])
    found = read_requests(path)
    assert next(found).custom_id == "a"
    assert next(found) == BatchRequest("b", URL, request("b")["body"])
