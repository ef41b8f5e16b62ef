"""Which engines of a cluster are alive, as a gate sees them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any

import ray
from ray.serve.context import _get_global_client

_log = logging.getLogger("foredraft.cluster")
_LOOK = 1.0
"""Seconds between two looks for engines."""
_PERIOD = 0.5
"""Seconds from an engine's answer to the next question."""
_HAND_OVER = 1.0
"""Seconds in which an engine is ended and its replies are asked for elsewhere."""
_SLICE = 0.1
"""Seconds of a wait: where this process stands still, two of them pass at most."""


class RayActors:
    """The replicas of a deployment of Ray Serve."""

    def __init__(self, application: str, deployment: str) -> None:
        self._application, self._deployment = application, deployment
        self._found: dict[str, Any] = {}

    def beat(self, name: str) -> Awaitable[object]:
        """Done when the process has answered; raises if it is gone."""
        answer: Awaitable[object] = self._actor(name).__ray_ready__.remote()
        return answer

    def end(self, name: str) -> None:
        """End a process, whatever it is at. May wait."""
        ray.kill(self._actor(name))

    def _actor(self, name: str) -> Any:
        if name not in self._found:
            self._found[name] = ray.get_actor(name, namespace="serve")
        return self._found[name]

    def running(self) -> set[str]:
        """Names of the engines that take requests. May wait."""
        found: Any = _get_global_client().get_serve_details()["applications"]  # as serve.status
        for name, inner in ((self._application, "deployments"), (self._deployment, "replicas")):
            found = found.get(name, {}).get(inner, {})
        return {each["actor_name"] for each in found if each["state"] == "RUNNING"}


class EngineWatch:
    """Asks each engine for signs of life, and ends one that is silent: it is frozen.

    Ray reports the end of a process to all who wait for it at once, while an engine that stands
    still would hold its requests until Serve's health checks have failed three times. An engine
    answers between its steps and during them: a step is computed on another thread. It is watched
    as soon as it takes requests, whether it has any or not; it does not answer while it loads the
    model.

    Silence is counted while this process runs: an engine that was stopped together with it, as when
    a container pauses, has time to answer.

    Args:
        silence: seconds from an engine's last sign of life until its replies have gone on
            elsewhere. Half a second passes until the next question, one is for the hand-over, and
            in the rest an engine must answer.

    Attributes:
        has_engine: whether an engine takes requests; True until the first look.
    """

    def __init__(self, actors: RayActors, silence: float) -> None:
        self._actors, self._silence = actors, silence
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._finding: asyncio.Task[None] | None = None
        self.has_engine = True

    def begin(self) -> None:
        """Look for engines from now on, and watch those that take requests."""
        if self._finding is None:
            self._finding = asyncio.create_task(self._find())

    def close(self) -> None:
        for task in (self._finding, *self._watching.values()):
            if task is not None:
                task.cancel()

    async def _find(self) -> None:
        while True:
            try:
                running = await asyncio.to_thread(self._actors.running)
                self.has_engine = bool(running)
                for name in running - self._watching.keys():
                    self._watching[name] = asyncio.create_task(self._watch(name))
            except Exception as error:
                _log.warning("the engines cannot be found: %s", error)
            await asyncio.sleep(_LOOK)

    async def _watch(self, name: str) -> None:
        try:
            while await self._answers(name):
                await asyncio.sleep(_PERIOD)
            _log.error("%s gives no sign of life (limit: %g s) and is ended", name, self._silence)
            await asyncio.to_thread(self._actors.end, name)
        except Exception as error:  # it is gone, is being replaced, or another gate has ended it
            _log.info("%s is watched no more: %s", name, error)
        finally:
            self._watching.pop(name, None)

    async def _answers(self, name: str) -> bool:
        """Whether an engine gives a sign of life in time; raises if it is gone."""
        beat = asyncio.ensure_future(self._actors.beat(name))
        try:
            loop, left = asyncio.get_running_loop(), self._silence - _PERIOD - _HAND_OVER
            while left > 0.0:
                began = loop.time()
                await asyncio.wait((beat,), timeout=min(left, _SLICE))
                if beat.done():
                    beat.result()
                    return True
                left -= min(loop.time() - began, 2 * _SLICE)
            return False
        finally:
            beat.cancel()
