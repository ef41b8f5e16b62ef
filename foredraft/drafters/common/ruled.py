"""What a request's rules know of the next tokens, in front of any drafter.

Tokens that a grammar forces are drafted without asking anyone, and guesses that the rules rule out
are not sent to verification. Drafters with a distribution have masked it already before they chose
or drew; drafters that copy have none. Only chosen tokens are dropped: a drawn one that is taken
away after it was seen would bias the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from foredraft.core.proposal import DrawnProposal, Proposal
from foredraft.core.tree import ROOT, TokenTree
from foredraft.drafters.base import (
    ContinuingDrafter,
    Drafter,
    DraftRequest,
    DraftRow,
    Observation,
    learns,
)


class RuledDrafter:
    """A drafter that is asked for what the rules leave open.

    Args:
        inner: drafts. Rows without bans pass through untouched.
    """

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner
        self.layers, self.look_ahead = tuple(inner.layers), inner.look_ahead

    @property
    def taps(self) -> Sequence[int]:
        return self._inner.taps

    @property
    def learns(self) -> bool:
        return learns(self._inner)

    def begin(self, request: DraftRequest) -> None:
        self._inner.begin(request)

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        forced = {row.request_id: self._forced(row) for row in rows}
        done = {
            row.request_id: draft
            for row in rows
            if (draft := self._without_asking(row, forced[row.request_id])) is not None
        }
        asked = [row for row in rows if row.request_id not in done]
        drafts = self._inner.propose(asked) if asked else ()
        for row, draft in zip(asked, drafts, strict=True):
            # What is forced is likely in the draft; who has none gets it for nothing.
            done[row.request_id] = draft if len(draft.tree) else _chain(forced[row.request_id])
        return [permitted(done[row.request_id], row) for row in rows]

    def observe(self, observations: Sequence[Observation]) -> None:
        self._inner.observe(observations)

    def end(self, request_id: int) -> None:
        self._inner.end(request_id)

    def _forced(self, row: DraftRow) -> tuple[int, ...]:
        if not row.budget or not row.rules.bans:
            return ()
        return tuple(row.rules.forced(row.tokens)[: row.budget])

    def _without_asking(self, row: DraftRow, forced: tuple[int, ...]) -> Proposal | None:
        """The draft where the rules know enough by themselves, or the drafter can go on there."""
        left = row.budget - len(forced)
        if not forced:
            return None
        if left and isinstance(self._inner, ContinuingDrafter):
            tail = self._inner.propose_after(replace(row, budget=left), forced)
            return Proposal.chosen(_behind(forced, tail.tree))
        return _chain(forced) if len(forced) > 1 or not left else None


def permitted(proposal: Proposal, row: DraftRow) -> Proposal:
    """A chosen draft without the tokens that the row's rules do not permit."""
    tree = proposal.tree
    if isinstance(proposal, DrawnProposal) or not row.rules.bans or not len(tree):
        return proposal
    paths: dict[int, tuple[int, ...]] = {ROOT: ()}
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        before = paths.get(parent)
        if before is not None and row.rules.permits(token, row.tokens, before):
            paths[node] = (*before, token)
    if len(paths) > len(tree):
        return proposal
    del paths[ROOT]
    numbers = {node: number for number, node in enumerate(paths)} | {ROOT: ROOT}
    return Proposal.chosen(
        TokenTree(
            tuple(tree.tokens[node] for node in paths),
            tuple(numbers[tree.parents[node]] for node in paths),
        )
    )


def _chain(tokens: Sequence[int]) -> Proposal:
    return Proposal.chosen(TokenTree.chain(tokens))


def _behind(chain: Sequence[int], tree: TokenTree) -> TokenTree:
    """A tree that hangs off the end of a chain."""
    first = TokenTree.chain(chain)
    size = len(chain)
    parents = (size - 1 if parent == ROOT else parent + size for parent in tree.parents)
    return TokenTree((*first.tokens, *tree.tokens), (*first.parents, *parents))
