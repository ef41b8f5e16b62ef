"""The exact law of the text that drafting and verification produce together."""

from __future__ import annotations

from collections.abc import Callable

from foredraft.core.choices import DrawKey
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import Proposal
from foredraft.core.sampling import NodeLaws
from foredraft.core.verify import Verdict
from tests.core.reference import is_path
from tests.exactness.drafting import Draft
from tests.exactness.ledger import Law, Ledger, LedgerChoices, law
from tests.exactness.worlds import PLAIN, Distributions, Tokens, TreeProbs, World

Rule = Callable[[Proposal, NodeLaws, DrawKey], Verdict]
ANY_BUDGET = 1000


class Steps:
    """Steps of a draft and a rule in a world.

    Args:
        params: the distribution asked for.
        draft_params: the distribution drafted from; any is legal.
    """

    def __init__(
        self,
        world: World,
        draft: Draft,
        rule: Rule,
        params: SamplingParams = PLAIN,
        draft_params: SamplingParams = PLAIN,
    ) -> None:
        self._target_probs = Distributions(world.target(), params)
        self._draft_probs = Distributions(world.draft(), draft_params)
        self._draft, self._rule = draft, rule
        self._known: dict[Tokens, Law[Tokens]] = {}

    def step_law(self, context: Tokens) -> Law[Tokens]:
        """The law of the tokens that one step after ``context`` commits."""
        if context not in self._known:
            self._known[context] = law(lambda ledger: self._step(context, ledger))
        return self._known[context]

    def _step(self, context: Tokens, ledger: Ledger) -> Tokens:
        choices = LedgerChoices(ledger)
        proposal = self._draft(context, self._draft_probs, choices, ANY_BUDGET)
        probs = TreeProbs(self._target_probs.law, context, proposal.tree)
        verdict = self._rule(proposal, probs, choices)
        assert is_path(proposal.tree, verdict.path)
        return (*(proposal.tree.tokens[node] for node in verdict.path), verdict.next_token)

    def text_law(self, num_tokens: int) -> Law[Tokens]:
        """The law of the first ``num_tokens`` tokens, however many steps they take."""
        by_length: list[Law[Tokens]] = [{} for _ in range(num_tokens + 1)]
        by_length[0][()] = 1.0
        for short in by_length[:-1]:
            for context, weight in short.items():
                for tokens, share in self.step_law(context).items():
                    text = (*context, *tokens)[:num_tokens]
                    longer = by_length[len(text)]
                    longer[text] = longer.get(text, 0.0) + weight * share
        return by_length[num_tokens]

    def expected_accepted(self, context: Tokens = ()) -> float:
        """Draft tokens that one step after ``context`` accepts, in expectation."""
        return sum(weight * (len(t) - 1) for t, weight in self.step_law(context).items())
