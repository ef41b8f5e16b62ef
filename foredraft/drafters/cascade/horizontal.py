"""Stages that take turns: a step belongs to the first one that offers something."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from foredraft.core.proposal import NO_PROPOSAL, Proposal
from foredraft.core.tree import ROOT, TokenTree
from foredraft.drafters.base import DraftRow
from foredraft.drafters.cascade.stages import Cascade, Stage, seeded


@dataclass
class _Relay:
    """One row's draft, handed from stage to stage."""

    row: DraftRow
    proposal: Proposal = NO_PROPOSAL
    authors: list[Stage] = field(default_factory=list)

    @property
    def is_handed_over(self) -> bool:
        """Whether the last stage reached its limit, and another can go on."""
        if not self.authors or self.proposal.is_drawn or not self.proposal.tree.is_chain:
            return False
        last = self.authors[-1]
        return last.hands_over(self.authors.count(last)) and len(self.authors) < self.row.budget

    def take(self, offer: Proposal, stage: Stage) -> None:
        """Add what ``stage`` offers, behind what is there."""
        if offer.tree.tokens:
            joined = Proposal.chosen(_joined(self.proposal.tree, offer.tree))
            self.proposal = joined if self.authors else offer
            self.authors += [stage] * len(offer.tree)


class HorizontalCascade(Cascade):
    """See `foredraft.drafters.cascade`."""

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        relays = [_Relay(row) for row in rows]
        for stage in self._stages:
            handed_over = [relay for relay in relays if relay.is_handed_over]
            empty = [relay for relay in relays if relay.row.budget and not relay.authors]
            if empty:
                offers = stage.propose([relay.row for relay in empty])
                for relay, offer in zip(empty, offers, strict=True):
                    relay.take(offer, stage)
            for relay in handed_over:
                tokens = relay.proposal.tree.tokens
                rest = seeded(relay.row, relay.row.budget - len(tokens))
                relay.take(stage.propose_after(rest, tokens), stage)
        for relay in relays:
            self._authors[relay.row.request_id] = relay.authors
        return [relay.proposal for relay in relays]


def _joined(chain: TokenTree, tree: TokenTree) -> TokenTree:
    """``tree`` hung off the end of ``chain``."""
    last = len(chain) - 1
    parents = (last if parent == ROOT else last + 1 + parent for parent in tree.parents)
    return TokenTree((*chain.tokens, *tree.tokens), (*chain.parents, *parents))
