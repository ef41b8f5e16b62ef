"""Drafting from a distribution: one verb for chosen and drawn tokens.

A drafter that has logits adds tokens below a node with `Draft.extend` and need not know which
kind the request asks for. The row's own rules (temperature, filters, bans, grammars) are applied
to the drafter's logits *before* a token is chosen or drawn; taking one away afterwards would bias
drawn drafts.

Shape legend: V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from foredraft.core.choices import DrawnChoices, SharedChoices
from foredraft.core.draws import DrawKey
from foredraft.core.errors import NoTokenError
from foredraft.core.proposal import DrawnProposalBuilder, Proposal
from foredraft.core.rules import Rules
from foredraft.core.sampling import Law
from foredraft.core.tree import ROOT, TokenTree


class Draft(ABC):
    """A draft under construction.

    Args:
        rules: the row's.
        text: all committed tokens.

    Attributes:
        tokens, parents: as in `TokenTree`.
        chances: for each node the estimated chance that it is accepted if its parent is.
    """

    def __init__(self, rules: Rules, text: Sequence[int]) -> None:
        self._rules, self._text = rules, text
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.chances: list[float] = []
        self._has_unknown = False

    @abstractmethod
    def extend(self, parent: int, logits_V: Tensor, count: int = 1) -> list[int]:
        """Hang up to ``count`` tokens below ``parent``; their nodes, the most promising first.

        Fewer where fewer are possible. To be called once for each parent.

        Args:
            parent: `ROOT` or a node.
            logits_V: the drafter's logits of the token after it.
        """

    @abstractmethod
    def build(self) -> Proposal:
        """The draft so far, as a proposal."""

    def draw_key(self, parent: int) -> DrawKey | None:
        """The key that draws the token that `extend` would append below ``parent``.

        None if the draw needs more than scaled logits.
        """
        return None

    def take(self, parent: int, token: int, chance: float | None = None) -> int:
        """Append a token below ``parent`` that was chosen elsewhere; returns its node.

        Args:
            chance: that the target accepts it; None: unknown, and `build` then gives no chances.
        """
        self._has_unknown |= chance is None
        return self._add(parent, token, 1.0 if chance is None else chance)

    @property
    def tree(self) -> TokenTree:
        """The tree so far."""
        return TokenTree(tuple(self.tokens), tuple(self.parents))

    def __len__(self) -> int:
        return len(self.tokens)

    def _law(self, parent: int, logits_V: Tensor) -> tuple[Law | None, int]:
        """The law by the row's rules (None if no token may come), and ``parent``'s depth."""
        drafted = self._drafted(parent)
        try:
            return self._rules.law(logits_V, self._text, drafted), len(drafted)
        except NoTokenError:  # such as after the end of a grammar
            return None, len(drafted)

    def _drafted(self, node: int) -> list[int]:
        """The tokens from the root to a node."""
        drafted: list[int] = []
        while node != ROOT:
            drafted.append(self.tokens[node])
            node = self.parents[node]
        return drafted[::-1]

    def _add(self, parent: int, token: int, chance: float) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.chances.append(chance)
        return len(self.tokens) - 1


class ChosenDraft(Draft):
    """Tokens chosen with the noise that the target draws with; at temperature 0 the likeliest."""

    def __init__(self, rules: Rules, text: Sequence[int], choices: SharedChoices) -> None:
        super().__init__(rules, text)
        self._choices = choices

    def extend(self, parent: int, logits_V: Tensor, count: int = 1) -> list[int]:
        law, depth = self._law(parent, logits_V)
        if law is None:
            return []
        return [self._add(parent, *choice) for choice in self._choices.best(law, depth, count)]

    def draw_key(self, parent: int) -> DrawKey | None:
        scale = self._rules.scale
        return None if scale is None else self._choices.draw_key(len(self._drafted(parent)), scale)

    def build(self) -> Proposal:
        if self._has_unknown:
            return Proposal.chosen(self.tree)
        chances: list[float] = []
        for parent, chance in zip(self.parents, self.chances, strict=True):
            chances.append(chance if parent == ROOT else chances[parent] * chance)
        return Proposal.chosen(self.tree, tuple(chances))


class DrawnDraft(Draft):
    """Tokens drawn from the drafter's distribution, siblings without replacement."""

    def __init__(self, rules: Rules, text: Sequence[int], choices: DrawnChoices) -> None:
        super().__init__(rules, text)
        self._builder = DrawnProposalBuilder(choices, replacement=False)

    def extend(self, parent: int, logits_V: Tensor, count: int = 1) -> list[int]:
        law, _ = self._law(parent, logits_V)
        if law is None:
            return []
        probs_V = law.probs_V
        drawn = [self._builder.draw(parent, probs_V) for _ in range(count)]
        tokens = [self._builder.token(node) for node in drawn if node is not None]
        return [self._add(parent, token, float(probs_V[token])) for token in tokens]

    def build(self) -> Proposal:
        return self._builder.build()
