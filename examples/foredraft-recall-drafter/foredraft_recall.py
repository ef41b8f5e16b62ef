"""A drafter that remembers: what followed these tokens the last time, in any request so far.

Prompt lookup searches one text. This one keeps its memory between requests, which pays where
requests resemble each other: forms, reports, the same question asked of many documents.
"""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.core.errors import ConfigError
from foredraft.core.proposal import Proposal
from foredraft.core.record import RowStep
from foredraft.core.tree import TokenTree
from foredraft.drafters.base import BaseDrafter, DraftRow
from foredraft.drafters.spec import DrafterContext, DrafterSpec


class RecallDrafter(BaseDrafter):
    """See the module docstring.

    Args:
        context_size: how many tokens must agree before what followed them is recalled.
        max_entries: how much to remember; the oldest is forgotten first.
    """

    def __init__(self, context_size: int = 3, max_entries: int = 100_000) -> None:
        for name, value in (("context_size", context_size), ("max_entries", max_entries)):
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} is {value!r}; it must be a whole number, 1 or more")
        self._size, self._max_entries = context_size, max_entries
        self._followers: dict[tuple[str | None, tuple[int, ...]], int] = {}  # by whose text, too
        self._tenants: dict[int, str | None] = {}
        self._tails: dict[int, tuple[int, ...]] = {}  # the last tokens of each running request

    def begin(self, row: DraftRow) -> None:
        self._tenants[row.request_id] = row.tenant
        self._tails[row.request_id] = ()
        self._learn(row.request_id, row.tokens)

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [Proposal.chosen(TokenTree.chain(self._recall(row))) for row in rows]

    def observe(self, observations: Sequence[RowStep]) -> None:
        for step in observations:
            self._learn(step.request_id, step.committed)

    def end(self, request_id: int) -> None:
        del self._tails[request_id], self._tenants[request_id]

    def _recall(self, row: DraftRow) -> list[int]:
        tenant = self._tenants[row.request_id]
        text = list(row.tokens[-self._size :])
        for _ in range(row.budget):
            follower = self._followers.get((tenant, tuple(text[-self._size :])))
            if follower is None:
                break
            text.append(follower)
        return text[self._size :]

    def _learn(self, request_id: int, tokens: Sequence[int]) -> None:
        tenant, tail = self._tenants[request_id], self._tails[request_id]
        for token in tokens:
            if len(tail) == self._size:
                self._followers.pop((tenant, tail), None)  # so that it counts as new again
                self._followers[tenant, tail] = token
            tail = (*tail, token)[-self._size :]
        self._tails[request_id] = tail
        while len(self._followers) > self._max_entries:
            del self._followers[next(iter(self._followers))]


def _build(context: DrafterContext) -> RecallDrafter:
    return RecallDrafter(**context.options)


DRAFTER = DrafterSpec(
    build=_build,
    summary="recalls what followed the same tokens in earlier requests",
    copies=True,
    options={
        "context_size": "tokens that must agree (3)",
        "max_entries": "how much to remember (100000)",
    },
    num_draft_tokens=6,
)
