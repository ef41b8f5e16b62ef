"""Trace files: written as the steps come, read with every line checked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO, TypeVar

from pydantic import ValidationError

from foredraft.core.errors import ConfigError
from foredraft.models.text.tokenizer import Tokenizer
from foredraft.trace.format import VERSION, TracedRun, TracedStep
from foredraft.trace.record import Tracer
from foredraft.version import __version__

_T = TypeVar("_T", TracedRun, TracedStep)


class TraceFile:
    """A trace that is being written; a context manager that closes it.

    `begin` writes the first line, once the run is known; each step is flushed, so an interrupted
    run leaves a valid file.

    Args:
        path: an existing file is replaced.

    Raises:
        ConfigError: it cannot be written, now or later.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._named():
            self._file: TextIO = path.open("w", encoding="utf-8")

    def begin(self, **about: Any) -> None:
        """Write the first line; ``about``: fields of `TracedRun`."""
        started = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._write(TracedRun(foredraft=__version__, started=started, **about))

    def tracer(self, tokenizer: Tokenizer | None = None) -> Tracer:
        """The `Tracer` for an engine that writes to this file."""
        return Tracer(self._write, tokenizer)

    def _write(self, line: TracedRun | TracedStep) -> None:
        with self._named():
            self._file.write(line.model_dump_json() + "\n")
            self._file.flush()

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            problem = f"the trace {self._path} cannot be written: {error.strerror}"
            raise ConfigError(problem) from error

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(OSError):  # of a full disk, which `_write` has named
            self._file.close()


@dataclass(frozen=True)
class Trace:
    """A trace that was read."""

    run: TracedRun
    steps: tuple[TracedStep, ...]

    @property
    def request_ids(self) -> tuple[int, ...]:
        """In the order of their first steps."""
        return tuple(dict.fromkeys(row.request_id for step in self.steps for row in step.rows))


def read_trace(path: Path) -> Trace:
    """Read a trace file.

    Raises:
        ConfigError: it cannot be read, is no trace, or is of a version that is not known here;
            the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the trace {path} cannot be read: {error}") from error
    name = f"the trace {path}"
    if not lines:
        raise ConfigError(f"{name} is empty")
    run = _parsed(TracedRun, lines[0], name, 1)
    if run.version != VERSION:
        raise ConfigError(f"{name} is of version {run.version}, and this foredraft reads {VERSION}")
    steps = tuple(_parsed(TracedStep, line, name, i) for i, line in enumerate(lines[1:], start=2))
    return Trace(run, steps)


def _parsed(kind: type[_T], line: str, name: str, number: int) -> _T:
    try:
        return kind.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the line"
        raise ConfigError(
            f"{name}, line {number}, is no {kind.model_fields['type'].default} of a trace: "
            f"{where}: {first['msg']}"
        ) from error
