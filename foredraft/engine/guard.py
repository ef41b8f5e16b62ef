"""Keeps a faulty drafter from costing anything but speed."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from foredraft.core.errors import MalformedProposalError
from foredraft.core.proposal import NO_PROPOSAL, Proposal
from foredraft.drafters.base import Drafter, DraftRow, Observation
from foredraft.models.base import Target

_log = logging.getLogger("foredraft")
_MAX_FAULTS = 3


class GuardedDrafter:
    """A drafter whose exceptions and malformed trees turn into empty proposals.

    The requests that were running at a fault are decoded plainly to their end (what the drafter
    remembers of them is no longer trusted) and it is said once. New requests get another chance;
    after three faults the drafter stays off.

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
            self._check(asked, proposals)
        except Exception as error:
            self._fault("propose", error)
            return [NO_PROPOSAL] * len(rows)
        by_id = {row.request_id: p for row, p in zip(asked, proposals, strict=True)}
        return [by_id.get(row.request_id, NO_PROPOSAL) for row in rows]

    def observe(self, observations: Sequence[Observation]) -> None:
        try:
            self._drafter.observe([o for o in observations if o.request_id in self._live])
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
                where, type(error).__name__, error, exc_info=error,
            )
        abandoned, self._live = self._live, set()
        for request_id in abandoned:
            try:
                self._drafter.end(request_id)
            except Exception as again:  # it already failed once; there is nothing left to save
                _log.debug("drafter failed to forget request %d: %s", request_id, again)

    def _check(self, rows: Sequence[DraftRow], proposals: Sequence[Proposal]) -> None:
        if len(proposals) != len(rows):
            raise MalformedProposalError(f"{len(proposals)} proposals for {len(rows)} rows")
        for row, proposal in zip(rows, proposals, strict=True):
            self._check_one(row, proposal)

    def _check_one(self, row: DraftRow, proposal: Proposal) -> None:
        tree, vocab_size = proposal.tree, self._target.vocab_size
        if len(tree) > row.budget:
            raise MalformedProposalError(f"{len(tree)} nodes drafted, {row.budget} allowed")
        if max(tree.tokens, default=0) >= vocab_size:
            raise MalformedProposalError(
                f"token {max(tree.tokens)} drafted; the target's vocabulary has {vocab_size}"
            )
        if not tree.is_chain and not self._target.capabilities.tree_attention:
            raise MalformedProposalError("a branching tree for a target without tree attention")
        probs = proposal.draft_probs_NV
        if probs is not None and tuple(probs.shape) != (len(tree), vocab_size):
            raise MalformedProposalError(
                f"draft probabilities of shape {tuple(probs.shape)} for {len(tree)} nodes over "
                f"{vocab_size} tokens"
            )
