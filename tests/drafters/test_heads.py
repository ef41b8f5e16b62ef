"""Checks of every kind of head: training sees the same predictions as drafting."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from foredraft.drafters.base import Drafter, DraftRow
from foredraft.drafters.growth import GrowthLimits
from foredraft.drafters.heads.base import HeadModule
from foredraft.drafters.heads.dspark import DsparkDrafter, DsparkModule
from foredraft.drafters.heads.eagle import EagleModule
from foredraft.drafters.heads.hidden_head import HiddenHeadModule
from foredraft.drafters.heads.hydra import HydraModule
from foredraft.drafters.heads.medusa import MedusaDrafter, MedusaModule
from foredraft.drafters.heads.mtp import MtpModule
from foredraft.drafters.heads.steps import StepDrafter
from foredraft.models.native.target import NativeTarget
from foredraft.train.heads.base import start_head, training_of
from tests.drafters.heads import (
    OUTPUT_IDS,
    TinySource,
    decoded_by,
    drafted_logits,
    random_text,
    shaken,
    text_batch,
    tiny_target,
)

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
        return start_head(self.module, TinySource(target), output_ids, self.options)


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
                expected_R = prediction.logits_BLR[batch_index, place]
                actual_R = logits_V if output_ids is None else logits_V[output_ids]
                error = (actual_R - expected_R.detach()).norm() / expected_R.detach().norm()
                assert error < kind.errors[decoder == "fused"]
                if output_ids is not None:
                    assert logits_V.isfinite().sum() == len(output_ids)


def test_a_module_is_made_again_from_its_config(kind: Kind, target: NativeTarget) -> None:
    source = TinySource(target)
    module = shaken(kind.start(target, OUTPUT_IDS))
    again = kind.module.from_config(source.shape, module.config)
    again.load_state_dict(module.state_dict())
    batch = text_batch(target, [random_text(12)], module.taps)
    for one, other in zip(
        training_of(module).predictions(batch, 2),
        training_of(again).predictions(batch, 2),
        strict=True,
    ):
        assert torch.equal(one.logits_BLR, other.logits_BLR)
    assert again.config == module.config
    assert again.output_ids_R is not None
    assert again.output_ids_R.tolist() == OUTPUT_IDS


def test_all_of_it_learns(kind: Kind, target: NativeTarget) -> None:
    """No parameter is left out of the predictions."""
    module = shaken(kind.start(target, OUTPUT_IDS))
    batch = text_batch(target, [random_text(12)], module.taps)
    predictions = training_of(module).predictions(batch, 4)
    loss = sum(prediction.logits_BLR.square().mean() for prediction in predictions)
    extra = training_of(module).extra_loss(batch, predictions)
    torch.autograd.backward(loss + (0.0 if extra is None else extra))
    assert [name for name, weight in module.named_parameters() if weight.grad is None] == []


def test_it_can_be_taught(kind: Kind, target: NativeTarget) -> None:
    """From where it starts, some steps on two texts halve what it does not know of them."""
    torch.manual_seed(0)
    module = kind.start(target, None).train()
    texts = [random_text(24), random_text(24, seed=2)]
    batch = text_batch(target, texts, module.taps)
    optimiser = torch.optim.Adam(module.parameters(), lr=3e-3)
    losses = []
    for _ in range(40):
        loss = torch.zeros(())
        for each in training_of(module).predictions(batch, 2):
            labels = batch.tokens_BL[:, each.shift :].flatten()
            logits = each.logits_BLR[:, : -each.shift].flatten(0, 1)
            loss = loss + torch.nn.functional.cross_entropy(logits, labels)
        losses.append(float(loss.detach()))
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
    assert losses[-1] < 0.5 * losses[0]


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
    assert drafter._num_steps(row, drafter._requests[0]) == steps == best + best % 2
