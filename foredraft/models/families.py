"""The families of models that run natively: how each differs from Llama, and nothing else.

A family is one entry of `FAMILIES`: the names of its tensors, the fields of ``config.json`` that it
heeds, and their defaults. The features are implemented once for all families, by
`foredraft.models.native.model` in torch and by the fused kernel. How to add a family:
docs/extend/add-a-family.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal


@dataclass(frozen=True)
class Names:
    """Names of a layer's tensors: without ``model.layers.N.`` in front and ``.weight`` behind.

    A norm without a name does not exist. Matrices of several names are concatenated by rows.
    ``{expert}`` stands for the number of an expert; a name without it is of all experts. The bias
    of a router has its whole name. The first layers of some mixtures have no experts (``dense``);
    where ``dense_post_norm`` is named, all layers have such a part beside them. Of latent attention
    ``qkv`` gives queries and the latent, or ``query_low`` what ``query_up`` makes queries of, and
    ``latent_up`` makes keys and values of each head.
    """

    attention_norm: str | None = "input_layernorm"
    attention_post_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_post_norm: str | None = None
    query_norm: str | None = None
    key_norm: str | None = None
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    query_low: str = ""
    query_up: str = ""
    latent_up: tuple[str, ...] = ()
    output: str = "self_attn.o_proj"
    router: str | None = None
    router_bias: str | None = None
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    dense_gate_up: tuple[str, ...] = ()
    dense_down: str = ""
    shared_router: str | None = None
    shared_gate_up: tuple[str, ...] = ()
    shared_down: str = ""
    recurrent_in: tuple[str, ...] = ()
    recurrent_out: str = ""
    convolution: str = ""
    recurrent_gates: tuple[str, ...] = ()
    recurrent_norm: str = ""
    sinks: str | None = None
    activation: str | None = None
    experts_norm: str | None = None
    experts_post_norm: str | None = None
    dense_post_norm: str | None = None
    router_norm: str = ""
    expert_factors: str = ""
    factor: str | None = None
    input_gate: str = ""
    input_output: str = ""
    input_norm: str = ""
    final_norm: str = "model.norm"

    @property
    def apart(self) -> Names:
        """The same, where each expert and each projection has a tensor of its own, as in GGUF."""
        found = self
        if self.router and "{expert}" not in self.down:
            each = self.down.rpartition(".")[0].removesuffix(".experts") + ".experts.{expert}."
            up = (f"{each}gate_proj", f"{each}up_proj")
            found = replace(found, gate_up=up, down=f"{each}down_proj")
        if self.recurrent_in == ("linear_attn.in_proj_qkvz",):
            found = replace(
                found, recurrent_in=("linear_attn.in_proj_qkv", "linear_attn.in_proj_z")
            )
        if self.latent_up:
            found = replace(found, latent_up=("self_attn.k_b_proj", "self_attn.v_b_proj"))
        if self.dense_gate_up == ("shared_mlp.input_linear",):
            part = self.dense_gate_up[0].rpartition(".")[0]
            both = (f"{part}.gate_proj", f"{part}.up_proj")
            found = replace(found, dense_gate_up=both, shared_gate_up=both)
        return found


@dataclass(frozen=True)
class Gguf:
    """GGUF's form of a family.

    Attributes:
        architecture: value of ``general.architecture``, and prefix of the family's keys.
        is_paired: rows of queries and keys lie such that rotary embedding turns neighbours, where
            transformers turns halves.
        keys: of fields of ``config.json``, beyond those of Llama; without the architecture.
        implied: fields of ``config.json`` that a file without keys for them implies, if they differ
            from `Family.defaults`.
        only: the only values of keys that are implemented.
        ignored: keys that change nothing of a text model.
        norms: names of norms that differ from `GGUF_NORMS`; "final_norm" is one of them.
        may_be_dense: a file of the family may have no experts.
        mark: a key that tells the family from an older one of the same architecture, and the value
            of it that does; None: any.
        rope: fields of rotary scaling that files do not say.
        wide_size: the number of layers of the one model of the family whose scores are divided by
            the root of hidden size / heads, and not of the head size. Files do not say it.
    """

    architecture: str
    is_paired: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)
    implied: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    norms: Mapping[str, str] = field(default_factory=dict)
    may_be_dense: bool = False
    mark: tuple[str, int | None] | None = None
    rope: Mapping[str, Any] = field(default_factory=dict)
    wide_size: int | None = None


RECURRENT_TYPES = {
    "short_conv": ("conv",),
    "delta_net": ("linear_attention",),
    "mamba2": ("linear_attention", "mamba", "M"),
}
"""Names of recurrent layers in ``layer_types``."""
FEED_FORWARD_TYPES = {"mlp": False, "-": False, "moe": True, "E": True}
"""And of layers that are feed-forward parts alone, with whether these are experts."""

GGUF_NORMS = {
    "attention_norm": "attn_norm",
    "attention_post_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp_post_norm": "post_ffw_norm",
    "query_norm": "attn_q_norm",
    "key_norm": "attn_k_norm",
    "experts_norm": "pre_ffw_norm_2",
    "experts_post_norm": "post_ffw_norm_2",
    "dense_post_norm": "post_ffw_norm_1",
    "router_norm": "ffn_gate_inp.scale",
    "input_norm": "post_norm",
}
"""GGUF's names of the norms of `Names`, in all families."""


@dataclass(frozen=True)
class Family:
    """A kind of decoder, by its differences from Llama.

    Attributes:
        model_type: in ``config.json``.
        names: of its tensors; they say where its norms are.
        reads: fields of ``config.json`` that it heeds beyond those that each family has and those
            of ``defaults``. Others are ignored, as in transformers.
        defaults: values of fields that a file leaves out.
        fixed: values of fields that override the file.
        neutral: fields of features that are not implemented, and the one value that is accepted; a
            tuple: each of these.
        head_norms: queries and keys are normalised: each head by itself, or all heads together.
        norm_offset: added to the weights of all norms.
        output_bias: ``attention_bias`` means a bias of the output projection, too.
        scales_embeddings: embeddings are multiplied with the root of the hidden size.
        windows: which layers see the last ``sliding_window`` tokens only: all, those from
            ``max_window_layers`` on, all but each ``sliding_window_pattern``-th, or those without
            rotary embedding. ``layer_types`` overrides this if the family reads it.
        recurrent: its recurrent layers, whose output has a projection as attention has. Their
            norm has weights as they are, whatever ``norm_offset`` says.
        gates_attention: behind each head of queries lie gates of what it attends to.
        mixes_beside: each layer attends, and has a recurrent part beside that reads the same input.
        has_single_parts: a layer is one part alone: attention, or a recurrent or feed-forward one.
        interleaved: rows of a delta net's inputs lie by key head: its query, its key, its values,
            and their gates; so do those of beta and decay.
        is_paired: rotary embedding turns neighbours: rows of queries and keys are laid anew so
            that it turns halves.
        has_wide_heads: layers with full attention have heads of another size, and the last layers
            read entries of others.
        norms_values: without weights.
        chances: of experts: their softmax, or the sigmoid of each; then the bias of the router
            counts for the choice alone.
        chance_floor: added to the sum that chances are divided by.
        has_transposed_experts: what all experts have lies as [X, inputs, outputs], without
            ``.weight`` behind its name, outputs of gates and of what they gate by turns.
        is_gated: feed-forward parts have gates.
        layer_norms: norms subtract the mean.
        norm_biases: and add a bias.
        is_parallel: attention and feed-forward part read the same input.
        rotates_windows: where there are windows, layers without one have no rotary embedding.
        norms_rotated: queries and keys are normalised behind rotary embedding.
        local_rope: windowed layers have a rotary embedding of their own.
        rope_names: older names of rotary scalings, with their names here.
        gguf: None: not known there.
    """

    model_type: str
    names: Names = Names()
    reads: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    neutral: Mapping[str, Any] = field(default_factory=dict)
    head_norms: Literal["each", "all"] | None = None
    norm_offset: float = 0.0
    output_bias: bool = True
    scales_embeddings: bool = False
    windows: Literal["all", "upper", "pattern", "unrotated"] | None = None
    recurrent: Literal["short_conv", "delta_net", "mamba2"] | None = None
    gates_attention: bool = False
    mixes_beside: bool = False
    has_single_parts: bool = False
    interleaved: bool = False
    is_paired: bool = False
    has_wide_heads: bool = False
    norms_values: bool = False
    chances: Literal["softmax", "sigmoid"] = "softmax"
    chance_floor: float = 0.0
    has_transposed_experts: bool = False
    is_gated: bool = True
    layer_norms: bool = False
    norm_biases: bool = False
    is_parallel: bool = False
    rotates_windows: bool = False
    norms_rotated: bool = False
    local_rope: bool = False
    rope_names: Mapping[str, str] = field(default_factory=dict)
    gguf: Gguf | None = None

    @property
    def heeds(self) -> frozenset[str]:
        """All fields of ``config.json`` that it heeds and other families need not."""
        return self.reads | (self.defaults.keys() - _OF_EACH_FAMILY)


def _fields(names: str) -> frozenset[str]:
    """Names of fields, with spaces between them."""
    return frozenset(names.split())


_OF_EACH_FAMILY = _fields(
    "head_dim hidden_act intermediate_size num_key_value_heads rms_norm_eps rope_parameters "
    "rope_theta tie_word_embeddings"
)
"""Fields that each family heeds, and some have defaults for."""


def _keys_of_experts(count: str) -> dict[str, str]:
    """Keys in GGUF files of a family that calls the number of experts ``count``."""
    return {
        count: "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
    }


_LLAMA = Names()
_HEAD_NORMS = replace(_LLAMA, query_norm="self_attn.q_norm", key_norm="self_attn.k_norm")
_POST_NORMS = replace(
    _HEAD_NORMS,
    attention_norm=None,
    attention_post_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_post_norm="post_feedforward_layernorm",
)
_FOUR_NORMS = replace(
    _LLAMA,
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
_EXPERTS: dict[str, Any] = {
    "router": "mlp.gate",
    "gate_up": ("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj"),
    "down": "mlp.experts.{expert}.down_proj",
}
_BESIDE_SHARED: dict[str, Any] = _EXPERTS | {
    "dense_gate_up": _LLAMA.gate_up,
    "dense_down": _LLAMA.down,
    "router_bias": "mlp.gate.e_score_correction_bias",
    "shared_gate_up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "shared_down": "mlp.shared_experts.down_proj",
}
_EXPERT_READS = _fields("num_experts num_local_experts num_experts_per_tok norm_topk_prob")
_WINDOW_DEFAULT = {"sliding_window": 4096}
_WINDOW_KEY = {"sliding_window": "attention.sliding_window"}
_NO_WINDOWS = {"use_sliding_window": False}
_SOFTMAX = {"expert_gating_func": 1}
_NO_GROUPS = {"n_group": 1, "topk_group": 1}
_ONE_GROUP = {"expert_group_count": 1, "expert_group_used_count": 1}
_ALL_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": []}
_PATTERN_KEYS = _WINDOW_KEY | {"sliding_window_pattern": "attention.sliding_window_pattern"}
_LAYER_NORM_KEY = {"layer_norm_eps": "attention.layer_norm_epsilon"}
_MLP_NORM = {"mlp_norm": "post_attention_norm"}
_SIGMOIDS = {"expert_gating_func": 2}
_DENSE_KEY = "leading_dense_block_count"
_KEYS_BESIDE_SHARED = _keys_of_experts("n_routed_experts") | {
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": _DENSE_KEY,
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
}
_NO_LIMIT = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}])

_MISTRAL = Family(
    "mistral",
    reads=_fields("layer_types"),  # which make it a Ministral
    defaults=_WINDOW_DEFAULT,
    windows="all",
)
_QWEN2 = Family(
    "qwen2",
    reads=_fields("use_sliding_window max_window_layers layer_types"),
    fixed={"attention_bias": True},
    output_bias=False,
    defaults=_WINDOW_DEFAULT,
    windows="upper",
    gguf=Gguf("qwen2", implied=_NO_WINDOWS),
)

_GEMMA_READS = _fields("attention_bias final_logit_softcapping layer_types")
_GEMMA_DEFAULTS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
    **_WINDOW_DEFAULT,
}
_GEMMA_KEYS = {**_WINDOW_KEY, "final_logit_softcapping": "final_logit_softcapping"}
_GEMMA3_KEYS = {**_GEMMA_KEYS, **_PATTERN_KEYS, "rope_local_base_freq": "rope.freq_base_swa"}
_GEMMA = Family(
    "gemma",
    reads=_fields("attention_bias"),
    defaults={"head_dim": 256, "tie_word_embeddings": True},
    # Its releases say "gelu" and mean this one, as transformers knows.
    fixed={"hidden_act": "gelu_pytorch_tanh"},
    neutral={"use_bidirectional_attention": False},
    norm_offset=1.0,
    scales_embeddings=True,
    gguf=Gguf("gemma"),
)

_GEMMA4_ALONE = _fields(
    "vocab_size_per_layer_input num_experts top_k_experts moe_intermediate_size"
)
_GEMMA4 = Family(
    "gemma4_text",
    names=replace(
        _FOUR_NORMS,
        query_norm="self_attn.q_norm",
        key_norm="self_attn.k_norm",
        router="router.proj",
        router_norm="router.scale",
        expert_factors="router.per_expert_scale",
        gate_up=("experts.{expert}.gate_proj", "experts.{expert}.up_proj"),
        down="experts.{expert}.down_proj",
        dense_gate_up=_LLAMA.gate_up,
        dense_down=_LLAMA.down,
        experts_norm="pre_feedforward_layernorm_2",
        experts_post_norm="post_feedforward_layernorm_2",
        dense_post_norm="post_feedforward_layernorm_1",
        factor="layer_scalar",
        input_gate="per_layer_input_gate",
        input_output="per_layer_projection",
        input_norm="post_per_layer_input_norm",
    ),
    reads=_GEMMA4_ALONE
    | _fields(
        "attention_bias final_logit_softcapping layer_types global_head_dim per_layer_config "
        "num_global_key_value_heads attention_k_eq_v num_kv_shared_layers use_double_wide_mlp"
    ),
    defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 256,
        "num_key_value_heads": 4,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "enable_moe_block": False,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e6,
            },
            "sliding_attention": {"rope_theta": 1e4},
        },
    },
    fixed={"attention_multiplier": 1.0, "sliding_window_pattern": 6, "norm_topk_prob": True},
    # Images alone are seen from both sides.
    neutral={"use_bidirectional_attention": "vision"},
    head_norms="each",
    scales_embeddings=True,
    windows="pattern",
    local_rope=True,
    has_wide_heads=True,
    norms_values=True,
    gguf=Gguf(
        "gemma4",
        keys={
            **_GEMMA3_KEYS,
            "head_dim": "attention.key_length_swa",
            "global_head_dim": "attention.key_length",
            "num_kv_shared_layers": "attention.shared_kv_layers",
            "hidden_size_per_layer_input": "embedding_length_per_layer_input",
            "num_experts": "expert_count",
            "top_k_experts": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
        },
        implied={"num_experts": 0, "sliding_window": None},
        ignored=_fields("attention.value_length_swa rope.dimension_count_swa"),
        may_be_dense=True,
    ),
)

_GRANITE_READS = _fields("attention_bias embedding_multiplier residual_multiplier logits_scaling")
_GRANITE_DEFAULTS = {"attention_multiplier": 1.0}
_GRANITE_KEYS = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}

_LFM2_NAMES = Names(
    attention_norm="operator_norm",
    mlp_norm="ffn_norm",
    query_norm="self_attn.q_layernorm",
    key_norm="self_attn.k_layernorm",
    output="self_attn.out_proj",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    recurrent_in=("conv.in_proj",),
    recurrent_out="conv.out_proj",
    convolution="conv.conv",
    final_norm="model.embedding_norm",
)
_LFM2_READS = _fields("tie_embedding conv_L_cache layer_types")
_LFM2_DEFAULTS = {
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "num_key_value_heads": 8,
}
_LFM2 = Family(
    "lfm2",
    names=_LFM2_NAMES,
    reads=_LFM2_READS
    | _fields("block_ff_dim full_attn_idxs block_ffn_dim_multiplier block_multiple_of"),
    defaults=_LFM2_DEFAULTS | {"block_auto_adjust_ff_dim": True},
    fixed={"hidden_act": "silu"},
    neutral={"conv_bias": False},
    head_norms="each",
    recurrent="short_conv",
    gguf=Gguf(
        "lfm2",
        keys={"conv_L_cache": "shortconv.l_cache"},
        implied={"block_auto_adjust_ff_dim": False},
        norms={"final_norm": "token_embd_norm"},
    ),
)

_DELTA_NET = replace(
    _HEAD_NORMS,
    recurrent_in=("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    recurrent_out="linear_attn.out_proj",
    convolution="linear_attn.conv1d",
    recurrent_gates=("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    recurrent_norm="linear_attn.norm",
)
_DELTA_NET_DEFAULTS = {"head_dim": 256, "partial_rotary_factor": 0.25}
_QWEN35_GGUF = Gguf(
    "qwen35",
    keys={
        "full_attention_interval": "full_attention_interval",
        "layer_types": "attention.recurrent_layers",
        "linear_conv_kernel_dim": "ssm.conv_kernel",
        "linear_key_head_dim": "ssm.state_size",
        "linear_value_head_dim": "ssm.state_size",
        "linear_num_key_heads": "ssm.group_count",
        "linear_num_value_heads": "ssm.time_step_rank",
    },
    implied={"linear_heads_tiled": True},
    # The shapes of tensors say the size of values, and all positions of a text are alike.
    ignored=_fields("ssm.inner_size rope.dimension_sections nextn_predict_layers"),
    norms=_MLP_NORM,
)
_QWEN3_5 = Family(
    "qwen3_5_text",
    names=_DELTA_NET,
    reads=_fields(
        "attention_bias layer_types full_attention_interval "
        "linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim "
        "linear_num_key_heads linear_num_value_heads linear_heads_tiled"
    ),
    defaults=_DELTA_NET_DEFAULTS | {"num_key_value_heads": 4},
    head_norms="each",
    norm_offset=1.0,
    recurrent="delta_net",
    gates_attention=True,
    gguf=_QWEN35_GGUF,
)
_SHARED_EXPERT_NAMES = replace(
    _DELTA_NET,
    **_EXPERTS,
    shared_router="mlp.shared_expert_gate",
    shared_gate_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_down="mlp.shared_expert.down_proj",
)
_SHARED_EXPERT_READS = _QWEN3_5.reads | _EXPERT_READS
_SHARED_KEYS = {
    **_QWEN35_GGUF.keys,
    **_keys_of_experts("num_experts"),
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
_SHARED_EXPERT_SIZES = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}

_MAMBA = replace(
    _LLAMA,
    recurrent_in=("mamba.in_proj",),
    recurrent_out="mamba.out_proj",
    convolution="mamba.conv1d",
    recurrent_norm="mamba.norm",
)
_MAMBA_READS = _fields(
    "mamba_n_heads mamba_n_groups mamba_d_state mamba_d_head mamba_d_conv mamba_expand "
    "mamba_conv_bias"
)
_MAMBA_KEYS = {
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_d_state": "ssm.state_size",
    "mamba_n_groups": "ssm.group_count",
    "mamba_n_heads": "ssm.time_step_rank",
}
_MAMBA_NEUTRAL = {"mamba_proj_bias": False, "time_step_limit": _NO_LIMIT}
_STATES_GGUF = Gguf(
    "mamba2",
    keys=_MAMBA_KEYS
    | _keys_of_experts("n_routed_experts")
    | {
        "mamba_d_ssm": "ssm.inner_size",
        "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        "routed_scaling_factor": "expert_weights_scale",
        "norm_topk_prob": "expert_weights_norm",
    },
    implied={"mamba_head_dim": None},
    only={"rope.scaling.finetuned": False} | _ONE_GROUP,
    ignored=_fields("expert_shared_count nextn_predict_layers attention.layer_norm_epsilon"),
    norms={"mlp_norm": "attn_norm"},
    may_be_dense=True,
)
_MAMBA2 = Family(
    "mamba2",
    names=Names(
        attention_norm="norm",
        mlp_norm="norm",
        recurrent_in=("mixer.in_proj",),
        recurrent_out="mixer.out_proj",
        convolution="mixer.conv1d",
        recurrent_norm="mixer.norm",
        final_norm="model.norm_f",
    ),
    reads=_MAMBA_READS | _fields("num_heads conv_kernel expand use_conv_bias mamba_d_ssm"),
    defaults={"n_groups": 8, "state_size": 128, "layer_norm_epsilon": 1e-5},
    # Of attention and feed-forward parts, which it has not, and of a longest text.
    fixed=dict.fromkeys(("num_attention_heads", "num_key_value_heads", "intermediate_size"), 1)
    | {"head_dim": 64, "max_position_embeddings": 2**20},
    neutral={"use_bias": False, "time_step_limit": _NO_LIMIT},
    recurrent="mamba2",
    has_single_parts=True,
    gguf=_STATES_GGUF,
)
_NEMOTRON = replace(
    _MAMBA2,
    model_type="nemotron_h",
    names=replace(
        _MAMBA2.names,
        qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
        output="mixer.o_proj",
        router="mixer.gate",
        router_bias="mixer.gate.e_score_correction_bias",
        gate_up=("mixer.experts.{expert}.up_proj",),
        down="mixer.experts.{expert}.down_proj",
        dense_gate_up=("mixer.up_proj",),
        dense_down="mixer.down_proj",
        shared_gate_up=("mixer.shared_experts.up_proj",),
        shared_down="mixer.shared_experts.down_proj",
    ),
    reads=_MAMBA2.reads
    | _EXPERT_READS
    | _fields(
        "layer_types layers_block_type hybrid_override_pattern position_embedding_type n_groups "
        "state_size mamba_num_heads mamba_head_dim ssm_state_size n_routed_experts "
        "moe_intermediate_size moe_shared_expert_intermediate_size routed_scaling_factor"
    ),
    # The shapes of tensors tell files that leave out a size.
    defaults={"mlp_hidden_act": "relu2", "norm_topk_prob": True, "layer_norm_epsilon": 1e-5},
    fixed={"position_embedding_type": "nope"},
    neutral=_MAMBA_NEUTRAL
    | _NO_GROUPS
    | dict.fromkeys(("use_bias", "mlp_bias"), False)
    # transformers has steps at least so long where it reads several tokens, and not for one.
    | {"time_step_min": 0.001, "mamba_hidden_act": "silu", "moe_latent_size": None},
    chances="sigmoid",
    chance_floor=1e-20,
    is_gated=False,
    gguf=replace(_STATES_GGUF, architecture="nemotron_h"),
)

_LATENT = replace(
    _LLAMA,
    qkv=("self_attn.q_proj", "self_attn.kv_a_proj_with_mqa"),
    query_low="self_attn.q_a_proj",
    query_up="self_attn.q_b_proj",
    latent_up=("self_attn.kv_b_proj",),
    query_norm="self_attn.q_a_layernorm",
    key_norm="self_attn.kv_a_layernorm",
)
_LATENT_READS = _fields("attention_bias qk_nope_head_dim v_head_dim rope_interleave")
_LATENT_DEFAULTS = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64}
_LATENT_GGUF = Gguf(
    "deepseek2",
    keys=_KEYS_BESIDE_SHARED
    | {
        "kv_lora_rank": "attention.kv_lora_rank",
        "q_lora_rank": "attention.q_lora_rank",
        "qk_nope_head_dim": "attention.key_length_mla",
        "qk_rope_head_dim": "rope.dimension_count",
        "v_head_dim": "attention.value_length_mla",
        "n_group": "expert_group_count",
        "topk_group": "expert_group_used_count",
    },
    implied={
        "q_lora_rank": None,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": False,
        "n_group": 1,
        "topk_group": 1,
    },
    ignored=_fields("rope.scaling.yarn_log_multiplier nextn_predict_layers"),
    norms={"query_norm": "attn_q_a_norm", "key_norm": "attn_kv_a_norm"},
)
_DEEPSEEK_V3 = Family(
    "deepseek_v3",
    names=replace(_LATENT, **_BESIDE_SHARED),
    reads=_LATENT_READS | _EXPERT_READS,
    defaults=_LATENT_DEFAULTS
    | {
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
    },
    fixed={"num_key_value_heads": 1},
    neutral={"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    is_paired=True,
    chances="sigmoid",
    chance_floor=1e-20,
    gguf=replace(_LATENT_GGUF, mark=("expert_gating_func", 2), only=_SIGMOIDS),
)

_FAMILIES = (
    Family("llama", reads=_fields("attention_bias mlp_bias"), gguf=Gguf("llama", is_paired=True)),
    _MISTRAL,
    _QWEN2,
    Family(
        "qwen3",
        names=_HEAD_NORMS,
        reads=_QWEN2.reads | {"attention_bias"},
        defaults=_WINDOW_DEFAULT | {"head_dim": 128},
        head_norms="each",
        windows="upper",
        gguf=Gguf("qwen3", implied=_NO_WINDOWS),
    ),
    Family(
        "smollm3",
        reads=_fields(
            "attention_bias mlp_bias no_rope_layers layer_types sliding_window use_sliding_window"
        ),
        defaults={
            "rope_theta": 2e6,
            "no_rope_layer_interval": 4,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        },
        windows="unrotated",
        gguf=Gguf("smollm3", is_paired=True, implied=_NO_WINDOWS),
    ),
    Family(
        "olmo2",
        names=_POST_NORMS,
        reads=_fields("attention_bias"),
        defaults={"rms_norm_eps": 1e-5},
        head_norms="all",
        gguf=Gguf("olmo2"),
    ),
    Family(
        "granite",
        reads=_GRANITE_READS | {"mlp_bias"},
        defaults=_GRANITE_DEFAULTS,
        gguf=Gguf(
            "granite",
            is_paired=True,
            keys=_GRANITE_KEYS,
            implied={"attention_multiplier": None},
            only={"rope.scaling.finetuned": True},
        ),
    ),
    Family(
        "phi3",
        names=replace(_LLAMA, qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
        reads=_fields("sliding_window partial_rotary_factor"),
        defaults={"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        windows="all",
        rope_names={"su": "longrope", "yarn": "longrope"},
        gguf=Gguf("phi3", keys=_WINDOW_KEY, implied={"sliding_window": None}),
    ),
    _GEMMA,
    replace(
        _GEMMA,
        model_type="gemma2",
        names=_FOUR_NORMS,
        reads=_GEMMA_READS,
        defaults=_GEMMA_DEFAULTS
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        fixed={"sliding_window_pattern": 2},
        windows="pattern",
        gguf=Gguf(
            "gemma2",
            keys=_GEMMA_KEYS | {"attn_logit_softcapping": "attn_logit_softcapping"},
            wide_size=46,
        ),
    ),
    replace(
        _GEMMA,
        model_type="gemma3_text",
        names=replace(_FOUR_NORMS, query_norm="self_attn.q_norm", key_norm="self_attn.k_norm"),
        # transformers reads attn_logit_softcapping here too, and does nothing with it.
        reads=_GEMMA_READS,
        defaults=_GEMMA_DEFAULTS
        | {"sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
        fixed={},
        head_norms="each",
        windows="pattern",
        local_rope=True,
        gguf=Gguf(
            "gemma3",
            keys=_GEMMA3_KEYS,
            implied={"sliding_window": None},
            wide_size=62,
        ),
    ),
    _GEMMA4,
    replace(
        _GEMMA4,
        model_type="gemma4_unified_text",
        reads=_GEMMA4.reads - _GEMMA4_ALONE,
        defaults={**_GEMMA4.defaults, "sliding_window": 1024},
        fixed={**_GEMMA4.fixed, "enable_moe_block": False, "hidden_size_per_layer_input": 0},
        gguf=None,  # as one of the others says all of it
    ),
    Family(
        "mixtral",
        names=replace(
            _LLAMA,
            router="block_sparse_moe.gate",
            gate_up=(
                "block_sparse_moe.experts.{expert}.w1",
                "block_sparse_moe.experts.{expert}.w3",
            ),
            down="block_sparse_moe.experts.{expert}.w2",
        ),
        reads=_EXPERT_READS | {"sliding_window"},
        defaults={"num_experts_per_tok": 2, "rope_theta": 1e6},
        fixed={"norm_topk_prob": True},
        windows="all",
        gguf=Gguf(
            "llama", is_paired=True, keys=_keys_of_experts("num_local_experts"), only=_SOFTMAX
        ),
    ),
    Family(
        "qwen3_moe",
        names=replace(_HEAD_NORMS, **_EXPERTS),
        reads=_EXPERT_READS | _fields("attention_bias use_sliding_window"),
        defaults=_WINDOW_DEFAULT | {"num_experts_per_tok": 8, "moe_intermediate_size": 768},
        neutral=_ALL_SPARSE,
        head_norms="each",
        windows="all",
        gguf=Gguf(
            "qwen3moe",
            keys=_keys_of_experts("num_experts"),
            implied={"norm_topk_prob": True, **_NO_WINDOWS},
            only=_SOFTMAX,
        ),
    ),
    Family(
        "olmoe",
        names=replace(_HEAD_NORMS, **_EXPERTS),
        reads=_EXPERT_READS | {"attention_bias"},
        defaults={"num_experts_per_tok": 8, "rms_norm_eps": 1e-5},
        neutral={"clip_qkv": None},
        head_norms="all",
        gguf=Gguf("olmoe", keys=_keys_of_experts("num_experts"), only=_SOFTMAX),
    ),
    _LFM2,
    _QWEN3_5,
    replace(
        _QWEN3_5,
        model_type="qwen3_5_moe_text",
        names=_SHARED_EXPERT_NAMES,
        reads=_SHARED_EXPERT_READS,
        defaults=_DELTA_NET_DEFAULTS
        | _SHARED_EXPERT_SIZES
        | {"intermediate_size": 512, "num_experts_per_tok": 8},
        fixed={"norm_topk_prob": True},
        gguf=replace(_QWEN35_GGUF, architecture="qwen35moe", keys=_SHARED_KEYS),
    ),
    replace(
        _QWEN3_5,
        model_type="qwen3_next",
        names=replace(
            _SHARED_EXPERT_NAMES,
            recurrent_in=("linear_attn.in_proj_qkvz",),
            recurrent_gates=("linear_attn.in_proj_ba",),
        ),
        reads=_SHARED_EXPERT_READS,
        defaults=_DELTA_NET_DEFAULTS
        | _SHARED_EXPERT_SIZES
        | {"num_experts_per_tok": 10, "norm_topk_prob": True, "num_key_value_heads": 2},
        neutral=_ALL_SPARSE,
        interleaved=True,
        gguf=replace(_QWEN35_GGUF, architecture="qwen3next", keys=_SHARED_KEYS, implied={}),
    ),
    replace(
        _LFM2,
        model_type="lfm2_moe",
        names=replace(
            _LFM2_NAMES,
            router="feed_forward.gate",
            router_bias="feed_forward.expert_bias",
            gate_up=("feed_forward.experts.{expert}.w1", "feed_forward.experts.{expert}.w3"),
            down="feed_forward.experts.{expert}.w2",
            dense_gate_up=_LFM2_NAMES.gate_up,
            dense_down=_LFM2_NAMES.down,
        ),
        reads=_LFM2_READS | _EXPERT_READS | _fields("use_expert_bias routed_scaling_factor"),
        defaults=_LFM2_DEFAULTS
        | {
            "moe_intermediate_size": 1792,
            "num_experts_per_tok": 4,
            "num_dense_layers": 2,
            "norm_topk_prob": True,
        },
        chances="sigmoid",
        chance_floor=1e-6,
        gguf=Gguf(
            "lfm2moe",
            keys=_keys_of_experts("num_experts")
            | {"conv_L_cache": "shortconv.l_cache", "num_dense_layers": _DENSE_KEY},
            only=_SIGMOIDS,
            norms={"final_norm": "token_embd_norm"},
        ),
    ),
    Family(
        "glm4_moe",
        names=replace(_HEAD_NORMS, **_BESIDE_SHARED),
        reads=_EXPERT_READS
        | _fields("attention_bias first_k_dense_replace n_routed_experts routed_scaling_factor"),
        defaults={
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8,
            "num_dense_layers": 1,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "use_qk_norm": False,
        },
        neutral=_NO_GROUPS,
        head_norms="each",
        output_bias=False,
        chances="sigmoid",
        chance_floor=1e-20,
        gguf=Gguf(
            "glm4moe",
            keys=_KEYS_BESIDE_SHARED,
            only=_SIGMOIDS | _ONE_GROUP,
            ignored=_fields("nextn_predict_layers"),
            norms=_MLP_NORM,
        ),
    ),
    Family(
        "gpt_oss",
        names=replace(
            _LLAMA,
            router="mlp.router",
            router_bias="mlp.router.bias",
            gate_up=("mlp.experts.gate_up_proj",),
            down="mlp.experts.down_proj",
            sinks="self_attn.sinks",
        ),
        reads=_EXPERT_READS | {"layer_types"},
        defaults={
            "head_dim": 64,
            "num_key_value_heads": 8,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "attention_bias": True,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
        },
        fixed={
            "hidden_act": "clipped_silu",
            "mlp_bias": True,
            "norm_topk_prob": True,
            "sliding_window_pattern": 2,
        },
        neutral={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        windows="pattern",
        has_transposed_experts=True,
        gguf=Gguf(
            "gpt-oss",
            keys=_WINDOW_KEY | _keys_of_experts("num_local_experts"),
            norms=_MLP_NORM,
            rope={"truncate": False},
        ),
    ),
    Family(
        "granitemoehybrid",
        names=replace(
            _MAMBA,
            router="block_sparse_moe.router.layer",
            gate_up=("block_sparse_moe.input_linear",),
            down="block_sparse_moe.output_linear",
            dense_gate_up=("shared_mlp.input_linear",),
            dense_down="shared_mlp.output_linear",
            shared_gate_up=("shared_mlp.input_linear",),
            shared_down="shared_mlp.output_linear",
        ),
        reads=_GRANITE_READS
        | _EXPERT_READS
        | _MAMBA_READS
        | _fields("layer_types layers_block_type position_embedding_type"),
        defaults=_GRANITE_DEFAULTS
        | {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024,
        },
        fixed={"norm_topk_prob": True},
        neutral=_MAMBA_NEUTRAL,
        recurrent="mamba2",
        gguf=Gguf(
            "granitehybrid",
            is_paired=True,
            keys=_GRANITE_KEYS
            | _MAMBA_KEYS
            | _keys_of_experts("num_local_experts")
            | {"shared_intermediate_size": "expert_shared_feed_forward_length"},
            implied={
                "attention_multiplier": None,
                "num_local_experts": 0,
                "position_embedding_type": "nope",
            },
            only={"rope.scaling.finetuned": False},
            ignored=_fields("ssm.inner_size"),  # the shapes of tensors say it
            may_be_dense=True,
        ),
    ),
    Family(
        "falcon_h1",
        names=replace(
            _MAMBA,
            mlp_norm="pre_ff_layernorm",
            gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
            down="feed_forward.down_proj",
            final_norm="model.final_layernorm",
        ),
        reads=_MAMBA_READS
        | _fields(
            "attention_bias mlp_bias embedding_multiplier lm_head_multiplier mlp_multipliers "
            "key_multiplier attention_in_multiplier ssm_multipliers attention_out_multiplier "
            "ssm_in_multiplier ssm_out_multiplier mamba_rms_norm"
        ),
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "mamba_d_ssm": 1024},
        neutral=_MAMBA_NEUTRAL | {"projectors_bias": False, "mamba_norm_before_gate": False},
        recurrent="mamba2",
        mixes_beside=True,
        gguf=Gguf("falcon-h1", keys=_MAMBA_KEYS | {"mamba_d_ssm": "ssm.inner_size"}),
    ),
    replace(_NEMOTRON, gguf=replace(_STATES_GGUF, architecture="nemotron_h_moe")),
    _NEMOTRON,
    _MAMBA2,
    Family(
        "glm4",
        names=replace(
            _LLAMA,
            attention_post_norm="post_self_attn_layernorm",
            mlp_post_norm="post_mlp_layernorm",
            gate_up=("mlp.gate_up_proj",),
        ),
        reads=_fields("attention_bias"),
        defaults={"head_dim": 128, "partial_rotary_factor": 0.5, "num_key_value_heads": 2},
        output_bias=False,
        is_paired=True,
        gguf=Gguf("glm4"),
    ),
    Family(
        "ernie4_5",
        reads=_fields("use_bias"),
        defaults={
            "head_dim": 128,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
        },
        is_paired=True,
        gguf=Gguf("ernie4_5"),
    ),
    Family(
        "hunyuan_v1_dense",
        names=replace(
            _LLAMA, query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm"
        ),
        reads=_fields("attention_bias alpha"),
        defaults={"rms_norm_eps": 1e-5},
        head_norms="each",
        norms_rotated=True,
        gguf=Gguf("hunyuan-dense"),
    ),
    Family(
        "seed_oss",
        reads=_fields("mlp_bias"),
        defaults={
            "attention_bias": True,
            "attention_out_bias": False,
            "head_dim": 128,
            "num_key_value_heads": 8,
        },
        gguf=Gguf("seed_oss", norms=_MLP_NORM),
    ),
    replace(_MISTRAL, model_type="ministral"),
    Family(
        "exaone4",
        names=_POST_NORMS,
        reads=_fields("layer_types"),
        defaults={"sliding_window": 4096, "sliding_window_pattern": 4, "rms_norm_eps": 1e-5},
        head_norms="each",
        windows="pattern",
        rotates_windows=True,
        gguf=Gguf("exaone4", keys=_PATTERN_KEYS, implied={"sliding_window": None}),
    ),
    Family(
        "olmo3",
        names=_POST_NORMS,
        reads=_fields("attention_bias layer_types"),
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 500000.0},
        fixed={"sliding_window_pattern": 4},
        head_norms="all",
        windows="pattern",
        local_rope=True,
        gguf=Gguf("olmo2", keys=_PATTERN_KEYS, mark=("attention.sliding_window", None)),
    ),
    Family(
        "cohere2",
        names=replace(_LLAMA, mlp_norm="input_layernorm"),
        reads=_fields("attention_bias layer_types"),
        defaults={
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "tie_word_embeddings": True,
        },
        windows="pattern",
        rotates_windows=True,
        is_paired=True,
        layer_norms=True,
        is_parallel=True,
        gguf=Gguf(
            "cohere2",
            keys=_PATTERN_KEYS | _LAYER_NORM_KEY | {"logit_scale": "logit_scale"},
            norms={"mlp_norm": "attn_norm"},
        ),
    ),
    Family(
        "stablelm",
        reads=_fields("use_qkv_bias"),
        defaults={"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
        neutral={"use_parallel_residual": False, "qk_layernorm": False},
        output_bias=False,
        layer_norms=True,
        norm_biases=True,
        gguf=Gguf("stablelm", keys=_LAYER_NORM_KEY, only={"use_parallel_residual": False}),
    ),
    Family(
        "starcoder2",
        names=replace(_LLAMA, gate_up=("mlp.c_fc",), down="mlp.c_proj"),
        reads=_fields("sliding_window"),
        defaults={
            "use_bias": True,
            "hidden_act": "gelu_pytorch_tanh",
            "num_key_value_heads": 2,
            "norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        },
        windows="all",
        is_gated=False,
        layer_norms=True,
        norm_biases=True,
        gguf=Gguf(
            "starcoder2",
            keys={"norm_epsilon": "attention.layer_norm_epsilon"},
            implied={"sliding_window": None},
        ),
    ),
    Family(
        "arcee",
        names=replace(_LLAMA, gate_up=("mlp.up_proj",)),
        reads=_fields("attention_bias mlp_bias"),
        defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5},
        is_gated=False,
        gguf=Gguf("arcee", is_paired=True),
    ),
    Family(
        "apertus",
        names=replace(
            _HEAD_NORMS,
            attention_norm="attention_layernorm",
            mlp_norm="feedforward_layernorm",
            gate_up=("mlp.up_proj",),
            activation="mlp.act_fn",
        ),
        reads=_fields("attention_bias"),
        defaults={"hidden_act": "xielu", "rms_norm_eps": 1e-5, "rope_theta": 12000000.0},
        head_norms="each",
        is_gated=False,
    ),
    replace(  # Qwen2's decoder, with layers that predict further tokens
        _QWEN2,
        model_type="mimo",
        fixed={},
        defaults=_WINDOW_DEFAULT | {"attention_bias": True},
        gguf=None,
    ),
    replace(
        _DEEPSEEK_V3,
        model_type="deepseek_v2",
        names=replace(_DEEPSEEK_V3.names, router_bias=None),
        reads=(_DEEPSEEK_V3.reads - {"norm_topk_prob", "rope_interleave"})
        | _fields("first_k_dense_replace routed_scaling_factor n_group topk_group"),
        defaults=_LATENT_DEFAULTS
        | {
            "moe_intermediate_size": 1407,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "topk_method": "greedy",
        },
        neutral={
            "moe_layer_freq": 1,
            "scoring_func": "softmax",
            "topk_method": ("greedy", "group_limited_greedy"),
            **dict.fromkeys(("norm_topk_prob", "mlp_bias"), False),
        },
        chances="softmax",
        gguf=replace(
            _LATENT_GGUF,
            implied={**_LATENT_GGUF.implied, "topk_method": "group_limited_greedy"},
            only=_SOFTMAX,
        ),
    ),
    _DEEPSEEK_V3,
    replace(_DEEPSEEK_V3, model_type="kimi_k2", gguf=None),
    replace(
        _DEEPSEEK_V3,
        model_type="glm4_moe_lite",
        reads=_DEEPSEEK_V3.reads | _fields("mlp_layer_types n_group topk_group"),
        defaults={
            "kv_lora_rank": 512,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "moe_intermediate_size": 1536,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.8,
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-5,
        },
        gguf=None,  # as DeepSeek-V3
    ),
    replace(
        _DEEPSEEK_V3,
        model_type="youtu",
        gguf=_LATENT_GGUF,
        names=_LATENT,
        reads=_LATENT_READS,
        defaults=_LATENT_DEFAULTS | {"tie_word_embeddings": True},
    ),
)
FAMILIES: Mapping[str, Family] = {family.model_type: family for family in _FAMILIES}
"""By ``model_type``. SmolLM and SmolLM2 are "llama"."""


def family_of_gguf(
    architecture: object, has_experts: bool, metadata: Mapping[str, object]
) -> Family | None:
    """The family of a GGUF file; None: none of these.

    Args:
        metadata: of the file.
    """

    def has(mark: tuple[str, int | None] | None) -> bool:
        if mark is None:
            return True
        found, value = metadata.get(f"{architecture}.{mark[0]}"), mark[1]
        return found is not None if value is None else type(found) is int and found == value

    found = [
        family
        for family in _FAMILIES
        if family.gguf
        and family.gguf.architecture == architecture
        and (family.gguf.may_be_dense or (family.names.router is not None) == has_experts)
        and has(family.gguf.mark)
    ]
    return found[-1] if found else None
