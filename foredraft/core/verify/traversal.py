"""Traversal verification of a drawn tree (arXiv 2505.12398).

Leaves are judged first: a node is given up only after everything below it. So a path whose first
token is a little too likely in the draft can be saved by what follows it, which rejection from
the root down cannot do. On a chain it is block verification.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from foredraft.core.choices import VerifyChoices
from foredraft.core.proposal import DrawnProposal
from foredraft.core.sampling import NodeLaws
from foredraft.core.tree import ROOT
from foredraft.core.verify.maths import normalised, positive_part, residual_or
from foredraft.core.verify.verdict import Verdict


def verify_traversal(proposal: DrawnProposal, laws: NodeLaws, choices: VerifyChoices) -> Verdict:
    """Accept a path, deepest first.

    A node of weight w is accepted, it or something below it, with probability w. Its children are
    tried in drafting order: with t the node's distribution and q the one its children were drawn
    from, child x has weight min(1, w t(x)/q(x)). When x and all below it are rejected, t becomes
    max(w t - q, 0), normalised, and w becomes S / (S + 1 - w) with S the sum before. After the
    last child the node itself is accepted with what w is then, and the next token comes from t.
    Drawn without replacement, a rejected token also leaves q.
    """
    accepted = _Traversal(proposal, laws, choices).visit(ROOT, 1.0)
    assert accepted is not None  # the root has weight 1 to the end
    tree, node = proposal.tree, accepted.node
    path = () if node == ROOT else tree.paths[node]
    next_token = choices.draw_residual(accepted.target_V)
    return Verdict(path, next_token, "correction" if node in tree.children else "bonus")


@dataclass(frozen=True)
class _Accepted:
    """Where the path ends, and what the next token is drawn from."""

    node: int
    target_V: Tensor


@dataclass(frozen=True)
class _Traversal:
    proposal: DrawnProposal
    laws: NodeLaws
    choices: VerifyChoices

    def visit(self, node: int, weight: float) -> _Accepted | None:
        """The accepted end of a path through ``node``; None when there is none."""
        tree = self.proposal.tree
        target_V = normalised(self.laws[node].probs_V)
        children = tree.children.get(node, ())
        draft_V = self._draft_probs(children[0]) if children else target_V
        for child in children:
            token = tree.tokens[child]
            ratio = float(target_V[token] / draft_V[token])
            if accepted := self.visit(child, min(1.0, weight * ratio)):
                return accepted
            residual_V = positive_part(weight * target_V, draft_V)
            weight = _weight_after_rejection(weight, float(residual_V.sum()))
            target_V = normalised(residual_or(target_V, residual_V))
            if not self.proposal.replacement and child != children[-1]:
                draft_V = draft_V.clone()
                draft_V[token] = 0.0
                draft_V = normalised(draft_V)
        if node == ROOT or self.choices.accept(weight, node + 1):
            return _Accepted(node, target_V)
        return None

    def _draft_probs(self, node: int) -> Tensor:
        return normalised(self.proposal.draft_probs_NV[node])


def _weight_after_rejection(weight: float, uncovered: float) -> float:
    # 0/0 is weight 1 with nothing uncovered: target and draft agree, and nothing is rejected.
    remaining = uncovered + 1.0 - weight
    return uncovered / remaining if remaining > 0.0 else 1.0
