"""A draft and the distribution it was really drawn from, in one object that nothing else builds.

The commonest bug of the field is a verifier that is handed another q than the one sampled from.
Here the code that draws a token is the code that records its distribution, so the two cannot part.

Shape legend: N tree nodes, V vocabulary, S tokens with a new name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from foredraft.core.choices import DraftChoices
from foredraft.core.errors import MalformedProposalError
from foredraft.core.tree import EMPTY_TREE, TokenTree


@dataclass(frozen=True)
class Proposal:
    """What a drafter offers for one row.

    Build one with `Proposal.chosen` (tokens are a function of the text so far) or with a
    `DrawnProposalBuilder` (tokens are random draws), never directly.

    Attributes:
        tree: the draft tokens.
        draft_probs_NV: for drawn tokens, row i is the distribution node i was drawn from (before
            its earlier siblings were removed, when drawn without replacement); None for chosen.
        replacement: whether siblings were drawn with replacement.
    """

    tree: TokenTree
    draft_probs_NV: Tensor | None = field(default=None, repr=False)
    replacement: bool = True

    @classmethod
    def chosen(cls, tree: TokenTree) -> Proposal:
        """A deterministic draft: always exact, the safe default."""
        return cls(tree)

    def renamed(self, renaming: Renaming) -> Proposal:
        """The same draft in another vocabulary.

        Drawing a token and then renaming it is drawing from the renamed distribution.

        Raises:
            MalformedProposalError: a token of the draft has no new name.
        """
        try:
            tokens = tuple(renaming.names[token] for token in self.tree.tokens)
        except KeyError as error:
            raise MalformedProposalError(f"draft token {error} has no new name") from None
        tree = TokenTree(tokens, self.tree.parents)
        if self.draft_probs_NV is None:
            return Proposal(tree)
        old_S, new_S = renaming.ids_S
        probs_NV = self.draft_probs_NV.new_zeros((len(tree), renaming.vocab_size))
        probs_NV[:, new_S] = self.draft_probs_NV[:, old_S]
        return Proposal(tree, probs_NV, self.replacement)

    @property
    def is_drawn(self) -> bool:
        return self.draft_probs_NV is not None


@dataclass(frozen=True)
class Renaming:
    """One-to-one names of some tokens in another vocabulary.

    Attributes:
        names: the new id of each token that has one. Tokens without must have no draft
            probability.
        vocab_size: of the new vocabulary.

    Raises:
        MalformedProposalError: two tokens get one name.
    """

    names: Mapping[int, int]
    vocab_size: int

    def __post_init__(self) -> None:
        if len(set(self.names.values())) != len(self.names):
            raise MalformedProposalError("two tokens cannot be renamed to one")

    @cached_property
    def ids_S(self) -> tuple[Tensor, Tensor]:
        """Old and new ids, pair by pair."""
        return torch.tensor(list(self.names)), torch.tensor(list(self.names.values()))


NO_PROPOSAL = Proposal.chosen(EMPTY_TREE)


class DrawnProposalBuilder:
    """Draws draft tokens and records the distribution of each.

    Whether to draw another token may depend on everything drawn so far; a token that was drawn
    stays in the proposal. Dropping one after seeing it would bias the output, so there is no way
    to do it.

    Args:
        choices: the row's draft stream.
        replacement: draw siblings with replacement; False never drafts a token twice under one
            parent.
    """

    def __init__(self, choices: DraftChoices, replacement: bool = True) -> None:
        self._choices = choices
        self._replacement = replacement
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._probs: list[Tensor] = []

    def draw(self, parent: int, draft_probs_V: Tensor) -> int | None:
        """Draw one child of ``parent`` and return its node index.

        Args:
            draft_probs_V: probabilities [V]; siblings must be drawn from the same ones.

        Returns:
            The new node, or None when drawing without replacement left nothing to draw.
        """
        siblings = [i for i, p in enumerate(self._parents) if p == parent]
        if any(not torch.equal(self._probs[i], draft_probs_V) for i in siblings):
            raise MalformedProposalError("siblings must be drawn from one distribution")
        remaining_V = draft_probs_V
        if not self._replacement and siblings:
            remaining_V = draft_probs_V.clone()
            remaining_V[[self._tokens[i] for i in siblings]] = 0.0
        if not float(remaining_V.sum()) > 0.0:
            return None
        node = len(self._tokens)
        self._tokens.append(self._choices.draw(remaining_V, node))
        self._parents.append(parent)
        self._probs.append(draft_probs_V.clone())  # the caller may reuse its buffer
        return node

    def token(self, node: int) -> int:
        return self._tokens[node]

    def build(self) -> Proposal:
        if not self._tokens:
            return NO_PROPOSAL
        tree = TokenTree(tuple(self._tokens), tuple(self._parents))
        return Proposal(tree, torch.stack(self._probs), self._replacement)
