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
from foredraft.core.proposal import DrawnProposal, Proposal
from foredraft.core.sampling import NodeLaws
from foredraft.core.tree import ROOT
from foredraft.core.verify.block import verify_block
from foredraft.core.verify.sound import sound_part
from foredraft.core.verify.target_only import verify_target_only
from foredraft.core.verify.traversal import verify_traversal
from foredraft.core.verify.verdict import Verdict


def verify(proposal: Proposal, laws: NodeLaws, choices: VerifyChoices) -> Verdict:
    """Accept a path of the proposal and draw the next token.

    Args:
        proposal: the draft of one row.
        laws: the target's laws by node. One that cannot be had ends the row where plain decoding
            would have ended; what was accepted before it stays accepted.
        choices: the row's verify stream.
    """
    if not isinstance(proposal, DrawnProposal):
        return verify_target_only(proposal, laws, choices)
    sound = sound_part(proposal, laws)
    if ROOT in sound.errors:
        return Verdict.failed((), sound.errors[ROOT])
    rule = verify_block if sound.proposal.tree.is_chain else verify_traversal
    return sound.in_whole(rule(sound.proposal, sound.laws, choices))


__all__ = ["Verdict", "verify"]
