"""Loading native weights: complete, of the right shape, finite, or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from foredraft.core.errors import ModelLoadError
from foredraft.load import plan_models
from foredraft.models.base import ScoreRow
from foredraft.models.hf.target import HFTarget
from foredraft.models.native.config import read_config
from foredraft.models.native.target import NativeTarget
from foredraft.models.native.weights import DecoderWeights, count_weights, load_weights
from foredraft.options import LoadOptions
from tests.models.checkpoints import NATIVE_CONFIGS, save_checkpoint
from tests.models.progress import RecordedProgress


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path, NATIVE_CONFIGS["llama"]())
    return tmp_path


def load(directory: Path, dtype: torch.dtype = torch.float32) -> DecoderWeights:
    return load_weights(directory, read_config(directory), dtype)


def change(directory: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(directory / "model.safetensors")
    edit(weights)
    save_file(weights, directory / "model.safetensors")


def split(directory: Path, num_files: int) -> list[Path]:
    """Turn a checkpoint into a sharded one."""
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names, paths, weight_map = sorted(weights), [], {}
    for number in range(num_files):
        path = directory / f"model-{number + 1:05}-of-{num_files:05}.safetensors"
        shard = {name: weights[name] for name in names[number::num_files]}
        save_file(shard, path)
        weight_map |= dict.fromkeys(shard, path.name)
        paths.append(path)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return paths


def test_weights_are_fused_and_counted_once(checkpoint: Path) -> None:
    weights, raw = load(checkpoint), load_file(checkpoint / "model.safetensors")
    layer = weights.layers[1]
    parts = [raw[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(layer.qkv_weight, torch.cat(parts))
    parts = [raw[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(layer.gate_up_weight, torch.cat(parts))
    assert weights.num_bytes == 4 * count_weights(read_config(checkpoint)).all
    assert load(checkpoint, torch.bfloat16).num_bytes == weights.num_bytes // 2


def test_a_tied_head_is_the_embedding_itself(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, NATIVE_CONFIGS["llama-tied"]())
    weights = load(tmp_path)
    assert weights.head_VE is weights.embedding_VE
    assert weights.num_bytes == 4 * count_weights(read_config(tmp_path)).all


def test_a_sharded_checkpoint_is_the_same_model(checkpoint: Path) -> None:
    whole = load(checkpoint)
    split(checkpoint, 3)
    for name, actual in load(checkpoint).tensors().items():
        assert torch.equal(actual, whole.tensors()[name])


@pytest.mark.parametrize(
    ("dropped", "message"),
    [
        ("model.layers.2.mlp.up_proj.weight", r"layers\.2\.mlp\.up_proj\.weight is missing"),
        ("model.layers.1.", r"input_layernorm.*and 6 more\. Missing"),
        ("lm_head.weight", r"lm_head\.weight is missing"),
    ],
)
def test_missing_tensors_are_named(checkpoint: Path, dropped: str, message: str) -> None:
    def drop(weights: dict[str, Tensor]) -> None:
        for name in [name for name in weights if name.startswith(dropped)]:
            del weights[name]

    change(checkpoint, drop)
    with pytest.raises(ModelLoadError, match=message):
        load(checkpoint)


def test_a_tensor_of_another_shape_is_named(checkpoint: Path) -> None:
    change(checkpoint, lambda weights: weights.update({"model.norm.weight": torch.ones(32)}))
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight has shape \(32,\), not \(64,\)"):
        load(checkpoint)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "name",
    ["model.layers.1.self_attn.q_proj.weight", "model.embed_tokens.weight", "model.norm.weight"],
)
def test_weights_that_are_not_finite_are_refused(checkpoint: Path, name: str, value: float) -> None:
    change(checkpoint, lambda weights: weights[name].view(-1)[-1].fill_(value))
    with pytest.raises(ModelLoadError, match=f"{name} holds NaN or infinite values"):
        load(checkpoint)


# ------------------------------------------------- files that are not what the config says they are


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers is 2147483647, .* hold 3 layers"),
        ({"num_hidden_layers": 4}, "num_hidden_layers is 4, .* hold 3 layers"),
        (
            {"vocab_size": 10**9},
            r"has shape \(300, 64\), not \(1000000000, 64\)",
        ),
        ({"hidden_size": 2**31 - 2}, r"has shape \(300, 64\), not \(300, 2147483646\)"),
        ({"intermediate_size": 10**9}, r"gate_proj\.weight has shape \(96, 64\)"),
        ({"num_attention_heads": 8}, r"q_proj\.weight has shape \(64, 64\), not \(128, 64\)"),
        ({"head_dim": 10**9}, r"q_proj\.weight has shape \(64, 64\), not \(4000000000, 64\)"),
    ],
)
def test_sizes_are_compared_before_anything_is_allocated(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, int], message: str
) -> None:
    edit_config(checkpoint, **changes)
    monkeypatch.setattr("foredraft.models.native.weights.read_tensor", None)
    empty, arange = torch.empty, torch.arange

    def few(*numbers: float, **options: object) -> Tensor:
        assert max(numbers) < 10**6
        return arange(*numbers, **options)  # type: ignore[call-overload, no-any-return]

    def only_outlines(shape: tuple[int, ...], **options: object) -> Tensor:
        assert options["device"] == "meta"
        return empty(shape, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "empty", only_outlines)
    monkeypatch.setattr(torch, "arange", few)
    with pytest.raises(ModelLoadError, match=message):
        load(checkpoint)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float8_e4m3fn, torch.bool])
def test_weights_that_mean_nothing_without_scales_are_refused(
    checkpoint: Path, dtype: torch.dtype
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    change(checkpoint, lambda weights: weights.update({name: weights[name].to(dtype)}))
    with pytest.raises(ModelLoadError, match=rf"{name} is stored as .*only BF16, F16, F32, F64"):
        load(checkpoint)


STRAY = {
    "a bias": ("model.layers.0.self_attn.q_proj.bias", (64,)),
    "a layer too many": ("model.layers.3.input_layernorm.weight", (64,)),
    "another model's": ("visual.patch.weight", (3, 3)),
    "what older versions stored needlessly": (
        *("model.layers.0.self_attn.rotary_emb.inv_freq", (8,)),
    ),
}


@pytest.mark.parametrize("name", STRAY)
def test_tensors_that_are_left_out_are_named(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    stray, shape = STRAY[name]
    change(checkpoint, lambda weights: weights.update({stray: torch.ones(shape)}))
    save_file({"model.norm.weight": torch.zeros(3)}, checkpoint / "consolidated.safetensors")
    assert NativeTarget.load(checkpoint).weights.final_norm_E.shape == (64,)
    is_silent = "inv_freq" in stray
    assert [record.levelname for record in caplog.records] == ["WARNING"] * (not is_silent)
    assert is_silent or f"are left out: {stray}" in caplog.text
    edit_config(checkpoint, num_hidden_layers=2)
    assert NativeTarget.load(checkpoint).num_layers == 2
    assert "model.layers.2.input_layernorm.weight" in caplog.text


def test_an_index_may_name_what_no_version_needs(checkpoint: Path) -> None:
    split(checkpoint, 2)
    path = checkpoint / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    file = min(index["weight_map"].values())
    index["weight_map"]["model.layers.0.self_attn.rotary_emb.inv_freq"] = file
    path.write_text(json.dumps(index))
    load(checkpoint)


# -------------------------------------------------------------------------------------- tied heads


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path, NATIVE_CONFIGS["llama-tied"]())
    return tmp_path


@pytest.mark.parametrize("differs", [True, False])
def test_a_stored_head_beside_tied_embeddings_counts_as_with_transformers(
    tied: Path, differs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def store_a_head(weights: dict[str, Tensor]) -> None:
        noise = torch.randn(300, 64, generator=torch.Generator().manual_seed(1))
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 0.2 * differs * noise

    change(tied, store_a_head)
    tokens = list(range(5, 25))
    theirs = AutoModelForCausalLM.from_pretrained(tied, dtype=torch.float32)
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0, -1]
    target = NativeTarget.load(tied)
    slot = target.cache.allocate()
    target.cache.reserve(slot, len(tokens))
    logits = target.score([ScoreRow(slot, tokens)])[0].logits_NV[-1]
    assert torch.allclose(logits, expected, atol=1e-4)
    assert (target.weights.head_VE is target.weights.embedding_VE) != differs
    plan, _ = plan_models(LoadOptions(model=str(tied), device="cpu", dtype="float32"))
    assert plan.weight_bytes == target.weights.num_bytes
    assert not [record for record in caplog.records if record.name == "foredraft"]


def test_a_stored_head_of_another_shape_is_refused(tied: Path) -> None:
    change(tied, lambda weights: weights.update({"lm_head.weight": torch.ones(3, 64)}))
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight has shape \(3, 64\)"):
        load(tied)


# ------------------------------------------------------------------------------ nothing unchecked

LOADERS: dict[str, Callable[[Path], object]] = {
    "NativeTarget.load": NativeTarget.load,
    "HFTarget.load": HFTarget.load,
    "load_weights": load,
}


@pytest.mark.parametrize("loader", LOADERS)
def test_no_loader_follows_an_index_out_of_its_directory(checkpoint: Path, loader: str) -> None:
    directory = checkpoint / "model"
    directory.mkdir()
    (checkpoint / "config.json").rename(directory / "config.json")
    names = load_file(checkpoint / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "../model.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match="not a safetensors file of its own directory"):
        LOADERS[loader](directory)


@pytest.mark.parametrize("loader", ["NativeTarget.load", "HFTarget.load"])
def test_no_loader_passes_over_code(checkpoint: Path, loader: str) -> None:
    code = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Mine"}
    (checkpoint / "mine.py").write_text("raise SystemExit('ran')")
    edit_config(checkpoint, auto_map=code)
    LOADERS[loader](checkpoint)  # transformers has a model of this type: that one is taken
    edit_config(checkpoint, auto_map=code, model_type="mine")
    with pytest.raises(ModelLoadError, match="never runs code"):
        LOADERS[loader](checkpoint)


def test_much_that_is_read_says_how_much_is_done(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, stages = read_config(checkpoint), []
    for much in (1, 1 << 30):
        monkeypatch.setattr("foredraft.models.native.weights._MUCH_TO_READ", much)
        progress = RecordedProgress()
        load_weights(checkpoint, config, torch.float32, progress=progress)
        assert progress.fractions[-1] == 1.0
        assert progress.details[-1].endswith("MB/s, 0 s left")
        stages.append(progress.stages)
    assert stages == [["reading the weights"], []]
