"""Published rules that the engine does not use: what its own rules are tested against."""

from __future__ import annotations

from foredraft.core.choices import DrawKey
from foredraft.core.proposal import DrawnProposal
from foredraft.core.sampling import NodeLaws
from foredraft.core.tree import ROOT
from foredraft.core.verify import Verdict, normalised, positive_part, residual_or


def verify_token_rule(proposal: DrawnProposal, laws: NodeLaws, choices: DrawKey) -> Verdict:
    """The token rule: speculative sampling of Leviathan et al. (arXiv 2211.17192, algorithm 1).

    Accept each drafted token with probability min(1, p/q); at the first rejection draw from the
    residual max(p - q, 0).

    Verify a drawn chain, left to right."""
    for node, token in enumerate(proposal.tree.tokens):
        target_V = normalised(laws(node - 1).probs_V)
        draft_V = normalised(proposal.draft_probs_NV[node])
        if not choices.accept(min(1.0, float(target_V[token] / draft_V[token])), node):
            residual_V = residual_or(target_V, positive_part(target_V, draft_V))
            return Verdict(tuple(range(node)), choices.draw_residual(residual_V), "correction")
    last = len(proposal.tree) - 1
    return Verdict(
        tuple(range(len(proposal.tree))), choices.draw_residual(laws(last).probs_V), "bonus"
    )


def verify_recursive(proposal: DrawnProposal, laws: NodeLaws, choices: DrawKey) -> Verdict:
    """Recursive rejection sampling over a drawn tree (SpecInfer, arXiv 2305.09781).

    At each node the children are tried in drafting order with the token rule; a rejected child
    leaves the residual as the next child's target. Siblings drawn without replacement (Sequoia,
    arXiv 2402.12374) also leave the draft distribution, so no token is tried twice."""
    tree, draft_probs_NV = proposal.tree, proposal.draft_probs_NV
    node = ROOT
    path: list[int] = []
    while node in tree.children:
        target_V = normalised(laws(node).probs_V)
        draft_V = normalised(draft_probs_NV[tree.children[node][0]])
        for child in tree.children[node]:
            token = tree.tokens[child]
            if choices.accept(min(1.0, float(target_V[token] / draft_V[token])), child):
                path.append(child)
                node = child
                break
            residual_V = residual_or(target_V, positive_part(target_V, draft_V))
            target_V = residual_V / residual_V.sum()
            if not proposal.replacement:
                draft_V = draft_V.clone()
                draft_V[token] = 0.0
                draft_V = normalised(draft_V)
        else:
            return Verdict(tuple(path), choices.draw_residual(target_V), "correction")
    return Verdict(tuple(path), choices.draw_residual(laws(node).probs_V), "bonus")
