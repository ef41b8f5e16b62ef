"""What a verification decided on, kept for whoever asks why: traces and the page.

Off unless a trace asks for it. Nothing is computed here that verification does not need: laws are
kept by reference, and whoever reads the evidence (`foredraft.trace.why`) does so before the next
forward, outside the times of the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from foredraft.core.choices import VerifyChoices
from foredraft.core.sampling import Law, NodeLaws
from foredraft.core.verify.verdict import Verdict


@dataclass(frozen=True)
class Decision:
    """One accept-or-reject decision of a ratio test.

    Attributes:
        index: number of the decision in its step: the node it is about, counted from 1.
        probability: with which it accepts.
        accepted: how it fell.
    """

    index: int
    probability: float
    accepted: bool


@dataclass
class Evidence:
    """Stands between a rule and what it asks, and remembers the answers.

    Args:
        laws: the target's, by node. Those of nodes that were not looked at can be had from here,
            too; looking one up may raise.
        choices: the row's.
        seed: of the row.
        num_tokens: committed before the step.

    Attributes:
        decisions: of the ratio test, in order; none for chosen drafts, which need no test but
            equality.
        residual_V: weights that the next token of a drawn draft was drawn from, not normalised.
    """

    laws: NodeLaws
    choices: VerifyChoices = field(repr=False)
    seed: int
    num_tokens: int
    decisions: list[Decision] = field(default_factory=list)
    residual_V: Tensor | None = field(default=None, repr=False)
    _known: dict[int, Law] = field(default_factory=dict, repr=False)

    def __getitem__(self, node: int) -> Law:
        if node not in self._known:
            self._known[node] = self.laws[node]
        return self._known[node]

    def draw_target(self, law: Law, depth: int) -> int:
        return self.choices.draw_target(law, depth)

    def accept(self, probability: float, index: int) -> bool:
        accepted = self.choices.accept(probability, index)
        self.decisions.append(Decision(index, probability, accepted))
        return accepted

    def draw_residual(self, probs_V: Tensor) -> int:
        self.residual_V = probs_V
        return self.choices.draw_residual(probs_V)

    def of(self, verdict: Verdict) -> Verdict:
        """The verdict with this evidence."""
        return replace(verdict, evidence=self)
