"""Drive an engine by a thread of its own. Readers of `Engine.stream` drive it themselves."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from foredraft.core.errors import EngineStoppedError, QueueFullError
from foredraft.engine.engine import Engine
from foredraft.engine.policy import Policy
from foredraft.engine.request import Event, Request

_log = logging.getLogger("foredraft")

Command = Callable[[], None]
Receiver = Callable[[Event | EngineStoppedError], None]
"""Takes a request's events, or its error. Raises `RuntimeError` if the reader is gone."""


class EngineThread:
    """The engine's thread. It steps while there is work, and sleeps while there is none.

    Commands of other threads go through one queue and are executed between two steps.

    Args:
        engine: the engine to step.
        policy: the policy of the requests that it steps; None: the engine's own.
        send: called when receivers have new events: after each step, and after each command.
        idle: does a little background work while no request is live, and gets the seconds since the
            last step. It returns those after which it wants to be called again; None: only after
            there was work again.

    Attributes:
        problem: why it takes no more requests; None: it does.
        longest_step: seconds of the longest step so far.
    """

    def __init__(
        self,
        engine: Engine,
        policy: Policy | None = None,
        send: Command = lambda: None,
        idle: Callable[[float], float | None] = lambda seconds: None,
    ) -> None:
        self._engine, self._policy, self._send, self._idle = engine, policy, send, idle
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()  # safe in finalizers
        self._receivers: dict[int, Receiver] = {}  # of the replies under way; the thread's own
        self._changed = threading.Condition()
        self._num_live = 0  # replies promised and not over
        self._stopping = self._is_over = False
        self.problem: str | None = None
        self.longest_step, self._last_step = 0.0, time.monotonic()
        self._step_began: float | None = None
        self._thread = threading.Thread(target=self._run, name="foredraft-engine", daemon=True)
        self._thread.start()

    @property
    def step_seconds(self) -> float:
        """Seconds that the present step has taken so far; 0 between two steps."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def enter(self, num_replies: int, limit: int) -> None:
        """Count a request in, or refuse it."""
        with self._changed:
            if self.problem is not None:
                raise EngineStoppedError(f"the engine takes no more requests: {self.problem}")
            if self._num_live + num_replies > limit:
                raise QueueFullError(
                    f"{self._num_live} requests are under way and {limit} are the most: try again "
                    "later, or raise max_waiting"
                )
            self._num_live += num_replies

    def leave(self, num_replies: int = 1) -> None:
        """Count it out, or one of its replies."""
        with self._changed:
            self._num_live -= num_replies
            self._changed.notify_all()

    def add(self, requests: Sequence[Request], receiver: Receiver) -> None:
        """Queue a request that was counted in."""
        with self._changed:
            if self._is_over:
                raise EngineStoppedError(f"the engine has stopped: {self.problem}")
            self._commands.put(lambda: self._add(requests, receiver))

    def abort(self, request_ids: Sequence[int]) -> None:
        self._commands.put(lambda: self._drop(request_ids))

    def wake(self) -> None:
        """Call `idle` again, if no request is live."""
        self._commands.put(lambda: None)

    def refuse(self, problem: str) -> None:
        """Take no further requests."""
        with self._changed:
            self.problem = self.problem or problem

    def wait_until_idle(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or not self._num_live)

    def stop(self) -> None:
        """Abort the live requests, and end the thread."""
        self.refuse("it was closed")
        self._stopping = True
        self.wake()
        if threading.current_thread() is not self._thread:  # as a finalizer may find itself
            self._thread.join()

    def _run(self) -> None:
        fault: EngineStoppedError | None = None
        try:
            while not self._stopping:
                idle_s = time.monotonic() - self._last_step
                self._obey(0.0 if self._receivers else self._idle(idle_s))
                if self._receivers:
                    self._step_began = time.monotonic()
                    self._engine.step(self._policy)
                    self.longest_step = max(self.longest_step, self.step_seconds)
                    self._step_began, self._last_step = None, time.monotonic()
                self._send()
        except BaseException as error:
            _log.critical("the engine's thread has failed: %s", error, exc_info=error)
            self.refuse(f"its thread failed ({type(error).__name__}: {error})")
            fault = EngineStoppedError(f"the engine has stopped: {self.problem}")
        self._end(fault)

    def _obey(self, seconds: float | None) -> None:
        """Execute queued commands; wait ``seconds`` for the first (None: for ever)."""
        try:
            while True:
                self._commands.get(timeout=seconds)()
                seconds = 0.0
        except queue.Empty:
            return

    def _add(self, requests: Sequence[Request], receiver: Receiver) -> None:
        self._receivers |= {each.request_id: receiver for each in requests}
        self._engine.add(requests, lambda event: self._deliver(event.request_id, event))

    def _deliver(self, request_id: int, event: Event | EngineStoppedError) -> None:
        receiver = self._receivers.get(request_id)
        if receiver is None:  # it has been sent the engine's fault
            return
        if isinstance(event, EngineStoppedError) or event.result is not None:
            del self._receivers[request_id]
            self.leave()
        try:
            receiver(event)
        except RuntimeError:  # its event loop is closed: the client is gone
            self.abort([request_id])
        if threading.current_thread() is not self._thread:  # another thread steps the engine
            self._send()

    def _drop(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            if request_id in self._receivers:
                self._engine.cancel(request_id)

    def _end(self, fault: EngineStoppedError | None) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._obey(0.0)
        for request_id in [*self._receivers]:
            if fault is not None:
                self._deliver(request_id, fault)
            try:
                self._engine.cancel(request_id)
            except Exception as error:  # of an engine that has failed already
                _log.debug("request %d could not be cancelled", request_id, exc_info=error)
        self._send()
