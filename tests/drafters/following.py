"""Leads a drafter along a given text, without an engine or a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foredraft.core.cost import USUAL_PRICES
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import Proposal
from foredraft.core.record import RowStep
from foredraft.core.tree import ROOT, TokenTree
from foredraft.drafters.base import Drafter, DraftRow


class Followed:
    """One request whose every token is given.

    Args:
        drafter: sees the prompt at once and the rest as it is committed.
        prompt: the tokens that are there at the start.
        node_cost: of every node that it drafts, in plain steps.
    """

    def __init__(
        self,
        drafter: Drafter,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        request_id: int = 0,
        tenant: str | None = None,
        node_cost: float | None = None,
    ) -> None:
        self._prices = USUAL_PRICES if node_cost is None else (1.0, 1.0 + node_cost)
        self.drafter, self.tokens = drafter, list(prompt)
        self.params, self.request_id = params or SamplingParams(), request_id
        drafter.begin(DraftRow.of(request_id, tuple(prompt), self.params, tenant=tenant))

    def draft(self, budget: int = 16) -> TokenTree:
        """The tokens that it would draft now."""
        return self.propose(budget).tree

    def propose(self, budget: int = 16) -> Proposal:
        tokens, prices = tuple(self.tokens), self._prices
        row = DraftRow.of(self.request_id, tokens, self.params, budget, prices=prices)
        (proposal,) = self.drafter.propose([row])
        return proposal

    def commit(self, *tokens: int, logits_V: torch.Tensor | None = None) -> None:
        """Commit tokens one a step, as plain decoding does."""
        for token in tokens:
            logits = torch.zeros(1, 1) if logits_V is None else logits_V[None]
            self.tokens.append(token)
            seen = RowStep(self.request_id, 0, 1, committed=(token,), logits_NV=logits)
            self.drafter.observe([seen])

    def end(self) -> None:
        self.drafter.end(self.request_id)

    def run(self, text: Sequence[int], budget: int = 16) -> tuple[int, int]:
        """Decode ``text`` greedily with drafts; returns steps and drafted nodes."""
        steps = drafted = done = 0
        while done < len(text):
            tree = self.draft(min(budget, len(text) - done - 1))
            accepted = num_right(tree, text[done:])
            self.commit(*text[done : done + accepted + 1])
            done += accepted + 1
            steps += 1
            drafted += len(tree)
        return steps, drafted


def num_right(tree: TokenTree, text: Sequence[int]) -> int:
    """Tokens of ``text`` that the tree drafts, from the first on."""
    node, right = ROOT, 0
    for token in text:
        child = tree.child_with_token(node, token)
        if child is None:
            break
        node, right = child, right + 1
    return right


def first_level(tree: TokenTree) -> list[int]:
    """Tokens drafted for the next place."""
    return [tree.tokens[node] for node in tree.children.get(ROOT, ())]
