"""Every kind of head that there is can be trained, kept, loaded and gone on with."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from foredraft.core.errors import ConfigError
from foredraft.drafters.common.head import HeadModule, TextBatch
from foredraft.drafters.common.head_files import load_head
from foredraft.train.kinds import checked_options, head_kinds, module_class
from foredraft.train.target import TrainingTarget
from tests.train.helpers import Watch, plan_of, train


@pytest.mark.parametrize("kind", head_kinds())
def test_it_is_trained_and_loaded(target: TrainingTarget, tmp_path: Path, kind: str) -> None:
    module, watch, plan = module_class(kind), Watch(), plan_of(tokens=3000, evaluations=1, depth=3)
    result = train(target, tmp_path / "head", kind=module, watch=Watch(stop_after=2), plan=plan)
    assert result.done < 1
    result = train(target, tmp_path / "head", kind=module, watch=watch, plan=plan)
    assert result.done >= 1
    acceptance = watch.statuses[-1].acceptance
    assert acceptance is not None
    assert len(acceptance.greedy) == len(acceptance.sampled) == 3
    assert load_head(tmp_path / "head", module, target.identity).kind == kind


def test_confidences_are_scaled_to_held_out_text(
    target: TrainingTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scales: list[list[float]] = []
    module = module_class("dspark")
    whole = module.calibrate

    def noting(self: HeadModule, batches: Iterable[TextBatch]) -> list[float]:
        scales.append(whole(self, batches))
        return scales[-1]

    monkeypatch.setattr(module, "calibrate", noting)
    train(target, tmp_path / "head", kind=module, plan=plan_of(tokens=3000, evaluations=1))
    assert scales
    assert all(scales)
    head = load_head(tmp_path / "head", module, target.identity)
    assert head.state_dict()["confidence_scale_S"].tolist() in [
        pytest.approx(found, rel=0.01) for found in scales
    ]


def test_unknown_kinds_and_options_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'eagle'"):
        module_class("eagel")
    with pytest.raises(ConfigError, match="did you mean 'taps'"):
        checked_options(module_class("eagle"), {"tapps": 1})
    assert checked_options(module_class("eagle"), {"taps": "0,2"}) == {"taps": [0, 2]}
    assert checked_options(module_class("eagle"), {"taps": "2,"}) == {"taps": [2]}
