"""The controller seam: a row's drafter, and how many nodes it may draft."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from foredraft.core.cost import USUAL_PRICES, Prices
from foredraft.core.params import SamplingParams
from foredraft.core.record import StepRecord


class Row(Protocol):
    """The request as a controller sees it.

    Attributes:
        tokens: all committed tokens, prompt included.
        params: what the user asked for.
        drafter: the drafter that it has now; None: it has none.
        excluded_drafters: drafters that must not draft for it: it asks for another one or for none,
            or they failed for it, are suspended, or could not draft for it.
        room: the most nodes that it may draft in the step to come.
        num_remaining: tokens that it may still commit.
    """

    @property
    def request_id(self) -> int: ...

    @property
    def tokens(self) -> Sequence[int]: ...

    @property
    def params(self) -> SamplingParams: ...

    @property
    def drafter(self) -> str | None: ...

    @property
    def excluded_drafters(self) -> Collection[str]: ...

    @property
    def room(self) -> int: ...

    @property
    def num_remaining(self) -> int: ...


@dataclass(frozen=True)
class Allowance:
    """The drafter, budget and prices of one row in the next step.

    Attributes:
        drafter: the drafter of the row from now on; None: none. A drafter that cannot join a text
            in the middle does not come back.
        budget: the most nodes that this drafter is asked for; 0 is a legal answer.
        prices: what nodes cost the row in this step.
        spare: nodes that it may add: see `DrafterTraits.spare`.
        reason: why the budget is 0, where it is, in a few words for people. The part behind a
            colon may differ from step to step.
        token_share: recent time of a draft token, in plain steps, where each takes a forward of the
            drafter; None: not known.
        num_forced: the most tokens that may be drafted because the row's rules leave no choice:
            they need no drafter and are all but certain.
    """

    drafter: str | None = None
    budget: int = 0
    prices: Prices = USUAL_PRICES
    num_forced: int = 0
    spare: int = 0
    reason: str = ""
    token_share: float | None = None


NOTHING_ALLOWED = Allowance()


class Controller(Protocol):
    """Chooses each row's drafter and budget from past steps; never which tokens.

    It does not see which tokens are drafted before they are verified. Several controllers may
    decide for rows of one batch, each for its own.
    """

    def begin(self, row: Row, others: Sequence[Row]) -> str | None:
        """The drafter of a new request; None: none for now.

        Also called for a request that comes back after it had to wait for memory.

        Args:
            others: the requests that are running or about to begin, under any controller.
        """

    def allow(self, rows: Sequence[Row], others: Sequence[Row] = ()) -> list[Allowance]:
        """One allowance for each row of the step to come.

        Rows that will read only a part of their pending tokens are not asked about.

        Args:
            others: rows of the same step that another controller decides for.
        """

    def observe(self, record: StepRecord) -> None:
        """A step has been committed that had rows of this controller, and perhaps others."""

    def end(self, request_id: int) -> None:
        """A request is over, also one that was cancelled or never ran: forget it."""
