"""EAGLE: what is drafted is what training predicts, and texts stay those of plain decoding."""

from __future__ import annotations

import pytest
import torch

from foredraft.core.record import RowStep
from foredraft.core.tree import TokenTree
from foredraft.drafters.heads.hidden_head import HiddenHeadModule
from foredraft.drafters.heads.steps import StepDrafter
from foredraft.kernels.build import KernelUnavailable, load_library
from foredraft.load import native_decoder
from foredraft.models.base import HeadRow
from foredraft.models.native.target import NativeTarget
from foredraft.train.heads.base import training_of
from tests.drafters.heads import TinySource, text_batch, tiny_target

TEXT = [token * 7 % 90 for token in range(24)]


def new_target(decoder: str) -> NativeTarget:
    if decoder == "fused":
        try:
            load_library()
        except KernelUnavailable as reason:
            pytest.skip(f"no fused kernel here: {reason}")
    return tiny_target(native_decoder(decoder))


def new_module(target: NativeTarget) -> HiddenHeadModule:
    torch.manual_seed(1)
    module = HiddenHeadModule(TinySource(target).shape, 48, (0, 2))
    assert module.output_ids_R is not None
    module.output_ids_R.mul_(2)
    return module.eval()


@pytest.fixture(params=["eager", "fused"])
def target(request: pytest.FixtureRequest) -> NativeTarget:
    return new_target(request.param)


def observed(target: NativeTarget, drafter: StepDrafter, text: list[int]) -> None:
    """Read a text but for its last token, as the engine would."""
    from foredraft.drafters.base import DraftRow
    from foredraft.models.base import ScoreRow

    slot = target.cache.allocate()
    drafter.begin(DraftRow.of(0, text[:-1], slot=slot))
    scores = target.score([ScoreRow(slot, text[:-1])], drafter.taps)[0]
    target.cache.keep(slot, len(text) - 1, ())
    drafter.observe(
        [
            RowStep(
                *(0, 0, len(text) - 1),
                committed=text[-1:],
                tokens=text,
                logits_NV=scores.logits_NV,
                taps=scores.taps,
            )
        ]
    )


@torch.no_grad()
def test_it_drafts_what_training_predicts(target: NativeTarget) -> None:
    """At an anchor, with the text's own tokens drafted behind it."""
    module = new_module(target)
    drafter = StepDrafter(module, target)
    depth, anchor = 3, 15
    observed(target, drafter, TEXT[: anchor + 2])
    request = drafter._requests[0]
    drafter._catch_up([request])
    found = [request.logits_R]
    state, drafted = request.state_E, TokenTree()
    for k in range(1, depth):
        drafted = TokenTree.chain(TEXT[anchor + 2 : anchor + 1 + k + 1])
        inputs = drafter._runner.own_inputs(drafted.tokens[-1:], state[None])
        states, logits = drafter._runner.run([HeadRow(request.slot, anchor, 1, drafted, k)], inputs)
        state = states[0]
        found.append(logits[0])
    batch = text_batch(target, [TEXT], module.taps)
    for k, prediction in enumerate(training_of(module).predictions(batch, depth)):
        assert (prediction.shift, prediction.depth) == (k + 2, k + 1)
        expected = prediction.logits_BLR[0, anchor]
        got = found[k]
        close = 2e-3 if target.decoder.name == "eager" else 0.03
        assert (got - expected).norm() < close * expected.norm() * 3, k
