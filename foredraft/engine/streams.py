"""Several readers on one engine: each sees the events of its own requests, and all of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from foredraft.core.params import SamplingParams
from foredraft.engine.engine import Engine, Event
from foredraft.engine.row import Session


class Streams:
    """Whoever reads drives the engine; what a step brings others waits in their inboxes.

    Args:
        engine: stepped from one thread at a time.
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
            for prompt in prompts:
                ids.append(self._engine.submit(prompt, params, session))
                self._inboxes[ids[-1]] = deque()
            while events := self._arrived(ids):
                yield from events
        finally:
            for request_id in ids:
                self._engine.cancel(request_id)
                del self._inboxes[request_id]

    def _arrived(self, ids: Sequence[int]) -> list[Event]:
        """What came for these requests, after as many steps as it takes; nothing: all are over."""
        inboxes = [self._inboxes[i] for i in ids]
        while not any(inboxes) and any(self._engine.is_live(i) for i in ids):
            for event in self._engine.step():
                if event.request_id in self._inboxes:  # else submitted past these streams
                    self._inboxes[event.request_id].append(event)
        return [inbox.popleft() for inbox in inboxes for _ in range(len(inbox))]
