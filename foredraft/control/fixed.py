"""The simplest controller: the same budget every step, capped by what can still be committed."""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.control.base import Allowance, drafting_room
from foredraft.core.cost import USUAL_PRICE, CostModel, Price
from foredraft.core.errors import ConfigError
from foredraft.core.record import StepRecord
from foredraft.core.request import Request

_NOTHING = Allowance(0)


class FixedBudget:
    """``num_draft_tokens`` a step, less where max_tokens or the context leaves no room for them.

    Args:
        num_draft_tokens: nodes a step, at least 0.
        max_context: most tokens a row of the target may hold.
        cost: what steps cost here; followed from now on. None: a usual machine.

    Raises:
        ConfigError: ``num_draft_tokens`` is negative or not a whole number.
    """

    def __init__(
        self, num_draft_tokens: int, max_context: int, cost: CostModel | None = None
    ) -> None:
        if type(num_draft_tokens) is not int or num_draft_tokens < 0:
            raise ConfigError(
                f"num_draft_tokens is {num_draft_tokens!r}; it must be a whole number, 0 or more"
            )
        self.num_draft_tokens = num_draft_tokens
        self._max_context = max_context
        self._cost = cost

    def allow(self, rows: Sequence[Request]) -> list[Allowance]:
        if not self.num_draft_tokens:
            return [_NOTHING] * len(rows)
        return [
            Allowance(
                min(self.num_draft_tokens, drafting_room(row, self._max_context)),
                self._price(row, len(rows)),
            )
            for row in rows
        ]

    def observe(self, record: StepRecord) -> None:
        if self._cost is not None and record.is_decoding:
            self._cost.observe(record.sizes, record.times.score_ms)

    def end(self, request_id: int) -> None:
        """Nothing is kept of a request."""

    def _price(self, row: Request, num_rows: int) -> Price:
        if self._cost is None:
            return USUAL_PRICE
        return self._cost.price(len(row.tokens), num_rows)
