"""`foredraft.mini`, the algorithm on one page: the engine's texts, and an exact law."""

from __future__ import annotations

import ast
import doctest
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import foredraft.mini as mini
from foredraft.core.params import SamplingParams
from foredraft.drafters.base import Drafter
from foredraft.drafters.model.draft_model import DraftModelDrafter
from foredraft.drafters.none import NoDrafter
from foredraft.models.table import TableModel
from tests.exactness.engine_runs import generate
from tests.exactness.ledger import Law, Ledger, law, total_variation
from tests.exactness.worlds import PLAIN, Tokens, World, target_law, world

V, GAMMA, LENGTH = 9, 3, 24
PROMPT = [3, 1, 4, 1, 5, 3, 1, 4]
SEEDS = range(6)


def models() -> tuple[TableModel, TableModel]:
    target = TableModel.random(V, seed=1, sharpness=1.5)
    mixed = TableModel.random(V, seed=2)

    def near(context: tuple[int, ...]) -> list[float]:
        pairs = zip(target.probs(context), mixed.probs(context), strict=True)
        return [0.7 * p + 0.3 * q for p, q in pairs]

    return target, TableModel(V, near)


def text_of_the_engine(target: TableModel, drafter: Drafter, params: SamplingParams) -> list[int]:
    (result,) = generate(target, drafter, GAMMA, [(tuple(PROMPT), params)])
    return list(result.token_ids)


def test_it_is_a_page_of_its_own() -> None:
    source = Path(mini.__file__).read_text()
    assert len(source.splitlines()) <= 250
    imported = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    assert not [node.module for node in imported if (node.module or "").startswith("foredraft")]
    assert doctest.testmod(mini).failed == 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["ngram", "greedy"])
def test_drafts_that_are_chosen_change_no_text(kind: str, seed: int) -> None:
    target, draft = models()
    drafter = (
        mini.ngram_drafter(GAMMA) if kind == "ngram" else mini.greedy_drafter(draft.probs, GAMMA)
    )
    plain = mini.plain(target.probs, PROMPT, LENGTH, seed)
    text = mini.speculate(target.probs, PROMPT, LENGTH, drafter, mini.target_only, seed)
    assert text == plain


@pytest.mark.parametrize("seed", SEEDS)
def test_its_texts_are_those_of_the_engine(seed: int) -> None:
    """Of plain decoding, and of drawn chains by block verification."""
    target, draft = models()
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=LENGTH, ignore_eos=True)
    plain = mini.plain(target.probs, PROMPT, LENGTH, seed)
    assert plain[len(PROMPT) :] == text_of_the_engine(target, NoDrafter(), params)
    drafter = mini.drawn_drafter(draft.probs, GAMMA)
    text = mini.speculate(target.probs, PROMPT, LENGTH, drafter, mini.block_rule, seed)
    longer = replace(params, max_tokens=LENGTH + GAMMA + 1, coupling="drawn")
    found = text_of_the_engine(target, DraftModelDrafter(draft), longer)
    assert text[len(PROMPT) :] == found[:LENGTH]


# ---------------------------------------------------------------------------------- enumeration


class LedgerNoise:
    """`mini.Noise`, with every decision taken by a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def draw_target(self, p: Any, depth: int) -> int:
        return self._ledger.decide(p.tolist())

    def draw_draft(self, q: Any, index: int) -> int:
        return self._ledger.decide(q.tolist())

    def accept(self, probability: float, index: int) -> bool:
        return self._ledger.decide([probability, max(0.0, 1.0 - probability)]) == 0

    def draw_residual(self, weights: Any) -> int:
        return self._ledger.decide(weights.tolist())


def text_law(w: World, drafter: mini.Drafter, rule: mini.Rule, num_tokens: int) -> Law[Tokens]:
    """The law of the first tokens of `mini.speculate`, by every random outcome."""

    def run(ledger: Ledger) -> Tokens:
        noise = cast(mini.Noise, LedgerNoise(ledger))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mini, "Noise", lambda seed, position: noise)
            target = w.target().probs
            return tuple(mini.speculate(target, [], num_tokens, drafter, rule, seed=0))

    return law(run)


@pytest.mark.parametrize("rule", [mini.token_rule, mini.block_rule])
@pytest.mark.parametrize("kind", ["random", "zeros in both", "disjoint", "q is p"])
def test_the_law_of_a_drawn_draft_is_the_targets(kind: str, rule: mini.Rule) -> None:
    w = world(kind, 3, seed=0)
    drafter = mini.drawn_drafter(w.draft().probs, gamma=2)
    found = text_law(w, drafter, rule, num_tokens=3)
    assert total_variation(found, target_law(w, PLAIN, 3)) < 1e-12


def test_the_law_of_a_chosen_draft_is_the_targets() -> None:
    w = world("random", 3, seed=0)
    drafter = mini.greedy_drafter(w.draft().probs, gamma=2)
    found = text_law(w, drafter, mini.target_only, num_tokens=3)
    assert total_variation(found, target_law(w, PLAIN, 3)) < 1e-12


def _keeps_everything(guesses: Any, qs: Any, ps: Any, noise: Any) -> list[int]:
    return [*guesses, noise.draw_residual(ps[-1])]


def _draws_again_from_p(guesses: Any, qs: Any, ps: Any, noise: Any) -> list[int]:
    for i, (guess, q) in enumerate(zip(guesses, qs, strict=True)):
        if not noise.accept(min(1.0, ps[i][guess] / q[guess]), i + 1):
            return [*guesses[:i], noise.draw_residual(ps[i])]
    return [*guesses, noise.draw_residual(ps[-1])]


@pytest.mark.parametrize("wrong", [_keeps_everything, _draws_again_from_p])
def test_a_wrong_rule_shows(wrong: Callable[..., Any]) -> None:
    w = world("random", 3, seed=0)
    drafter = mini.drawn_drafter(w.draft().probs, gamma=2)
    found = text_law(w, drafter, wrong, num_tokens=3)
    assert total_variation(found, target_law(w, PLAIN, 3)) > 0.01


def test_gumbel_noise_is_that_of_the_engine() -> None:
    from foredraft.core.noise import gumbel_noise

    tokens = [0, 1, 3, 64, 255, 256, 70_000]
    noise = mini.Noise(seed=2**63 + 5, position=0)
    found = [noise._gumbel(2**33 + 7, token) for token in tokens]
    np.testing.assert_allclose(found, gumbel_noise(tokens, 2**63 + 5, 2**33 + 7), rtol=1e-14)
