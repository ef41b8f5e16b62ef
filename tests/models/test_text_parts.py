"""Models of text and images: their language part loads as a model of text, and says so."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma4Config,
    Mistral3Config,
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
)

from foredraft.load import plan_models
from foredraft.models.base import ScoreRow
from foredraft.models.native.target import NativeTarget
from foredraft.options import LoadOptions
from tests.models.checkpoints import NATIVE_CONFIGS, save_tokenizer

_TOKENS = [(7 * i) % 90 + 3 for i in range(30)]
_IMAGES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
_PATCHES = {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
_QWEN = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}


def _text(name: str) -> dict[str, object]:
    return {**NATIVE_CONFIGS[name]().to_dict(), "tie_word_embeddings": False}


def _qwen_vl() -> PretrainedConfig:
    text = _text("qwen2") | {"model_type": "qwen2_5_vl_text"}
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [2, 3, 3],
    }
    return Qwen2_5_VLConfig(text_config=text, vision_config={**_QWEN, "out_hidden_size": 64})


WRAPPED: Mapping[str, Callable[[], PretrainedConfig]] = {
    "gemma3": lambda: Gemma3Config(
        text_config=_text("gemma3") | {"final_logit_softcapping": None},
        vision_config={**_IMAGES, **_PATCHES},
        mm_tokens_per_image=4,
        tie_word_embeddings=False,
    ),
    "gemma4": lambda: Gemma4Config(
        text_config=_text("gemma4"),
        vision_config={**_IMAGES, "num_attention_heads": 2, "head_dim": 16},
        tie_word_embeddings=False,
    ),
    "mistral3": lambda: Mistral3Config(
        text_config=_text("mistral"),
        vision_config={**_IMAGES, **_PATCHES, "model_type": "pixtral", "head_dim": 16},
        tie_word_embeddings=False,
    ),
    "qwen2.5-vl": _qwen_vl,
    "qwen3.5": lambda: Qwen3_5Config(
        text_config=_text("qwen3.5"), vision_config={**_QWEN, "out_hidden_size": 64}
    ),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_the_language_part_loads_as_text(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(3)
    model = AutoModelForImageTextToText.from_config(WRAPPED[name](), dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=0.15)
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    plan, _ = plan_models(LoadOptions(model=str(tmp_path), device="cpu", dtype="float32"))
    assert plan.backend == "native"
    with caplog.at_level(logging.WARNING):
        target = NativeTarget.load(tmp_path, torch.float32)
    assert "left out" in caplog.text
    logits_V = target.score([ScoreRow(target.cache.allocate(), _TOKENS)])[0].logits_NV[0]
    with torch.inference_mode():
        expected_V = model(input_ids=torch.tensor([_TOKENS])).logits[0, -1]
    assert torch.allclose(logits_V, expected_V, atol=1e-4)
