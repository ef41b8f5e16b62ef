"""Tiny random checkpoints of every native family, and a small tokenizer that really works.

The weights are drawn wider than transformers initialises them: its defaults give almost equal
logits, and a wrong mask or rotation would hardly show.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 300
EOS_TOKEN = "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SENTENCES = (
    "The ferry crosses the river twice a day, in the morning and in the evening.",
    "A draft is checked by the model that it was written for.",
    "Crème brûlée, naïve café, Straße, Москва, 東京, 🦊🌊",
)


def _sizes(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 2,
        **more,
    }


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}

NATIVE_CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_sizes(), tie_word_embeddings=False),
    "llama-tied": lambda: LlamaConfig(**_sizes(), tie_word_embeddings=True),
    "llama-bias": lambda: LlamaConfig(**_sizes(), attention_bias=True),
    "llama-linear-rope": lambda: LlamaConfig(**_sizes(), rope_parameters=_LINEAR_ROPE),
    "llama-llama3-rope": lambda: LlamaConfig(**_sizes(), rope_parameters=_LLAMA3_ROPE),
    "mistral": lambda: MistralConfig(**_sizes(head_dim=24), sliding_window=None),
    "qwen2": lambda: Qwen2Config(**_sizes()),
    "qwen3": lambda: Qwen3Config(**_sizes(head_dim=32), tie_word_embeddings=True),
}
"""One entry for each family and each feature of `DecoderConfig`."""


def tiny_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A float32 model with random weights wide enough for distributions with some shape."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            is_norm = weight.ndim == 1 and name.endswith("weight")
            weight.copy_(1 + 0.1 * noise if is_norm else 0.15 * noise)
    return model.eval()


def save_checkpoint(directory: Path, config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Write weights, config and tokenizer the way transformers does; returns the saved model."""
    model = tiny_model(config, seed)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return model


def train_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer: any text can be encoded, rare characters take several tokens."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>", "<|im_start|>", EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    return tokenizer


def save_tokenizer(directory: Path, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``."""
    directory.mkdir(parents=True, exist_ok=True)
    train_tokenizer().save(str(directory / "tokenizer.json"))
    config = {"eos_token": EOS_TOKEN, "tokenizer_class": "PreTrainedTokenizerFast"}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
