"""A policy: the controller that decides on drafts, and the drafters that it may use."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foredraft.control.base import Controller
from foredraft.core.record import StepRecord
from foredraft.core.verify import Rule, verify
from foredraft.drafters.base import Drafter
from foredraft.engine.guard import LoadedDrafter
from foredraft.models.base import Target

Trace = Callable[[StepRecord], None]
"""Called with the record of each step. When it raises, the error is logged and it is not called
again."""


class Policy:
    """A controller and the drafters that it chooses from. Each request of an engine has one.

    Requests of several policies run in one batch.

    Args:
        controller: decides which drafter drafts for a row, and how many tokens.
        drafters: the loaded drafters that it knows by name.
        trace: called with the records of these requests' steps, without the rows of others.
        is_apart: whether these requests take part only in steps made for this policy
            (`Engine.step`). Two policies can then race on one target without slowing each other
            down.

    Attributes:
        prefix_caching: whether these requests may use cached entries, and leave theirs in the
            cache.
        rule: verifies the drafts: `verify`, or `recorded` for traces that show the evidence.
            Anything else is a fault, which only audits plant, to see whether they would find it.
        most_drafted: tokens of a row and step, at most; None: as many as controllers allow.
    """

    def __init__(
        self,
        controller: Controller,
        drafters: Sequence[LoadedDrafter] = (),
        trace: Trace | None = None,
        is_apart: bool = False,
    ) -> None:
        self.controller, self.trace, self.is_apart = controller, trace, is_apart
        self.drafters = {loaded.traits.name: loaded for loaded in drafters}
        self.rule: Rule = verify
        self.prefix_caching = True
        self.most_drafted: int | None = None

    @classmethod
    def of(cls, target: Target, drafter: Drafter, controller: Controller) -> Policy:
        """A policy of one drafter and a controller."""
        return cls(controller, [LoadedDrafter(drafter, target)])

    @property
    def num_faults(self) -> int:
        """Requests in which a drafter failed."""
        return sum(loaded.num_faults for loaded in self.drafters.values())
