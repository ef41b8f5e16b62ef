"""Heads choose with the target's noise, from just what they would draw from."""

from __future__ import annotations

import pytest
import torch

from foredraft.core.choices import Choice, DrawnChoices
from foredraft.core.params import SamplingParams
from foredraft.core.sampling import law_of
from foredraft.drafters.base import DraftRow
from foredraft.drafters.heads.rows import HEAD_TRUST, OutputRows

VOCAB = 40
IDS_R = torch.arange(0, VOCAB, 2)


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_best_choice_is_that_of_the_whole_law(
    temperature: float, filters: dict[str, float]
) -> None:
    rows = OutputRows(IDS_R, VOCAB)
    generator = torch.Generator().manual_seed(1)
    params = SamplingParams.of(temperature=temperature, **filters)
    for seed in range(30):
        logits_R = 2.0 * torch.randn(len(IDS_R), generator=generator)
        row = DraftRow.of(1, (1, 2, 3), params, 4, seed)
        (found,) = rows.choices(row, logits_R[None], [(7,)], 2)
        assert not isinstance(row.choices, DrawnChoices)
        law = law_of(rows.spread(logits_R), params)
        expected = row.choices.best(law, 1, 2, HEAD_TRUST)
        # Unlikely tokens are skipped: a sibling may be missed, hardly ever the best one.
        assert found[0].token == expected[0].token
        assert found[0].chance == pytest.approx(expected[0].chance, rel=0.15)


def test_copied_tokens_count_with_what_the_head_says() -> None:
    """Also one that the head has no row for, and what it says itself stays as it is."""
    rows, params = OutputRows(IDS_R, VOCAB), SamplingParams.of(temperature=1.0)
    logits_NR = torch.zeros(1, len(IDS_R))
    copied, taken = [[Choice(7, 0.9), Choice(8, 0.1)]], 0
    for seed in range(200):
        row = DraftRow.of(1, (1, 2, 3), params, 4, seed)
        (found,) = rows.choices(row, logits_NR, [()], 1, copied)
        taken += found[0].token == 7
    assert torch.equal(logits_NR, torch.zeros(1, len(IDS_R)))
    assert taken / 200 == pytest.approx(0.35 * 0.9, abs=0.08)
