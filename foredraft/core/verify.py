"""Which rule verifies which proposal. All of them keep the target's distribution exactly.

============================  ==================================================================
proposal                      rule
============================  ==================================================================
chosen chain or tree          target-only: draw from the target, follow the child that matches
drawn chain                   block verification (arXiv 2403.10444)
drawn tree                    traversal verification (arXiv 2505.12398)
============================  ==================================================================

Shape legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from torch import Tensor

from foredraft.core.choices import DrawKey
from foredraft.core.proposal import DrawnProposal, Proposal
from foredraft.core.sampling import Law, NodeLaws
from foredraft.core.tree import ROOT


@dataclass(frozen=True)
class Verdict:
    """The accepted path and the token after it.

    Attributes:
        path: accepted node indices, outermost first; empty when none was accepted.
        next_token: drawn from the target, or from the residual after a rejection; None where the
            target has no law at the end of the path.
        kind: "correction" where the draft offered something else, "bonus" where it had ended,
            "failed" where there is no next token. Plain decoding would have failed there, too.
        error: why it failed.
        evidence: inputs and decisions of the verification, if the rule was `recorded`.
    """

    path: tuple[int, ...]
    next_token: int | None
    kind: Literal["bonus", "correction", "failed"]
    error: Exception | None = None
    evidence: Evidence | None = field(default=None, repr=False, compare=False)

    @classmethod
    def failed(cls, path: tuple[int, ...], error: Exception) -> Verdict:
        return cls(path, None, "failed", error)

    @property
    def num_accepted(self) -> int:
        return len(self.path)


Rule: TypeAlias = Callable[[Proposal, NodeLaws, DrawKey], Verdict]
"""A verification rule: the verdict for a draft and the target's laws, such as `verify`."""


def verify(proposal: Proposal, laws: NodeLaws, key: DrawKey) -> Verdict:
    """Accept a path of the proposal and draw the next token.

    Args:
        proposal: the draft of one row.
        laws: the target's laws by node. One that raises ends the row where plain decoding would
            have ended; tokens accepted before it stay accepted.
        key: the row's, of this step.
    """
    if not isinstance(proposal, DrawnProposal):
        return verify_target_only(proposal, laws, key)
    sound = sound_part(proposal, laws)
    if ROOT in sound.errors:
        return Verdict.failed((), sound.errors[ROOT])
    rule = verify_block if sound.proposal.tree.is_chain else verify_traversal
    return sound.in_whole(rule(sound.proposal, sound.laws, key))


# ------------------------------------------------------------------------------------------- rules


def verify_target_only(proposal: Proposal, laws: NodeLaws, key: DrawKey) -> Verdict:
    """Target-only verification, for proposals that are a function of the text so far.

    Draw from the target as plain decoding would, with the same noise; while the token drawn happens
    to be in the draft, the next distribution is already there. So the text equals plain decoding
    token for token, whatever is drafted, also by a drafter that chose with the very noise of the
    draw."""
    tree = proposal.tree
    node = ROOT
    path: list[int] = []
    while True:
        try:
            law = laws(node)
        except Exception as error:  # plain decoding would have come here, too
            return Verdict.failed(tuple(path), error)
        token = key.draw_target(law, len(path))
        child = tree.child_with_token(node, token)
        if child is None:
            return Verdict(tuple(path), token, "correction" if node in tree.children else "bonus")
        path.append(child)
        node = child


def verify_block(proposal: DrawnProposal, laws: NodeLaws, key: DrawKey) -> Verdict:
    """Block verification of a drawn chain (Sun et al., arXiv 2403.10444, algorithm 2).

    The optimal rule for one chain: it looks at the whole block before rejecting, and accepts at
    least as many tokens as the token rule on every input, in expectation.

    Accept the longest prefix whose own decision succeeds.

    With weight w_i = min(1, w_{i-1} p(x_i)/q(x_i)) and uncovered mass
    S_i = sum max(w_i p - q, 0) after i tokens, prefix i succeeds with S_i / (S_i + 1 - w_i); the
    whole block with w_K.
    """
    tokens = proposal.tree.tokens
    target = [normalised(laws(node).probs_V) for node in range(-1, len(tokens))]
    draft = [normalised(draft_V) for draft_V in proposal.draft_probs_NV]
    weights = [1.0]
    for i, token in enumerate(tokens):
        weights.append(min(1.0, weights[-1] * float(target[i][token] / draft[i][token])))
    # Every prefix has an independent decision and the longest success wins, so deciding from the
    # longest down and stopping at the first success is the same law with fewer decisions.
    for length in range(len(tokens), 0, -1):
        if key.accept(_prefix_success(length, weights, target, draft), length):
            break
    else:
        length = 0
    path = tuple(range(length))
    if length == len(tokens):
        return Verdict(path, key.draw_residual(target[length]), "bonus")
    residual_V = positive_part(weights[length] * target[length], draft[length])
    next_token = key.draw_residual(residual_or(target[length], residual_V))
    return Verdict(path, next_token, "correction")


def _prefix_success(
    length: int, weights: list[float], target: list[Tensor], draft: list[Tensor]
) -> float:
    weight = weights[length]
    if length == len(draft):
        return weight
    return _uncovered_share(weight, positive_part(weight * target[length], draft[length]))


def verify_traversal(proposal: DrawnProposal, laws: NodeLaws, key: DrawKey) -> Verdict:
    """Traversal verification of a drawn tree (arXiv 2505.12398).

    Leaves are judged first: a node is given up only after everything below it. So a path whose
    first token is a little too likely in the draft can be saved by what follows it, which rejection
    from the root down cannot do. On a chain it is block verification.

    Accept a path, deepest first.

    A node of weight w is accepted, it or something below it, with probability w. Its children are
    tried in drafting order: with t the node's distribution and q the one its children were drawn
    from, child x has weight min(1, w t(x)/q(x)). When x and all below it are rejected, t becomes
    max(w t - q, 0), normalised, and w becomes S / (S + 1 - w) with S the sum before. After the
    last child the node itself is accepted with what w is then, and the next token comes from t.
    Drawn without replacement, a rejected token also leaves q.
    """
    accepted = _Traversal(proposal, laws, key).visit(ROOT, 1.0)
    assert accepted is not None  # the root has weight 1 to the end
    tree, node = proposal.tree, accepted.node
    path = () if node == ROOT else tree.paths[node]
    next_token = key.draw_residual(accepted.target_V)
    return Verdict(path, next_token, "correction" if node in tree.children else "bonus")


@dataclass(frozen=True)
class _Accepted:
    """The last accepted node, and the weights that the next token is drawn from."""

    node: int
    target_V: Tensor


@dataclass(frozen=True)
class _Traversal:
    proposal: DrawnProposal
    laws: NodeLaws
    key: DrawKey

    def visit(self, node: int, weight: float) -> _Accepted | None:
        """The accepted end of a path through ``node``; None when there is none."""
        tree = self.proposal.tree
        target_V = normalised(self.laws(node).probs_V)
        children = tree.children.get(node, ())
        probs_NV = self.proposal.draft_probs_NV
        draft_V = normalised(probs_NV[children[0]]) if children else target_V
        for child in children:
            token = tree.tokens[child]
            ratio = float(target_V[token] / draft_V[token])
            if accepted := self.visit(child, min(1.0, weight * ratio)):
                return accepted
            residual_V = positive_part(weight * target_V, draft_V)
            weight = _uncovered_share(weight, residual_V)
            target_V = normalised(residual_or(target_V, residual_V))
            if not self.proposal.replacement and child != children[-1]:
                draft_V = draft_V.clone()
                draft_V[token] = 0.0
                draft_V = normalised(draft_V)
        if node == ROOT or self.key.accept(weight, node + 1):
            return _Accepted(node, target_V)
        return None


def _uncovered_share(weight: float, residual_V: Tensor) -> float:
    """S / (S + 1 - w): a block's success, and the weight of a node after a child's rejection."""
    uncovered = float(residual_V.sum())
    remaining = uncovered + 1.0 - weight
    # 0/0 is weight 1 with nothing uncovered: target and draft have the same next distribution.
    return uncovered / remaining if remaining > 0.0 else 1.0


def normalised(weights_V: Tensor) -> Tensor:
    """Weights as float64 probabilities. float32 softmax sums to one only within 1e-6."""
    weights_V = weights_V.double()
    return weights_V / weights_V.sum()


def positive_part(target_V: Tensor, draft_V: Tensor) -> Tensor:
    """max(target - draft, 0): the mass that drafting left uncovered, not normalised."""
    return (target_V - draft_V).clamp_min(0.0)


def residual_or(fallback_V: Tensor, residual_V: Tensor) -> Tensor:
    """The residual, or ``fallback_V`` where rounding left none.

    A residual without mass means target and draft agree, and is then reached with probability 0.
    """
    return residual_V if float(residual_V.sum()) > 0.0 else fallback_V


# ----------------------------------------------------------------------------- nodes without a law


@dataclass(frozen=True)
class SoundPart:
    """The part of a drawn proposal that the target has laws for.

    The rules for drawn proposals look at every node, also at those they then reject. A node without
    a law (NaN logits, a grammar's error) must not cost the row anything unless it is reached. So
    the draft is cut there: whether a node has children then depends on the tokens up to that node
    alone, never on the children, and the distribution of the output is unchanged.

    Attributes:
        proposal: the nodes that are left.
        laws: of its nodes. Leaves without one of their own have their parent's in its place: a
            leaf's law is asked for the token after it alone, which `in_whole` then takes back.
        nodes: for each node that is left its number in the whole proposal.
        errors: why nodes have no law, by number in the whole proposal.
    """

    proposal: DrawnProposal
    laws: NodeLaws
    nodes: tuple[int, ...]
    errors: Mapping[int, Exception]

    def in_whole(self, verdict: Verdict) -> Verdict:
        """A verdict about this part as one about the whole proposal."""
        path = tuple(self.nodes[node] for node in verdict.path)
        if path and path[-1] in self.errors:
            return Verdict.failed(path, self.errors[path[-1]])
        return Verdict(path, verdict.next_token, verdict.kind)


def sound_part(proposal: DrawnProposal, laws: NodeLaws) -> SoundPart:
    """See `SoundPart`; laws are looked up for every node above which all have one."""
    tree = proposal.tree
    found: dict[int, Law] = {}
    errors: dict[int, Exception] = {}
    for node in (ROOT, *range(len(tree))):
        parent = ROOT if node == ROOT else tree.parents[node]
        if node == ROOT or parent in found:
            try:
                found[node] = laws(node)
            except Exception as error:  # said when the node is reached
                errors[node] = error
    kept = tuple(n for n in range(len(tree)) if tree.parents[n] in found)
    if len(kept) < len(tree):
        proposal = proposal.restricted_to(kept)
    stand_ins = {n: found[tree.parents[n]] for n in kept if n in errors}
    by_new = {new: {**found, **stand_ins}[old] for new, old in enumerate(kept)}
    if ROOT in found:
        by_new[ROOT] = found[ROOT]
    return SoundPart(proposal, by_new.__getitem__, kept, errors)


# ---------------------------------------------------------------------------------------- evidence


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


class Evidence(DrawKey):
    """Inputs and decisions of one verification, for traces and the page.

    A recording proxy: the rule calls it in place of the laws and the random source, and it stores
    every answer (see `recorded`). It computes nothing that verification does not need: laws are
    kept by reference, and `foredraft.trace.why` reads the evidence before the next forward, outside
    the measured times of the step.

    Args:
        proposal: the draft.
        laws: the target's, by node. Those of nodes that were not looked at can be had from here,
            too; looking one up may raise.
        key: the row's.

    Attributes:
        decisions: of the ratio test, in order; none for chosen drafts, which need no test but
            equality.
        residual_V: weights that the next token of a drawn draft was drawn from, not normalised.
    """

    def __new__(cls, proposal: Proposal, laws: NodeLaws, key: DrawKey) -> Evidence:
        return super().__new__(cls, *key)

    def __init__(self, proposal: Proposal, laws: NodeLaws, key: DrawKey) -> None:
        self.proposal = proposal
        self._laws, self._key, self._known = laws, key, dict[int, Law]()
        self.decisions: list[Decision] = []
        self.residual_V: Tensor | None = None

    def law(self, node: int) -> Law:
        """The target's law after a node."""
        if node not in self._known:
            self._known[node] = self._laws(node)
        return self._known[node]

    def draw_target(self, law: Law, depth: int) -> int:
        return self._key.draw_target(law, depth)

    def accept(self, probability: float, index: int) -> bool:
        accepted = self._key.accept(probability, index)
        self.decisions.append(Decision(index, probability, accepted))
        return accepted

    def draw_residual(self, probs_V: Tensor) -> int:
        self.residual_V = probs_V
        return self._key.draw_residual(probs_V)


def recorded(rule: Rule) -> Rule:
    """The same rule, whose verdicts carry their `Evidence`."""

    def verify_and_record(proposal: Proposal, laws: NodeLaws, key: DrawKey) -> Verdict:
        evidence = Evidence(proposal, laws, key)
        return replace(rule(proposal, evidence.law, evidence), evidence=evidence)

    return verify_and_record
