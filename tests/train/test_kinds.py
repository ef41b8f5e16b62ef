"""Every kind of head that there is can be trained, kept, loaded and gone on with."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.drafters import build_drafter
from foredraft.drafters.registry import head_class, head_kinds
from foredraft.drafters.spec import DrafterContext
from foredraft.drafters.trained import load_head
from foredraft.models.native.cpu import FusedDecoder
from foredraft.models.native.target import NativeTarget
from foredraft.models.native.weights import Bits
from foredraft.train.heads.base import TextBatch
from foredraft.train.heads.dspark import DsparkTraining
from foredraft.train.options import checked_options
from foredraft.train.target import TrainingTarget
from tests.conformance.harness import run
from tests.train.helpers import Watch, options_of, train


@pytest.mark.parametrize("kind", head_kinds())
def test_it_is_trained_and_loaded(target: TrainingTarget, tmp_path: Path, kind: str) -> None:
    module, watch, options = (
        head_class(kind),
        Watch(),
        options_of(tokens=3000, evaluations=1, depth=3),
    )
    result = train(
        target, tmp_path / "head", kind=module, watch=Watch(stop_after=2), options=options
    )
    assert result.done < 1
    result = train(target, tmp_path / "head", kind=module, watch=watch, options=options)
    assert result.done >= 1
    acceptance = watch.statuses[-1].acceptance
    assert acceptance is not None
    assert len(acceptance.greedy) == len(acceptance.sampled) == 3
    assert load_head(tmp_path / "head", module, target.identity).kind == kind


def test_confidences_are_scaled_to_held_out_text(
    target: TrainingTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scales: list[list[float]] = []
    whole = DsparkTraining.calibrate

    def noting(self: DsparkTraining, batches: Iterable[TextBatch]) -> list[float]:
        scales.append(whole(self, batches))
        return scales[-1]

    monkeypatch.setattr(DsparkTraining, "calibrate", noting)
    module = head_class("dspark")
    train(target, tmp_path / "head", kind=module, options=options_of(tokens=3000, evaluations=1))
    assert scales
    assert all(scales)
    head = load_head(tmp_path / "head", module, target.identity)
    assert head.state_dict()["confidence_scale_S"].tolist() in [
        pytest.approx(found, rel=0.01) for found in scales
    ]


def test_unknown_kinds_and_options_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'eagle'"):
        head_class("eagel")
    with pytest.raises(ConfigError, match="did you mean 'taps'"):
        checked_options(head_class("hidden_head"), {"tapps": 1})
    assert checked_options(head_class("hidden_head"), {"taps": "0,2"}) == {"taps": [0, 2]}


@pytest.mark.parametrize("bits", [8, 4])
def test_a_target_in_few_bits_gets_a_head(checkpoint: Path, tmp_path: Path, bits: Bits) -> None:
    """It learns from the numbers that this target has, and drafts for it."""
    loaded = NativeTarget.load(checkpoint, torch.bfloat16, new_decoder=FusedDecoder, bits=bits)
    target = TrainingTarget(loaded, "tiny, few bits", "its weights")
    options = options_of(tokens=2000, evaluations=1, depth=3)
    train(target, tmp_path / "head", kind=head_class("eagle"), options=options)
    context = DrafterContext(loaded, options={"head": str(tmp_path / "head")})
    prompts, params = [[5, 9, 13], [7]], SamplingParams(temperature=1.0, seed=4, max_tokens=20)
    results = run(loaded, build_drafter("eagle", context), prompts, params, 6)
    plain = run(loaded, build_drafter("none", DrafterContext(loaded)), prompts, params, 0)
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    assert sum(r.stats.drafted for r in results) > 0
