"""Loading native weights: complete, of the right shape, finite, or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foredraft.core.errors import ModelLoadError
from foredraft.models.native.config import read_config
from foredraft.models.native.weights import DecoderWeights, load_weights
from tests.models.checkpoints import NATIVE_CONFIGS, save_checkpoint


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
    assert weights.num_bytes == 4 * read_config(checkpoint).num_parameters
    assert load(checkpoint, torch.bfloat16).num_bytes == weights.num_bytes // 2


def test_a_tied_head_is_the_embedding_itself(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, NATIVE_CONFIGS["llama-tied"]())
    weights = load(tmp_path)
    assert weights.head_VE is weights.embedding_VE
    assert weights.num_bytes == 4 * read_config(tmp_path).num_parameters


def test_selected_layers_share_their_tensors(checkpoint: Path) -> None:
    weights = load(checkpoint)
    view = weights.select_layers((0, 2))
    assert [layer.qkv_weight for layer in view.layers] == [
        weights.layers[0].qkv_weight,
        weights.layers[2].qkv_weight,
    ]


def test_a_sharded_checkpoint_is_the_same_model(checkpoint: Path) -> None:
    whole = load(checkpoint)
    split(checkpoint, 3)
    for expected, actual in zip(whole.tensors(), load(checkpoint).tensors(), strict=True):
        assert torch.equal(actual, expected)


def test_a_missing_tensor_is_named(checkpoint: Path) -> None:
    change(checkpoint, lambda weights: weights.pop("model.layers.2.mlp.up_proj.weight"))
    with pytest.raises(ModelLoadError, match=r"model\.layers\.2\.mlp\.up_proj\.weight is missing"):
        load(checkpoint)


def test_many_missing_tensors_are_counted(checkpoint: Path) -> None:
    def drop_a_layer(weights: dict[str, Tensor]) -> None:
        for name in [name for name in weights if name.startswith("model.layers.1.")]:
            del weights[name]

    change(checkpoint, drop_a_layer)
    with pytest.raises(ModelLoadError, match=r"input_layernorm.*and 6 more\. Missing"):
        load(checkpoint)


def test_an_untied_checkpoint_without_a_head_is_refused(checkpoint: Path) -> None:
    change(checkpoint, lambda weights: weights.pop("lm_head.weight"))
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight is missing"):
        load(checkpoint)


def test_a_tensor_of_another_shape_is_named(checkpoint: Path) -> None:
    change(checkpoint, lambda weights: weights.update({"model.norm.weight": torch.ones(32)}))
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight has shape \(32,\), not \(64,\)"):
        load(checkpoint)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.0.input_layernorm.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
    ],
)
def test_weights_that_are_not_finite_are_refused(checkpoint: Path, name: str, value: float) -> None:
    change(checkpoint, lambda weights: weights[name].view(-1)[-1].fill_(value))
    with pytest.raises(ModelLoadError, match=f"{name} holds NaN or infinite values"):
        load(checkpoint)


def test_a_truncated_file_is_refused(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelLoadError, match="truncated or damaged"):
        load(checkpoint)


def test_a_missing_file_is_named(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="has no weights"):
        load(checkpoint)


def test_a_missing_shard_is_named(checkpoint: Path) -> None:
    split(checkpoint, 2)[1].unlink()
    with pytest.raises(ModelLoadError, match=r"lacks 1 of the 2 .*: model-00002-of-00002"):
        load(checkpoint)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_an_index_that_is_none_is_refused(checkpoint: Path, content: str) -> None:
    split(checkpoint, 2)
    (checkpoint / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors\.index\.json"):
        load(checkpoint)


def test_files_beside_the_checkpoint_are_left_alone(checkpoint: Path) -> None:
    save_file({"model.norm.weight": torch.zeros(3)}, checkpoint / "consolidated.safetensors")
    assert load(checkpoint).final_norm_E.shape == (64,)
