"""LoRA adapters: merged as their model is read, and refused by name where they cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foredraft import LLM, SamplingParams
from foredraft.core.errors import ModelLoadError
from foredraft.models.files.store import resolve_model
from foredraft.models.native.quant import as_tensor
from tests.models.checkpoints import NATIVE_CONFIGS, save_checkpoint
from tests.models.loaded import plan_of, target_of

RANK = 4
TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


pytestmark = pytest.mark.usefixtures("cache")


def adapter_of(
    tmp_path: Path, family: str = "llama", targets: tuple[str, ...] = TARGETS, **more: Any
) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder as PEFT writes it, and the merged weights."""
    base, folder = tmp_path / "base", tmp_path / "adapter"
    if not base.exists():
        save_checkpoint(base, NATIVE_CONFIGS[family]())
    merged, own = load_file(base / "model.safetensors"), dict[str, torch.Tensor]()
    draw = torch.Generator().manual_seed(1)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "bias": "none"}
    config |= {"base_model_name_or_path": str(base), "target_modules": list(targets)} | more
    for name, weight in merged.items():
        stem = name.removesuffix(".weight")
        if not stem.endswith(targets):
            continue
        alpha = {"o_proj": 8}.get(stem.rpartition(".")[2], 16) if "alpha_pattern" in more else 16
        first = torch.randn(RANK, weight.shape[1], generator=draw) / 10
        second = torch.randn(weight.shape[0], RANK, generator=draw) / 10
        own[f"base_model.model.{stem}.lora_A.weight"] = first
        own[f"base_model.model.{stem}.lora_B.weight"] = second
        scale = alpha / (RANK**0.5 if more.get("use_rslora") else RANK)
        merged[name] = weight.float().addmm(second, first, alpha=scale)
    folder.mkdir(exist_ok=True)
    save_file(own, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder, merged


@pytest.mark.parametrize(
    ("family", "targets", "more"),
    [
        ("llama", TARGETS, {}),
        ("llama", TARGETS, {"use_rslora": True}),
        ("llama", TARGETS, {"alpha_pattern": {"o_proj": 8}}),
        ("phi3", ("qkv_proj", "gate_up_proj"), {}),
    ],
)
def test_an_adapter_is_merged_into_its_model(
    tmp_path: Path, family: str, targets: tuple[str, ...], more: dict[str, Any]
) -> None:
    folder, merged = adapter_of(tmp_path, family, targets, **more)
    target = target_of(plan_of(folder, dtype="float32"))
    layer, prefix = target.weights.layers[1], "model.layers.1"
    parts = ["qkv"] if family == "phi3" else [*"qkv"]
    expected = torch.cat([merged[f"{prefix}.self_attn.{part}_proj.weight"] for part in parts])
    assert torch.equal(as_tensor(layer.qkv_weight, torch.float32), expected.float())
    output = merged[f"{prefix}.self_attn.o_proj.weight"].float()
    assert torch.equal(as_tensor(layer.output_weight, torch.float32), output)
    assert torch.equal(
        as_tensor(layer.down_weight, torch.float32),
        merged[f"{prefix}.mlp.down_proj.weight"].float(),
    )


def test_an_adapter_of_a_model_whose_parts_have_other_names(tmp_path: Path) -> None:
    folder, merged = adapter_of(tmp_path, "mamba2", ("out_proj",))
    target = target_of(plan_of(folder, dtype="float32"))
    output = merged["backbone.layers.1.mixer.out_proj.weight"].float()
    assert torch.equal(as_tensor(target.weights.layers[1].output_weight, torch.float32), output)


def test_its_texts_are_those_of_the_merged_model(tmp_path: Path) -> None:
    folder, merged = adapter_of(tmp_path)
    whole = tmp_path / "whole"
    save_checkpoint(whole, NATIVE_CONFIGS["llama"]())
    save_file(merged, whole / "model.safetensors", {"format": "pt"})
    params = SamplingParams(max_tokens=12, temperature=0.0)
    texts = [
        LLM.load(one, drafter="none", dtype="float32").generate(["one two"], params)[0].token_ids
        for one in (folder, whole, tmp_path / "base")
    ]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_one_that_was_trained_again_counts(tmp_path: Path) -> None:
    folder, _ = adapter_of(tmp_path)
    first = resolve_model(folder)
    assert resolve_model(folder) == first
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 1}))
    assert (
        json.loads((resolve_model(folder) / "adapter_config.json").read_text())["lora_alpha"] == 1
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"peft_type": "IA3"}, "kind 'IA3' are not merged"),
        ({"use_dora": True}, "use_dora True is not merged"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save \['lm_head'\] is not merged"),
        ({"bias": "all"}, "bias 'all' is not merged"),
        ({"base_model_name_or_path": None}, "names no base_model_name_or_path"),
    ],
)
def test_what_cannot_be_merged_is_named(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    folder, _ = adapter_of(tmp_path, **more)
    with pytest.raises(ModelLoadError, match=message):
        resolve_model(folder)


def test_an_adapter_of_another_model(tmp_path: Path) -> None:
    folder, _ = adapter_of(tmp_path)
    own = load_file(folder / "adapter_model.safetensors")
    key = "base_model.model.model.layers.0.mlp.up_proj"
    own[f"{key}.lora_A.weight"] = own[f"{key}.lora_A.weight"][:, :-1].contiguous()
    save_file(own, folder / "adapter_model.safetensors")
    with pytest.raises(ModelLoadError, match=r"up_proj.*belongs to another model"):
        plan_of(folder)
