"""Heads: training sees the same predictions as drafting, and what each kind drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from foredraft.core.choices import Choice, DrawnChoices
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import DrawnProposal, Proposal
from foredraft.core.sampling import law_of
from foredraft.drafters.base import Drafter, DraftRow
from foredraft.drafters.growth import GrowthLimits
from foredraft.drafters.heads.base import HeadModule
from foredraft.drafters.heads.dspark import DsparkDrafter, DsparkModule
from foredraft.drafters.heads.eagle import EagleModule
from foredraft.drafters.heads.hidden_head import HiddenHeadModule
from foredraft.drafters.heads.hydra import HydraModule
from foredraft.drafters.heads.medusa import MedusaDrafter, MedusaModule
from foredraft.drafters.heads.mtp import MtpModule
from foredraft.drafters.heads.rows import HEAD_TRUST, OutputRows
from foredraft.drafters.heads.steps import StepDrafter
from foredraft.models.native.target import NativeTarget
from foredraft.train.heads.base import start_head, training_of
from tests.drafters.heads import (
    OUTPUT_IDS,
    VOCAB,
    decoded_by,
    drafted_logits,
    logits_of,
    random_text,
    shaken,
    text_batch,
    tiny_source,
    tiny_target,
)
from tests.drafters.prices import FREE_NODES

DEPTH = 3
CHAIN = GrowthLimits(DEPTH, width=1, branching=1, round_cost=0.0)


@dataclass(frozen=True)
class Kind:
    """A kind of head with some options, and a chain drafter for one.

    Attributes:
        errors: of what is drafted to training's prediction, at most, on eager and fused decoders:
            addends of tokens to a layer's input, or to its keys, are stored in bfloat16, and fused
            decoders multiply in 8 bits.
    """

    module: type[HeadModule]
    drafter: Callable[[NativeTarget, Any], Drafter]
    errors: tuple[float, float]
    options: Mapping[str, Any] = field(default_factory=dict)

    def start(self, target: NativeTarget, output_ids: Sequence[int] | None) -> HeadModule:
        return start_head(self.module, tiny_source(target), output_ids, self.options)


def stepwise(module: type[HeadModule], *errors: float, **options: Any) -> Kind:
    at_most = errors[0], errors[1]
    return Kind(module, lambda target, head: StepDrafter(head, target, CHAIN), at_most, options)


KINDS: dict[str, Kind] = {
    "medusa": Kind(
        MedusaModule, lambda target, module: MedusaDrafter(module, target, width=1), (1e-3, 0.02)
    ),
    "mtp": stepwise(MtpModule, 0.02, 0.16),
    "dspark": Kind(
        DsparkModule, lambda target, module: DsparkDrafter(module, target), (1e-3, 0.08)
    ),
    "hidden_head": stepwise(HiddenHeadModule, 0.02, 0.15),
    "eagle": stepwise(EagleModule, 0.06, 0.2),
    "hydra": stepwise(HydraModule, 0.01, 0.06),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[str(request.param)]


@pytest.fixture(scope="module")
def target() -> NativeTarget:
    return tiny_target()


@pytest.mark.parametrize("output_ids", [None, OUTPUT_IDS])
@pytest.mark.parametrize("decoder", ["eager", "fused"])
def test_training_predicts_what_drafting_says(
    kind: Kind, decoder: str, output_ids: list[int] | None
) -> None:
    target = decoded_by(decoder)
    module = shaken(kind.start(target, output_ids))
    text, other = random_text(24), random_text(17, seed=2)
    module.eval()
    predictions = training_of(module).predictions(
        text_batch(target, [text, other], module.taps), DEPTH
    )
    assert len(predictions) == DEPTH
    drafter = kind.drafter(target, module)
    for batch_index, words in enumerate([text, other]):
        for anchor in (0, 5, len(words) - DEPTH - 2):
            drafted = drafted_logits(drafter, target, words, anchor, DEPTH)
            for prediction, logits_V in zip(predictions, drafted, strict=True):
                # Draft token k is token anchor + 1 + k.
                place = anchor + 1 + prediction.depth - prediction.shift
                expected_R = logits_of(prediction)[batch_index, place]
                actual_R = logits_V if output_ids is None else logits_V[output_ids]
                error = (actual_R - expected_R.detach()).norm() / expected_R.detach().norm()
                assert error < kind.errors[decoder == "fused"]
                if output_ids is not None:
                    assert logits_V.isfinite().sum() == len(output_ids)


def test_all_of_it_learns(kind: Kind, target: NativeTarget) -> None:
    """No parameter is left out of the predictions."""
    module = shaken(kind.start(target, OUTPUT_IDS))
    batch = text_batch(target, [random_text(12)], module.taps)
    predictions = training_of(module).predictions(batch, 4)
    loss = sum(logits_of(prediction).square().mean() for prediction in predictions)
    extra = training_of(module).extra_loss(batch, predictions)
    torch.autograd.backward(loss + (0.0 if extra is None else extra))
    assert [name for name, weight in module.named_parameters() if weight.grad is None] == []


@pytest.mark.parametrize(("chance", "steps"), [(0.2, 2), (0.585, 4), (0.7, 4), (0.792, 6)])
def test_a_round_on_the_device_has_the_steps_that_pay(
    target: NativeTarget, chance: float, steps: int
) -> None:
    """1, 3, 4 and 6, up to the next even number."""
    rates = [
        sum(chance**depth for depth in range(count + 1)) / (1.0 + 0.1 * count) for count in range(7)
    ]
    best = max(range(7), key=rates.__getitem__)
    module = KINDS["hidden_head"].start(target, None)
    module.promise = (chance, chance)
    drafter = StepDrafter(module, target, GrowthLimits(max_depth=6))  # type: ignore[arg-type]
    row = DraftRow.of(0, (1, 2), budget=6)
    drafter.begin(row)
    assert drafter._num_steps(row) == steps == best + best % 2


# ------------------------------------------------------------- heads choose with the target's noise


NUM_IDS = 40
IDS_R = torch.arange(0, NUM_IDS, 2)


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_best_choice_is_that_of_the_whole_law(
    temperature: float, filters: dict[str, float]
) -> None:
    rows = OutputRows(IDS_R, NUM_IDS)
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
    rows, params = OutputRows(IDS_R, NUM_IDS), SamplingParams.of(temperature=1.0)
    logits_NR = torch.zeros(1, len(IDS_R))
    copied, taken = [[Choice(7, 0.9), Choice(8, 0.1)]], 0
    for seed in range(200):
        row = DraftRow.of(1, (1, 2, 3), params, 4, seed)
        (found,) = rows.choices(row, logits_NR, [()], 1, copied)
        taken += found[0].token == 7
    assert torch.equal(logits_NR, torch.zeros(1, len(IDS_R)))
    assert taken / 200 == pytest.approx(0.35 * 0.9, abs=0.08)


# ------------------------------------------------------------------------------------------- dspark


def new_module(target: NativeTarget, **options: int) -> DsparkModule:
    torch.manual_seed(4)
    module = start_head(DsparkModule, tiny_source(target), None, options)
    shaken(module)
    return module.eval()


@torch.no_grad()
def drafted(drafter: DsparkDrafter, seed: int, price: float) -> Proposal:
    """A draft, drawn from a block that says the same at every place."""
    params = SamplingParams(temperature=1.0, coupling="drawn", seed=seed)
    row = DraftRow.of(1, (1, 2, 3), params, 4, seed, prices=(1.0, 1.0 + price))
    return drafter._drawn(row, torch.zeros(4, 64), torch.zeros(4, VOCAB))


def test_what_is_drawn_stays_and_its_probabilities_are_those_it_was_drawn_from() -> None:
    """Whether a token is submitted depends on tokens before it alone: so prefixes agree."""
    target = tiny_target()
    module, sizes = new_module(target), set()
    with torch.no_grad():
        module.confidence.bias.fill_(2.0)
    drafter = DsparkDrafter(module, target)
    for seed in range(12):
        short, long = (drafted(drafter, seed, price) for price in (0.4, 0.0))
        size = len(short.tree)
        assert short.tree.tokens == long.tree.tokens[:size]
        assert isinstance(long, DrawnProposal)
        if isinstance(short, DrawnProposal):
            assert torch.equal(short.draft_probs_NV, long.draft_probs_NV[:size])
        assert len(long.tree) == 4
        sizes.add(size)
    assert len(sizes) > 1


@torch.no_grad()
def test_a_sure_head_drafts_more_than_an_unsure_one() -> None:
    target = tiny_target()
    sizes = []
    for bias in (-3.0, 0.0, 3.0):
        module = new_module(target)
        with torch.no_grad():
            module.confidence.weight.zero_()
            module.confidence.bias.fill_(bias)
        drafter = DsparkDrafter(module, target)
        row = DraftRow.of(1, (1, 2, 3), SamplingParams(), 4, prices=(1.0, 1.2))
        proposal = drafter._chosen(row, torch.zeros(4, 64), torch.randn(4, VOCAB))
        sizes.append(len(proposal.tree))
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1] == 4


@torch.no_grad()
def test_dflash_is_the_special_case() -> None:
    """Without the Markov head the places do not know each other's tokens."""
    target = tiny_target()
    module = new_module(target, rank=0)
    assert not {name for name in module.state_dict() if "markov" in name or "confidence" in name}
    drafter = DsparkDrafter(module, target)
    row = replace(
        DraftRow.of(1, (1, 2, 3), SamplingParams(temperature=0.0), 4, prices=FREE_NODES),
        rules=SamplingParams(temperature=0.0),
    )
    logits_SR = torch.randn(4, VOCAB)
    proposal = drafter._chosen(row, torch.zeros(4, 64), logits_SR)
    assert list(proposal.tree.tokens) == logits_SR.argmax(1).tolist()


@pytest.mark.parametrize("true_scale", [0.5, 2.0])
def test_calibration_finds_the_scale(true_scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Confidences that are off by a factor in log odds, and tokens that are right as they say."""
    module = new_module(tiny_target())
    generator = torch.Generator().manual_seed(3)
    logits_NS = torch.randn(20_000, 4, generator=generator, dtype=torch.float64) * 2 + 1
    right_NS = torch.rand(20_000, 4, generator=generator) < (logits_NS * true_scale).sigmoid()
    training = training_of(module)
    monkeypatch.setattr(training, "_places", lambda batch: (logits_NS, right_NS))
    scales = training.calibrate([None])  # type: ignore[list-item]
    for scale in scales[:3]:  # few blocks are right up to the last place
        assert scale == pytest.approx(true_scale, rel=0.25)
