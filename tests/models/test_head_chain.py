"""A head's recorded round says what the head says step by step; `TRITON_INTERPRET=1` on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from foredraft.core.choices import DrawKey
from foredraft.core.noise import gumbel_top
from foredraft.core.params import SamplingParams
from foredraft.core.record import RowStep
from foredraft.core.sampling import law_of
from foredraft.core.tree import TokenTree
from foredraft.drafters.base import DraftRow
from foredraft.drafters.growth import GrowthLimits
from foredraft.drafters.heads.base import HeadModule
from foredraft.drafters.heads.eagle import EagleModule
from foredraft.drafters.heads.hidden_head import HiddenHeadModule
from foredraft.drafters.heads.steps import StepDrafter, StepRunner
from foredraft.models.base import ChainRow, HeadRow, ScoreRow
from foredraft.models.native import draft_layers
from foredraft.models.native.cuda import PagedDecoder
from foredraft.models.native.head_chain import RecordedChain
from foredraft.models.native.target import NativeTarget
from tests.drafters.heads import tiny_source, tiny_target
from tests.drafters.prices import FREE_NODES
from tests.models.on_triton import DEVICE, NEEDS_GPU

pytestmark = NEEDS_GPU
TEXTS = [[t * 7 % 90 for t in range(24)], [t * 5 % 60 + 3 for t in range(9)]]
STEPS = 4
LAWS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_p=0.9),
]


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_layers, "why_not_paged", lambda *_: None)
    monkeypatch.setattr(draft_layers, "has_kernels", lambda _: True)


def new_module(kind: str, target: NativeTarget) -> HeadModule:
    torch.manual_seed(1)
    shape = tiny_source(target).shape
    module: HeadModule
    if kind == "eagle":
        module = EagleModule(shape, 48, (0, 2), "each", "plain", "normed")
    else:
        module = HiddenHeadModule(shape, 48, (0, 2))
    assert module.output_ids_R is not None
    module.output_ids_R.mul_(2)
    return module.to(DEVICE).eval()


# Heads in 8 bits are of models in 16; in 32 a card's compiler takes minutes for their products.
@pytest.mark.skipif(DEVICE == "cuda", reason="float32, shown by the interpreter")
@pytest.mark.parametrize("kind", ["hidden_head", "eagle"])
def test_a_round_of_a_head_in_8_bits_equals_steps(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_layers, "packs_on_card", lambda *_: True)
    test_a_round_equals_steps(kind, LAWS[1])


@pytest.mark.parametrize("params", LAWS, ids=["greedy", "sampled", "filtered"])
@pytest.mark.parametrize("kind", ["hidden_head", "eagle"])
def test_a_round_equals_steps(kind: str, params: SamplingParams) -> None:
    target = tiny_target(device=DEVICE)
    module = new_module(kind, target)
    runner = module.runner(target)  # type: ignore[operator]
    names_R = module.output_ids_R
    assert names_R is not None
    chain = runner.new_chain(names_R, 2)
    assert chain is not None
    rows, expected = [], []
    for number, text in enumerate(TEXTS):
        slot, taps = read(target, text)
        key = DrawKey.of(params, 7 + number, len(text))
        # All but the last few are read before, as a prompt is.
        last = len(text) - 4
        runner.run(
            [HeadRow(slot, 0, last)], runner.text_inputs(text[1 : last + 1], head(taps, last))
        )
        following, rest = text[last + 1 :], [tap[last:-1] for tap in taps]
        expected.append(by_steps(runner, slot, last, following, rest, key, params, names_R))
        rows.append(ChainRow(slot, last, following, rest, key))
    for found in (
        chain.run(rows, STEPS),
        [*chain.run(rows[:1], STEPS), *chain.run(rows[1:], STEPS)],
    ):
        for levels, wanted in zip(found, expected, strict=True):
            for level, scored in zip(levels, wanted, strict=True):
                assert [token for token, _ in level.scored[:5]] == [t for t, _ in scored[:5]]
                values = [value for _, value in level.scored[: len(scored)]]
                assert values == pytest.approx([value for _, value in scored], abs=1e-3)


def read(target: NativeTarget, text: list[int]) -> tuple[int, list[Tensor]]:
    slot = target.cache.allocate()
    scores = target.score([ScoreRow(slot, text)], (0, 2))
    target.cache.keep(slot, len(text), ())
    return slot, [scores.taps[0], scores.taps[2]]


def head(taps: Sequence[Tensor], count: int) -> list[Tensor]:
    return [tap[:count] for tap in taps]


def by_steps(
    runner: StepRunner,
    slot: int,
    start: int,
    following: Sequence[int],
    taps: Sequence[Tensor],
    key: DrawKey,
    params: SamplingParams,
    names_R: Tensor,
) -> list[list[tuple[int, float]]]:
    """The candidates of each position, each step a run of its own."""
    count, levels = len(following), []
    states, logits = runner.run([HeadRow(slot, start, count)], runner.text_inputs(following, taps))
    state, tokens = states[-1:], list[int]()
    for step in range(STEPS):
        levels.append(candidates(logits[-1].cpu(), key, step, params, names_R.cpu()))
        tokens.append(levels[-1][0][0])
        tree = TokenTree.chain(tokens)
        inputs = runner.own_inputs(tokens[-1:], state)
        root = start + count - 1
        state, logits = runner.run([HeadRow(slot, root, 1, tree, 1 + step)], inputs)
    return levels


def candidates(
    logits_R: Tensor, key: DrawKey, step: int, params: SamplingParams, names_R: Tensor
) -> list[tuple[int, float]]:
    if not params.temperature:
        top = logits_R.topk(16)
        return [*zip(names_R[top.indices].tolist(), top.values.tolist(), strict=True)]
    law = law_of(logits_R, params)
    spread_V = torch.full((96,), -torch.inf)
    spread_V[names_R] = law.logits_V
    assert law.scale is not None
    scored = gumbel_top(spread_V, 16, key.seed, key.position + step, law.scale)
    largest = 0.0 if key.has_filters else float(logits_R.max()) * law.scale
    return [(token, score + largest) for token, score in scored]


@pytest.mark.parametrize("params", LAWS, ids=["greedy", "sampled", "filtered"])
def test_a_drafter_goes_by_rounds(params: SamplingParams) -> None:
    target, text = tiny_target(device=DEVICE), TEXTS[0]
    module = new_module("hidden_head", target)
    drafters = [StepDrafter(module, target, GrowthLimits(width=1, branching=1)) for _ in range(2)]  # type: ignore[arg-type]
    drafters[1]._chain = None
    slot = target.cache.allocate()
    found = []
    for drafter in drafters:
        drafter.begin(DraftRow.of(0, text[:-1], slot=slot))
    scores = target.score([ScoreRow(slot, text[:-1])], (0, 2))[0]
    target.cache.keep(slot, len(text) - 1, ())
    for drafter in drafters:
        seen = RowStep(
            *(0, 0, len(text) - 1),
            committed=tuple(text[-1:]),
            tokens=text,
            logits_NV=scores.logits_NV,
            taps=scores.taps,
        )
        drafter.observe([seen])
        row = DraftRow.of(0, text, slot=slot, params=params, budget=4, prices=FREE_NODES)
        found.append(drafter.propose([row])[0].tree.tokens)
    assert found[0][: len(found[1])] == found[1]
    assert len(found[0]) >= 1


def test_rounds_are_recorded_before_a_request_comes() -> None:
    target = tiny_target(PagedDecoder, device=DEVICE)
    module = new_module("hidden_head", target)
    drafter = StepDrafter(module, target)  # type: ignore[arg-type]
    target.record(drafter.taps)
    chain = drafter._chain
    assert isinstance(chain, RecordedChain)
    made = {*chain._rounds}
    slot, taps = read(target, TEXTS[0])
    key = DrawKey.of(LAWS[1], 7, len(TEXTS[0]))
    for steps in (2, 4, 6):
        chain.run([ChainRow(slot, 0, TEXTS[0][1:5], head(taps, 4), key)], steps)
    assert made == {*chain._rounds}
