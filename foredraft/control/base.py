"""The controller seam."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from foredraft.core.cost import USUAL_PRICE, Price
from foredraft.core.record import StepRecord
from foredraft.core.request import Request


@dataclass(frozen=True)
class Allowance:
    """What one row may draft.

    Attributes:
        budget: the most nodes; 0 is a legal answer.
        price: what nodes cost it in this step.
        drafter: which of several loaded drafters follows it from now on; "" leaves it with the one
            it has, None with none. One that cannot join a text in the middle stays away for good.
    """

    budget: int
    price: Price = USUAL_PRICE
    drafter: str | None = ""


def drafting_room(row: Request, max_context: int) -> int:
    """Most nodes that a row may draft, in a context of so many tokens."""
    # The last token a step commits is the target's own, so one fewer can be drafted.
    return max(0, min(row.num_remaining - 1, max_context - len(row.tokens)))


class Controller(Protocol):
    """Decides how much each row may draft, from how steps went; never what, and it does not see
    which tokens are drafted before they are verified.

    One with an attribute `drafts_forced` that is true leaves it to the engine to draft what a
    row's rules force, beyond its budget too: it costs no drafter, and is all but certain.
    """

    def allow(self, rows: Sequence[Request]) -> list[Allowance]:
        """One allowance for each row of the step to come.

        Rows that will read only a part of their pending tokens are not asked about.
        """
        ...

    def observe(self, record: StepRecord) -> None:
        """A step has been committed."""
        ...

    def end(self, request_id: int) -> None:
        """A request is over, also one that was cancelled or never ran: forget it."""
        ...
