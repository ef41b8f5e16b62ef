"""Keeps a faulty drafter from costing anything but speed, and that only where it is faulty."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from torch import Tensor

from foredraft.cache.base import NO_MEMORY
from foredraft.core.errors import MalformedProposalError
from foredraft.core.proposal import DrawnProposal, Proposal
from foredraft.core.tree import TokenTree
from foredraft.drafters.base import Drafter, DraftRequest, DraftRow, Observation, Switching, learns
from foredraft.models.base import Target

_log = logging.getLogger("foredraft")
_MAX_FAULTS = 3
_FIRST_PAUSE = 8
_LONGEST_PAUSE = 1024


class GuardedDrafter:
    """A drafter whose exceptions and malformed proposals turn into empty ones.

    The request in which it fails is decoded plainly to its end; the others go on. After three
    faulty requests in a row the drafter is left out of the next few requests, then tried again,
    with longer pauses as long as it keeps failing; a lack of memory does not count. All of it is
    said in the log. Texts of seeded requests are unaffected. For drawn ones a fault that depends on
    which token was drawn discards a draft after seeing it, which bends that request's distribution;
    nothing can undo that after the draw.

    Args:
        drafter: the drafter to watch.
        target: what its proposals must be scorable by.

    Attributes:
        num_faults: requests in which it failed.
    """

    def __init__(self, drafter: Drafter, target: Target) -> None:
        self._drafter, self._target = drafter, target
        self._live: set[int] = set()
        self._in_a_row, self._pause, self._left_out = 0, _FIRST_PAUSE, 0
        self._observes_alone = False
        self.num_faults = 0
        self.layers, self.look_ahead = tuple(drafter.layers), drafter.look_ahead
        self._switch = drafter if isinstance(drafter, Switching) else None
        self._observes = learns(drafter)

    @property
    def taps(self) -> Sequence[int]:
        return self._drafter.taps

    def is_live(self, request_id: int) -> bool:
        """Whether the drafter has followed a request from its beginning."""
        if request_id not in self._live:
            return False
        return self._switch is None or self._switch.is_whole(request_id)

    def watches(self, request_id: int) -> bool:
        """Whether the drafter is to observe a request's steps."""
        if not self._observes or request_id not in self._live:
            return False
        return self._switch is None or self._switch.follower(request_id) is not None

    def is_asked(self, request_id: int, budget: int, drafter: str | None) -> bool:
        """Whether it is to draft for a request, or another drafter is to follow it from now on."""
        if request_id not in self._live:
            return False
        if budget > 0:
            return True
        moves = self._switch is not None and drafter != ""
        return moves and drafter != self._switch.follower(request_id)  # type: ignore[union-attr]

    def begin(self, request: DraftRequest) -> None:
        if self._left_out:
            self._left_out -= 1
            return
        try:
            self._drafter.begin(request)
            self._live.add(request.request_id)
        except Exception as error:
            self._live.add(request.request_id)  # so that what it did begin is ended
            self._abandon(request.request_id, "begin", error)

    def propose(self, rows: Sequence[DraftRow]) -> dict[int, Proposal]:
        """Proposals by request, for rows that it `is_asked` about; none where it failed.

        All rows together, or one by one after a fault.
        """
        try:
            proposals = self._drafter.propose(rows)
            if len(proposals) != len(rows):
                raise MalformedProposalError(f"{len(proposals)} proposals for {len(rows)} rows")
        except Exception as error:
            if len(rows) > 1:
                return {k: v for row in rows for k, v in self.propose([row]).items()}
            self._abandon(rows[0].request_id, "propose", error)
            return {}
        found: dict[int, Proposal] = {}
        for row, proposal in zip(rows, proposals, strict=True):
            try:
                check_proposal(proposal, row, self._target)
                found[row.request_id] = proposal
            except Exception as error:
                self._abandon(row.request_id, "propose", error)
        return found

    def observe(self, observations: Sequence[Observation]) -> None:
        """Of requests that it `watches`."""
        groups = [[seen] for seen in observations] if self._observes_alone else [observations]
        for group in groups:
            try:
                self._drafter.observe(group)
            except Exception as error:
                # Nobody knows which rows it got to. From now on it gets them one by one.
                self._observes_alone = True
                for seen in group:
                    self._abandon(seen.request_id, "observe", error)

    def end(self, request_id: int) -> None:
        if request_id not in self._live:
            return
        self._live.discard(request_id)
        try:
            self._drafter.end(request_id)
        except Exception as error:
            self._count(request_id, "end", error)
        else:
            self._in_a_row, self._pause = 0, _FIRST_PAUSE

    def _abandon(self, request_id: int, where: str, error: Exception) -> None:
        """Leave a request to plain decoding: what the drafter keeps of it is not trusted."""
        self._count(request_id, where, error)
        if request_id in self._live:
            self._live.discard(request_id)
            try:
                self._drafter.end(request_id)
            except Exception as again:  # it has failed already; there is nothing left to save
                _log.debug("drafter failed to forget request %d: %s", request_id, again)

    def _count(self, request_id: int, where: str, error: Exception) -> None:
        if isinstance(error, NO_MEMORY):  # is the load's doing, and others may have some again soon
            _log.warning("request %d goes on with plain decoding: %s", request_id, error)
            return
        self.num_faults += 1
        self._in_a_row += 1
        _log.warning(
            "drafter failed in %s (%s: %s); request %d goes on with plain decoding, its text is "
            "unaffected",
            where,
            type(error).__name__,
            error,
            request_id,
            exc_info=error,
        )
        if self._in_a_row >= _MAX_FAULTS:
            self._left_out = self._pause
            _log.warning(
                "drafter switched off for the next %d requests: it failed in %d in a row",
                self._left_out,
                self._in_a_row,
            )
            self._in_a_row, self._pause = _MAX_FAULTS - 1, min(2 * self._pause, _LONGEST_PAUSE)


def check_proposal(proposal: Proposal, row: DraftRow, target: Target) -> None:
    """Make sure that what a drafter returned can be scored and verified.

    Costs one pass over the draft probabilities, and nothing to speak of for chosen tokens.

    Raises:
        MalformedProposalError: it cannot.
    """
    if not isinstance(proposal, Proposal) or not isinstance(proposal.tree, TokenTree):
        raise MalformedProposalError(f"{proposal!r} is not a Proposal of a TokenTree")
    _check_tree(proposal.tree, row, target)
    if isinstance(proposal, DrawnProposal):
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
