"""The token rule: speculative sampling of Leviathan et al. (arXiv 2211.17192, algorithm 1).

Accept each drafted token with probability min(1, p/q); at the first rejection draw from the
residual max(p - q, 0). Not used by the engine: the reference that other rules are tested against.
"""

from __future__ import annotations

from foredraft.core.choices import VerifyChoices
from foredraft.core.proposal import DrawnProposal
from foredraft.core.sampling import NodeLaws
from foredraft.core.verify.maths import normalised, positive_part, residual_or
from foredraft.core.verify.verdict import Verdict


def verify_token_rule(proposal: DrawnProposal, laws: NodeLaws, choices: VerifyChoices) -> Verdict:
    """Verify a drawn chain, left to right."""
    for node, token in enumerate(proposal.tree.tokens):
        target_V = normalised(laws[node - 1].probs_V)
        draft_V = normalised(proposal.draft_probs_NV[node])
        if not choices.accept(min(1.0, float(target_V[token] / draft_V[token])), node):
            residual_V = residual_or(target_V, positive_part(target_V, draft_V))
            return Verdict(tuple(range(node)), choices.draw_residual(residual_V), "correction")
    last = len(proposal.tree) - 1
    return Verdict(
        tuple(range(len(proposal.tree))), choices.draw_residual(laws[last].probs_V), "bonus"
    )
