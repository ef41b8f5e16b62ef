"""Every kind of head that there is can be trained, kept, loaded and gone on with."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from foredraft.cli.main import app
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.drafters import build_drafter
from foredraft.drafters.heads.base import HeadModule
from foredraft.drafters.heads.eagle import EagleModule, read_published
from foredraft.drafters.heads.hidden_head import HiddenHeadModule
from foredraft.drafters.registry import head_class, head_kinds
from foredraft.drafters.spec import DrafterContext
from foredraft.drafters.trained import identify, load_head
from foredraft.load import load_target, plan_models
from foredraft.models.native.cpu import FusedDecoder
from foredraft.models.native.target import NativeTarget
from foredraft.models.native.weights import Bits
from foredraft.options import LoadOptions
from foredraft.train.export import export_head
from foredraft.train.heads.base import TextBatch, start_head, training_of
from foredraft.train.heads.dspark import DsparkTraining
from foredraft.train.heads.saving import save_head
from foredraft.train.options import checked_options
from foredraft.train.target import TrainingTarget
from tests.conformance.harness import run
from tests.drafters.heads import OUTPUT_IDS, logits_of, shaken, text_batch, tiny_source, tiny_target
from tests.models.checkpoints import NATIVE_CONFIGS, save_checkpoint
from tests.models.gguf_files import metadata_of, shape_of, tensors_of, write_gguf
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


def gguf_target(folder: Path, kind: str) -> NativeTarget:
    """The target of a GGUF file, with the integers that the file holds."""
    tensors, _ = tensors_of(config := shape_of(), kind)
    path = write_gguf(folder / "model.gguf", metadata_of(config), tensors)
    loaded = load_target(plan_models(LoadOptions(model=str(path), drafter="none"))[0])
    assert isinstance(loaded, NativeTarget)
    return loaded


@pytest.mark.parametrize("form", [8, 4, "Q4_K"])
def test_a_target_in_few_bits_gets_a_head(
    checkpoint: Path, tmp_path: Path, form: Bits | str
) -> None:
    """It learns from the numbers that this target has, and drafts for it."""
    if isinstance(form, str):
        loaded = gguf_target(tmp_path, form)
    else:
        loaded = NativeTarget.load(checkpoint, torch.bfloat16, new_decoder=FusedDecoder, bits=form)
    drafts_as_trained(loaded, "eagle", tmp_path)


@pytest.mark.parametrize(("name", "kind"), [("deepseek-v3", "eagle"), ("glm4-moe-lite", "mtp")])
def test_a_target_with_latents_gets_a_head(tmp_path: Path, name: str, kind: str) -> None:
    """With heads of the usual kind, whose keys and values lie beside the target's latents."""
    save_checkpoint(tmp_path / "tiny", NATIVE_CONFIGS[name]())
    loaded = NativeTarget.load(tmp_path / "tiny", torch.float32, new_decoder=FusedDecoder)
    drafts_as_trained(loaded, kind, tmp_path)


def drafts_as_trained(loaded: NativeTarget, kind: str, tmp_path: Path) -> None:
    """A head is trained, drafts, and changes no text."""
    target = TrainingTarget(loaded, "tiny", "its weights")
    options = options_of(tokens=2000, evaluations=1, depth=3)
    train(target, tmp_path / "head", kind=head_class(kind), options=options)
    context = DrafterContext(loaded, options={"head": str(tmp_path / "head")})
    prompts, params = [[5, 9, 13], [7]], SamplingParams(temperature=1.0, seed=4, max_tokens=20)
    results = run(loaded, build_drafter(kind, context), prompts, params, 6)
    plain = run(loaded, build_drafter("none", DrafterContext(loaded)), prompts, params, 0)
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    assert sum(r.stats.drafted for r in results) > 0


# -------------------------------------------------------------------------- heads for other engines


TARGET = tiny_target()


def saved(kind: type[HeadModule], directory: Path) -> HeadModule:
    module = shaken(start_head(kind, tiny_source(TARGET), OUTPUT_IDS, {}))
    with torch.no_grad():  # as it will be stored
        for weight in module.parameters():
            weight.copy_(weight.bfloat16())
    info = {"target": identify(TARGET, "org/tiny"), "provenance": {}, "measured": {}}
    save_head(directory, module, info, text_batch(TARGET, [[1, 2, 3, 4, 5]], module.taps), 2, "")
    return module


def test_an_exported_head_is_the_same_head(tmp_path: Path) -> None:
    module, out = saved(EagleModule, tmp_path / "head"), tmp_path / "out"
    command = ["train", "export", str(tmp_path / "head"), "--out", str(out)]
    assert CliRunner().invoke(app, command).exit_code == 0
    found = read_published(out, TARGET)
    batch = text_batch(TARGET, [[7, 1, 9, 30, 4, 4, 2]], module.taps)
    for mine, theirs in zip(
        training_of(module).predictions(batch, 3),
        training_of(found).predictions(batch, 3),
        strict=True,
    ):
        torch.testing.assert_close(logits_of(mine), logits_of(theirs))
    config = json.loads((out / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/tiny"


def test_another_kind_and_a_folder_in_use_are_refused(tmp_path: Path) -> None:
    saved(HiddenHeadModule, tmp_path / "head")
    with pytest.raises(ConfigError, match="of kind 'hidden_head' and not 'eagle'"):
        export_head(tmp_path / "head", tmp_path / "out")
    saved(EagleModule, tmp_path / "eagle")
    with pytest.raises(ConfigError, match="is there already"):
        export_head(tmp_path / "eagle", tmp_path / "head")
