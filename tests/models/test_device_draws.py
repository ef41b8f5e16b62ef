"""What a GPU draws is, to the token, what the host draws; `TRITON_INTERPRET=1` runs it on a CPU."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from foredraft.core.choices import DrawKey
from foredraft.core.noise import gumbel_argmax
from foredraft.core.params import SamplingParams
from foredraft.core.sampling import law_of
from foredraft.models.native.cuda import RecordedDraws
from tests.models.on_triton import DEVICE, NEEDS_GPU

pytestmark = NEEDS_GPU

LAWS = [
    *(SamplingParams(temperature=t) for t in (0.0, 0.3, 1.0, 2.0)),
    *(SamplingParams(temperature=0.9, top_k=k) for k in (1, 5, 300)),
    *(SamplingParams(temperature=1.1, top_p=p) for p in (0.01, 0.8, 0.97)),
    SamplingParams(temperature=0.7, min_p=0.05),
    SamplingParams(temperature=1.0, top_k=40, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=0.0, top_k=3),
]


Draw = tuple[int | None, int, float, float | None]


def draw(logits_NV: Tensor, keys: list[DrawKey]) -> list[Draw | None]:
    """The token drawn, the likeliest one, the cut and the scale of each row."""
    laws = RecordedDraws(torch.device(DEVICE)).draw(logits_NV.to(DEVICE), keys)
    return [law and (law.drawn, law.token, law.cut, law.scale) for law in laws]


def expected(logits_V: Tensor, key: DrawKey, params: SamplingParams) -> Draw:
    law = law_of(logits_V, params)
    token = law.token
    if law.scale is not None:
        token = gumbel_argmax(logits_V, key.seed, key.position, law.scale, law.cut)
    return token, law.token, law.cut, law.scale


@pytest.mark.parametrize("vocab", [1, 7, 255, 1000, 1024, 5000])
@pytest.mark.parametrize("kind", ["normal", "tied", "flat", "holes"])
def test_draws_equal_those_of_the_host(vocab: int, kind: str) -> None:
    chance = random.Random(vocab)
    generator = torch.Generator().manual_seed(vocab)
    logits_NV = 4 * torch.randn(len(LAWS), vocab, generator=generator)
    if kind == "tied":
        logits_NV = logits_NV.round()
    if kind == "flat":
        logits_NV = torch.full_like(logits_NV, -3.25)
    if kind == "holes":
        logits_NV[:, 1::3] = -math.inf
    seeds = [chance.choice([0, 7, 2**63 + 11, 2**64 - 1, chance.getrandbits(64)]) for _ in LAWS]
    positions = [chance.choice([0, 5, 2**32 + 3, chance.getrandbits(20)]) for _ in LAWS]
    keys = [DrawKey.of(q, s, p) for s, p, q in zip(seeds, positions, LAWS, strict=True)]
    found = draw(logits_NV, keys)
    assert found == [*map(expected, logits_NV, keys, LAWS)]
    # The same alone, and among rows that filter nothing.
    assert [draw(row[None], [key])[0] for row, key in zip(logits_NV, keys, strict=True)] == found


def test_rows_that_are_not_finite_have_no_draw() -> None:
    logits_NV = torch.zeros(4, 300)
    logits_NV[0, 17], logits_NV[1], logits_NV[2, 3] = math.nan, -math.inf, math.inf
    found = draw(logits_NV, [DrawKey(1, 2, 1.0, 10, 0.9, 0.1)] * 4)
    assert found[:3] == [None] * 3
    assert found[3] is not None


@pytest.mark.parametrize("vocab", [5, 512, 1300])
def test_the_best_sums_of_a_row_are_listed(vocab: int) -> None:
    from foredraft.models.native.device_draws import listed

    sums_NV = 300 * torch.randn(3, vocab, dtype=torch.float64)
    sums_NV[1, 1:] = -math.inf
    sums_NV[2] = sums_NV[2].sign()
    names_V, count = torch.arange(vocab) * 3, min(16, vocab)
    lines = listed(sums_NV.to(DEVICE), names_V.to(DEVICE), count).cpu()
    best = sums_NV.sort(dim=1, descending=True, stable=True)
    assert lines[:, :count].tolist() == names_V[best.indices[:, :count]].tolist()
    torch.testing.assert_close(lines[:, count:-1], best.values[:, :count], rtol=1e-8, atol=0)
    torch.testing.assert_close(lines[:, -1], sums_NV.logsumexp(1), rtol=0, atol=1e-4)
