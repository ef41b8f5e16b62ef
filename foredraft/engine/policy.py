"""A policy: the controller that decides on drafts, and the drafters that it may use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from foredraft.control.base import Allowance, Controller, Row
from foredraft.core.record import StepRecord
from foredraft.core.verify import Rule, verify
from foredraft.drafters.base import Drafter
from foredraft.engine.guard import LoadedDrafter
from foredraft.models.base import Target

Trace = Callable[[StepRecord], None]
"""Called with the record of each step. When it raises, the error is logged and it is not called
again."""

_log = logging.getLogger("foredraft")


class GuardedTrace:
    """A trace that is switched off when it fails; None: there is none."""

    def __init__(self, trace: Trace | None) -> None:
        self._trace = trace

    def __call__(self, record: StepRecord) -> None:
        if self._trace is None:
            return
        try:
            self._trace(record)
        except Exception as error:
            self._trace = None
            _log.warning("the trace failed and is switched off: %s", error, exc_info=error)


class Policy:
    """A controller and the drafters that it chooses from. Each request of an engine has one.

    Requests of several policies run in one batch. If a controller fails, the step has no drafts,
    and the error is logged.

    Args:
        controller: decides which drafter drafts for a row, and how many tokens.
        drafters: the loaded drafters that it knows by name.
        trace: called with the records of these requests' steps, without the rows of others.
        is_apart: whether these requests take part only in steps made for this policy
            (`Engine.step`). Two policies can then race on one target without slowing each other
            down.
        keeps_evidence: whether the verdicts on these requests record the probabilities and draws
            behind them.

    Attributes:
        rule: verifies the drafts. Anything but `verify` is a fault, which only audits plant, to see
            whether they would find it.
    """

    def __init__(
        self,
        controller: Controller,
        drafters: Sequence[LoadedDrafter] = (),
        trace: Trace | None = None,
        is_apart: bool = False,
        keeps_evidence: bool = False,
    ) -> None:
        self.controller, self.is_apart = controller, is_apart
        self.drafters = {loaded.traits.name: loaded for loaded in drafters}
        self.keeps_evidence = keeps_evidence
        self.trace = GuardedTrace(trace)
        self.rule: Rule = verify

    @classmethod
    def of(cls, target: Target, drafter: Drafter, controller: Controller) -> Policy:
        """A policy of one drafter and a controller."""
        return cls(controller, [LoadedDrafter(drafter, target)])

    @property
    def num_faults(self) -> int:
        """Requests in which a drafter failed."""
        return sum(loaded.num_faults for loaded in self.drafters.values())

    def begin(self, row: Row, others: Sequence[Row]) -> str | None:
        """See `Controller.begin`; no drafter if it fails."""
        try:
            return self._known(self.controller.begin(row, others))
        except Exception as error:
            _say_failed("begin a request", error)
            return None

    def allow(self, rows: Sequence[Row], others: Sequence[Row]) -> list[Allowance]:
        """See `Controller.allow`; if it fails, no nodes, and each row keeps its drafter."""
        try:
            allowances = self.controller.allow(rows, others)
            if len(allowances) != len(rows):
                raise ValueError(f"{len(allowances)} allowances for {len(rows)} rows")
            for allowance in allowances:
                self._known(allowance.drafter)
        except Exception as error:
            _say_failed("allow anything", error)
            return [Allowance(row.drafter) for row in rows]
        return allowances

    def observe(self, record: StepRecord) -> None:
        """See `Controller.observe`."""
        try:
            self.controller.observe(record)
        except Exception as error:
            _say_failed("observe a step", error)

    def end(self, request_id: int) -> None:
        """See `Controller.end`."""
        try:
            self.controller.end(request_id)
        except Exception as error:
            _say_failed("end a request", error)

    def _known(self, name: str | None) -> str | None:
        if name is not None and name not in self.drafters:
            raise ValueError(f"no drafter {name!r} is loaded, only {sorted(self.drafters)}")
        return name


def _say_failed(what: str, error: Exception) -> None:
    _log.warning("the controller failed to %s: %s", what, error, exc_info=error)
