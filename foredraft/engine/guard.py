"""Keeps a faulty drafter from costing anything but speed."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from torch import Tensor

from foredraft.core.errors import MalformedProposalError
from foredraft.core.proposal import NO_PROPOSAL, Proposal
from foredraft.core.tree import TokenTree
from foredraft.drafters.base import Drafter, DraftRow, Observation
from foredraft.models.base import Target

_log = logging.getLogger("foredraft")
_MAX_FAULTS = 3


class GuardedDrafter:
    """A drafter whose exceptions and malformed proposals turn into empty ones.

    The requests that were running at a fault are decoded plainly to their end (what the drafter
    remembers of them is no longer trusted) and it is said once. New requests get another chance;
    after three faults the drafter stays off. Texts of seeded requests are unaffected. For drawn
    ones a fault that depends on which token was drawn discards a draft after seeing it, which
    bends the distribution until the drafter is off; nothing can undo that after the draw.

    Args:
        drafter: the drafter to watch.
        target: what its proposals must be scorable by.
    """

    def __init__(self, drafter: Drafter, target: Target) -> None:
        self._drafter, self._target = drafter, target
        self._live: set[int] = set()
        self.num_faults = 0
        self.taps: Sequence[int] = tuple(drafter.taps)

    def begin(self, request_id: int, prompt: Sequence[int]) -> None:
        if self.num_faults >= _MAX_FAULTS:
            return
        try:
            self._drafter.begin(request_id, prompt)
            self._live.add(request_id)
        except Exception as error:
            self._fault("begin", error)

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        asked = [row for row in rows if row.request_id in self._live and row.budget > 0]
        if not asked:
            return [NO_PROPOSAL] * len(rows)
        try:
            proposals = self._drafter.propose(asked)
            check_proposals(proposals, asked, self._target)
        except Exception as error:
            self._fault("propose", error)
            return [NO_PROPOSAL] * len(rows)
        by_id = {row.request_id: p for row, p in zip(asked, proposals, strict=True)}
        return [by_id.get(row.request_id, NO_PROPOSAL) for row in rows]

    def observe(self, observations: Sequence[Observation]) -> None:
        watched = [o for o in observations if o.request_id in self._live]
        if not watched:
            return
        try:
            self._drafter.observe(watched)
        except Exception as error:
            self._fault("observe", error)

    def end(self, request_id: int) -> None:
        if request_id not in self._live:
            return
        self._live.discard(request_id)
        try:
            self._drafter.end(request_id)
        except Exception as error:
            self._fault("end", error)

    def _fault(self, where: str, error: Exception) -> None:
        self.num_faults += 1
        if self.num_faults == 1:
            _log.warning(
                "drafter failed in %s (%s: %s); going on with plain decoding, the text is "
                "unaffected",
                where,
                type(error).__name__,
                error,
                exc_info=error,
            )
        abandoned, self._live = self._live, set()
        for request_id in abandoned:
            try:
                self._drafter.end(request_id)
            except Exception as again:  # it already failed once; there is nothing left to save
                _log.debug("drafter failed to forget request %d: %s", request_id, again)


def check_proposals(
    proposals: Sequence[Proposal], rows: Sequence[DraftRow], target: Target
) -> None:
    """Make sure that what a drafter returned can be scored and verified.

    Costs one pass over the draft probabilities, and nothing to speak of for chosen tokens.

    Raises:
        MalformedProposalError: it cannot.
    """
    if len(proposals) != len(rows):
        raise MalformedProposalError(f"{len(proposals)} proposals for {len(rows)} rows")
    for proposal, row in zip(proposals, rows, strict=True):
        if not isinstance(proposal, Proposal) or not isinstance(proposal.tree, TokenTree):
            raise MalformedProposalError(f"{proposal!r} is not a Proposal of a TokenTree")
        _check_tree(proposal.tree, row, target)
        if proposal.draft_probs_NV is not None:
            _check_draft_probs(proposal.draft_probs_NV, proposal.tree, row, target)


def _check_tree(tree: TokenTree, row: DraftRow, target: Target) -> None:
    if len(tree) > row.budget:
        raise MalformedProposalError(f"{len(tree)} nodes drafted, {row.budget} allowed")
    if max(tree.tokens, default=0) >= target.vocab_size:
        raise MalformedProposalError(
            f"token {max(tree.tokens)} drafted; the target's vocabulary has {target.vocab_size}"
        )
    if not tree.is_chain and not target.capabilities.tree_attention:
        raise MalformedProposalError("a branching tree for a target without tree attention")


def _check_draft_probs(probs_NV: Tensor, tree: TokenTree, row: DraftRow, target: Target) -> None:
    if row.params.coupling != "drawn":
        raise MalformedProposalError(
            "drawn tokens for a request with coupling 'seeded', whose text must not depend on them"
        )
    if tuple(probs_NV.shape) != (len(tree), target.vocab_size) or not probs_NV.is_floating_point():
        raise MalformedProposalError(
            f"draft probabilities {probs_NV.dtype}{list(probs_NV.shape)} for {len(tree)} nodes "
            f"over {target.vocab_size} tokens"
        )
    # Weights need no normalising: drawing and verification both divide by the sum.
    least, total = float(probs_NV.min()), float(probs_NV.sum())
    if not (least >= 0.0 and math.isfinite(total)):
        raise MalformedProposalError(f"draft probabilities with minimum {least}, sum {total}")
    drawn_N = probs_NV[range(len(tree)), tree.tokens]
    if not float(drawn_N.min()) > 0.0:
        raise MalformedProposalError("a token was drafted that had draft probability 0")
