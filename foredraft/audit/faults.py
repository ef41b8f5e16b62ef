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

import torch
from torch.nn.functional import one_hot

from foredraft.cache.paged import Cache
from foredraft.core.choices import DrawKey
from foredraft.core.proposal import DrawnProposal, Proposal
from foredraft.core.sampling import Law, NodeLaws
from foredraft.core.tree import ROOT
from foredraft.core.verify import Rule, Verdict, recorded, verify
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


def taking(chance: Callable[[float, int], float]) -> Rule:
    """A rule that accepts drafted tokens without regard to the target's draw.

    The target's law is put on such a token as a whole before the draft is verified.

    Args:
        chance: of that, by the token's probability and its depth, from 0.
    """

    def rule(proposal: Proposal, laws: NodeLaws, choices: DrawKey) -> Verdict:
        tree = proposal.tree

        def bent(node: int) -> Law:
            law = laws(node)
            for child in tree.children.get(node, ()):
                token = tree.tokens[child]
                # At temperature 0 the model's own, at temperature 1.
                probs_V = law.logits_V.softmax(0) if law.scale is None else law.probs_V
                share = chance(float(probs_V[token]), tree.depths[child] - 1)
                if choices.accept(share, child + 1):
                    return Law.of_probs(one_hot(torch.tensor(token), len(law.logits_V)).double())
            return law

        return verify(proposal, bent, choices)

    return rule


def _no_residual(proposal: Proposal, laws: NodeLaws, choices: DrawKey) -> Verdict:
    """Draws from the target's whole law after a rejection."""
    verdict = verify(proposal, laws, choices)
    if verdict.kind != "correction":
        return verdict
    law = laws(verdict.path[-1] if verdict.path else ROOT)
    return replace(verdict, next_token=choices.draw_residual(law.probs_V))


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
    return taking(lambda p, depth: min(1.0, p / CLAIMED))(proposal, laws, choices)


FAULTS: tuple[Fault, ...] = (
    Fault("accept all", "every draft token is accepted", taking(lambda p, depth: 1.0)),
    Fault(
        "typical acceptance",
        f"a draft token of probability {TYPICAL} or more is accepted without a test",
        taking(lambda p, depth: float(p >= TYPICAL)),
    ),
    Fault(
        "first token untested",
        "the first draft token of a step is not verified",
        taking(lambda p, depth: float(depth == 0)),
    ),
    Fault(
        "no residual",
        "after a rejection the token is drawn from the target's whole law",
        _no_residual,
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
