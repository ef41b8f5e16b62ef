"""The whole engine, enumerated: its own keyed numbers, cache, budgets and commits included.

Only the numbers behind the keys are replaced. Two decisions that used one key would share a
number here as they do in earnest, and bias the law.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from foredraft.core import choices as keyed_choices
from foredraft.core.choices import SharedChoices
from foredraft.core.draws import Key
from foredraft.core.noise import gumbel_argmax
from foredraft.core.params import SamplingParams
from foredraft.core.rng import keyed_uniform
from foredraft.core.sampling import Law, draw_rows
from foredraft.drafters import base as drafters_base
from foredraft.drafters.base import Drafter
from foredraft.drafters.growth import GrowthLimits
from foredraft.drafters.model.draft_model import DraftModelDrafter, DraftTreeDrafter
from foredraft.drafters.none import NoDrafter
from foredraft.drafters.text.ngram import NgramDrafter
from foredraft.drafters.text.per_request import GuidedDrafter
from foredraft.drafters.text.suffix import SuffixText
from foredraft.drafters.text.token_recycling import TokenRecyclingDrafter
from foredraft.models import base as models_base
from tests.exactness.drafting import SHAPES, Chosen, Drawn, TableDrafter
from tests.exactness.engine_runs import PROMPT, generate
from tests.exactness.ledger import Ledger, keyed_numbers_from, law, total_variation
from tests.exactness.worlds import Tokens, World, target_law, world

ROUNDING = 1e-12
SEED = 7
DRAWN = SamplingParams(temperature=1.0, max_tokens=3, seed=SEED, coupling="drawn")
SEEDED = replace(DRAWN, coupling="seeded")
NewDrafter = Callable[[World], Drafter]


def table_drafter(draft: Chosen | Drawn) -> NewDrafter:
    return lambda w: TableDrafter(w.draft(), draft)


ANY_COUPLING: dict[str, NewDrafter] = {
    "none": lambda w: NoDrafter(),
    "ngram": lambda w: NgramDrafter(max_ngram_size=2, min_ngram_size=1),
    "draft model": lambda w: DraftModelDrafter(w.draft()),
    "draft tree": lambda w: DraftTreeDrafter(w.draft(), GrowthLimits(2, 2, 2, round_cost=0.0)),
    "suffix": lambda w: GuidedDrafter(lambda r: SuffixText(r.tokens)),
    "token recycling": lambda w: TokenRecyclingDrafter(3),
    "chosen tree": table_drafter(Chosen(SHAPES["unbalanced"])),
}
DRAFTERS = ANY_COUPLING | {
    "drawn chain": table_drafter(Drawn(SHAPES["chain of 2"])),
    "drawn tree": table_drafter(Drawn(SHAPES["unbalanced"])),
    "drawn tree without replacement": table_drafter(Drawn(SHAPES["unbalanced"], False)),
}


def assert_exact(w: World, new_drafter: NewDrafter, params: SamplingParams) -> None:
    drafter = new_drafter(w)  # one for all paths: of a request that is over it keeps nothing

    def run(ledger: Ledger) -> Tokens:
        with keyed_numbers_from(ledger):
            (result,) = generate(w.target(), drafter, 3, [(PROMPT, params)])
        return result.token_ids

    distance = total_variation(law(run), target_law(w, params, params.max_tokens, PROMPT))
    assert distance < ROUNDING, f"total variation {distance:.3g}"


@pytest.mark.parametrize("kind", ["random", "zeros in both"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_engine_keeps_the_law(name: str, kind: str) -> None:
    assert_exact(world(kind, 3), DRAFTERS[name], DRAWN)


@pytest.mark.parametrize("name", ANY_COUPLING)
def test_the_engine_keeps_the_law_of_seeded_requests(name: str) -> None:
    assert_exact(world("random", 3), DRAFTERS[name], SEEDED)


RULES: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.5, "frequency_penalty": 0.6, "presence_penalty": -0.4},
    "bias": {"logit_bias": {0: 0.8, 2: -0.5}, "top_k": 2},
    "allowed": {"allowed_token_ids": [0, 2], "frequency_penalty": 1.0, "top_p": 0.9},
}


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_engine_keeps_the_law_under_rules(name: str, rules: str) -> None:
    """Also with a draft distribution that knows nothing of them: it is only accepted less."""
    assert_exact(world("random", 3), DRAFTERS[name], replace(DRAWN, **RULES[rules]))


@pytest.mark.parametrize("name", ["draft model", "draft tree"])
def test_drafts_are_chosen_with_the_number_of_the_draw(name: str) -> None:
    """A draft model that is the target foresees the draws; with another number it cannot."""
    w = world("q is p", 3)

    def num_accepted(seed: int | None) -> float:
        """The expected number of tokens that were drafted and taken."""

        def run(ledger: Ledger) -> int:
            with keyed_numbers_from(ledger), pytest.MonkeyPatch.context() as patch:
                if seed is not None:
                    patch.setattr(
                        drafters_base,
                        "SharedChoices",
                        lambda _, *rest: SharedChoices(seed, *rest),
                    )
                (result,) = generate(w.target(), DRAFTERS[name](w), 3, [(PROMPT, SEEDED)])
            return result.stats.accepted

        return sum(count * weight for count, weight in law(run).items())

    foreseen = num_accepted(None)
    assert foreseen == pytest.approx(2.0)
    assert num_accepted(SEED + 1) < foreseen - 0.1


def test_rows_of_a_batch_are_independent() -> None:
    """Two requests with two seeds: the joint law is the product of the two laws."""
    w = world("random", 2)
    left, right = (replace(DRAWN, max_tokens=2, seed=seed) for seed in (1, 2))

    def run(ledger: Ledger) -> tuple[Tokens, Tokens]:
        drafter = DRAFTERS["drawn chain"](w)
        with keyed_numbers_from(ledger):
            first, second = generate(w.target(), drafter, 1, [((0,), left), ((1, 1), right)])
        return first.token_ids, second.token_ids

    first_law, second_law = target_law(w, left, 2, (0,)), target_law(w, right, 2, (1, 1))
    product = {(a, b): p * q for a, p in first_law.items() for b, q in second_law.items()}
    assert total_variation(law(run), product) < ROUNDING


@pytest.mark.parametrize("name", DRAFTERS)
def test_no_key_is_used_twice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[int | str, ...]] = []

    def recorded(*key: int) -> float:
        used.append(key)
        return keyed_uniform(*key)  # type: ignore[arg-type]

    def recorded_noise(logits_V: Tensor, seed: int, position: int, scale: float, cut: float) -> int:
        used.append(("noise", seed, position))
        return gumbel_argmax(logits_V, seed, position, scale, cut)

    monkeypatch.setattr(keyed_choices, "keyed_uniform", recorded)

    def recorded_rows(logits_NV: Tensor, wanted: Sequence[tuple[int, Key]]) -> list[Law | None]:
        used.extend(("noise", seed, position) for _, (seed, position, _) in wanted)
        return draw_rows(logits_NV, wanted)

    monkeypatch.setattr(keyed_choices, "gumbel_argmax", recorded_noise)
    monkeypatch.setattr(models_base, "draw_rows", recorded_rows)
    w = world("random", 4)
    requests = [(PROMPT, replace(DRAWN, max_tokens=40, seed=seed)) for seed in range(4)]
    generate(w.target(), DRAFTERS[name](w), 4, requests)
    assert len(used) >= 40
    assert len(set(used)) == len(used)
