"""Quantised safetensors: tiny models written by the published layouts, in plain torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.gguf_models import save_tiny
from foredraft.core.errors import ModelLoadError
from foredraft.core.tree import TokenTree
from foredraft.load import ModelPlan, load_target, plan_models
from foredraft.models.base import ScoreRow
from foredraft.models.native.quant import PackedMatrix, as_tensor
from foredraft.models.native.target import NativeTarget
from foredraft.options import LoadOptions
from tests.models.checkpoints import NATIVE_CONFIGS, need_kernel, save_checkpoint
from tests.models.gguf_files import shape_of

GROUP = 64
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Parts = dict[str, Tensor]


def packed(numbers: Tensor, bits: int) -> Tensor:
    """Whole numbers [..., n] as int32 words [..., n * bits / 32], the first in the lowest bits."""
    each = 32 // bits
    fields = (numbers.long() & (1 << bits) - 1).unflatten(-1, (-1, each))
    words = sum(fields[..., i] << bits * i for i in range(each))
    assert isinstance(words, Tensor)
    return (words - (words >> 31 << 32)).int()


def rounded(weight_RK: Tensor, bits: int, asymmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Integers [R, K] from 0, scales and zero points [R, G]."""
    groups = weight_RK.float().unflatten(1, (-1, GROUP))
    most = (1 << bits) - 1
    if asymmetric:
        low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
        scales = ((high - low) / most).half()
        zeros = (-low / scales.float()).round().clamp(0, most)
    else:
        scales = (2 * groups.abs().amax(-1) / most).half()
        zeros = torch.full_like(scales, 1 << bits - 1).float()
    integers = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, most)
    return integers.flatten(1).int(), scales, zeros.int()


def numbers_of(integers: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    by_group = (integers.unflatten(1, (scales.shape[1], -1)) - zeros[..., None]).float()
    return (by_group * scales.float()[..., None]).flatten(1)


def gptq(weight_RK: Tensor, bits: int = 4, asymmetric: bool = False, less: int = 1) -> Any:
    integers, scales, zeros = rounded(weight_RK, bits, asymmetric)
    parts = {
        "qweight": packed(integers.T.contiguous().T, bits).T,
        "qzeros": packed((zeros - less).T.contiguous(), bits),
        "scales": scales.T,
        "g_idx": torch.arange(weight_RK.shape[1], dtype=torch.int32) // GROUP,
    }
    return parts, numbers_of(integers, scales, zeros)


def gptq_in_order_of_activations(weight_RK: Tensor) -> Any:
    order = torch.randperm(weight_RK.shape[1], generator=torch.Generator().manual_seed(1))
    parts, numbers = gptq(weight_RK[:, order])
    back = order.argsort()
    words = packed(rounded(weight_RK[:, order], 4, False)[0][:, back], 4).T
    return parts | {"qweight": words, "g_idx": parts["g_idx"][back]}, numbers[:, back]


def awq(weight_RK: Tensor) -> Any:
    integers, scales, zeros = rounded(weight_RK, 4, True)

    def in_order(numbers: Tensor) -> Tensor:
        return packed(numbers.unflatten(-1, (-1, 8))[..., list(AWQ_ORDER)].flatten(-2), 4)

    parts = {"qweight": in_order(integers.T), "qzeros": in_order(zeros.T), "scales": scales.T}
    return parts, numbers_of(integers, scales, zeros)


def compressed(weight_RK: Tensor, asymmetric: bool = False) -> Any:
    integers, scales, zeros = rounded(weight_RK, 4, asymmetric)
    shape = torch.tensor(weight_RK.shape)
    parts = {"weight_packed": packed(integers, 4), "weight_scale": scales, "weight_shape": shape}
    if asymmetric:
        parts["weight_zero_point"] = packed(zeros.T.contiguous(), 4).T
    return parts, numbers_of(integers, scales, zeros)


def int8(weight_RK: Tensor) -> Any:
    scales = (weight_RK.float().abs().amax(-1, keepdim=True) / 127).bfloat16()
    integers = (weight_RK.float() / scales.float()).round().clamp(-128, 127).to(torch.int8)
    return {"weight": integers, "weight_scale": scales}, integers.float() * scales.float()


def fp8(weight_RK: Tensor) -> Any:
    rows, inputs = weight_RK.shape
    scales = torch.rand(-(-rows // 128), -(-inputs // 128)) / 100 + 0.001
    wide = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :inputs]
    floats = (weight_RK.float() / wide).to(torch.float8_e4m3fn)
    return {"weight": floats, "weight_scale_inv": scales}, floats.float() * wide


def mlx(weight_RK: Tensor) -> Any:
    groups = weight_RK.float().unflatten(1, (-1, GROUP))
    minima = groups.amin(-1).half()
    scales = ((groups.amax(-1) - minima.float()) / 15).half()
    above = (groups - minima.float()[..., None]) / scales.float()[..., None]
    integers = above.round().clamp(0, 15)
    numbers = integers * scales.float()[..., None] + minima.float()[..., None]
    words = packed(integers.flatten(1), 4).view(torch.uint32)
    return {"weight": words, "scales": scales, "biases": minima}, numbers.flatten(1)


def scheme(kind: str, bits: int, type: str = "int", symmetric: bool = True) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": type, "symmetric": symmetric}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
KINDS: Mapping[str, tuple[Callable[[Tensor], Any], dict[str, Any], str | None]] = {
    "gptq": (gptq, GPTQ, "int4"),
    "gptq 8": (lambda w: gptq(w, 8), GPTQ | {"bits": 8}, "int8"),
    "gptq v2": (lambda w: gptq(w, less=0), GPTQ | {"checkpoint_format": "gptq_v2"}, "int4"),
    "gptq zeros": (lambda w: gptq(w, asymmetric=True), GPTQ | {"sym": False}, "uint4"),
    "gptq order": (gptq_in_order_of_activations, GPTQ | {"desc_act": True}, None),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP}, "uint4"),
    "pack": (compressed, scheme("pack-quantized", 4), "int4"),
    "pack zeros": (
        lambda w: compressed(w, True),
        scheme("pack-quantized", 4, symmetric=False),
        "uint4",
    ),
    "int8": (int8, scheme("int-quantized", 8), "int8"),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}, None),
    "mlx": (mlx, {"bits": 4, "group_size": GROUP}, "MLX 4 bits"),
}


@pytest.fixture(autouse=True)
def kernel() -> None:
    need_kernel()


def written(folder: Path, kind: str, family: str | None = None) -> dict[str, Tensor]:
    """A checkpoint, and the numbers in it."""
    make, described, _ = KINDS[kind]
    if family is None:
        save_checkpoint(folder, shape_of(tie_word_embeddings=False))
    else:
        save_tiny(folder, family)
    numbers, stored = dict[str, Tensor](), Parts()
    for name, weight in load_file(folder / "model.safetensors").items():
        numbers[name] = stored[name] = weight
        if "_proj" in name:
            parts, numbers[name] = make(weight)
            del stored[name]
            stem = name.removesuffix(".weight")
            stored |= {f"{stem}.{key}": part.contiguous() for key, part in parts.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": described}))
    return numbers


def plan_of(folder: Path, **options: Any) -> ModelPlan:
    return plan_models(LoadOptions(model=str(folder), drafter="none", **options))[0]


def target_of(plan: ModelPlan) -> NativeTarget:
    target = load_target(plan)
    assert isinstance(target, NativeTarget)
    return target


@pytest.mark.parametrize("kind", KINDS)
def test_the_very_weights_are_taken(tmp_path: Path, kind: str) -> None:
    numbers = written(tmp_path, kind)
    plan = plan_of(tmp_path, dtype="float32", weights="file" if KINDS[kind][2] else "auto")
    assert plan.backend == "native"
    weights = target_of(plan).weights
    found = weights.layers[1]
    for matrix, names in (
        (found.qkv_weight, [f"self_attn.{part}_proj" for part in "qkv"]),
        (found.output_weight, ["self_attn.o_proj"]),
        (found.gate_up_weight, ["mlp.gate_proj", "mlp.up_proj"]),
        (found.down_weight, ["mlp.down_proj"]),
    ):
        expected = torch.cat([numbers[f"model.layers.1.{name}.weight"] for name in names])
        assert torch.equal(as_tensor(matrix, torch.float32), expected.float())
        assert isinstance(matrix, PackedMatrix) == (KINDS[kind][2] is not None)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind][2]])
def test_they_are_kept_in_few_bits_and_give_the_same_bits_in_any_company(
    tmp_path: Path, kind: str
) -> None:
    written(tmp_path, kind)
    plan = plan_of(tmp_path)
    assert plan.weights == "file"
    assert plan.formats[0] == KINDS[kind][2]
    assert any("head" in note and "8 bits" in note for note in plan.notes)
    target = target_of(plan)
    assert target.weights.num_bytes == pytest.approx(plan.weight_bytes, rel=0.05)
    tokens = [7, 250, 31, 7, 98]
    assert torch.equal(chain_logits(target, tokens), logits_alone(target, tokens))


def chain_logits(target: NativeTarget, tokens: list[int]) -> Tensor:
    """Of one forward."""
    slot = target.cache.allocate()
    [scores] = target.score([ScoreRow(slot, tokens[:1], TokenTree.chain(tokens[1:]))])
    return scores.logits_NV


def logits_alone(target: NativeTarget, tokens: list[int]) -> Tensor:
    """Of a forward a token."""
    slot, found = target.cache.allocate(), []
    for token in tokens:
        [scores] = target.score([ScoreRow(slot, [token])])
        target.cache.keep(slot, 1, [])
        found.append(scores.logits_NV)
    return torch.cat(found)


@pytest.mark.parametrize("kind", ["gptq", "awq", "mlx"])
def test_latents_keep_all_but_what_makes_keys_of_them(tmp_path: Path, kind: str) -> None:
    """Which is turned, and is kept in 8 bits."""
    numbers = written(tmp_path, kind, "youtu")
    plan = plan_of(tmp_path, dtype="float32", weights="file")
    weights = target_of(plan).weights
    assert weights.num_bytes == pytest.approx(plan.weight_bytes, rel=0.05)
    both = numbers["model.layers.1.self_attn.kv_b_proj.weight"].unflatten(0, (8, 288))
    keys_HIR, values_HVR = both[:, :256], both[:, 256:]
    found = weights.layers[1]
    assert torch.equal(as_tensor(found.value_weight, torch.float32), values_HVR.flatten(0, 1))
    rounded = as_tensor(found.key_weight, torch.float32)
    assert torch.allclose(rounded, keys_HIR.mT.flatten(0, 1), atol=3e-3)


@pytest.mark.parametrize(
    ("described", "named"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        (GPTQ | {"bits": 3}, "gptq in 3 bits"),
        (GPTQ | {"group_size": "all"}, "malformed"),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, "malformed"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ in 4 bits of version 'gemv'"),
        ({"quant_method": "quark"}, "'quark'"),
        (scheme("marlin-24", 4), "compressed-tensors in the form 'marlin-24'"),
    ],
)
def test_other_formats_are_refused_by_name(
    tmp_path: Path, described: dict[str, Any], named: str
) -> None:
    save_checkpoint(tmp_path, shape_of())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": described}))
    with pytest.raises(ModelLoadError, match=f"{named}.* are not read; get the model in bfloat16"):
        plan_of(tmp_path, backend="native")


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    written(tmp_path, "gptq")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.qzeros"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"int4 weights are missing.*qzeros"):
        target_of(plan_of(tmp_path))


@pytest.mark.parametrize(
    ("name", "field", "value", "message"),
    [
        ("gptq zeros", "sym", True, r"int4 weights from .* zero points"),
        ("gptq order", "desc_act", False, "do not follow each other"),
    ],
)
def test_what_the_config_denies_is_refused(
    tmp_path: Path, name: str, field: str, value: bool, message: str
) -> None:
    written(tmp_path, name)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"][field] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=message):
        target_of(plan_of(tmp_path))


def gpt_oss(path: Path) -> tuple[Path, Path]:
    """A checkpoint whose experts are in MXFP4, and one with the same numbers as floats."""
    plain, folder, stored = path / "plain", path / "mxfp4", Parts()
    draw = torch.Generator().manual_seed(1)
    codes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    for directory in (plain, folder):
        save_checkpoint(directory, NATIVE_CONFIGS["gpt-oss"]())
    numbers = load_file(plain / "model.safetensors")
    for name, weight in numbers.items():
        numbers[name] = stored[name] = weight = weight.bfloat16()
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, rows = weight.shape
            places = torch.randint(0, 16, (experts, rows, inputs // 32, 32), generator=draw)
            powers = torch.randint(118, 124, (experts, rows, inputs // 32), generator=draw)
            places[0, 0, 0], powers[0, 0, 0] = 8, 1  # a block of zeros may have any scale
            found = codes[places] * 2.0 ** (powers - 127)[..., None]
            numbers[name] = found.flatten(2).transpose(1, 2).contiguous().to(weight.dtype)
            del stored[name]
            stored[f"{name}_blocks"] = (places[..., ::2] | places[..., 1::2] << 4).to(torch.uint8)
            stored[f"{name}_scales"] = powers.to(torch.uint8)
    save_file(numbers, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, plain


def test_the_experts_of_gpt_oss_come_in_floats_of_4_bits(tmp_path: Path) -> None:
    found, expected = (
        target_of(plan_of(directory, dtype="float32")).weights.tensors()
        for directory in gpt_oss(tmp_path)
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_experts_of_gpt_oss_stay_in_4_bits(tmp_path: Path, dtype: str) -> None:
    """All else is as in the model of floats, and so is the text's likelihood."""
    folder, plain = gpt_oss(tmp_path)
    plan = plan_of(folder, dtype=dtype, weights="file")
    assert plan.formats == ("MXFP4", "BF16")
    assert plan_of(folder).weights == "file"
    kept, floats = target_of(plan), target_of(plan_of(plain, dtype=dtype))
    assert kept.weights.num_bytes == pytest.approx(plan.weight_bytes, rel=0.2)  # of filled-up rows
    for ours, theirs in zip(kept.weights.layers, floats.weights.layers, strict=True):
        for name, (matrix, _) in ours.matrices.items():
            is_packed = name in ("gate_up_weight", "down_weight")
            assert isinstance(matrix, PackedMatrix) == is_packed
            expected = as_tensor(getattr(theirs, name), theirs.output_weight.dtype)
            assert torch.equal(as_tensor(matrix, expected.dtype), expected)
    tokens = [(7 * i) % 250 + 3 for i in range(40)]
    found, expected = chain_logits(kept, tokens), chain_logits(floats, tokens)
    most = {"float32": 1e-3, "bfloat16": 2e-2}[dtype]  # entries of the cache are rounded to it
    assert (found - expected).abs().max() < most * expected.std()


def test_packed_experts_give_the_same_bits_in_any_company(tmp_path: Path) -> None:
    folder, _ = gpt_oss(tmp_path)
    plan = plan_of(folder)
    tokens = [(7 * i) % 250 + 3 for i in range(16)]
    alone = logits_alone(target_of(plan), tokens)
    for threads in (1, 2):
        target = load_target(plan, threads)
        assert isinstance(target, NativeTarget)
        for count in range(1, 17):
            assert torch.equal(chain_logits(target, tokens[:count]), alone[:count])
