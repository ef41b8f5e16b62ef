"""Traversal verification: equal to block verification on a chain, exact for trees that grow by
what was drawn, and a misreading of it that is found.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from foredraft.core import verify
from foredraft.core.choices import DrawKey, DrawnChoices
from foredraft.core.proposal import Draft, Proposal
from foredraft.core.tree import ROOT
from foredraft.core.verify import verify_block, verify_traversal
from tests.exactness.drafting import SHAPES, Conditional, Drawn
from tests.exactness.laws import Rule, Steps
from tests.exactness.ledger import total_variation
from tests.exactness.reference_rules import verify_recursive
from tests.exactness.worlds import KINDS, PLAIN, Tokens, TreeProbs, target_law, world
from tests.exactness.worlds import Distributions as Probs

ROUNDING = 1e-12


@dataclass(frozen=True)
class Grown:
    """A drawn tree whose shape follows from what was drawn so far.

    A root's child is drawn; a likely one gets a child of its own, an unlikely one a sibling, and
    so on: every decision falls before the token that it is about.
    """

    num_nodes: int
    replacement: bool

    def __call__(
        self, context: Tokens, probs: Conditional, choices: DrawnChoices, budget: int
    ) -> Proposal:
        builder = Draft(choices, replacement=self.replacement)
        parent, text = ROOT, context
        for _ in range(min(self.num_nodes, budget)):
            probs_V = probs(text)
            node = builder.draw(parent, probs_V)
            if node is None:
                break
            if float(probs_V[builder.tokens[node]]) > 0.4:
                parent, text = node, (*text, builder.tokens[node])
            elif builder.tokens[node] == 0:  # back to the root: the order of drawing is mixed up
                parent, text = ROOT, context
        return builder.build()


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("rule", [verify_traversal, verify_recursive])
@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_may_grow_by_what_was_drawn(kind: str, rule: Rule, replacement: bool) -> None:
    w = world(kind, 3)
    text_law = Steps(w, Grown(4, replacement), rule).text_law(3)
    assert total_variation(text_law, target_law(w, PLAIN, 3)) < ROUNDING


@pytest.mark.parametrize("kind", ["random", "zeros in q", "zeros in p", "q is p"])
def test_on_a_chain_it_is_block_verification(kind: str) -> None:
    """Verdict by verdict, with the same random numbers."""
    w = world(kind, 4)
    target, draft = Probs(w.target(), PLAIN), Probs(w.draft(), PLAIN)
    for seed in range(200):
        proposal = Drawn((ROOT, 0, 1, 2))((), draft, DrawnChoices(seed, 0), 4)
        probs, choices = TreeProbs(target.law, (), proposal.tree), DrawKey(seed, 0)
        assert verify_traversal(proposal, probs, choices) == verify_block(proposal, probs, choices)


def test_another_weight_after_a_rejection_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dividing what is uncovered by the draft mass of the other tokens looks plausible."""
    w, shape = world("random", 3), SHAPES["fork below a chain"]
    right = Steps(w, Drawn(shape), verify_traversal).text_law(3)
    assert total_variation(right, target_law(w, PLAIN, 3)) < ROUNDING
    share = lambda weight, residual_V: min(1.0, float(residual_V.sum()) / 0.6)  # noqa: E731
    monkeypatch.setattr(verify, "_uncovered_share", share)
    wrong = Steps(w, Drawn(shape), verify_traversal).text_law(3)
    assert total_variation(wrong, target_law(w, PLAIN, 3)) > 1e-3
