"""The simplest controller: the same budget every step, capped by what can still be committed."""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.core.errors import ConfigError
from foredraft.core.request import Request


class FixedBudget:
    """``num_draft_tokens`` a step, less where max_tokens or the context leaves no room for them.

    Args:
        num_draft_tokens: nodes a step, at least 0.
        max_context: most tokens a row of the target may hold.

    Raises:
        ConfigError: ``num_draft_tokens`` is negative or not a whole number.
    """

    def __init__(self, num_draft_tokens: int, max_context: int) -> None:
        if type(num_draft_tokens) is not int or num_draft_tokens < 0:
            raise ConfigError(
                f"num_draft_tokens is {num_draft_tokens!r}; it must be a whole number, 0 or more"
            )
        self.num_draft_tokens = num_draft_tokens
        self._max_context = max_context

    def budget(self, rows: Sequence[Request]) -> list[int]:
        return [max(0, min(self.num_draft_tokens, self._room(row))) for row in rows]

    def _room(self, row: Request) -> int:
        # The last token a step commits is the target's own, so one fewer can be drafted.
        return min(row.num_remaining - 1, self._max_context - len(row.tokens))

    def observe(self, rows: Sequence[Request]) -> None:
        pass
