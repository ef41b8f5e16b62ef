"""Tiny random checkpoints of every native family, and a small tokenizer that really works.

The weights are drawn wider than transformers initialises them: its defaults give almost equal
logits, and a wrong mask or rotation would hardly show.
"""

from __future__ import annotations

import functools
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import (
    ApertusConfig,
    ArceeConfig,
    AutoModelForCausalLM,
    Cohere2Config,
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5Config,
    Exaone4Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    HunYuanDenseV1Config,
    Lfm2Config,
    Lfm2MoeConfig,
    LlamaConfig,
    Mamba2Config,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
    YoutuConfig,
)

from foredraft.kernels.build import KernelUnavailable, load_library
from foredraft.models.base import ScoreRow
from foredraft.models.families import FAMILIES
from foredraft.models.native.target import NativeTarget


def need_kernel() -> None:
    """Skip a test where the fused kernel cannot be compiled."""
    try:
        load_library()
    except KernelUnavailable as reason:
        pytest.skip(f"no fused kernel: {reason}")


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
_DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 8.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 16.0,
}
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [2.0 + 3.0 * i for i in range(6)],
}
_DELTA_NET: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 16,
}
_SHARED_EXPERT: dict[str, Any] = {
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 40,
    "num_experts": 5,
    "num_experts_per_tok": 2,
}
_MAMBA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_d_head": 16,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.1,
    "logits_scaling": 2.0,
}
_BESIDE: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_d_head": 16,
    "mamba_d_ssm": 64,
    "mamba_norm_before_gate": False,
}
WINDOW = 13
"""Of tokens that a layer sees: it cuts the prompts, the chunks and the trees of tests."""
_GEMMA4: dict[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 24,
    "sliding_window": WINDOW,
}

_NEMOTRON: dict[str, Any] = {
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 24,
    "chunk_size": 16,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 48,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
}
_GROUPS: dict[str, Any] = {
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "rope_parameters": _YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 0.4},
}

NATIVE_CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_sizes(), tie_word_embeddings=False),
    "llama-tied": lambda: LlamaConfig(**_sizes(), tie_word_embeddings=True),
    "llama-bias": lambda: LlamaConfig(**_sizes(), attention_bias=True),
    "llama-linear-rope": lambda: LlamaConfig(**_sizes(), rope_parameters=_LINEAR_ROPE),
    "llama-llama3-rope": lambda: LlamaConfig(**_sizes(), rope_parameters=_LLAMA3_ROPE),
    "llama-dynamic-rope": lambda: LlamaConfig(**_sizes(), rope_parameters=_DYNAMIC_ROPE),
    "llama-yarn-rope": lambda: LlamaConfig(**_sizes(), rope_parameters=_YARN_ROPE),
    "mistral": lambda: MistralConfig(**_sizes(head_dim=24), sliding_window=None),
    "mistral-window": lambda: MistralConfig(**_sizes(), sliding_window=WINDOW),
    "qwen2": lambda: Qwen2Config(**_sizes()),
    "qwen2-window": lambda: Qwen2Config(
        **_sizes(), use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**_sizes(head_dim=32), tie_word_embeddings=True),
    "smollm3": lambda: SmolLM3Config(
        **_sizes(), no_rope_layer_interval=2, use_sliding_window=True, sliding_window=WINDOW
    ),
    "olmo2": lambda: Olmo2Config(**_sizes()),
    "granite": lambda: GraniteConfig(
        **_sizes(),
        embedding_multiplier=6.0,
        residual_multiplier=0.3,
        attention_multiplier=0.1,
        logits_scaling=2.0,
    ),
    "phi3": lambda: Phi3Config(
        **_sizes(),
        sliding_window=WINDOW,
        partial_rotary_factor=0.75,
        rope_scaling=_LONG_ROPE,
        original_max_position_embeddings=1024,
    ),
    "gemma": lambda: GemmaConfig(**_sizes(head_dim=32)),
    "gemma2": lambda: Gemma2Config(
        **_sizes(head_dim=32),
        sliding_window=WINDOW,
        query_pre_attn_scalar=40,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=6.0,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **_sizes(head_dim=32),
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        final_logit_softcapping=8.0,
    ),
    "gemma4": lambda: Gemma4TextConfig(
        **_sizes(),
        **_GEMMA4,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        num_kv_shared_layers=1,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=24,
        vocab_size_per_layer_input=VOCAB_SIZE,
        final_logit_softcapping=8.0,
    ),
    "gemma4-unified": lambda: Gemma4UnifiedTextConfig(
        **_sizes(num_key_value_heads=4),
        **_GEMMA4,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
    ),
    "gemma4-moe": lambda: Gemma4TextConfig(
        **_sizes(),
        **_GEMMA4,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        attention_k_eq_v=True,
        hidden_size_per_layer_input=24,
        vocab_size_per_layer_input=VOCAB_SIZE,
        enable_moe_block=True,
        num_experts=5,
        top_k_experts=3,
        moe_intermediate_size=40,
    ),
    "mixtral": lambda: MixtralConfig(**_sizes(), num_local_experts=4, num_experts_per_tok=2),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **_sizes(head_dim=32),
        moe_intermediate_size=40,
        num_experts=6,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        mlp_only_layers=[],
    ),
    "olmoe": lambda: OlmoeConfig(**_sizes(), num_experts=5, num_experts_per_tok=2),
    "lfm2": lambda: Lfm2Config(
        **_sizes(),
        layer_types=["conv", "full_attention", "conv"],
        block_multiple_of=32,
        norm_eps=1e-2,
    ),
    "qwen3.5": lambda: Qwen3_5TextConfig(**_sizes(head_dim=32), **_DELTA_NET),
    "qwen3.5-moe": lambda: Qwen3_5MoeTextConfig(
        **{k: v for k, v in _sizes(head_dim=32).items() if k != "intermediate_size"},
        **_DELTA_NET,
        **_SHARED_EXPERT,
    ),
    "qwen3-next": lambda: Qwen3NextConfig(
        **_sizes(head_dim=32), **_DELTA_NET, **_SHARED_EXPERT, norm_topk_prob=True
    ),
    "lfm2-moe": lambda: Lfm2MoeConfig(
        **_sizes(),
        layer_types=["conv", "full_attention", "conv"],
        moe_intermediate_size=40,
        num_dense_layers=1,
        num_experts=5,
        num_experts_per_tok=2,
        routed_scaling_factor=1.5,
    ),
    "glm4-moe": lambda: Glm4MoeConfig(
        **_sizes(head_dim=32),
        moe_intermediate_size=40,
        n_shared_experts=2,
        n_routed_experts=5,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        routed_scaling_factor=1.5,
        use_qk_norm=True,
        attention_bias=True,
    ),
    "gpt-oss": lambda: GptOssConfig(
        **_sizes(head_dim=32), num_local_experts=5, num_experts_per_tok=2, sliding_window=WINDOW
    ),
    "granite-hybrid": lambda: GraniteMoeHybridConfig(
        **_sizes(), **_MAMBA, num_local_experts=0, shared_intermediate_size=96
    ),
    "granite-hybrid-moe": lambda: GraniteMoeHybridConfig(
        **_sizes(intermediate_size=48),
        **_MAMBA,
        num_local_experts=5,
        num_experts_per_tok=2,
        shared_intermediate_size=96,
        position_embedding_type="rope",
    ),
    "falcon-h1": lambda: FalconH1Config(
        **_sizes(),
        **_BESIDE,
        lm_head_multiplier=0.5,
        embedding_multiplier=3.0,
        mlp_multipliers=[0.7, 1.3],
        key_multiplier=0.6,
        attention_out_multiplier=1.4,
        attention_in_multiplier=0.9,
        ssm_multipliers=[0.5, 1.5, 0.7, 1.2, 0.8],
        ssm_in_multiplier=1.1,
        ssm_out_multiplier=0.6,
        mlp_bias=True,
        attention_bias=True,
    ),
    "falcon-h1-norm": lambda: FalconH1Config(**_sizes(), **_BESIDE, mamba_rms_norm=True),
    "nemotron-h": lambda: NemotronHConfig(
        **_sizes(),
        **_NEMOTRON,
        layers_block_type=["linear_attention", "full_attention", "mlp"],
    ),
    "nemotron-h-moe": lambda: NemotronHConfig(
        **_sizes(),
        **_NEMOTRON,
        layers_block_type=["linear_attention", "moe", "full_attention"],
        n_routed_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        moe_shared_expert_intermediate_size=80,
        routed_scaling_factor=1.5,
    ),
    "mamba2": lambda: Mamba2Config(
        **{name: value for name, value in _sizes().items() if "heads" not in name},
        num_heads=8,
        head_dim=16,
        n_groups=2,
        state_size=24,
        chunk_size=16,
    ),
    "glm4": lambda: Glm4Config(**_sizes(head_dim=32), attention_bias=True),
    "ernie4.5": lambda: Ernie4_5Config(**_sizes(head_dim=32), use_bias=True),
    "hunyuan": lambda: HunYuanDenseV1Config(
        **_sizes(head_dim=32),
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0},
    ),
    "seed-oss": lambda: SeedOssConfig(**_sizes(head_dim=32), attention_out_bias=False),
    "ministral": lambda: MinistralConfig(
        **_sizes(head_dim=16),
        sliding_window=WINDOW,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    ),
    "exaone4": lambda: Exaone4Config(**_sizes(), sliding_window=WINDOW, sliding_window_pattern=2),
    "olmo3": lambda: Olmo3Config(
        **_sizes(),
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": _YARN_ROPE,
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "cohere2": lambda: Cohere2Config(
        **_sizes(),
        sliding_window=WINDOW,
        logit_scale=0.5,
        layer_norm_eps=1e-2,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "stablelm": lambda: StableLmConfig(**_sizes(), use_qkv_bias=True),
    "starcoder2": lambda: Starcoder2Config(**_sizes(), sliding_window=WINDOW, norm_epsilon=1e-2),
    "arcee": lambda: ArceeConfig(**_sizes(), mlp_bias=True),
    "apertus": lambda: ApertusConfig(**_sizes()),
    "deepseek-v2": lambda: DeepseekV2Config(
        **_sizes(**_LATENT) | {"q_lora_rank": None, "rms_norm_eps": 1e-3, "v_head_dim": 100},
        **_GROUPS | {"num_experts_per_tok": 2, "first_k_dense_replace": 0},
        topk_method="group_limited_greedy",
    ),
    "deepseek-v3": lambda: DeepseekV3Config(**_sizes(**_LATENT), **_GROUPS, attention_bias=True),
    "glm4-moe-lite": lambda: Glm4MoeLiteConfig(
        **_sizes(**_LATENT),
        moe_intermediate_size=40,
        n_shared_experts=2,
        n_routed_experts=5,
        num_experts_per_tok=2,
        mlp_layer_types=["dense", "dense", "sparse"],
    ),
    "youtu": lambda: YoutuConfig(**_sizes(**_LATENT) | {"pad_token_id": None}),
    "llama-mlp-bias": lambda: LlamaConfig(**_sizes(), mlp_bias=True),
}
"""One entry for each family and each feature of `DecoderConfig`."""


def tiny_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A float32 model with random weights wide enough for distributions with some shape."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    family = FAMILIES.get(config.model_type)
    usual_norm = 1 - family.norm_offset if family else 1
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            is_norm = weight.ndim == 1 and name.endswith("weight")
            weight.copy_(usual_norm + 0.1 * noise if is_norm else 0.15 * noise)
        for factor in saved_buffers(model, "layer_scalar"):
            factor.copy_(1 + 0.15 * torch.randn(1, generator=generator))
        for bias in saved_buffers(model, "_bias"):
            bias.copy_(0.15 * torch.randn(bias.shape, generator=generator))
    return model.eval()


def saved_buffers(model: PreTrainedModel, *ends: str) -> list[torch.Tensor]:
    """Numbers that are saved though gradients do not learn them, by the ends of their names.

    Such are biases of routers ("_bias"), numbers of activations ("act_fn.beta", "act_fn.eps") and
    factors of Gemma 4's layers ("layer_scalar").
    """
    return [buffer for name, buffer in model.named_buffers() if name.endswith(ends)]


def save_checkpoint(directory: Path, config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Write weights, config and tokenizer the way transformers does; returns the saved model."""
    model = tiny_model(config, seed)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return model


@functools.cache
def made(name: str) -> Path:
    """The checkpoint of one of `NATIVE_CONFIGS`, made once; nothing may write to it."""
    directory = Path(_scratch().name) / name
    save_checkpoint(directory, NATIVE_CONFIGS[name]())
    return directory


@functools.cache
def _scratch() -> Any:
    return tempfile.TemporaryDirectory(prefix="foredraft-models-")


def text(length: int, seed: int = 0) -> list[int]:
    """Made-up tokens."""
    generator = random.Random(seed)
    return [generator.randrange(VOCAB_SIZE) for _ in range(length)]


def read(target: Any, tokens: Sequence[int]) -> int:
    """A slot that holds ``tokens``."""
    slot: int = target.cache.allocate()
    target.score([ScoreRow(slot, tokens)])
    target.cache.keep(slot, len(tokens), ())
    return slot


def train_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer: any text can be encoded, rare characters take several tokens."""
    return Tokenizer.from_str(_trained_tokenizer())


@functools.cache
def _trained_tokenizer() -> str:
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
    return str(tokenizer.to_str())


def save_tokenizer(directory: Path, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``."""
    directory.mkdir(parents=True, exist_ok=True)
    train_tokenizer().save(str(directory / "tokenizer.json"))
    config = {"eos_token": EOS_TOKEN, "tokenizer_class": "PreTrainedTokenizerFast"}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def some_layers(target: NativeTarget, layers: Sequence[int]) -> NativeTarget:
    """A target of some of the layers, which shares the weights, with a cache of its own."""
    weights = replace(target.weights, layers=tuple(target.weights.layers[i] for i in layers))
    kinds = tuple(layer.kind for layer in weights.layers) if target.config.kinds else ()
    config = replace(target.config, num_hidden_layers=len(layers), kinds=kinds)
    return NativeTarget(
        *(config, weights, target.new_decoder, target.max_context, target.cache.memory),
        cache_dtype=target.cache.store.dtype,
    )
