"""How requests are drafted for: who decides, and who may draft."""

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
"""Called with the record of each step. The first time that it raises, the log says so, and it is
called no more.
"""

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

    Requests of several policies run in one batch. A controller that fails costs the step its
    drafts; it is said in the log.

    Args:
        controller: decides who drafts for a row, and how much.
        drafters: the loaded drafters that it knows by name.
        trace: called with the records of these requests' steps, without the rows of others.
        is_apart: whether these requests take part only in steps that somebody asks for on their
            behalf (`Engine.step`). So two policies can race on one target without slowing each
            other down.
        keeps_evidence: whether the verdicts on these requests say what they were decided on.

    Attributes:
        rule: by which drafts are verified. Anything but `verify` is a fault, and is planted by
            audits alone, to see whether they would find it.
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
        """One drafter, and whatever controls it."""
        return cls(controller, [LoadedDrafter(drafter, target)])

    @property
    def num_faults(self) -> int:
        """Requests in which a drafter failed."""
        return sum(loaded.num_faults for loaded in self.drafters.values())

    def begin(self, row: Row, others: Sequence[Row]) -> str | None:
        """See `Controller.begin`; nobody where it fails."""
        try:
            return self._known(self.controller.begin(row, others))
        except Exception as error:
            _say_failed("begin a request", error)
            return None

    def allow(self, rows: Sequence[Row], others: Sequence[Row]) -> list[Allowance]:
        """See `Controller.allow`; nothing, by whoever drafts now, where it fails."""
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
        """A request is over."""
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
