"""Tiny random checkpoints, made by transformers, of each family that is written as GGUF.

Each row has 256 weights, which every format can hold. The weights are drawn wider than transformers
draws them: a wrong mask or rotation would hardly show in almost equal logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from foredraft.models.families import FAMILIES

WINDOW = 13
"""Of tokens that a layer sees where it sees few: less than a text of some sentences has."""
_VOCAB_SIZE = 300
_SIZES = {
    "vocab_size": _VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 8.0,
    "original_max_position_embeddings": 256,
}
_LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(12)],
    "long_factor": [2.0 + 3.0 * i for i in range(12)],
}
_GEMMA_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0}
_DELTA_NET = {
    "num_hidden_layers": 4,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
_MAMBA = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "mamba_d_head": 32,
    "shared_intermediate_size": 256,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.1,
    "logits_scaling": 2.0,
}
_NEMOTRON = {
    "head_dim": 32,
    "mamba_num_heads": 16,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "ssm_state_size": 32,
    "chunk_size": 16,
}
_SHARED = {
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
_LATENT = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "kv_lora_rank": 256,
    "q_lora_rank": 256,
    "qk_nope_head_dim": 256,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}
_GROUPS = {
    "moe_intermediate_size": 256,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "rope_parameters": _YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
}
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"

MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama-llama3-rope": (
        "llama",
        {"attention_bias": True, "rope_parameters": _LLAMA_3, "max_position_embeddings": 16384},
    ),
    "llama-linear-rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}},
    ),
    "llama-yarn-rope": ("llama", {"rope_parameters": _YARN | {"beta_fast": 16.0}}),
    "qwen2-yarn-rope": ("qwen2", {"rope_parameters": _YARN}),
    "qwen3": ("qwen3", {"head_dim": 64, "tie_word_embeddings": True}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "use_sliding_window": False}),
    "olmo2": ("olmo2", {}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.1,
            "logits_scaling": 2.0,
        },
    ),
    "phi3": (
        "phi3",
        {
            "sliding_window": 1000,
            "partial_rotary_factor": 0.75,
            "rope_scaling": _LONG,
            "original_max_position_embeddings": 1024,
        },
    ),
    "gemma": ("gemma", {"head_dim": 64}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 64,
            "query_pre_attn_scalar": 64,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 6.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 64,
            "query_pre_attn_scalar": 64,
            "sliding_window": WINDOW,
            "num_hidden_layers": 3,
            "layer_types": [_LOCAL, _GLOBAL, _LOCAL],
            "rope_parameters": _GEMMA_ROPES,
            "final_logit_softcapping": 8.0,
        },
    ),
    "gemma4": (
        "gemma4_text",
        {
            "head_dim": 32,
            "global_head_dim": 64,
            "sliding_window": WINDOW,
            "num_hidden_layers": 4,
            "layer_types": [_LOCAL, _GLOBAL, _LOCAL, _GLOBAL],
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": _VOCAB_SIZE,
            "final_logit_softcapping": 8.0,
        },
    ),
    "gemma4-moe": (
        "gemma4_text",
        {
            "head_dim": 32,
            "global_head_dim": 64,
            "sliding_window": WINDOW,
            "layer_types": [_LOCAL, _GLOBAL],
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 256,
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        "qwen3_moe",
        {
            "head_dim": 64,
            "moe_intermediate_size": 256,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "mlp_only_layers": [],
        },
    ),
    "olmoe": (
        "olmoe",
        {"num_key_value_heads": 8, "num_experts": 5, "num_experts_per_tok": 2},
    ),
    "lfm2": (
        "lfm2",
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", _GLOBAL, "conv"],
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "qwen3.5": ("qwen3_5_text", _DELTA_NET),
    "qwen3.5-moe": ("qwen3_5_moe_text", _DELTA_NET | _SHARED),
    "qwen3-next": ("qwen3_next", _DELTA_NET | _SHARED),
    "lfm2-moe": (
        "lfm2_moe",
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", _GLOBAL, "conv"],
            "moe_intermediate_size": 256,
            "num_dense_layers": 1,
            "num_experts": 5,
            "num_experts_per_tok": 2,
        },
    ),
    "glm4-moe": (
        "glm4_moe",
        {
            "num_hidden_layers": 3,
            "head_dim": 64,
            "moe_intermediate_size": 256,
            "n_shared_experts": 1,
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            "head_dim": 64,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
        },
    ),
    "glm4": ("glm4", {"head_dim": 64, "attention_bias": True}),
    "ernie4.5": ("ernie4_5", {"head_dim": 64, "use_bias": False}),
    "hunyuan": (
        "hunyuan_v1_dense",
        {"head_dim": 64, "rope_parameters": _DYNAMIC},
    ),
    "seed-oss": ("seed_oss", {"head_dim": 64, "attention_out_bias": False}),
    "exaone4": (
        "exaone4",
        {
            "num_hidden_layers": 3,
            "sliding_window": WINDOW,
            "layer_types": [_LOCAL, _GLOBAL, _LOCAL],
        },
    ),
    "olmo3": (
        "olmo3",
        {
            "num_hidden_layers": 3,
            "sliding_window": WINDOW,
            "layer_types": [_LOCAL, _GLOBAL, _LOCAL],
            "rope_parameters": {
                _GLOBAL: _YARN,
                _LOCAL: {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "cohere2": (
        "cohere2",
        {"num_hidden_layers": 4, "sliding_window": WINDOW, "logit_scale": 0.5},
    ),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "arcee": ("arcee", {}),
    "granite-hybrid": ("granitemoehybrid", _MAMBA | {"num_local_experts": 0}),
    "granite-hybrid-moe": (
        "granitemoehybrid",
        _MAMBA
        | {"num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 512},
    ),
    "falcon-h1": (
        "falcon_h1",
        {
            "head_dim": 32,
            "mamba_n_heads": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 32,
            "mamba_d_head": 32,
            "mamba_d_ssm": 256,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
        },
    ),
    "nemotron-h": (
        "nemotron_h",
        _NEMOTRON
        | {"layers_block_type": ["linear_attention", "mlp", "linear_attention", _GLOBAL, "mlp"]},
    ),
    "nemotron-h-moe": (
        "nemotron_h",
        _NEMOTRON
        | {
            "layers_block_type": ["linear_attention", "moe", _GLOBAL, "moe"],
            "n_routed_experts": 5,
            "moe_intermediate_size": 256,
            "moe_shared_expert_intermediate_size": 512,
            "routed_scaling_factor": 1.5,
        },
    ),
    "mamba2": (
        "mamba2",
        {"num_heads": 16, "head_dim": 32, "n_groups": 2, "state_size": 32, "chunk_size": 16},
    ),
    "deepseek-v2": (
        "deepseek_v2",
        _LATENT | _GROUPS | {"q_lora_rank": None, "topk_method": "group_limited_greedy"},
    ),
    "deepseek-v3": ("deepseek_v3", _LATENT | _GROUPS),
    "youtu": ("youtu", _LATENT | {"pad_token_id": None}),
}
"""``model_type`` and fields of each: every family, and every rotary scaling that files have."""


def save_tiny(directory: Path, name: str, seed: int = 0) -> None:
    """Write config, float32 weights and a tokenizer, as transformers writes them."""
    model_type, fields = MODELS[name]
    config = transformers.CONFIG_MAPPING[model_type](**{**_SIZES, **fields})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    usual_norm = 1 - FAMILIES[model_type].norm_offset
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            is_norm = weight.ndim == 1 and weight_name.endswith("weight")
            weight.copy_(usual_norm + 0.1 * noise if is_norm else 0.1 * noise)
    model.save_pretrained(directory)
    _tokenizer().save(str(directory / "tokenizer.json"))


def _tokenizer() -> Tokenizer:
    """Marks, all bytes, and pairs of bytes that make the vocabulary full."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    merges = [(letters[i], letters[i + 1]) for i in range(_VOCAB_SIZE - len(marks + letters))]
    tokens = [*marks, *letters, *(first + second for first, second in merges)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(marks)
    return tokenizer
