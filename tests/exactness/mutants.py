"""Engines with one well-known mistake each, and beside each the same without the mistake.

The exactness tests must tell them apart, else they prove nothing. Most of these mistakes have been
made by engines that people use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from foredraft.core import choices as keyed_choices
from foredraft.core.choices import (
    DrawKey,
    DrawnChoices,
)
from foredraft.core.noise import gumbel_noise
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import NO_PROPOSAL, DrawnProposal, Proposal
from foredraft.core.rng import Purpose
from foredraft.core.sampling import Law, NodeLaws, law_of
from foredraft.core.tree import ROOT, TokenTree
from foredraft.core.verify import Verdict, verify
from foredraft.drafters import base as drafters_base
from foredraft.engine import policy as engine_policy
from foredraft.engine import request as engine_request
from foredraft.models import base as models_base
from foredraft.models.table import TableModel, TokenCache
from tests.exactness.drafting import SHAPES, Chosen, Conditional, Draft, Drawn
from tests.exactness.laws import Rule
from tests.exactness.worlds import PLAIN, Tokens

DRAWN = replace(PLAIN, coupling="drawn")
ONE = Drawn(SHAPES["chain of 1"])
CHAIN = Drawn(SHAPES["chain of 2"])
STAR = Drawn(SHAPES["star of 2"])
CHOSEN = Chosen(SHAPES["chain of 2"])
Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Parts:
    """The parts of an engine; each may carry a mistake."""

    draft: Draft = CHAIN
    rule: Rule = verify
    draft_choices: Callable[[int, int], DrawnChoices] = DrawnChoices
    verify_choices: type[DrawKey] = DrawKey
    law: Callable[[Tensor, SamplingParams], Law] = law_of
    new_cache: Callable[[], TokenCache] = TokenCache
    params: SamplingParams = DRAWN

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let the engine's step use these parts."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine_policy, "verify", self.rule)
            patch.setattr(drafters_base, "DrawnChoices", self.draft_choices)
            patch.setattr(engine_request, "DrawKey", self.verify_choices)
            # Draws for all rows at once bypass these parts.
            patch.setattr(models_base, "draw_rows", lambda _, wanted: [None] * len(wanted))
            patch.setattr(
                SamplingParams, "law", lambda params, logits_V, *_: self.law(logits_V, params)
            )
            yield

    def fit(self, target: TableModel) -> TableModel:
        """The target with these parts' cache."""
        target.cache = self.new_cache()
        return target


@dataclass(frozen=True)
class Mutant:
    """A mistake.

    Attributes:
        broken: the parts with the mistake.
        sound: the same parts without it.
        visible: whether a few thousand samples show it.
        enumerable: whether enumeration shows it; not where the noise itself is wrong, in whose
            place enumeration has uniform numbers.
    """

    broken: Parts
    sound: Parts = Parts()
    visible: bool = True
    enumerable: bool = True


# Mistakes of the rule -----------------------------------------------------------------------


def residual(target_V: Tensor, draft_V: Tensor, token: int) -> Tensor:
    return (target_V - draft_V).clamp_min(0.0)


def residual_from_target(target_V: Tensor, draft_V: Tensor, token: int) -> Tensor:
    return target_V


def residual_without_the_rejected(target_V: Tensor, draft_V: Tensor, token: int) -> Tensor:
    return target_V.index_fill(0, torch.tensor([token]), 0.0)


@dataclass(frozen=True)
class Recursive:
    """Recursive rejection with replacement, and whatever is drawn from after a rejection."""

    after_rejection: Callable[[Tensor, Tensor, int], Tensor] = residual

    def __call__(self, proposal: Proposal, laws: NodeLaws, choices: DrawKey) -> Verdict:
        tree, node, path = proposal.tree, ROOT, list[int]()
        while node in tree.children:
            assert isinstance(proposal, DrawnProposal)
            target_V = laws(node).probs_V
            for child in tree.children[node]:
                token, draft_V = tree.tokens[child], proposal.draft_probs_NV[child]
                if choices.accept(min(1.0, float(target_V[token] / draft_V[token])), child):
                    path.append(child)
                    node = child
                    break
                target_V = self.after_rejection(target_V, draft_V, token)
                target_V = target_V / target_V.sum()
            else:
                return Verdict(tuple(path), choices.draw_residual(target_V), "correction")
        return Verdict(tuple(path), choices.draw_residual(laws(node).probs_V), "bonus")


@dataclass(frozen=True)
class Block:
    """Block verification, and two ways to misread the paper.

    Attributes:
        capped: whether the weight of a prefix is held to at most one at every token.
        last_success: whether a failure is passed over when a longer prefix succeeds.
    """

    capped: bool = True
    last_success: bool = True

    def __call__(self, proposal: Proposal, laws: NodeLaws, choices: DrawKey) -> Verdict:
        tokens, draft = proposal.tree.tokens, getattr(proposal, "draft_probs_NV", None)
        weight, accepted, residual_V = 1.0, 0, self._residual(1.0, 0, proposal, laws)
        for i, token in enumerate(tokens):
            assert draft is not None
            weight *= float(laws(i - 1).probs_V[token] / draft[i][token])
            weight = min(1.0, weight) if self.capped else weight
            left_V = self._residual(min(1.0, weight), i + 1, proposal, laws)
            left, due = float(left_V.sum()), 1.0 - min(1.0, weight)
            success = left / (left + due) if left + due else 1.0
            if choices.accept(min(1.0, weight) if i + 1 == len(tokens) else success, i + 1):
                accepted, residual_V = i + 1, left_V
            elif not self.last_success:
                break
        kind: Literal["bonus", "correction"]
        kind = "bonus" if accepted == len(tokens) else "correction"
        return Verdict(tuple(range(accepted)), choices.draw_residual(residual_V), kind)

    def _residual(self, weight: float, length: int, proposal: Proposal, laws: NodeLaws) -> Tensor:
        target_V = laws(length - 1).probs_V
        if length == len(proposal.tree):
            return target_V
        assert isinstance(proposal, DrawnProposal)
        return (weight * target_V - proposal.draft_probs_NV[length]).clamp_min(0.0)


def unfiltered(logits_V: Tensor, params: SamplingParams) -> Law:
    """The model's own distribution, whatever was asked for."""
    return law_of(logits_V, PLAIN)


class WrongRows(TokenCache):
    """Keeps as many tree entries as were accepted, but the first ones drafted."""

    def keep(self, slot: int, num_pending: int, path: Sequence[int]) -> None:
        super().keep(slot, num_pending, range(len(path)))


# Mistakes of the drafter --------------------------------------------------------------------


@dataclass(frozen=True)
class _Tampered(DrawnChoices):
    choices: DrawnChoices
    change: Change

    def draw(self, probs_V: Tensor, index: int) -> int:
        return self.choices.draw(self.change(probs_V), index)


@dataclass(frozen=True)
class DrawnFrom:
    """Draws from a changed distribution and declares the unchanged one."""

    change: Change
    draft: Draft = CHAIN

    def __call__(
        self, context: Tokens, probs: Conditional, choices: DrawnChoices, budget: int
    ) -> Proposal:
        return self.draft(context, probs, _Tampered(choices, self.change), budget)


@dataclass(frozen=True)
class Afterwards:
    """Changes a sound proposal after its tokens were drawn."""

    change: Callable[[Proposal], Proposal]
    draft: Draft = CHAIN

    def __call__(
        self, context: Tokens, probs: Conditional, choices: DrawnChoices, budget: int
    ) -> Proposal:
        proposal = self.draft(context, probs, choices, budget)
        return self.change(proposal) if proposal.is_drawn else proposal


def colder(probs_V: Tensor) -> Tensor:
    return probs_V**2


def top_two(probs_V: Tensor) -> Tensor:
    return probs_V.where(probs_V >= probs_V.topk(2).values[-1], 0.0)


def bfloat16(probs_V: Tensor) -> Tensor:
    return probs_V.bfloat16().double()


def filtered_after_the_draw(proposal: Proposal) -> Proposal:
    """The engine refuses a drafted token of probability zero, so this filter leaves a trace."""
    assert isinstance(proposal, DrawnProposal)
    filtered = [top_two(row_V).clamp_min(1e-9) for row_V in proposal.draft_probs_NV]
    return replace(proposal, draft_probs_NV=torch.stack(filtered))


def declared_with_replacement(proposal: Proposal) -> Proposal:
    return replace(proposal, replacement=True)


def _taken(proposal: Proposal, nodes: list[int], parents: list[int]) -> Proposal:
    assert isinstance(proposal, DrawnProposal)
    if not nodes:
        return NO_PROPOSAL
    tree = TokenTree(tuple(proposal.tree.tokens[node] for node in nodes), tuple(parents))
    return replace(proposal, tree=tree, draft_probs_NV=proposal.draft_probs_NV[nodes])


def _confidences(proposal: Proposal) -> list[float]:
    assert isinstance(proposal, DrawnProposal)
    rows = zip(proposal.draft_probs_NV, proposal.tree.tokens, strict=True)
    return [float(row_V[token]) for row_V, token in rows]


def unlikely_tokens_dropped(proposal: Proposal) -> Proposal:
    confident = [confidence >= 0.4 for confidence in _confidences(proposal)]
    length = [*confident, False].index(False)
    return _taken(proposal, list(range(length)), list(range(ROOT, length - 1)))


def likelier_sibling_kept(proposal: Proposal) -> Proposal:
    confidences = _confidences(proposal)
    return _taken(proposal, [confidences.index(max(confidences))], [ROOT])


def siblings_sorted(proposal: Proposal) -> Proposal:
    confidences = _confidences(proposal)
    order = sorted(range(len(confidences)), key=lambda node: -confidences[node])
    return _taken(proposal, order, list(proposal.tree.parents))


# Mistakes of the random streams -------------------------------------------------------------


class SharedStream(DrawnChoices):
    """Draws a draft token with the number that will decide its acceptance."""

    def draw(self, probs_V: Tensor, index: int) -> int:
        # By the names that enumeration replaces.
        shared = keyed_choices.keyed_uniform  # type: ignore[attr-defined]
        draw_token = keyed_choices.draw_token  # type: ignore[attr-defined]
        number = shared(self.seed, self.num_tokens, Purpose.ACCEPT, index + 1)
        return int(draw_token(probs_V, number))


class ReusedNumbers(DrawnChoices):
    """Keys a draft token by its absolute position: drafted again, it gets the old number."""

    def draw(self, probs_V: Tensor, index: int) -> int:
        return DrawnChoices(self.seed, self.num_tokens + index).draw(probs_V, 0)


# Mistakes of the shared noise ---------------------------------------------------------------


def _best(probs_V: Tensor, seed: int, position: int) -> int:
    """The target's draw from these probabilities."""
    argmax = keyed_choices.gumbel_argmax  # type: ignore[attr-defined]
    return int(argmax(probs_V.log(), seed, position, 1.0))


class NoiseForTwo(DrawKey):
    """Takes the noise of one position at the next one as well."""

    def draw_target(self, law: Law, depth: int) -> int:
        return _best(law.probs_V, self.seed, (self.position + depth) // 2)


class NoiseOfTheStep(DrawKey):
    """Takes the noise of the step's first position at all of them."""

    def draw_target(self, law: Law, depth: int) -> int:
        return _best(law.probs_V, self.seed, self.position)


class NoiseRenormalised(DrawKey):
    """Gives the noise of the tokens that a filter has left its mean and spread back."""

    def draw_target(self, law: Law, depth: int) -> int:
        kept = law.probs_V.nonzero().flatten()
        noise = gumbel_noise(kept.tolist(), self.seed, self.position + depth)
        noise_M = torch.tensor(noise, dtype=torch.float64)
        noise_M = (noise_M - noise_M.mean()) / noise_M.std(correction=0)
        return int(kept[(law.probs_V[kept].log() + noise_M).argmax()])


class DrawnWithTheNoise(DrawnChoices):
    """Draws a chain for the ratio test with the noise that is for choosing."""

    def draw(self, probs_V: Tensor, index: int) -> int:
        return _best(probs_V, self.seed, self.num_tokens + index)


class CorrectedWithTheNoise(DrawKey):
    """After the ratio test of one token draws as the target would: with the position's noise."""

    def __init__(self, *key: float) -> None:
        self._results: list[bool] = []

    def accept(self, probability: float, index: int) -> bool:
        self._results.append(super().accept(probability, index))
        return self._results[-1]

    def draw_residual(self, probs_V: Tensor) -> int:
        return _best(probs_V, self.seed, self.position + sum(self._results))


SEEDED = replace(PLAIN, coupling="seeded")
TOP_TWO = replace(SEEDED, top_k=2)
COLD = replace(DRAWN, temperature=0.5)
STAR_APART = replace(STAR, replacement=False)
MUTANTS = {
    "residual from p, chain": Mutant(
        Parts(rule=Recursive(residual_from_target)), Parts(rule=Recursive())
    ),
    "residual from p, tree": Mutant(
        Parts(STAR, Recursive(residual_from_target)), Parts(STAR, Recursive())
    ),
    "residual without the rejected token, chain": Mutant(
        Parts(rule=Recursive(residual_without_the_rejected)), Parts(rule=Recursive())
    ),
    "residual without the rejected token, tree": Mutant(
        Parts(STAR, Recursive(residual_without_the_rejected)), Parts(STAR, Recursive())
    ),
    "block stops at the first failure": Mutant(
        Parts(rule=Block(last_success=False)), Parts(rule=Block())
    ),
    "block without the cap": Mutant(Parts(rule=Block(capped=False)), Parts(rule=Block())),
    "target not as asked for": Mutant(Parts(law=unfiltered, params=COLD), Parts(params=COLD)),
    "cache keeps the wrong rows": Mutant(Parts(STAR, new_cache=WrongRows), Parts(STAR)),
    "drafted at another temperature": Mutant(Parts(DrawnFrom(colder))),
    "filtered before the draw, declared raw": Mutant(Parts(DrawnFrom(top_two))),
    "filtered after the draw": Mutant(Parts(Afterwards(filtered_after_the_draw))),
    "drawn in bfloat16, declared in float64": Mutant(Parts(DrawnFrom(bfloat16)), visible=False),
    "without replacement, declared with": Mutant(
        Parts(Afterwards(declared_with_replacement, STAR_APART)), Parts(STAR_APART)
    ),
    "unlikely token dropped": Mutant(Parts(Afterwards(unlikely_tokens_dropped))),
    "likelier sibling kept": Mutant(Parts(Afterwards(likelier_sibling_kept, STAR)), Parts(STAR)),
    "siblings sorted": Mutant(Parts(Afterwards(siblings_sorted, STAR)), Parts(STAR)),
    "draft shares the verify stream": Mutant(Parts(draft_choices=SharedStream)),
    "drafted again with the old numbers": Mutant(Parts(draft_choices=ReusedNumbers)),
    "noise reused at the next position": Mutant(
        Parts(CHOSEN, verify_choices=NoiseForTwo, params=SEEDED), Parts(CHOSEN, params=SEEDED)
    ),
    "noise of the step at all its positions": Mutant(
        Parts(CHOSEN, verify_choices=NoiseOfTheStep, params=SEEDED), Parts(CHOSEN, params=SEEDED)
    ),
    "noise renormalised after a filter": Mutant(
        Parts(CHOSEN, verify_choices=NoiseRenormalised, params=TOP_TWO),
        Parts(CHOSEN, params=TOP_TWO),
        enumerable=False,
    ),
    "drawn with the target's noise": Mutant(Parts(draft_choices=DrawnWithTheNoise)),
    "drawn and corrected with the target's noise": Mutant(
        Parts(ONE, draft_choices=DrawnWithTheNoise, verify_choices=CorrectedWithTheNoise),
        Parts(ONE),
    ),
}
