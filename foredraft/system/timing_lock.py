"""One lock for timing: while a process measures, training and generation jobs pause.

It has two files: a measuring process takes a gate first, so that many training jobs, which release
and take the lock again and again, cannot keep it out for ever.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from foredraft.system.paths import cache_root

SWITCH = "FOREDRAFT_TIMING_LOCK"
_TO_OTHERS_S = 0.002
"""Seconds of sleep between releasing the lock and taking it again, so that processes that do not
use the gate can get it."""


def lock_path(environment: Mapping[str, str] = os.environ) -> Path:
    """The lock file: ``$FOREDRAFT_TIMING_LOCK``, or in foredraft's cache."""
    named = environment.get(SWITCH)
    return Path(named).expanduser() if named else cache_root(environment) / "timing.lock"


@contextmanager
def measuring(say: Callable[[str], None], path: Path | None = None) -> Iterator[None]:
    """Hold the machine for a measurement: processes that heed the lock pause meanwhile.

    Args:
        say: called with a message where other processes are waited for.
    """
    with ExitStack() as held:
        for file in _files(path or lock_path(), held):
            _take(file, say)
        yield


class Heed:
    """Pauses while another process measures; call it often, between pieces of work.

    Between two calls it holds its share of the lock, so a measurement begins when the piece of work
    at hand is done.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._held = ExitStack()
        self._gate, self._lock = (*_files(path or lock_path(), self._held), None, None)[:2]

    def __enter__(self) -> Heed:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def __call__(self) -> float:
        """Wait while another process measures.

        Returns:
            Seconds waited.
        """
        if self._gate is None or self._lock is None:
            return 0.0
        began = time.monotonic()
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        time.sleep(_TO_OTHERS_S)
        fcntl.flock(self._gate, fcntl.LOCK_SH)
        fcntl.flock(self._gate, fcntl.LOCK_UN)
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        return time.monotonic() - began


def _files(path: Path, held: ExitStack) -> list[IO[bytes]]:
    """Gate and lock, open; none if the folder cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        paths = (path.with_name(f"{path.name}.gate"), path)
        return [held.enter_context(each.open("ab")) for each in paths]
    except OSError:  # without a writable cache, work without the lock
        return []


def _take(file: IO[bytes], say: Callable[[str], None]) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say(f"waiting for a training step or another measurement to end ({file.name})")
        fcntl.flock(file, fcntl.LOCK_EX)
