"""A draft and the distribution it was really drawn from, in one object that nothing else builds.

The commonest bug of the field is a verifier that is handed another q than the one sampled from.
Here the code that draws a token is the code that records its distribution, so the two cannot part.

Shape legend: N tree nodes, V vocabulary, S tokens with a new name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from foredraft.core.choices import DraftChoices, DrawKey, DrawnChoices, SharedChoices
from foredraft.core.errors import MalformedProposalError, NoTokenError
from foredraft.core.rules import Rules
from foredraft.core.tree import EMPTY_TREE, ROOT, TokenTree


@dataclass(frozen=True)
class Proposal:
    """A drafter's draft for one row: a chosen one, or a `DrawnProposal`.

    Chosen tokens are a function of the text so far, and of the target's own noise if need be: they
    are accepted if and only if the target draws the same tokens.

    Attributes:
        tree: the draft tokens.
        chances: for each node the drafter's own estimate that it and all above it are accepted.
            For traces only; nothing is decided by it. None: it has none.
        authors: for each node the drafter that proposed it, if several do; for traces only.
        is_ready: False: the drafter cannot draft for the row yet. See `NOT_READY`.
    """

    tree: TokenTree
    chances: tuple[float, ...] | None = field(default=None, repr=False, compare=False)
    authors: tuple[str, ...] | None = field(default=None, repr=False, compare=False)
    is_ready: bool = field(default=True, kw_only=True)

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

    def without_tensors(self) -> Proposal:
        """The draft for a record that outlives the step."""
        return self


@dataclass(frozen=True)
class DrawnProposal(Proposal):
    """Randomly drawn tokens with their distributions. `Draft` makes it.

    Attributes:
        draft_probs_NV: row i is the distribution that node i was drawn from (before its earlier
            siblings were removed, when drawn without replacement).
        replacement: whether siblings were drawn with replacement.
    """

    draft_probs_NV: Tensor = field(kw_only=True, repr=False)
    replacement: bool = field(default=True, kw_only=True)

    def without_tensors(self) -> DrawnProposal:
        none_NV = self.draft_probs_NV.new_empty((0, self.draft_probs_NV.shape[-1]))
        return replace(self, draft_probs_NV=none_NV)

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
        tree, probs_NV = self.tree.subset(nodes), self.draft_probs_NV[list(nodes)]
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
NOT_READY = Proposal(EMPTY_TREE, is_ready=False)
"""The proposal of a drafter that cannot draft for a row yet, such as a head that has not read the
end of the text. The row counts as not asked: it does not enter the drafter's acceptance."""


class Draft:
    """A draft under construction: the one builder, of chosen and drawn drafts, chains and trees.

    `extend` appends tokens that follow from the drafter's logits: chosen with the target's noise,
    or drawn, as the request's coupling asks. The request's own rules (temperature, filters, bans,
    grammars) are applied to the logits *before* a token is chosen or drawn; taking one away
    afterwards would bias drawn drafts. `take` appends a chosen token, `draw` a drawn one.

    Whether to draw another token may depend on everything drawn so far; a token that was drawn
    stays in the proposal. Dropping one after seeing it would bias the output, so there is no way
    to do it.

    Args:
        choices: the row's random source; it decides between chosen and drawn.
        rules: the row's, for `extend`.
        text: all committed tokens, for the rules.
        replacement: draw siblings with replacement; False never drafts a token twice under one
            parent.

    Attributes:
        tokens, parents: as in `TokenTree`.
        chances: for each node the estimated chance that it is accepted if its parent is.
    """

    def __init__(
        self,
        choices: DraftChoices,
        rules: Rules | None = None,
        text: Sequence[int] = (),
        replacement: bool = False,
    ) -> None:
        self._choices, self._rules, self._text = choices, rules, text
        self._replacement, self._has_unknown = replacement, False
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.chances: list[float] = []
        self._probs: list[Tensor] = []

    def extend(self, parent: int, logits_V: Tensor, count: int = 1) -> list[int]:
        """Append up to ``count`` children of ``parent``; their nodes, the most promising first.

        Fewer where fewer are possible. To be called once for each parent.

        Args:
            parent: `ROOT` or a node.
            logits_V: the drafter's logits of the token after it.
        """
        assert self._rules is not None
        drafted = self.path(parent)
        try:
            law = self._rules.law(logits_V, self._text, drafted)
        except NoTokenError:  # such as after the end of a grammar
            return []
        if isinstance(self._choices, DrawnChoices):
            drawn = [self.draw(parent, law.probs_V) for _ in range(count)]
            return [node for node in drawn if node is not None]
        chosen = self._choices.best(law, len(drafted), count)
        return [self.take(parent, token, chance) for token, chance in chosen]

    def take(self, parent: int, token: int, chance: float | None = None) -> int:
        """Append a token below ``parent`` that was chosen elsewhere; returns its node.

        Args:
            chance: that the target accepts it; None: unknown, and `build` then gives no chances.
        """
        self._has_unknown |= chance is None
        self.tokens.append(token)
        self.parents.append(parent)
        self.chances.append(1.0 if chance is None else chance)
        return len(self.tokens) - 1

    def draw(self, parent: int, draft_probs_V: Tensor) -> int | None:
        """Draw one child of ``parent``, record its distribution, and return its node.

        Args:
            draft_probs_V: probabilities [V]; siblings must be drawn from the same ones.

        Returns:
            The new node, or None when drawing without replacement left nothing to draw.
        """
        assert not isinstance(self._choices, SharedChoices), "the target's noise draws nothing"
        siblings = [i for i, p in enumerate(self.parents) if p == parent]
        if any(not torch.equal(self._probs[i], draft_probs_V) for i in siblings):
            raise MalformedProposalError("siblings must be drawn from one distribution")
        remaining_V = draft_probs_V
        if not self._replacement and siblings:
            remaining_V = draft_probs_V.clone()
            remaining_V[[self.tokens[i] for i in siblings]] = 0.0
        if not float(remaining_V.sum()) > 0.0:
            return None
        token = self._choices.draw(remaining_V, len(self.tokens))
        self._probs.append(draft_probs_V.clone())  # the caller may reuse its buffer
        return self.take(parent, token, float(draft_probs_V[token]))

    def draw_key(self, parent: int) -> DrawKey | None:
        """The key that draws the token that `extend` would append below ``parent``.

        None if the draw needs more than scaled logits.
        """
        scale = None if self._rules is None else self._rules.scale
        if scale is None or isinstance(self._choices, DrawnChoices):
            return None
        return self._choices.draw_key(len(self.path(parent)), scale)

    def path(self, node: int) -> list[int]:
        """The tokens from the root to a node."""
        drafted: list[int] = []
        while node != ROOT:
            drafted.append(self.tokens[node])
            node = self.parents[node]
        return drafted[::-1]

    @property
    def tree(self) -> TokenTree:
        """The tree so far."""
        return TokenTree(tuple(self.tokens), tuple(self.parents))

    def __len__(self) -> int:
        return len(self.tokens)

    def build(self) -> Proposal:
        """The draft so far, as a proposal."""
        if not self.tokens:
            return NO_PROPOSAL
        if self._probs:
            if len(self._probs) < len(self.tokens):
                raise MalformedProposalError("a draft is chosen or drawn, not both")
            probs_NV = torch.stack(self._probs)
            return DrawnProposal(self.tree, draft_probs_NV=probs_NV, replacement=self._replacement)
        if self._has_unknown:
            return Proposal.chosen(self.tree)
        chances: list[float] = []
        for parent, chance in zip(self.parents, self.chances, strict=True):
            chances.append(chance if parent == ROOT else chances[parent] * chance)
        return Proposal.chosen(self.tree, tuple(chances))
