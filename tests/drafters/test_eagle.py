"""Published EAGLE heads: every layout is read as it was meant, and what does not fit is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from foredraft.core.errors import ConfigError, ModelLoadError
from foredraft.drafters import build_drafter
from foredraft.drafters.heads.eagle import (
    EagleModule,
    FirstEagleModule,
    published_taps,
    read_published,
)
from foredraft.drafters.heads.steps import StepDrafter
from foredraft.drafters.spec import DrafterContext
from foredraft.models.native.target import NativeTarget
from foredraft.train.export import published_config, published_tensors
from foredraft.train.heads.base import (
    AnchoredAttention,
    Prediction,
    TextBatch,
    start_head,
    training_of,
    unrolled,
)
from tests.drafters.heads import (
    OUTPUT_IDS,
    VOCAB,
    drafted_logits,
    logits_of,
    random_text,
    shaken,
    text_batch,
    tiny_source,
    tiny_target,
)
from tests.drafters.test_heads import CHAIN, DEPTH

Change = Callable[[dict[str, Any], dict[str, Tensor]], object]
TARGET = tiny_target()
SOURCE = tiny_source(TARGET)
PLAIN = {"tap_norms": "none", "residual": "plain", "returns": "plain"}
"""EAGLE-3 as its authors published it, before there were more norms."""


def new_head(output_ids: list[int] | None = OUTPUT_IDS, **options: Any) -> EagleModule:
    torch.manual_seed(4)
    module = start_head(EagleModule, SOURCE, output_ids, options)
    shaken(module)
    with torch.no_grad():  # as it will be stored
        for weight in module.parameters():
            weight.copy_(weight.bfloat16())
    return module.eval()


def speculators(module: EagleModule) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """As vLLM's speculators write it, with the target's embeddings."""
    tensors = published_tensors(module) | {"embed_tokens.weight": SOURCE.embedding()}
    tensors["verifier_norm.weight"] = SOURCE.final_norm()
    return published_config(module, "org/tiny"), tensors


def authors(module: EagleModule) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """As EAGLE's authors write it: sizes at the top, the layer under another name."""
    config = {**asdict(SOURCE.shape), "num_hidden_layers": 1, "hidden_act": "silu"}
    config |= {"draft_vocab_size": len(module.output), "rope_scaling": None}
    tensors = published_tensors(module)
    return config, {n.replace("layers.0.", "midlayer."): t for n, t in tensors.items()}


LAYOUTS = {"speculators": speculators, "authors": authors}


def write(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({n: t.contiguous() for n, t in tensors.items()}, directory / "model.safetensors")
    return directory


def read(directory: Path) -> EagleModule | FirstEagleModule:
    return read_published(directory, TARGET)


def predictions_of(module: Any, batch: TextBatch, depth: int) -> list[Prediction]:
    """As in training; the first EAGLE heads are read alone, and computed here as papers have it."""
    if not isinstance(module, FirstEagleModule):
        return training_of(module).predictions(batch, depth)
    attention = AnchoredAttention(module.layer)

    def step(k: int, embeddings: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        x = attention.step(module.join(torch.cat((embeddings, state), -1)), k - 1)
        return x, x

    state_BLE = module.target_norm(batch.taps[module.taps[0]].to(module.output.dtype))
    return unrolled(batch, depth, module.output, state_BLE, step)


def assert_same_logits(one: EagleModule, other: Any) -> None:
    batch = text_batch(TARGET, [random_text(12)], one.taps)
    for mine, theirs in zip(
        predictions_of(one, batch, 3),
        predictions_of(other, batch, 3),
        strict=True,
    ):
        torch.testing.assert_close(logits_of(mine), logits_of(theirs))


@pytest.mark.parametrize("output_ids", [None, OUTPUT_IDS])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_is_read(layout: str, output_ids: list[int] | None, tmp_path: Path) -> None:
    module = new_head(output_ids, **PLAIN)
    found = read(write(tmp_path, *LAYOUTS[layout](module)))
    assert_same_logits(module, found)
    assert isinstance(found, EagleModule)
    assert found.config == module.config
    drafter = build_drafter("eagle", DrafterContext(TARGET, options={"head": str(tmp_path)}))
    assert isinstance(drafter, StepDrafter)
    assert drafter.taps == module.taps


VARIANTS = [
    {**PLAIN, name: value} for name, option in EagleModule.OPTIONS.items() for value in option.words
]  # each option by itself


@pytest.mark.parametrize("options", VARIANTS)
def test_each_variant_comes_back_and_drafts_as_it_predicts(
    options: dict[str, str], tmp_path: Path
) -> None:
    module = new_head(**options)
    found = read(write(tmp_path, *speculators(module)))
    assert_same_logits(module, found)
    assert_drafts_as_it_predicts(found, StepDrafter(module, TARGET, CHAIN))


def assert_drafts_as_it_predicts(module: Any, drafter: Any, target: NativeTarget = TARGET) -> None:
    text = random_text(20)
    predictions = predictions_of(module, text_batch(target, [text], module.taps), DEPTH)
    for anchor in (0, 7):
        drafted = drafted_logits(drafter, target, text, anchor, DEPTH)
        for prediction, logits_V in zip(predictions, drafted, strict=True):
            expected_R = logits_of(prediction)[0, anchor].detach()
            actual_R = logits_V[logits_V.isfinite()]
            assert (actual_R - expected_R).norm() < 0.06 * expected_R.norm()


def test_rows_come_in_the_order_of_their_tokens(tmp_path: Path) -> None:
    module = new_head(**PLAIN)
    config, tensors = authors(module)
    order = torch.randperm(len(OUTPUT_IDS), generator=torch.Generator().manual_seed(0))
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    tensors["d2t"] = torch.tensor(OUTPUT_IDS)[order] - torch.arange(len(order))
    assert_same_logits(module, read(write(tmp_path, config, tensors)))


def test_layers_are_numbered_as_each_layout_does(tmp_path: Path) -> None:
    """By what goes into them, and in SpecForge's own entry by what comes out."""
    config, tensors = authors(new_head(**PLAIN))
    count = len(published_taps(3))
    tensors["fc.weight"] = torch.zeros(64, 2 * 64)
    for entry in (
        {"eagle_aux_hidden_state_layer_ids": [1, 3]},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2]}},
    ):
        assert read(write(tmp_path, config | entry, tensors)).taps == (0, 2)
    assert count == 2  # of three layers, two are tapped
    entry = {"eagle_aux_hidden_state_layer_ids": [1, 4]}
    with pytest.raises(ConfigError, match=r"\[0, 3\]; there are 3"):
        read(write(tmp_path, config | entry, tensors))


def first_layout(has_bias: bool = True) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """An EAGLE-1 checkpoint with random weights."""
    torch.manual_seed(6)
    module = FirstEagleModule(SOURCE.shape, has_bias)
    shaken_weights = {n: w + 0.1 * torch.randn_like(w) for n, w in module.state_dict().items()}
    renamed = {
        "fc.weight": shaken_weights["join.weight"],
        "layers.0.post_attention_layernorm.weight": shaken_weights["layer.mlp_norm.weight"],
        "layers.0.self_attn.o_proj.weight": shaken_weights["layer.output.weight"],
        "layers.0.mlp.down_proj.weight": shaken_weights["layer.down.weight"],
        "embed_tokens.weight": SOURCE.embedding(),
    }
    if has_bias:
        renamed["fc.bias"] = shaken_weights["join.bias"]
    for name, piece in zip("qkv", shaken_weights["layer.qkv.weight"].split([64, 32, 32])):  # noqa: B905
        renamed[f"layers.0.self_attn.{name}_proj.weight"] = piece
    gate, up = shaken_weights["layer.gate_up.weight"].chunk(2)
    renamed |= {"layers.0.mlp.gate_proj.weight": gate, "layers.0.mlp.up_proj.weight": up}
    return {**asdict(SOURCE.shape), "num_hidden_layers": 1}, renamed


@pytest.mark.parametrize("has_bias", [True, False])
def test_the_first_eagle_is_read_and_drafts_as_it_predicts(has_bias: bool, tmp_path: Path) -> None:
    config, tensors = first_layout(has_bias)
    module = read(write(tmp_path, config, tensors))
    assert isinstance(module, FirstEagleModule)
    drafter = build_drafter("eagle", DrafterContext(TARGET, options={"head": str(tmp_path)}))
    assert isinstance(drafter, StepDrafter)
    assert drafter.taps == module.taps == (2,)
    assert_drafts_as_it_predicts(module, StepDrafter(module, TARGET, CHAIN))


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda c, w: c.update(num_hidden_layers=2), ConfigError, "num_hidden_layers 2.*one layer"),
        (lambda c, w: c.update(rope_scaling={"rope_type": "llama3"}), ConfigError, "rope_scaling"),
        (lambda c, w: c.update(target_hidden_size=128), ConfigError, "target_hidden_size 128"),
        (lambda c, w: c.update(attention_bias=True), ConfigError, "attention_bias"),
        (lambda c, w: c.update(vocab_size=99), ConfigError, "with 99 tokens.*with 96"),
        (lambda c, w: c.update(speculators_model_type="mlp"), ConfigError, "type 'mlp'"),
        (lambda c, w: c.pop("hidden_size"), ModelLoadError, "does not give 'hidden_size'"),
        (lambda c, w: c.update(rope_scaling="x"), ModelLoadError, "rope_scaling is 'x'"),
        (lambda c, w: c.update(hidden_size="x"), ModelLoadError, "hidden_size is 'x'"),
        (lambda c, w: c.update(num_attention_heads=10**12), ModelLoadError, "attention_heads"),
        (lambda c, w: c.update(eagle_aux_hidden_state_layer_ids=["x"]), ModelLoadError,
         "eagle_aux_hidden_state_layer_ids.0 is 'x'"),
        (lambda c, w: c.update(eagle_config="x"), ModelLoadError, "eagle_config is 'x'"),
        (lambda c, w: c.update(intermediate_size=2**24), ModelLoadError, "has shape"),
        (lambda c, w: w.pop("midlayer.mlp.up_proj.weight"), ConfigError, "lacks.*up_proj"),
        (lambda c, w: w.pop("fc.weight"), ConfigError, "no EAGLE head.*foredraft train eagle"),
        (lambda c, w: w.update({"midlayer.self_attn.q_norm.weight": torch.ones(16)}),
         ConfigError, "no place for"),
        (lambda c, w: w.update({"embed_tokens.weight": torch.randn(VOCAB, 64)}),
         ConfigError, "other embeddings"),
        (lambda c, w: w.update({"norm.weight": torch.ones(32)}), ModelLoadError, "norm.weight has"),
        (lambda c, w: w["norm.weight"].fill_(float("nan")), ModelLoadError, "NaN"),
        (lambda c, w: w["d2t"].add_(90), ModelLoadError, "d2t does not name"),
        (lambda c, w: w["t2d"].logical_not_(), ModelLoadError, "different tokens"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(
    change: Change, error: type[Exception], says: str, tmp_path: Path
) -> None:
    config, tensors = authors(new_head(**PLAIN))
    change(config, tensors)
    with pytest.raises(error, match=says):
        read(write(tmp_path, config, tensors))


def test_a_pickle_is_never_read(tmp_path: Path) -> None:
    config, _ = authors(new_head(**PLAIN))
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "pytorch_model.bin").write_bytes(b"never")
    with pytest.raises(ModelLoadError, match="pickle"):
        read(tmp_path)
