"""A draft and the distribution it was really drawn from, in one object that nothing else builds.

The commonest bug of the field is a verifier that is handed another q than the one sampled from.
Here the code that draws a token is the code that records its distribution, so the two cannot part.

Shape legend: N tree nodes, V vocabulary, S tokens with a new name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from foredraft.core.choices import DrawnChoices
from foredraft.core.errors import MalformedProposalError
from foredraft.core.tree import EMPTY_TREE, ROOT, TokenTree


@dataclass(frozen=True)
class Proposal:
    """A drafter's draft for one row: a chosen one, or a `DrawnProposal`.

    Chosen tokens are a function of the text so far, and of the target's own noise if need be: they
    are accepted if and only if the target draws the same tokens.

    Attributes:
        tree: the draft tokens.
        computed: the part of the target's own forward that drafting has already computed (see
            `foredraft.models.base.Computed`), or None.
        chances: for each node the drafter's own estimate that it and all above it are accepted.
            For traces only; nothing is decided by it. None: it has none.
        authors: for each node the drafter that proposed it, if several do; for traces only.
    """

    tree: TokenTree
    computed: object | None = field(default=None, repr=False, compare=False)
    chances: tuple[float, ...] | None = field(default=None, repr=False, compare=False)
    authors: tuple[str, ...] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def chosen(
        cls,
        tree: TokenTree,
        chances: tuple[float, ...] | None = None,
        authors: tuple[str, ...] | None = None,
    ) -> Proposal:
        """A chosen draft: always exact, the safe default."""
        return Proposal(tree, chances=chances, authors=authors)

    def renamed(self, renaming: Renaming) -> Proposal:
        """The same draft in another vocabulary.

        Raises:
            MalformedProposalError: a token of the draft has no new name.
        """
        return Proposal(renaming.tree(self.tree))

    @property
    def is_drawn(self) -> bool:
        return isinstance(self, DrawnProposal)


@dataclass(frozen=True)
class DrawnProposal(Proposal):
    """Randomly drawn tokens with their distributions. `DrawnProposalBuilder` makes it.

    Attributes:
        draft_probs_NV: row i is the distribution that node i was drawn from (before its earlier
            siblings were removed, when drawn without replacement).
        replacement: whether siblings were drawn with replacement.
    """

    draft_probs_NV: Tensor = field(kw_only=True, repr=False)
    replacement: bool = field(default=True, kw_only=True)

    def renamed(self, renaming: Renaming) -> DrawnProposal:
        """`Proposal.renamed`: a renamed draw is a draw from the renamed distribution."""
        old_S, new_S = renaming.ids_S
        tree = renaming.tree(self.tree)
        probs_NV = self.draft_probs_NV.new_zeros((len(tree), renaming.vocab_size))
        probs_NV[:, new_S] = self.draft_probs_NV[:, old_S]
        return DrawnProposal(tree, draft_probs_NV=probs_NV, replacement=self.replacement)

    def restricted_to(self, nodes: Sequence[int]) -> DrawnProposal:
        """The draft with these nodes only, ascending; their parents are among them.

        Lossless if leaving out a node depends only on the tokens above it.
        """
        new = {old: i for i, old in enumerate(nodes)} | {ROOT: ROOT}
        tree = TokenTree(
            tuple(self.tree.tokens[n] for n in nodes),
            tuple(new[self.tree.parents[n]] for n in nodes),
        )
        probs_NV = self.draft_probs_NV[list(nodes)]
        return DrawnProposal(tree, draft_probs_NV=probs_NV, replacement=self.replacement)


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
    def old_names(self) -> dict[int, int]:
        """The old id of each new one."""
        return {new: old for old, new in self.names.items()}

    @cached_property
    def ids_S(self) -> tuple[Tensor, Tensor]:
        """Old and new ids, pair by pair."""
        return torch.tensor(list(self.names)), torch.tensor(list(self.names.values()))

    def tree(self, tree: TokenTree) -> TokenTree:
        """The same tree under the new names.

        Raises:
            MalformedProposalError: a token has none.
        """
        try:
            tokens = tuple(self.names[token] for token in tree.tokens)
        except KeyError as error:
            raise MalformedProposalError(f"draft token {error} has no new name") from None
        return TokenTree(tokens, tree.parents)


NO_PROPOSAL = Proposal.chosen(EMPTY_TREE)
NOT_READY = Proposal.chosen(EMPTY_TREE)
"""The proposal of a drafter that cannot draft for a row yet, such as a head that has not read the
end of the text. The row counts as not asked: it does not enter the drafter's acceptance."""


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

    def __init__(self, choices: DrawnChoices, replacement: bool = True) -> None:
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

    @property
    def tree(self) -> TokenTree:
        """The tree drawn so far."""
        return TokenTree(tuple(self._tokens), tuple(self._parents))

    def build(self) -> Proposal:
        if not self._tokens:
            return NO_PROPOSAL
        return DrawnProposal(
            self.tree, draft_probs_NV=torch.stack(self._probs), replacement=self._replacement
        )
