"""Steps of the engine, handed to whoever watches."""

from __future__ import annotations

import logging
from collections.abc import Callable

from foredraft.core.record import StepRecord

_log = logging.getLogger("foredraft.server")

Watcher = Callable[[StepRecord], None]


class StepFeed:
    """A trace for an engine, which passes each step on.

    Watchers are called on the engine's thread between two steps: they must be quick. One that
    raises is dropped.

    Attributes:
        wants_evidence: whether verdicts are to say what they were decided on (`Tracer`).
    """

    wants_evidence = False

    def __init__(self) -> None:
        self._watchers: tuple[Watcher, ...] = ()

    def add(self, watcher: Watcher) -> None:
        self._watchers = (*self._watchers, watcher)

    def remove(self, watcher: Watcher) -> None:
        self._watchers = tuple(each for each in self._watchers if each != watcher)

    def __call__(self, record: StepRecord) -> None:
        for watcher in self._watchers:
            try:
                watcher(record)
            except Exception as error:
                self.remove(watcher)
                _log.warning("a watcher of steps failed and is dropped: %s", error, exc_info=error)
