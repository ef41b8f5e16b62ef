"""A wrong draft never changes a seeded text: any logits, any shape, any number of draft tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foredraft.core.params import SamplingParams
from foredraft.core.proposal import Proposal
from foredraft.drafters.base import BaseDrafter, DraftRow
from foredraft.drafters.growth import Growth, GrowthLimits
from foredraft.drafters.none import NoDrafter
from tests.exactness.engine_runs import generate, texts
from tests.exactness.worlds import Tokens, world

WORLD = world("random", 6)
REQUESTS: tuple[Tokens, ...] = ((1,), (5, 0, 2))
FREE = (1.0, 1.001)


@dataclass(frozen=True)
class Wild:
    """Logits that have nothing to do with anything.

    Attributes:
        spread: 0 makes all of them equal.
        gone: the share of tokens that cannot occur; one is left at least.
    """

    seed: int
    spread: float
    gone: float
    dtype: torch.dtype

    def logits(self, num: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + num)
        logits_V = self.spread * torch.randn(WORLD.vocab_size, generator=generator)
        gone_V = torch.rand(WORLD.vocab_size, generator=generator) < self.gone
        gone_V[num % WORLD.vocab_size] = False
        return logits_V.masked_fill(gone_V, -math.inf).to(self.dtype)


class WildDrafter(BaseDrafter):
    """Grows trees from wild logits."""

    def __init__(self, wild: Wild, limits: GrowthLimits) -> None:
        self._wild, self._limits = wild, limits

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [self._grown(row) for row in rows]

    def _grown(self, row: DraftRow) -> Proposal:
        growth = Growth(replace(row, prices=FREE), self._limits)
        while growth.frontier:
            numbers = [len(row.tokens) + node + 1 for node in growth.frontier]
            growth.extend(torch.stack([self._wild.logits(number) for number in numbers]))
        return growth.build()


wilds = st.builds(
    Wild,
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([0.0, 1.0, 5.0, 1e4]),
    gone=st.sampled_from([0.0, 0.5, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
limits = st.builds(
    GrowthLimits, st.integers(1, 4), st.integers(1, 8), st.integers(1, 8), round_cost=st.just(0.0)
)
sampling = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-3, 0.4, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 3]),
    top_p=st.sampled_from([1.0, 0.7]),
    min_p=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 2**64 - 2),
    max_tokens=st.just(12),
)


def assert_same_text(drafter: BaseDrafter, num_draft_tokens: int, params: SamplingParams) -> None:
    requests = [(prompt, params) for prompt in REQUESTS]
    requests[1] = (REQUESTS[1], replace(params, seed=(params.seed or 0) + 1))
    plain = generate(WORLD.target(), NoDrafter(), 0, requests)
    drafted = generate(WORLD.target(), drafter, num_draft_tokens, requests)
    assert texts(drafted) == texts(plain)


@settings(max_examples=120)
@given(wilds, limits, st.integers(0, 9), sampling)
def test_any_logits_in_any_tree(
    wild: Wild, limits: GrowthLimits, num_draft_tokens: int, params: SamplingParams
) -> None:
    assert_same_text(WildDrafter(wild, limits), num_draft_tokens, params)
