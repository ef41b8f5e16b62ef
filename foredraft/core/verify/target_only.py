"""Target-only verification, for proposals that are a function of the text so far.

Draw from the target as plain decoding would, with the same noise; while the token drawn happens to
be in the draft, the next distribution is already there. So the text equals plain decoding token for
token, whatever is drafted, also by a drafter that chose with the very noise of the draw.
"""

from __future__ import annotations

from foredraft.core.choices import VerifyChoices
from foredraft.core.proposal import Proposal
from foredraft.core.sampling import NodeLaws
from foredraft.core.tree import ROOT
from foredraft.core.verify.verdict import Verdict


def verify_target_only(proposal: Proposal, laws: NodeLaws, choices: VerifyChoices) -> Verdict:
    tree = proposal.tree
    node = ROOT
    path: list[int] = []
    while True:
        try:
            law = laws[node]
        except Exception as error:  # plain decoding would have come here, too
            return Verdict.failed(tuple(path), error)
        token = choices.draw_target(law, len(path))
        child = tree.child_with_token(node, token)
        if child is None:
            return Verdict(tuple(path), token, "correction" if node in tree.children else "bonus")
        path.append(child)
        node = child
