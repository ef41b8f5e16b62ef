"""Several readers on one engine: each sees the events of its own requests, and all of them."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence, Set

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

    def open(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        session: Session | None = None,
        tenant: str | None = None,
    ) -> Iterator[Event]:
        """Submit requests and yield their events until all are over.

        Closing the iterator early cancels what is unfinished. Nothing is submitted before the
        first event is asked for, and nothing generated unless every prompt is accepted.

        Raises:
            PromptError, ConfigError: as `Engine.submit`.
        """
        engine, inbox, live = self._engine, deque[Event](), set[int]()
        # Preparing may wait for a grammar to be compiled, and others go on meanwhile.
        prepared = [engine.prepare(prompt, params, session, tenant) for prompt in prompts]
        try:
            with engine.lock:
                for rows in prepared:
                    live.update(row.request_id for row in rows)
                    engine.add(rows, inbox.append)
            while live:
                self._drive(inbox, live)
                if not inbox:  # an interrupt swallowed the last event
                    break
                while inbox:
                    event = inbox.popleft()
                    if event.result is not None:
                        live.discard(event.request_id)
                    yield event
        finally:
            # A stream that is still open when the interpreter ends: nothing is there to be tidy in.
            if not sys.is_finalizing():
                for request_id in live:
                    engine.cancel(request_id)

    def _drive(self, inbox: deque[Event], live: Set[int]) -> None:
        """Step until something has arrived, also by another thread, or nothing will."""
        while not inbox:
            with self._engine.lock:
                if inbox or not any(self._engine.is_live(i) for i in live):
                    return
                self._engine.step()
