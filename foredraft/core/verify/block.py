"""Block verification of a drawn chain (Sun et al., arXiv 2403.10444, algorithm 2).

The optimal rule for one chain: it looks at the whole block before rejecting, and accepts at least
as many tokens as the token rule on every input, in expectation.
"""

from __future__ import annotations

from torch import Tensor

from foredraft.core.choices import VerifyChoices
from foredraft.core.proposal import DrawnProposal
from foredraft.core.sampling import NodeLaws
from foredraft.core.verify.maths import normalised, positive_part, residual_or
from foredraft.core.verify.verdict import Verdict


def verify_block(proposal: DrawnProposal, laws: NodeLaws, choices: VerifyChoices) -> Verdict:
    """Accept the longest prefix whose own decision succeeds.

    With weight w_i = min(1, w_{i-1} p(x_i)/q(x_i)) and uncovered mass
    S_i = sum max(w_i p - q, 0) after i tokens, prefix i succeeds with S_i / (S_i + 1 - w_i); the
    whole block with w_K.
    """
    tokens = proposal.tree.tokens
    target = [normalised(laws[node].probs_V) for node in range(-1, len(tokens))]
    draft = [normalised(draft_V) for draft_V in proposal.draft_probs_NV]
    weights = [1.0]
    for i, token in enumerate(tokens):
        weights.append(min(1.0, weights[-1] * float(target[i][token] / draft[i][token])))
    # Every prefix has an independent decision and the longest success wins, so deciding from the
    # longest down and stopping at the first success is the same law with fewer decisions.
    for length in range(len(tokens), 0, -1):
        if choices.accept(_prefix_success(length, weights, target, draft), length):
            break
    else:
        length = 0
    path = tuple(range(length))
    if length == len(tokens):
        return Verdict(path, choices.draw_residual(target[length]), "bonus")
    residual_V = positive_part(weights[length] * target[length], draft[length])
    next_token = choices.draw_residual(residual_or(target[length], residual_V))
    return Verdict(path, next_token, "correction")


def _prefix_success(
    length: int, weights: list[float], target: list[Tensor], draft: list[Tensor]
) -> float:
    weight = weights[length]
    if length == len(draft):
        return weight
    uncovered = float(positive_part(weight * target[length], draft[length]).sum())
    # 0/0 is weight 1 with nothing uncovered: target and draft agree on what follows.
    return uncovered / (uncovered + 1.0 - weight) if uncovered + 1.0 - weight > 0.0 else 1.0
