"""Typed schemas of the JSON files of a checkpoint, one for each.

Only the fields that foredraft reads are here; further fields of a file are ignored. A value
outside of its range is refused with the field's name rather than found later as a crash or as
wrong numbers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
"""A count of anything: larger ones overflow the arithmetic of some kernel."""
CountOr0 = Annotated[int, Field(ge=0, le=2**31 - 1)]
Epsilon = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Theta = Annotated[float, Field(ge=1, le=1e15, allow_inf_nan=False)]
Factor = Annotated[float, Field(ge=1e-3, le=1e6, allow_inf_nan=False)]
Multiplier = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]
Scale = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


def _listed(ids: object) -> object:
    """One id, several or none, as a tuple. Old conversions write -1 for none."""
    if ids is None or (ids == -1 and type(ids) is int):
        return ()
    if isinstance(ids, list):
        return tuple(ids)
    if type(ids) is not int:
        raise ValueError("it must be a token id, or a list of them")
    return (ids,)


TokenId = Annotated[int, Field(ge=0, lt=2**32)]
TokenIds = Annotated[tuple[TokenId, ...], BeforeValidator(_listed)]


def _as_tuple(numbers: object) -> object:
    return tuple(numbers) if isinstance(numbers, list) else numbers


Factors = Annotated[tuple[Factor, ...], BeforeValidator(_as_tuple)]
Multipliers = Annotated[tuple[Multiplier, ...], BeforeValidator(_as_tuple)]
OfLayers = Annotated[tuple[int, ...] | None, BeforeValidator(_as_tuple)]
KindsOfLayers = Annotated[tuple[str, ...] | None, BeforeValidator(_as_tuple)]


def _either(*names: str, default: Any = ...) -> Any:
    return Field(default, validation_alias=AliasChoices(*names))


def _counted(value: Any) -> Any:
    """A list of layers by kind says how many there are."""
    return len(value) if isinstance(value, list) else value


def _as_list(numbers: object) -> object:
    return numbers.tolist() if isinstance(numbers, np.ndarray) else numbers


Integers = Annotated[list[int], BeforeValidator(_as_list)]


class _Schema(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, protected_namespaces=())

    @classmethod
    def keys(cls) -> set[str]:
        """The keys that are read, of schemas whose fields have one each."""
        return {str(field.validation_alias or name) for name, field in cls.model_fields.items()}


class GenerationFields(_Schema):
    """``generation_config.json``, and its fields in ``config.json``."""

    eos_token_id: TokenIds = ()
    do_sample: bool | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None

    @property
    def sampling(self) -> dict[str, float]:
        """Sampling parameters that the model's makers name, as `SamplingParams` has them.

        As in transformers, tokens are drawn only where ``do_sample`` says so, or a temperature is
        named without it.
        """
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        named = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.do_sample is False:
            named = {name: named[name] for name in names[-1:] if name in named}
        elif self.do_sample:
            named.setdefault("temperature", 1.0)
        return named


class RopeFields(_Schema):
    """Rotary parameters, in the spelling of transformers 5 or in that of 4."""

    rope_type: str | None = _either("rope_type", "type", default=None)
    rope_theta: Theta | None = None
    partial_rotary_factor: Share | None = None
    factor: Factor | None = None
    low_freq_factor: Factor | None = None
    high_freq_factor: Factor | None = None
    original_max_position_embeddings: Count | None = None
    attention_factor: Factor | None = None
    beta_fast: Factor | None = None
    beta_slow: Factor | None = None
    alpha: Factor | None = None
    mscale: Factor | None = None
    mscale_all_dim: Factor | None = None
    truncate: bool = True
    short_factor: Factors | None = None
    long_factor: Factors | None = None

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        needed = _NEEDED_OF_ROPE.get(self.rope_type or "", ())
        missing = [name for name in needed if getattr(self, name) is None]
        if missing:
            raise ValueError(f"rotary scaling {self.rope_type!r} needs {', '.join(missing)}")
        low, high = self.low_freq_factor, self.high_freq_factor
        if self.rope_type == "llama3" and low is not None and high is not None and low >= high:
            raise ValueError(f"low_freq_factor {low} must be below high_freq_factor {high}")
        return self


_NEEDED_OF_ROPE = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


class LayeredRopeFields(_Schema):
    """Rotary parameters of layers with full attention, and of windowed ones."""

    full_attention: RopeFields | None = None
    sliding_attention: RopeFields | None = None


class LayerFields(_Schema):
    """Sizes that a layer has in place of those of the model."""

    head_dim: Count | None = None
    num_key_value_heads: Count | None = None


class DecoderFields(_Schema):
    """``config.json`` of the families that the native decoder knows.

    `foredraft.models.families.Family` holds a family's defaults, and the optional fields that it
    reads; fields that it does not read are ignored.
    """

    model_type: str
    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count = _either("block_ff_dim", "intermediate_size")
    num_hidden_layers: Annotated[Count, BeforeValidator(_counted)] = _either(
        "num_hidden_layers", "layers_block_type"
    )
    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    max_position_embeddings: Count
    rms_norm_eps: Epsilon = _either(
        "rms_norm_eps", "norm_eps", "layer_norm_eps", "norm_epsilon", "layer_norm_epsilon"
    )
    hidden_act: str = "silu"
    hidden_activation: str | None = _either("hidden_activation", "mlp_hidden_act", default=None)
    rope_theta: Theta | None = None
    rope_local_base_freq: Theta | None = None
    rope_parameters: RopeFields | None = None
    rope_scaling: RopeFields | None = None
    layered_rope: LayeredRopeFields | None = Field(default=None, validation_alias="rope_parameters")
    partial_rotary_factor: Share | None = None
    original_max_position_embeddings: Count | None = None
    tie_word_embeddings: bool | None = _either("tie_embedding", "tie_word_embeddings", default=None)
    attention_bias: bool | None = _either(
        "attention_bias", "use_bias", "use_qkv_bias", default=None
    )
    output_bias: bool | None = Field(default=None, validation_alias="attention_out_bias")
    mlp_bias: bool | None = _either("mlp_bias", "use_bias", default=None)
    use_qk_norm: bool | None = None
    use_sliding_window: bool | None = None
    sliding_window: Count | None = None
    sliding_window_pattern: Count | str | None = _either(
        "sliding_window_pattern", "_sliding_window_pattern", default=None
    )
    max_window_layers: CountOr0 = 28
    layer_types: KindsOfLayers = _either("layer_types", "layers_block_type", default=None)
    position_embedding_type: str | None = None
    no_rope_layers: OfLayers = None
    no_rope_layer_interval: Count | None = None
    embedding_multiplier: Multiplier = 1.0
    residual_multiplier: Multiplier = 1.0
    attention_multiplier: Scale | None = None
    logits_scaling: Factor = 1.0
    logit_scale: Scale | None = _either("logit_scale", "lm_head_multiplier", default=None)
    key_multiplier: Multiplier = 1.0
    attention_in_multiplier: Multiplier = 1.0
    attention_out_multiplier: Multiplier = 1.0
    ssm_in_multiplier: Multiplier = 1.0
    ssm_out_multiplier: Multiplier = 1.0
    ssm_multipliers: Multipliers = (1.0,) * 5
    mlp_multipliers: Multipliers = (1.0,) * 2
    query_pre_attn_scalar: Factor | None = None
    attn_logit_softcapping: Factor | None = None
    final_logit_softcapping: Factor | None = None
    num_experts: CountOr0 | None = _either(
        "num_local_experts", "num_experts", "n_routed_experts", default=None
    )
    num_experts_per_tok: Count | None = _either(
        "num_experts_per_tok", "top_k_experts", default=None
    )
    enable_moe_block: bool = True
    moe_intermediate_size: Count | None = None
    norm_topk_prob: bool | None = None
    shared_expert_intermediate_size: Count | None = _either(
        "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", default=None
    )
    shared_intermediate_size: Count | None = None
    n_shared_experts: Annotated[int, Field(ge=0, le=64)] | None = None
    num_dense_layers: CountOr0 = _either("first_k_dense_replace", "num_dense_layers", default=0)
    mlp_layer_types: KindsOfLayers = None
    use_expert_bias: bool | None = None
    n_group: Count | None = None
    topk_group: Count | None = None
    topk_method: str | None = None
    routed_scaling_factor: Scale = 1.0
    block_auto_adjust_ff_dim: bool = False
    block_ffn_dim_multiplier: Factor | None = 1.0
    block_multiple_of: Count = 256
    conv_L_cache: Count = 3
    full_attn_idxs: OfLayers = None
    full_attention_interval: Count = 4
    linear_conv_kernel_dim: Count = 4
    linear_key_head_dim: Count = 128
    linear_value_head_dim: Count = 128
    linear_num_key_heads: Count = 16
    linear_num_value_heads: Count = 32
    linear_heads_tiled: bool = False
    mamba_n_heads: Count = _either("mamba_n_heads", "mamba_num_heads", "num_heads", default=128)
    mamba_n_groups: Count = _either("mamba_n_groups", "n_groups", default=1)
    mamba_d_state: Count = _either("mamba_d_state", "ssm_state_size", "state_size", default=256)
    mamba_d_head: Count | Literal["auto"] | None = _either(
        "mamba_d_head", "mamba_head_dim", default=None
    )
    mamba_d_conv: Count = _either("mamba_d_conv", "conv_kernel", default=4)
    mamba_expand: Count = _either("mamba_expand", "expand", default=2)
    mamba_conv_bias: bool = _either("mamba_conv_bias", "use_conv_bias", default=True)
    mamba_d_ssm: Count | None = None
    mamba_rms_norm: bool = True
    global_head_dim: Count = 512
    num_global_key_value_heads: Count | None = None
    per_layer_config: dict[str, LayerFields] | None = None
    attention_k_eq_v: bool = False
    num_kv_shared_layers: CountOr0 = 0
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: CountOr0 = 0
    vocab_size_per_layer_input: Count = 262_144
    kv_lora_rank: Count | None = None
    q_lora_rank: Count | None = None
    qk_nope_head_dim: Count = 128
    qk_rope_head_dim: Count | None = None
    v_head_dim: Count = 128
    rope_interleave: bool | None = True
    quantization_config: Any = None
    eos_token_id: TokenIds = ()

    @property
    def feed_forward_size(self) -> int:
        """``intermediate_size``, or what LFM2 makes of it."""
        size, factor = self.intermediate_size, self.block_ffn_dim_multiplier
        if not self.block_auto_adjust_ff_dim:
            return size
        size = int(2 * size / 3)
        if factor is None:
            return size
        return -(-int(factor * size) // self.block_multiple_of) * self.block_multiple_of

    @property
    def head_size(self) -> int:
        """``head_dim``, or its default; where heads share a latent, that and its rotated part."""
        if self.kv_lora_rank and self.qk_rope_head_dim:
            return self.qk_rope_head_dim + self.kv_lora_rank
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rotated_size(self) -> int:
        """Numbers of a head that turn, if all may."""
        return (self.kv_lora_rank and self.qk_rope_head_dim) or self.head_size

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        heads, key_value_heads = self.num_attention_heads, self.num_key_value_heads
        if key_value_heads is not None and heads % key_value_heads:
            raise ValueError(
                f"num_attention_heads {heads} is no multiple of num_key_value_heads "
                f"{key_value_heads}"
            )
        if self.head_size < 1 or self.head_size % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size}, num_attention_heads {heads} and head_dim "
                f"{self.head_dim} make heads of {self.head_size}; rotary embedding needs an even "
                "size"
            )
        return self


class IndexFields(_Schema):
    """``model.safetensors.index.json``: the file of each tensor."""

    weight_map: dict[str, str] = Field(min_length=1)


def _said(key: str, default: Any = ...) -> Any:
    return Field(default, validation_alias=key)


def _most(counts: object) -> object:
    """The most of any layer: recurrent ones have no heads. 1 where none has."""
    if isinstance(counts, np.ndarray) and counts.size:
        counts = max(counts.tolist())
    return 1 if type(counts) is int and counts == 0 else counts


class GgufFields(_Schema):
    """Metadata of a GGUF file about its model; keys lack the architecture that they begin with.

    Fields of single families: `foredraft.models.families.Gguf`.

    Attributes:
        scaling_type: of rotary embedding; without a factor linear scaling changes nothing.
        attention_factor: longrope's factor of cosines and sines.
    """

    block_count: Count
    context_length: Count
    embedding_length: Count
    feed_forward_length: Annotated[Count, BeforeValidator(_most)]
    head_count: Annotated[Count, BeforeValidator(_most)] = _said("attention.head_count")
    head_count_kv: Annotated[Count | None, BeforeValidator(_most)] = _said(
        "attention.head_count_kv", None
    )
    key_length: Count | None = _said("attention.key_length", None)
    value_length: Count | None = _said("attention.value_length", None)
    rms_norm_eps: Epsilon | None = _said("attention.layer_norm_rms_epsilon", None)
    rope_dimension_count: Count | None = _said("rope.dimension_count", None)
    rope_theta: Theta = _said("rope.freq_base", 10000.0)
    local_rope_theta: Theta | None = _said("rope.freq_base_swa", None)
    scaling_type: Literal["none", "linear", "yarn", "longrope"] = _said(
        "rope.scaling.type", "linear"
    )
    scaling_factor: Factor = _said("rope.scaling.factor", 1.0)
    original_context: Count | None = _said("rope.scaling.original_context_length", None)
    attention_factor: Factor | None = _said("rope.scaling.attn_factor", None)
    beta_fast: Factor | None = _said("rope.scaling.yarn_beta_fast", None)
    beta_slow: Factor | None = _said("rope.scaling.yarn_beta_slow", None)
    expert_count: Annotated[int, Field(ge=0, le=2**16)] = 0
    is_causal: Literal[True] = _said("attention.causal", True)


ENDS_BY_TEXT = frozenset(
    {
        *("<|endoftext|>", "<|end_of_text|>", "<|end▁of▁sentence|>", "<eos>", "[EOS]"),
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<turn|>"),
        "<|tool_response>",
        *("<|return|>", "<|call|>", "<|eot|>", "<EOT>", "_<EOT>", "[EOT]", "<end_of_utterance>"),
        *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
    }
)
"""Tokens that end a text, a turn or a message, whatever ids a GGUF file names: most files name one
id alone. llama.cpp knows them by their text, too (src/llama-vocab.cpp)."""
_HARMONY = {"<|return|>", "<|call|>"}
"""In vocabularies with these, ``<|end|>`` ends a part of a reply and not the reply."""


TOKENIZER_KEY = "tokenizer.ggml.{}"


class GgufTokenizerFields(_Schema):
    """The tokenizer of a GGUF file."""

    model_config = ConfigDict(alias_generator=TOKENIZER_KEY.format)

    architecture: str = _said("general.architecture", "")
    tokenizer_model: Literal["gpt2", "llama", "gemma4"] = _said("tokenizer.ggml.model")
    pre_tokenizer: str = _said("tokenizer.ggml.pre", "default")
    tokens: list[str]
    token_type: Integers
    merges: list[str] = []
    scores: Annotated[list[float], BeforeValidator(_as_list)] = []
    add_space_prefix: bool = True
    remove_extra_whitespaces: Literal[False] = False
    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | None = None
    eot_token_id: TokenId | None = None
    eom_token_id: TokenId | None = None
    padding_token_id: TokenId | None = None
    unknown_token_id: TokenId | None = None
    add_bos_token: bool | None = None
    add_eos_token: Literal[False] = False
    chat_template: str | None = _said("tokenizer.chat_template", None)
    suppress_tokens: Integers = []

    def end_ids(self) -> list[int]:
        """Ids that end a reply: named by the file, or known by their text."""
        named = {self.eos_token_id, self.eot_token_id, self.eom_token_id} - {None}
        known = {token: index for index, token in enumerate(self.tokens) if token in ENDS_BY_TEXT}
        if known.keys() >= _HARMONY:
            known.pop("<|end|>", None)
        return sorted({index for index in (*named, *known.values()) if index is not None})

    def special_ids(self) -> dict[str, int]:
        """The ids that the file gives, under the names of ``config.json``."""
        ids = {
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "pad_token_id": self.padding_token_id,
            "unk_token_id": self.unknown_token_id,
        }
        return {name: index for name, index in ids.items() if index is not None}
