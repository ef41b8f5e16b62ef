"""A drafter that is always wrong and always sure: what the worst one can cost."""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.core.proposal import Proposal
from foredraft.core.tree import TokenTree
from foredraft.drafters.base import BaseDrafter, DraftRow


class WrongDrafter(BaseDrafter):
    """Drafts as many tokens as it may, hardly one of which the target would ever write.

    Args:
        vocab_size: of the target.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [self._draft(row) for row in rows]

    def _draft(self, row: DraftRow) -> Proposal:
        first = 7919 * len(row.tokens) + row.tokens[-1]
        tokens = [(first + 104_729 * i) % self._vocab_size for i in range(row.budget)]
        return Proposal.chosen(TokenTree.chain(tokens))
