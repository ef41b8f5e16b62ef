"""Known mistakes of speculative engines, to be planted: would this audit find them here?

Each occurred in engines that people use. A fault stands in the place of
`foredraft.core.verify.verify` for the requests of one policy, or spoils their cache entries;
`planted` puts it there and takes it away again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from torch import Tensor

from foredraft.cache.base import Cache
from foredraft.core.choices import DrawKey
from foredraft.core.proposal import DrawnProposal, Proposal
from foredraft.core.sampling import Law, NodeLaws
from foredraft.core.tree import ROOT
from foredraft.core.verify import (
    Rule,
    Verdict,
    normalised,
    positive_part,
    recorded,
    residual_or,
    verify,
)
from foredraft.engine.policy import Policy

TYPICAL = 0.09
"""Typical acceptance takes a drafted token of at least this probability."""
CLAIMED = 0.5
_WRONG_TEMPERATURE = 0.7
"""Factor on the target's temperature if it is 1, where ignoring the temperature changes nothing."""


@dataclass(frozen=True)
class Fault:
    """A known mistake.

    Attributes:
        name: of it.
        said: its effect, in a few words.
        rule: stands in for `verify`.
        spoils_cache: the cache keeps the entry of a rejected token in an accepted one's place.
        needs_draws: at temperature 0 it changes nothing.
    """

    name: str
    said: str
    rule: Rule = verify
    spoils_cache: bool = False
    needs_draws: bool = False


@contextmanager
def planted(fault: Fault, policy: Policy, cache: Cache) -> Iterator[None]:
    """Plant a fault for the requests of a policy.

    Nothing that the cache holds of them may serve others: they must run without prefix caching,
    and alone where the fault is one of the cache.
    """
    keep = cache.keep

    def keep_rejected(slot: int, num_pending: int, path: Sequence[int]) -> None:
        if path:
            with suppress(ValueError):  # nothing was drafted behind it, and nothing has changed
                return keep(slot, num_pending, (*path[:-1], path[-1] + 1))
        return keep(slot, num_pending, path)

    before, policy.rule = policy.rule, recorded(fault.rule)
    if fault.spoils_cache:
        vars(cache)["keep"] = keep_rejected
    try:
        yield
    finally:
        policy.rule = before
        vars(cache).pop("keep", None)


# ------------------------------------------------------------------------------------- the rules


@dataclass(frozen=True)
class TokenRule:
    """The token rule (arXiv 2211.17192), with the mistakes that can be made in it.

    Chosen drafts are followed where they are what the target draws, as they should be.

    Attributes:
        takes: whether a draft token is accepted without a test, by its probability and depth.
        redraws: after a rejection draws from the target's whole law, not from the residual.
        claims: chosen drafts are tested as if they had been drawn with probability `CLAIMED`.
    """

    takes: Callable[[float, int], bool] = lambda probability, depth: False
    redraws: bool = False
    claims: bool = False

    def __call__(self, proposal: Proposal, laws: NodeLaws, choices: DrawKey) -> Verdict:
        tree, node, path = proposal.tree, ROOT, list[int]()
        is_drawn = isinstance(proposal, DrawnProposal)
        step = self._drawn_step if is_drawn else self._chosen_step
        while node in tree.children:
            child, token = step(proposal, laws(node), node, len(path), choices)
            if child is None:
                return Verdict(tuple(path), token, "correction")
            path.append(child)
            node = child
        law = laws(node)
        token = (
            choices.draw_residual(law.probs_V) if is_drawn else choices.draw_target(law, len(path))
        )
        return Verdict(tuple(path), token, "bonus")

    def _chosen_step(
        self, proposal: Proposal, law: Law, node: int, depth: int, choices: DrawKey
    ) -> tuple[int | None, int]:
        tree = proposal.tree
        first = tree.children[node][0]
        probability = _probability(law, tree.tokens[first])
        accepts = self.claims and choices.accept(min(1.0, probability / CLAIMED), first + 1)
        if accepts or self.takes(probability, depth):
            return first, tree.tokens[first]
        token = choices.draw_target(law, depth)
        child = tree.child_with_token(node, token)
        if child is None and self.redraws:
            token = choices.draw_residual(law.probs_V)
        return child, token

    def _drawn_step(
        self, proposal: Proposal, law: Law, node: int, depth: int, choices: DrawKey
    ) -> tuple[int | None, int]:
        assert isinstance(proposal, DrawnProposal)
        target_V = whole_V = normalised(law.probs_V)
        draft_V = normalised(proposal.draft_probs_NV[proposal.tree.children[node][0]])
        for child in proposal.tree.children[node]:
            token = proposal.tree.tokens[child]
            ratio = float(target_V[token] / draft_V[token])
            is_taken = self.takes(_probability(law, token), depth)
            if is_taken or choices.accept(min(1.0, ratio), child + 1):
                return child, token
            target_V = normalised(residual_or(target_V, positive_part(target_V, draft_V)))
            draft_V = _without(draft_V, token, proposal.replacement)
        return None, choices.draw_residual(whole_V if self.redraws else target_V)


def _probability(law: Law, token: int) -> float:
    """Probability of a token by a law; at temperature 0 by the model at temperature 1."""
    probs_V = law.logits_V.softmax(0) if law.scale is None else law.probs_V
    return float(probs_V[token])


def _without(draft_V: Tensor, token: int, replacement: bool) -> Tensor:
    if replacement:
        return draft_V
    left_V = draft_V.clone()
    left_V[token] = 0.0
    return normalised(residual_or(draft_V, left_V))


def _wrong_row(proposal: Proposal, laws: NodeLaws, choices: DrawKey) -> Verdict:
    """Draws the token after an accepted path from the distribution one position too early."""
    verdict = verify(proposal, laws, choices)
    if not verdict.path:
        return verdict
    law = laws(proposal.tree.parents[verdict.path[-1]])
    return replace(verdict, next_token=choices.draw_residual(law.probs_V))


def _draft_temperature_only(proposal: Proposal, laws: NodeLaws, choices: DrawKey) -> Verdict:
    """The temperature reaches the draft and not the target.

    It is 1 there, or below it where 1 was asked for.
    """

    def warm(node: int) -> Law:
        law = laws(node)
        is_one = law.scale is not None and math.isclose(law.scale, 1.0)
        return Law(law.logits_V, 1.0 / _WRONG_TEMPERATURE if is_one else 1.0, law.token)

    return verify(proposal, warm, choices)


def _wrong_draft_law(proposal: Proposal, laws: NodeLaws, choices: DrawKey) -> Verdict:
    """The ratio test takes drafts to be from another law than they are: another temperature.

    Chosen drafts, which the drafter was sure of, it takes to have been drawn with `CLAIMED`.
    """
    if isinstance(proposal, DrawnProposal):
        flat_NV = proposal.draft_probs_NV**0.5
        return verify(replace(proposal, draft_probs_NV=flat_NV), laws, choices)
    return TokenRule(claims=True)(proposal, laws, choices)


FAULTS: tuple[Fault, ...] = (
    Fault("accept all", "every draft token is accepted", TokenRule(lambda p, depth: True)),
    Fault(
        "typical acceptance",
        f"a draft token of probability {TYPICAL} or more is accepted without a test",
        TokenRule(lambda p, depth: p >= TYPICAL),
    ),
    Fault(
        "first token untested",
        "the first draft token of a step is not verified",
        TokenRule(lambda p, depth: depth == 0),
    ),
    Fault(
        "no residual",
        "after a rejection the token is drawn from the target's whole law",
        TokenRule(redraws=True),
        needs_draws=True,
    ),
    Fault("wrong row", "the token behind the draft comes from the row before", _wrong_row),
    Fault(
        "temperature of the draft only",
        "the target draws at another temperature than asked for",
        _draft_temperature_only,
    ),
    Fault(
        "wrong draft law",
        "the draft was drawn from another law than the test takes it to be from",
        _wrong_draft_law,
        needs_draws=True,
    ),
    Fault(
        "rejected entry kept",
        "the cache keeps the entry of a rejected token in an accepted one's place",
        spoils_cache=True,
    ),
)
"""The eight that `foredraft audit` plants."""
