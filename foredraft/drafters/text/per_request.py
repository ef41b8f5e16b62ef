"""Drafters that keep a state for each request and draft a tree from it.

A subclass does the drafting itself: its state, its drafts and its learning. This file keeps the
states by request, and handles empty budgets and rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence, Sized
from functools import reduce
from typing import Generic, TypeVar

from foredraft.core.proposal import NO_PROPOSAL, Proposal
from foredraft.core.record import RowStep
from foredraft.core.traits import DrafterTraits
from foredraft.core.tree import TokenTree
from foredraft.drafters.base import BaseDrafter, DraftRow
from foredraft.drafters.guide import Guide, best_first

Request = TypeVar("Request")
"""The drafter's state of a request while it runs."""


class PerRequestDrafter(BaseDrafter, ABC, Generic[Request]):
    """A `ContinuingDrafter` of chosen trees; subclasses implement it for one request."""

    traits = DrafterTraits(continues=True)

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}

    @abstractmethod
    def begin_request(self, row: DraftRow) -> Request:
        """The initial state of a request."""

    @abstractmethod
    def draft_tree(self, request: Request, row: DraftRow, draft: Sequence[int]) -> TokenTree:
        """Draft the continuation of the row's tokens and ``draft``.

        Args:
            row: its budget is 1 or more, and the most nodes to draft.
            draft: a guess that may be rejected: nothing of it may be left in ``request``.
        """

    def observe_request(self, request: Request, seen: RowStep) -> None:
        """Observe a committed step of the request; does nothing by default."""

    def end_request(self, request: Request) -> None:
        """The request is over and forgotten; does nothing more if not overridden."""

    def begin(self, row: DraftRow) -> None:
        self._requests[row.request_id] = self.begin_request(row)

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [self.propose_after(row, ()) for row in rows]

    def propose_after(self, row: DraftRow, draft: Sequence[int]) -> Proposal:
        if not row.budget:
            return NO_PROPOSAL
        return Proposal.chosen(self.draft_tree(self._requests[row.request_id], row, draft))

    def observe(self, observations: Sequence[RowStep]) -> None:
        for seen in observations:
            self.observe_request(self._requests[seen.request_id], seen)

    def end(self, request_id: int) -> None:
        self.end_request(self._requests.pop(request_id))


class GuidedDrafter(PerRequestDrafter[Guide]):
    """Drafts the best tree of successors in each request's text; see `best_first`.

    Args:
        new_text: makes the text of a request that starts.
        tree: whether drafts may branch.
    """

    def __init__(self, new_text: Callable[[DraftRow], Guide], tree: bool = True) -> None:
        super().__init__()
        self._new_text, self._tree = new_text, tree

    def begin_request(self, row: DraftRow) -> Guide:
        return self._new_text(row)

    def draft_tree(self, request: Guide, row: DraftRow, draft: Sequence[int]) -> TokenTree:
        place = reduce(request.advance, draft, request.place)
        return best_first(place, request.successors, row, self._tree, len(draft))

    def observe_request(self, request: Guide, seen: RowStep) -> None:
        for token in seen.committed:
            request.commit(token)

    def end_request(self, request: Guide) -> None:
        request.end()


Kept = TypeVar("Kept", bound=Sized)
"""Its length counts towards the limit of `PerTenant`."""


class PerTenant(Generic[Kept]):
    """One object for each tenant, with LRU eviction when their total length exceeds ``most``.

    Args:
        new: makes the object of a tenant; None stands for all requests without a tenant.
        most: largest sum of all lengths.
    """

    def __init__(self, new: Callable[[str | None], Kept], most: int) -> None:
        self._new, self._most = new, most
        self._kept: OrderedDict[str | None, Kept] = OrderedDict()

    def of(self, tenant: str | None) -> Kept:
        """The object of a tenant, made if there is none."""
        if tenant not in self._kept:
            self._kept[tenant] = self._new(tenant)
        self._kept.move_to_end(tenant)
        total = sum(map(len, self._kept.values()))
        while total > self._most and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            total -= len(dropped)
        return self._kept[tenant]
