"""Drafters that can go on from a draft as well as from the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from foredraft.core.proposal import Proposal
from foredraft.drafters.base import Drafter, DraftRow


@runtime_checkable
class ContinuingDrafter(Drafter, Protocol):
    """A drafter that others can build on: see `foredraft.drafters.cascade`."""

    def propose_after(self, row: DraftRow, draft: Sequence[int]) -> Proposal:
        """Draft what follows the row's tokens and ``draft``: chosen tokens, ``row.budget`` at most.

        ``draft`` is a guess that may be rejected: nothing of it may be left in the drafter's state.
        """
        ...
