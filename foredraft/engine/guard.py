"""Code that is not the engine's own, behind a guard: its faults cost speed, and no request."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar, cast

import torch
from torch import Tensor

from foredraft.cache.base import NO_MEMORY
from foredraft.core.errors import MalformedProposalError
from foredraft.core.proposal import DrawnProposal, Proposal
from foredraft.core.record import NO_TIMES, RowStep
from foredraft.core.traits import OWN
from foredraft.core.tree import TokenTree
from foredraft.drafters.base import (
    ContinuingDrafter,
    Drafter,
    DraftRow,
    Reading,
    ReadingDrafter,
)
from foredraft.models.base import Target, check_taps

_log = logging.getLogger("foredraft")
_MAX_FAULTS = 3
_PAUSE = 64
"""Requests that a drafter is left out of after so many faults."""
Result = TypeVar("Result")


def guarded(call: Callable[[], Result], fallback: Result, problem: str) -> Result:
    """The result of ``call``; if it raises, the problem is logged, and the fallback returned."""
    try:
        return call()
    except Exception as error:
        _log.warning("%s: %s", problem, error, exc_info=error)
        return fallback


class LoadedDrafter:
    """A drafter whose exceptions and malformed proposals end drafting for one request only.

    After three faulty requests in a row the drafter is suspended for the next 64 requests, then
    tried again; a lack of memory does not count. Each fault and suspension is logged. Texts of
    seeded requests are unaffected. For drawn ones a fault that depends on which token was drawn
    discards a draft after seeing it, which bends that request's distribution; nothing can undo that
    after the draw.

    Args:
        drafter: the drafter itself.
        target: the model that its proposals are scored by.
        name: its name for controllers and records.
        most_nodes: see `DrafterTraits`.
        joins_late: see `DrafterTraits`.
        clock: seconds, to time its calls.

    Attributes:
        taps: the layers whose outputs it wants, as they are when it is loaded.
        traits: its properties, under this name.
        layers: the cache layers of its own, with an entry for each token.
        num_faults: requests in which it failed.
        times: of its calls since the last record.
        taken: of its calls in that record's step.

    Raises:
        ConfigError: it taps a layer that the target lacks.
    """

    def __init__(
        self,
        drafter: Drafter,
        target: Target,
        name: str = OWN,
        most_nodes: int = 16,
        joins_late: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.taps = tuple(drafter.taps)
        check_taps(self.taps, target.capabilities.taps)
        self._drafter, self._target = drafter, target
        self.traits = replace(
            drafter.traits, name=name, most_nodes=most_nodes, joins_late=joins_late
        )
        self.layers = tuple(drafter.layers)
        self.num_faults, self.times, self.taken, self._clock = 0, NO_TIMES, NO_TIMES, clock
        self._faults_in_a_row = self._num_left_out = 0
        self._observes_alone = False

    @contextmanager
    def timed(self, field: str) -> Iterator[None]:
        """Add the time of the block to this field of `times`."""
        started = self._clock()
        yield
        ms = getattr(self.times, field) + 1e3 * (self._clock() - started)
        self.times = replace(self.times, **{field: ms})

    def can_follow(self, slot: int, num_cached: int) -> bool:
        """Whether it can begin when the target's cache holds ``num_cached`` tokens.

        True if its own cache layers hold as many, or if it can continue behind the gap.
        """
        return self.traits.skips_gaps or all(
            not layers.first(slot) and layers.covered(slot) >= num_cached for layers in self.layers
        )

    def begin(self, row: DraftRow) -> bool:
        """Begin to follow a request; False if the drafter is suspended or fails."""
        if self._num_left_out:
            self._num_left_out -= 1
            return False
        return bool(self._asked([row], "begin", lambda rows: [*map(self._drafter.begin, rows)]))

    def propose(self, rows: Sequence[DraftRow]) -> dict[int, Proposal]:
        """Valid proposals by request id. Where the drafter failed, the request is missing.

        The drafter is detached from such a request. All rows are asked together, or one by one
        after a fault.
        """
        proposals = self._asked(rows, "propose", self._drafter.propose)
        sound = (row for row in rows if row.request_id in proposals)
        return {
            row.request_id: proposals[row.request_id]
            for row in sound
            if self._is_sound(proposals[row.request_id], row)
        }

    def read(self, rows: Sequence[DraftRow], most_tokens: int) -> dict[int, int]:
        """Let the drafter prefill; the tokens left to read by request id, without failed requests.

        See `ReadingDrafter`.
        """
        drafter = cast(ReadingDrafter, self._drafter)

        def read(some: Sequence[DraftRow]) -> Sequence[Reading]:
            found = drafter.read(some, max(1, most_tokens * len(some) // len(rows)))
            return [Reading(*each) for each in found]

        found = self._asked(rows, "read", read)
        num_read = sum(each.num_read for each in found.values())
        self.times = replace(self.times, num_read=self.times.num_read + num_read)
        return {number: each.num_left for number, each in found.items()}

    def propose_after(self, row: DraftRow, draft: Sequence[int]) -> Proposal | None:
        """The continuation of ``draft`` by a drafter that ``continues``; None if it failed."""
        assert self.traits.continues
        drafter = cast(ContinuingDrafter, self._drafter)
        found = self._asked(
            [row], "propose_after", lambda rows: [drafter.propose_after(row, draft)]
        )
        proposal = found.get(row.request_id)
        return proposal if proposal is not None and self._is_sound(proposal, row) else None

    def observe(self, observations: Sequence[RowStep]) -> list[int]:
        """Pass on observations; returns the requests that it failed in (now detached)."""
        groups = [[seen] for seen in observations] if self._observes_alone else [observations]
        failed: list[int] = []
        for group in groups:
            try:
                self._drafter.observe(group)
            except Exception as error:
                # Which rows it has processed is unknown. From now on it gets them one by one.
                self._observes_alone = True
                for seen in group:
                    self._abandon(seen.request_id, "observe", error)
                    failed.append(seen.request_id)
        return failed

    def end(self, request_id: int) -> None:
        """Stop following a request."""
        try:
            self._drafter.end(request_id)
        except Exception as error:
            self._count_fault(request_id, "end", error)
        else:
            self._faults_in_a_row = 0

    def _asked(
        self,
        rows: Sequence[DraftRow],
        what: str,
        ask: Callable[[Sequence[DraftRow]], Sequence[Result]],
    ) -> dict[int, Result]:
        """A result for each row, all asked together, or one by one after a fault.

        A row for which the drafter failed is missing; the drafter is detached from it.
        """
        try:
            results = ask(rows)
            if len(results) != len(rows):
                raise MalformedProposalError(f"{len(results)} proposals for {len(rows)} rows")
        except Exception as error:
            if len(rows) > 1:
                return {k: v for row in rows for k, v in self._asked([row], what, ask).items()}
            self._abandon(rows[0].request_id, what, error)
            return {}
        return {row.request_id: result for row, result in zip(rows, results, strict=True)}

    def _is_sound(self, proposal: Proposal, row: DraftRow) -> bool:
        try:
            check_proposal(proposal, row, self._target)
        except Exception as error:
            self._abandon(row.request_id, "propose", error)
            return False
        return True

    def _abandon(self, request_id: int, where: str, error: Exception) -> None:
        """Detach the drafter from a request: its state for this request is not trusted."""
        self._count_fault(request_id, where, error)
        try:
            self._drafter.end(request_id)
        except Exception as again:  # it has failed already, so a second error is ignored
            _log.debug("drafter failed to forget request %d: %s", request_id, again)

    def _count_fault(self, request_id: int, where: str, error: Exception) -> None:
        if isinstance(error, NO_MEMORY):  # the load causes it; other requests may have memory soon
            _log.warning("request %d goes on with plain decoding: %s", request_id, error)
            return
        self.num_faults += 1
        self._faults_in_a_row += 1
        _log.warning(
            "drafter failed in %s (%s: %s); request %d goes on with plain decoding, its text is "
            "unaffected",
            where,
            type(error).__name__,
            error,
            request_id,
            exc_info=error,
        )
        if self._faults_in_a_row >= _MAX_FAULTS:
            self._num_left_out = _PAUSE
            _log.warning(
                "drafter switched off for the next %d requests: it failed in %d in a row",
                self._num_left_out,
                self._faults_in_a_row,
            )
            self._faults_in_a_row = _MAX_FAULTS - 1


def check_proposal(proposal: Proposal, row: DraftRow, target: Target) -> None:
    """Check that a drafter's proposal can be scored and verified.

    Takes one pass over the draft probabilities, and almost no time for chosen tokens. One draw
    cannot show that a token was drawn from the probabilities beside it: `Draft`
    ensures it, and a drafter that bypasses the builder biases drawn texts.

    Raises:
        MalformedProposalError: the proposal is not valid.
    """
    if not isinstance(proposal, Proposal) or not isinstance(proposal.tree, TokenTree):
        raise MalformedProposalError(f"{proposal!r} is not a Proposal of a TokenTree")
    _check_tree(proposal.tree, row, target)
    if isinstance(proposal, DrawnProposal):
        _check_draft_probs(proposal.draft_probs_NV, proposal.tree, row, target)
        if not proposal.tree.is_chain:
            _check_siblings(proposal)


def _check_tree(tree: TokenTree, row: DraftRow, target: Target) -> None:
    if len(tree) > row.budget + row.spare:
        allowed = row.budget + row.spare
        raise MalformedProposalError(f"{len(tree)} nodes drafted, {allowed} allowed")
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


def _check_siblings(proposal: DrawnProposal) -> None:
    """Siblings are drawn from one distribution, and without replacement they differ."""
    tree, probs_NV = proposal.tree, proposal.draft_probs_NV
    first: dict[int, int] = {}
    drawn: set[tuple[int, int]] = set()
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if not torch.equal(probs_NV[node], probs_NV[first.setdefault(parent, node)]):
            raise MalformedProposalError("siblings were drawn from different distributions")
        if (parent, token) in drawn and not proposal.replacement:
            raise MalformedProposalError(f"token {token} was drawn twice without replacement")
        drawn.add((parent, token))
