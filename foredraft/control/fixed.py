"""The simplest controller: one drafter, and the same budget every step."""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.control.base import Allowance, Row
from foredraft.core.cost import USUAL_PRICES, CostModel
from foredraft.core.errors import ConfigError
from foredraft.core.record import StepRecord
from foredraft.core.traits import OWN


class FixedBudget:
    """``num_draft_tokens`` a step, as far as the engine finds room for them.

    Args:
        num_draft_tokens: nodes a step, at least 0.
        cost: what steps cost here. None: a usual machine.
        drafter: the one that drafts; None: none does.

    Raises:
        ConfigError: ``num_draft_tokens`` is negative or not a whole number.
    """

    def __init__(
        self, num_draft_tokens: int, cost: CostModel | None = None, drafter: str | None = OWN
    ) -> None:
        if type(num_draft_tokens) is not int or num_draft_tokens < 0:
            raise ConfigError(
                f"num_draft_tokens is {num_draft_tokens!r}; it must be a whole number, 0 or more"
            )
        self.num_draft_tokens = num_draft_tokens
        self._cost, self._drafter = cost, drafter

    def begin(self, row: Row, others: Sequence[Row]) -> str | None:
        return self._drafter

    def allow(self, rows: Sequence[Row], others: Sequence[Row] = ()) -> list[Allowance]:
        most = self.num_draft_tokens
        if not most:
            reason = "plain decoding was asked for"
            return [Allowance(row.drafter, reason=reason) for row in rows]
        prices = USUAL_PRICES
        if self._cost is not None and rows:
            prices = self._cost.prices([len(row.tokens) for row in (*rows, *others)], most)
        return [Allowance(row.drafter, most, prices, most) for row in rows]

    def observe(self, record: StepRecord) -> None:
        """The budget does not depend on what happens."""

    def end(self, request_id: int) -> None:
        """Nothing is kept of a request."""
