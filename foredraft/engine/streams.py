"""Several readers on one engine: each sees the events of its own requests, and all of them."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence

from foredraft.cache.prefix import Session
from foredraft.core.params import SamplingParams
from foredraft.engine.engine import Engine, Event


class Streams:
    """Whoever reads drives the engine; what a step brings others waits in their inboxes.

    Readers may be in several threads: they take turns at driving.

    Args:
        engine: what runs the requests.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inboxes: dict[int, deque[Event]] = {}

    def open(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        session: Session | None = None,
    ) -> Iterator[Event]:
        """Submit requests and yield their events until all are over.

        Closing the iterator early cancels what is unfinished. Nothing is submitted before the
        first event is asked for, and nothing generated unless every prompt is accepted.

        Raises:
            PromptError, ConfigError: as `Engine.submit`.
        """
        ids: list[int] = []
        try:
            with self._engine.lock:
                for prompt in prompts:
                    ids.append(self._engine.submit(prompt, params, session))
                    self._inboxes[ids[-1]] = deque()
            while events := self._arrived(ids):
                yield from events
        finally:
            # A stream that is still open when the interpreter ends: nothing is there to be tidy in.
            if not sys.is_finalizing():
                for request_id in ids:
                    self._engine.cancel(request_id)
                    del self._inboxes[request_id]

    def _arrived(self, ids: Sequence[int]) -> list[Event]:
        """What came for these requests, after as many steps as it takes; nothing: all are over."""
        inboxes = [self._inboxes[i] for i in ids]
        while True:
            with self._engine.lock:
                if any(inboxes) or not any(self._engine.is_live(i) for i in ids):
                    return [inbox.popleft() for inbox in inboxes for _ in range(len(inbox))]
                for event in self._engine.step():
                    if event.request_id in self._inboxes:  # else submitted past these streams
                        self._inboxes[event.request_id].append(event)
