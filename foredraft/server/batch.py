"""Files of requests in OpenAI's batch format, answered by the server within this process.

A line of the input is ``{"custom_id": …, "method": "POST", "url": "/v1/chat/completions", "body":
{…}}``. A line of the output is ``{"id": …, "custom_id": …, "response": {"status_code": …,
"request_id": …, "body": {…}}, "error": null}``. Answers are appended as they come, in any order.
A request whose answer is in the output is not run again, but for answers that say that the
server could not answer then (408, 409, 429 and 500 to 599): the later answer counts.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from foredraft.core.checks import shown
from foredraft.core.errors import ConfigError, unknown

if TYPE_CHECKING:
    from fastapi import FastAPI

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""The routes that a request may name."""

_MAX_PROBLEMS = 5
_JSON = {"Content-Type": "application/json"}
_BEGINNING = b'{"id": "batch_req_'
"""How each line of the output begins."""


@dataclass(frozen=True)
class BatchRequest:
    """One line of the input."""

    custom_id: str
    url: str
    body: Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """The answer to one request."""

    status: int
    body: Mapping[str, Any]


Ask = Callable[[BatchRequest], Awaitable[Answer]]


def read_requests(path: Path) -> Iterator[BatchRequest]:
    """The requests of a file that has passed `check_requests`, one at a time."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _parse(number, line)


def check_requests(path: Path) -> list[str]:
    """Checks the whole file before anything runs, and returns the ids of its requests in order.

    Raises:
        ConfigError: lines that are no requests, or two with one id; the first few are named.
    """
    ids: dict[str, int] = {}
    problems: list[str] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                custom_id = _parse(number, line).custom_id
                if custom_id in ids:
                    raise ConfigError(
                        f"line {number}: custom_id {custom_id!r} is that of line {ids[custom_id]}"
                    )
                ids[custom_id] = number
            except ConfigError as error:
                problems.append(str(error))
    if problems:
        more = len(problems) - _MAX_PROBLEMS
        named = "\n  ".join(problems[:_MAX_PROBLEMS] + [f"and {more} more"] * (more > 0))
        raise ConfigError(f"{path} is no batch of requests; nothing was asked:\n  {named}")
    return list(ids)


def _parse(number: int, line: bytes) -> BatchRequest:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"line {number} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"line {number} must be a JSON object, not {shown(value)}")
    custom_id, url, body = (value.get(name) for name in ("custom_id", "url", "body"))
    if not isinstance(custom_id, str) or not custom_id:
        raise ConfigError(f"line {number}: custom_id must be text, not {shown(custom_id)}")
    if value.get("method", "POST") != "POST":
        raise ConfigError(f"line {number}: method must be POST, not {shown(value['method'])}")
    if url not in URLS:
        raise ConfigError(f"line {number}: {unknown('url', str(url), URLS)}")
    if not isinstance(body, dict):
        raise ConfigError(f"line {number}: body must be an object, not {shown(body)}")
    if body.get("stream"):
        raise ConfigError(f"line {number}: stream is of no use in a file; leave it out")
    return BatchRequest(custom_id, url, body)


class AnswerFile:
    """The output file. Answers are appended as whole lines.

    The answers of an interrupted run are kept; an unfinished last line is cut off.

    Args:
        path: the file, which is created if it does not exist.

    Attributes:
        answered: ids of the requests whose answers it holds, but for those to be asked again.
        num_failed: how many of the answers of earlier runs are errors that stay.

    Raises:
        ConfigError: the file holds something else, or another run is writing to it.
    """

    def __init__(self, path: Path) -> None:
        self.answered: set[str] = set()
        self.num_failed = 0
        self._file = path.open("ab")
        try:
            self._keep_others_out(path)
            with path.open("rb") as file:
                end = self._read(path, file)
            self._file.truncate(end)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def add(self, request: BatchRequest, answer: Answer) -> None:
        """Append an answer; it is whole in the file, or not there."""
        request_id = str(answer.body.get("id") or f"batch_{request.custom_id}")
        value = {
            "id": f"batch_req_{request.custom_id}",
            "custom_id": request.custom_id,
            "response": {
                "status_code": answer.status,
                "request_id": request_id,
                "body": answer.body,
            },
            "error": None,
        }
        line = json.dumps(value, ensure_ascii=False) + "\n"
        self._file.write(line.encode("utf-8", "replace"))
        self._file.flush()
        self.answered.add(request.custom_id)

    def _keep_others_out(self, path: Path) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another run is writing to {path}: wait for it, or give another --output"
            ) from None

    def _read(self, path: Path, file: BinaryIO) -> int:
        """Read the existing answers; returns the end of the last whole line."""
        end = 0
        for number, line in enumerate(file, start=1):
            is_ours = line.startswith(_BEGINNING) or _BEGINNING.startswith(line)
            if is_ours and not line.endswith(b"\n"):
                break  # cut off when it was written
            try:
                value = json.loads(line)
                custom_id, status = value["custom_id"], value["response"]["status_code"]
                is_final = status < 500 and status not in (408, 409, 429)
                if is_final:  # the same request will not get a reply another time
                    self.answered.add(custom_id)
                    self.num_failed += status != 200
            except (ValueError, LookupError, TypeError):
                raise ConfigError(
                    f"line {number} of {path} is no answer of a batch: give another --output, or "
                    "move the file away"
                ) from None
            end += len(line)
        return end


@dataclass
class BatchSummary:
    """The result of a run.

    Attributes:
        answered: requests that got a reply.
        failed: requests that were refused or went wrong; their answers say why.
        skipped: requests that had been answered before.
    """

    answered: int = 0
    failed: int = 0
    skipped: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, answer: Answer) -> None:
        if answer.status == 200:
            self.answered += 1
        else:
            self.failed += 1
        usage = answer.body.get("usage") or {}
        self.prompt_tokens += usage.get("prompt_tokens") or usage.get("input_tokens") or 0
        self.completion_tokens += usage.get("completion_tokens") or usage.get("output_tokens") or 0


async def run_batch(
    path: Path,
    answers: AnswerFile,
    ask: Ask,
    concurrency: int,
    on_answer: Callable[[BatchSummary], object] = lambda summary: None,
) -> BatchSummary:
    """Run the requests that have no answer yet, several at a time."""
    summary = BatchSummary()
    requests = read_requests(path)

    async def work() -> None:
        for request in requests:
            if request.custom_id in answers.answered:
                summary.skipped += 1
                continue
            answer = await ask(request)
            answers.add(request, answer)
            summary.add(answer)
            on_answer(summary)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
    return summary


@asynccontextmanager
async def in_process(new_app: Callable[..., FastAPI]) -> AsyncIterator[Ask]:
    """A server in this process, called without a network.

    A call that is cancelled ends like a connection that closes.

    Args:
        new_app: makes it, and takes ``when_loaded`` as `create_app` does.
    """
    import httpx  # here, like the server: reading a file needs neither

    loaded = asyncio.Event()
    app = new_app(when_loaded=lambda context: loaded.set())
    calls = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=calls, base_url="http://127.0.0.1") as client,
    ):
        await loaded.wait()
        if app.state.context.failure is not None:
            raise app.state.context.failure

        async def ask(request: BatchRequest) -> Answer:
            body = json.dumps(request.body)  # as ASCII: a text may hold half a surrogate pair
            answer = await client.post(request.url, content=body, headers=_JSON)
            return Answer(answer.status_code, answer.json())

        yield ask
