"""Keeps a faulty controller from costing anything but speed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from foredraft.control.base import Allowance, Controller, drafting_room
from foredraft.core.record import StepRecord
from foredraft.core.request import Request

_log = logging.getLogger("foredraft")


class GuardedController:
    """A controller whose exceptions turn into steps without drafts, and are said in the log.

    What it allows beyond what may still be committed, or fits into the context, is cut down.

    Args:
        controller: which one.
        max_context: most tokens a row of the target may hold.
    """

    def __init__(self, controller: Controller, max_context: int) -> None:
        self._controller, self._max_context = controller, max_context
        self.drafts_forced = bool(getattr(controller, "drafts_forced", False))

    def allow(self, rows: Sequence[Request]) -> list[Allowance]:
        try:
            allowed = self._controller.allow(rows)
            if len(allowed) != len(rows):
                raise ValueError(f"{len(allowed)} allowances for {len(rows)} rows")
            return [*map(self._fitting, rows, allowed)]
        except Exception as error:
            self._say("allow anything", error)
            return [Allowance(0)] * len(rows)

    def observe(self, record: StepRecord) -> None:
        self._tell("observe a step", lambda: self._controller.observe(record))

    def end(self, request_id: int) -> None:
        self._tell("end a request", lambda: self._controller.end(request_id))

    def _fitting(self, row: Request, allowed: Allowance) -> Allowance:
        budget = max(0, min(allowed.budget, drafting_room(row, self._max_context)))
        return allowed if budget == allowed.budget else replace(allowed, budget=budget)

    def _tell(self, what: str, tell: Callable[[], None]) -> None:
        try:
            tell()
        except Exception as error:
            self._say(what, error)

    def _say(self, what: str, error: Exception) -> None:
        _log.warning("the controller failed to %s: %s", what, error, exc_info=error)
