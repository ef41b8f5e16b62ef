"""DSpark: how long a draft gets, and that drawn drafts are cut before they are drawn."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foredraft import SamplingParams
from foredraft.core.proposal import DrawnProposal, Proposal
from foredraft.drafters.base import DraftRow
from foredraft.drafters.heads.dspark import DsparkDrafter, DsparkModule
from foredraft.models.native.target import NativeTarget
from foredraft.train.heads.base import start_head, training_of
from foredraft.train.heads.dspark import DsparkTraining
from tests.drafters.heads import TinySource, random_text, shaken, text_batch, tiny_target
from tests.drafters.prices import FREE_NODES

VOCAB = 96


def new_module(target: NativeTarget, **options: int) -> DsparkModule:
    torch.manual_seed(4)
    module = start_head(DsparkModule, TinySource(target), None, options)
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


def test_a_block_of_one_is_still_a_block() -> None:
    target = tiny_target()
    module = new_module(target, block_size=1, num_layers=1)
    batch = text_batch(target, [random_text(10)], module.taps)
    (only,) = training_of(module).predictions(batch, 3)
    assert (only.shift, only.depth) == (2, 1)


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


def test_calibration_looks_inside_the_texts_only() -> None:
    target = tiny_target()
    module = new_module(target)
    batch = text_batch(target, [random_text(14), random_text(9, seed=2)], module.taps)
    logits_NS, right_NS = DsparkTraining(module)._places(batch)
    assert logits_NS.shape == right_NS.shape == (14 - 5 + 9 - 5, 4)
    assert len(training_of(module).calibrate([batch])) == 4
