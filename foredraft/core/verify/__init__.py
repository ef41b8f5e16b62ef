"""Which rule verifies which proposal. All of them keep the target's distribution exactly.

============================  ==================================================================
proposal                      rule
============================  ==================================================================
chosen chain or tree          target-only: draw from the target, follow the child that matches
drawn chain                   block verification (arXiv 2403.10444)
drawn tree                    traversal verification (arXiv 2505.12398)
============================  ==================================================================

Two rules are kept as what these are measured against: the token rule of Leviathan et al. for
chains (`token_rule.py`) and recursive rejection sampling for trees (`recursive.py`).
"""

from __future__ import annotations

from foredraft.core.choices import VerifyChoices
from foredraft.core.proposal import Proposal
from foredraft.core.sampling import NodeProbs
from foredraft.core.verify.block import verify_block
from foredraft.core.verify.target_only import verify_target_only
from foredraft.core.verify.traversal import verify_traversal
from foredraft.core.verify.verdict import Verdict


def verify(proposal: Proposal, target_probs: NodeProbs, choices: VerifyChoices) -> Verdict:
    """Accept a path of the proposal and draw the next token.

    Args:
        proposal: the draft of one row.
        target_probs: target probabilities [V] by node.
        choices: the row's verify stream.
    """
    if not proposal.is_drawn:
        return verify_target_only(proposal, target_probs, choices)
    rule = verify_block if proposal.tree.is_chain else verify_traversal
    return rule(proposal, target_probs, choices)


__all__ = ["Verdict", "verify"]
