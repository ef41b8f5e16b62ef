"""Target-only verification, for proposals that are a function of the text so far.

Draw from the target as plain decoding would; while the token drawn happens to be in the draft,
the next distribution is already there. A chosen token x is accepted with probability p(x), just
what rejection sampling gives for a one-hot q, and the text equals plain decoding token for token.
"""

from __future__ import annotations

from foredraft.core.choices import VerifyChoices
from foredraft.core.proposal import Proposal
from foredraft.core.sampling import NodeProbs
from foredraft.core.tree import ROOT
from foredraft.core.verify.verdict import Verdict


def verify_target_only(
    proposal: Proposal, target_probs: NodeProbs, choices: VerifyChoices
) -> Verdict:
    tree = proposal.tree
    node = ROOT
    path: list[int] = []
    while True:
        token = choices.draw_target(target_probs[node], len(path))
        child = tree.child_with_token(node, token)
        if child is None:
            return Verdict(tuple(path), token, "correction" if node in tree.children else "bonus")
        path.append(child)
        node = child
