"""The shape of a checkpoint of a native family, read from its ``config.json``.

Its rotary embeddings (arXiv 2104.09864) rotate the two halves of a head. Scalings that stretch a
context: linear (arXiv 2306.15595), llama3, yarn (arXiv 2309.00071) and longrope (arXiv 2402.13753).
Frequencies never depend on the current length of a text: keys in the cache would otherwise have
another embedding than the queries that attend to them.

Shape legend: P rotated numbers of a head, in pairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.cache.base import KVShape
from foredraft.cache.kv import KVCache
from foredraft.cache.memory import CacheMemory
from foredraft.cache.states import StateCache, StateShape
from foredraft.core.errors import ModelLoadError
from foredraft.models.families import FAMILIES, FEED_FORWARD_TYPES, RECURRENT_TYPES, Family
from foredraft.models.files.json_files import parse_fields, read_json
from foredraft.models.files.quantised import why_not_read
from foredraft.models.files.schema import DecoderFields, LayerFields, RopeFields
from foredraft.models.native.recurrent import Recurrent

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
"""``rope_type`` values. A dynamic one is plain as long as a text fits ``max_position_embeddings``;
for longer ones the longest that is allowed decides, for all texts."""


_PLAIN = RopeFields()


@dataclass(frozen=True)
class RotaryEmbedding:
    """One rotary embedding.

    Attributes:
        theta: base of the frequencies.
        size: P, how many of a head's first numbers it rotates.
        fields: its scaling.
        context: ``max_position_embeddings``.
        is_long: of longrope, whether the factors for long texts are meant.
        longest: of dynamic, the longest text, if that is more than ``context``.
    """

    theta: float
    size: int
    fields: RopeFields = _PLAIN
    context: int = 0
    is_long: bool = False
    longest: int = 0

    @property
    def kind(self) -> str:
        return self.fields.rope_type or "default"

    @property
    def amplitude(self) -> float:
        """Factor of cosines and sines."""
        fields = self.fields
        if self.kind == "yarn":
            return _yarn_amplitude(fields, self._factor)
        if self.kind == "longrope":
            if fields.attention_factor is not None:
                return fields.attention_factor
            if self._factor <= 1:
                return 1.0
            return math.sqrt(1 + math.log(self._factor) / math.log(self._original_context))
        return 1.0

    def inverse_frequencies(self) -> Tensor:
        """Rotation speed of each pair of numbers, float32 [P / 2]."""
        exponent = torch.arange(0, self.size, 2, dtype=torch.float32) / self.size
        inv_freq: Tensor = 1.0 / (self._base**exponent)
        if self.kind == "linear":
            return inv_freq / self._factor
        if self.kind == "proportional":  # a share of the pairs turn, as fast as if all did
            share = self.fields.partial_rotary_factor or 1.0
            inv_freq[int(share * self.size // 2) :] = 0.0
            return inv_freq / (self.fields.factor or 1.0)
        if self.kind == "llama3":
            return self._llama3(inv_freq)
        if self.kind == "yarn":
            return self._yarn(inv_freq)
        if self.kind == "longrope":
            factors = self.fields.long_factor if self.is_long else self.fields.short_factor
            return 1.0 / (torch.tensor(factors) * self.theta**exponent)
        return inv_freq

    @property
    def _base(self) -> float:
        """Theta, which dynamic scaling stretches: by Hunyuan's alpha, or by the longest text."""
        stretch = self.fields.alpha or 1.0
        if self.kind != "dynamic" or self.size < 4:
            return self.theta
        if self.fields.alpha is None and self.longest > self.context:
            stretch = self._factor * self.longest / self.context - (self._factor - 1)
        return float(self.theta * stretch ** (self.size / (self.size - 2)))

    @property
    def _original_context(self) -> int:
        return self.fields.original_max_position_embeddings or self.context

    @property
    def _factor(self) -> float:
        return self.fields.factor or self.context / self._original_context

    def _llama3(self, inv_freq: Tensor) -> Tensor:
        """Slow rotations are slowed by ``factor``, fast ones kept, with a ramp between."""
        low, high = self.fields.low_freq_factor, self.fields.high_freq_factor
        assert low is not None
        assert high is not None
        turns = inv_freq * (self._original_context / (2 * math.pi))
        ramp = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return inv_freq / self._factor * (1 - ramp) + inv_freq * ramp

    def _yarn(self, inv_freq: Tensor) -> Tensor:
        """The same, with a ramp over pairs instead of over turns."""
        fast, slow = self.fields.beta_fast or 32, self.fields.beta_slow or 1
        low, high = (self._pair_of(turns) for turns in (fast, slow))
        if self.fields.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.size - 1)
        if low == high:
            high += 0.001
        pairs = torch.arange(self.size // 2, dtype=torch.float32)
        kept = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
        return inv_freq / self._factor * (1 - kept) + inv_freq * kept

    def _pair_of(self, turns: float) -> float:
        """The pair that turns so often in the original context."""
        length = self._original_context / (turns * 2 * math.pi)
        return self.size * math.log(length) / (2 * math.log(self.theta))


def _yarn_amplitude(fields: RopeFields, factor: float) -> float:
    if fields.attention_factor is not None:
        return fields.attention_factor
    if fields.mscale and fields.mscale_all_dim:
        return _mscale(fields.mscale, factor) / _mscale(fields.mscale_all_dim, factor)
    return _mscale(1.0, factor)


def _mscale(weight: float, factor: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


ACTIVATIONS = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
    "clipped_silu": "clipped_silu",
    "xielu": "xielu",
}
"""Activations by their names in ``config.json``."""

_MOST_LAYERS = 100_000
"""Limit on layers: their kinds are made before the files are checked for that many."""
_FULL, _SLIDING = "full_attention", "sliding_attention"
_MOST_GROUPS = 64
"""Of experts: the kernel notes the chosen ones in the bits of a word."""
_CHANNELS = 16
"""Channels of a convolution, and numbers of a value, come in multiples of so many."""
_MOST_CONVOLVED, _MOST_OF_HEAD = 16, 1024
_MOST_ROTATED = 4096
"""Numbers of a head that are computed to see whether they are finite."""


@dataclass(frozen=True)
class LayerKind:
    """How a layer attends.

    Attributes:
        is_recurrent: it does not, but keeps a state of the text.
        mixes_beside: it does both.
        rope: number of its rotary embedding; None: none.
        window: how many entries a token sees at most, its own included; None: all.
        is_wide: its heads are `DecoderConfig.wide_heads`.
        source: the layer whose entries it reads, of those with as many heads; None: its own.
        mixes: it attends or keeps a state.
        feeds: it has a feed-forward part.
    """

    rope: int | None = 0
    window: int | None = None
    is_recurrent: bool = False
    mixes_beside: bool = False
    is_wide: bool = False
    source: int | None = None
    mixes: bool = True
    feeds: bool = True

    @property
    def attends(self) -> bool:
        return self.mixes and not self.is_recurrent

    @property
    def has_state(self) -> bool:
        """Whether it keeps a state of the text."""
        return self.is_recurrent or self.mixes_beside


USUAL_KIND = LayerKind()


@dataclass(frozen=True)
class Latent:
    """Sizes of multi-head latent attention (arXiv 2405.04434).

    A cache entry is one key for all heads: its rotary part, then the latent, its value as well.

    Attributes:
        rank: C, numbers of the latent.
        query_rank: size of the latent of queries; 0: queries are projected from a layer's input.
        still: N, size of the part of a head's query without rotary embedding.
        value_size: of a head.
    """

    rank: int
    query_rank: int
    still: int
    value_size: int


@dataclass(frozen=True)
class Experts:
    """The experts of a mixture, in each layer.

    Attributes:
        count: X.
        per_token: how many of them a token chooses.
        normalised: their weights are made to add up to 1.
        num_shared: the last ones, which each token chooses beside others.
        shared_gate: by the sigmoid of one more logit; else with weight 1.
        scale: factor of the weights of the others.
        num_dense: layers from the first on that have none, and a feed-forward part instead.
        dense_size: of that part.
        has_bias: the router has a bias.
        groups: the others lie in so many groups, side by side.
        chosen_groups: those whose best experts rank highest; a token chooses among their experts.
    """

    count: int
    per_token: int
    normalised: bool
    num_shared: int = 0
    shared_gate: bool = False
    scale: float = 1.0
    num_dense: int = 0
    dense_size: int = 0
    has_bias: bool = False
    groups: int = 1
    chosen_groups: int = 1


@dataclass(frozen=True)
class Multipliers:
    """Factors of what a layer's matrices give; weights have them once they are read.

    Attributes:
        inputs, key, output: of attention: of all that it reads, of keys beside that, and of what it
            gives.
        mixer: of Mamba-2's gates, x, B, C and steps.
        mixer_output: of what it gives.
        gate, down: of the feed-forward part.
    """

    inputs: float = 1.0
    key: float = 1.0
    output: float = 1.0
    mixer: tuple[float, ...] = (1.0,) * 5
    mixer_output: float = 1.0
    gate: float = 1.0
    down: float = 1.0


NO_MULTIPLIERS = Multipliers()


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and constants of a decoder. Fields are named as in ``config.json`` where it has them.

    Attributes:
        model_type: the family; `family` holds the names of its tensors.
        intermediate_size: of an expert, where there are such.
        ropes: the rotary embeddings of its layers.
        kinds: of the layers; empty: each is of `USUAL_KIND`.
        query_scale: factor of attention scores; None: 1 / root of the head size.
        attention_cap: c, where scores s of attention become c tanh(s / c).
        logits_cap: the same for logits.
        logits_scale: factor of logits, before the cap.
        embedding_scale: factor of embeddings.
        residual_scale: factor of each part of a layer before it is added.
        experts: of the feed-forward parts; None: they are whole.
        mlp_bias: whether feed-forward parts have biases.
        has_head_norms: whether queries and keys are normalised, in a family that does so.
        multipliers: of what matrices give.
        latent: its attention is to latents; ``head_dim`` is then the size of an entry, of one head.
        recurrent: its recurrent layers; None: there are none.
        wide_heads: of layers with other heads their number of keys and values, and their size.
        keys_are_values: of such layers, before norms and rotary embedding.
        reader_times: factor of the feed-forward parts of layers that read another's entries.
        input_size: P, size of per-layer embeddings (Gemma 4's second input of a layer); 0: none.
        input_vocab: rows of their tables.
        num_ids: output rows behind these are no tokens, and their logits are -inf; None: all are
            tokens. Nothing that is kept depends on it.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    ropes: tuple[RotaryEmbedding, ...]
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...] = ()
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    has_head_norms: bool = True
    multipliers: Multipliers = NO_MULTIPLIERS
    kinds: tuple[LayerKind, ...] = ()
    activation: str = "silu"
    query_scale: float | None = None
    attention_cap: float | None = None
    logits_cap: float | None = None
    logits_scale: float = 1.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    experts: Experts | None = None
    latent: Latent | None = None
    recurrent: Recurrent | None = None
    wide_heads: tuple[int, int] | None = None
    keys_are_values: bool = False
    reader_times: int = 1
    input_size: int = 0
    input_vocab: int = 0
    num_ids: int | None = field(default=None, repr=False)

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @property
    def windows(self) -> tuple[int, ...]:
        """Windows of the layers, each once."""
        return tuple(dict.fromkeys(kind.window for kind in self.kinds if kind.window is not None))

    @property
    def fits_tiles(self) -> bool:
        """Whether attention can be computed on tiles, which know no windows and no caps."""
        return not self.windows and self.attention_cap is None

    @property
    def rope_theta(self) -> float:
        """Theta of layers with full attention."""
        return self.ropes[0].theta

    def kind(self, index: int) -> LayerKind:
        """Kind of a layer."""
        return self.kinds[index] if self.kinds else USUAL_KIND

    @property
    def num_recurrent_layers(self) -> int:
        return sum(kind.has_state for kind in self.kinds)

    @property
    def num_attending_layers(self) -> int:
        return self.num_hidden_layers - sum(not kind.attends for kind in self.kinds)

    def numbers(self) -> list[int]:
        """Of each layer its number among the recurrent ones, or among those with its heads that
        have entries; of one that reads another's the number of that."""
        found, counts = list[int](), dict[tuple[bool, ...], int]()
        for index in range(self.num_hidden_layers):
            kind = self.kind(index)
            if kind.source is not None:
                found.append(found[kind.source])
                continue
            alike = kind.attends, kind.is_recurrent, kind.is_wide
            found.append(counts.get(alike, 0))
            counts[alike] = found[-1] + 1
        return found

    def heads(self, kind: LayerKind) -> tuple[int, int]:
        """Key-value heads of a layer, and numbers of a head."""
        return self.each_heads[kind.is_wide]

    @property
    def each_heads(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """`heads` of usual layers, and of wide ones, where there are such."""
        own = self.num_key_value_heads, self.head_dim
        return own, self.wide_heads or own

    def qkv_rows(self, kind: LayerKind) -> tuple[int, ...]:
        """Rows of the matrices of queries, keys and values that a layer has: gates of what is
        attended lie behind each head's queries."""
        num_kv, size = self.heads(kind)
        query = self.num_attention_heads * size * (1 + self.family.gates_attention)
        return (query,) if kind.source is not None else (query, num_kv * size, num_kv * size)

    @property
    def kv_shape(self) -> KVShape:
        kinds = [self.kind(index) for index in range(self.num_hidden_layers)]
        own = [kind.is_wide for kind in kinds if kind.source is None and kind.attends]
        wide = KVShape(sum(own), *self.wide_heads) if self.wide_heads and any(own) else None
        sizes = len(own) - sum(own), self.num_key_value_heads, self.head_dim
        return KVShape(*sizes, wide, keys_are_values=self.latent is not None)

    @property
    def row_states(self) -> StateShape | None:
        """Sizes of a row's recurrent states; None: there are no recurrent layers."""
        count = self.num_recurrent_layers
        return self.recurrent.states(count) if self.recurrent and count else None

    def new_cache(
        self,
        dtype: torch.dtype,
        device: torch.device | str,
        max_length: int,
        memory: CacheMemory | int | None = None,
    ) -> KVCache:
        """A cache of its entries, and of its states; see there."""
        shape, states = self.kv_shape, self.row_states
        if states is None:
            return KVCache(shape, dtype, device, max_length, memory)
        return StateCache(shape, states, dtype, device, max_length, memory)

    @property
    def max_context(self) -> int:
        return self.max_position_embeddings

    def feed_forward(self, index: int) -> tuple[int, int]:
        """Numbers of a layer's experts (1: it has none), and rows of each one's gates."""
        experts = self.experts
        if not self.kind(index).feeds:
            return 1, 0
        if experts is None:
            is_reader = self.kind(index).source is not None
            return 1, self.intermediate_size * (self.reader_times if is_reader else 1)
        if index < experts.num_dense:
            return 1, experts.dense_size
        return experts.count, self.intermediate_size

    @property
    def dense_beside(self) -> int:
        """Rows of gates of the part that all tokens read beside experts; 0: there is none."""
        experts = self.experts
        return experts.dense_size if experts and self.family.names.dense_post_norm else 0

    def head_norm_sizes(self, kind: LayerKind = USUAL_KIND) -> tuple[int, ...]:
        """Sizes of the norms of queries and of keys; empty: there are none."""
        if self.family.head_norms is None or not self.has_head_norms:
            return ()
        num_kv, size = self.heads(kind)
        if self.family.head_norms == "each":
            return size, 0 if kind.source is not None else size
        return self.num_attention_heads * size, num_kv * size


def why_not_native(raw: Mapping[str, Any], path: Path) -> str | None:
    """The feature of a checkpoint that this decoder lacks; None: it lacks nothing.

    For other families the message names the family.

    Raises:
        ModelLoadError: it is of such a family, and malformed. ``path`` is named then.
    """
    raw = text_part(raw)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        return f"model_type {model_type!r:.80} is not one of {', '.join(FAMILIES)}"
    family = FAMILIES[model_type]
    return _unsupported(raw, family, _parse(path, raw, family))


def read_config(directory: Path, max_context: int | None = None) -> DecoderConfig:
    """Parse ``config.json``.

    Args:
        max_context: longest text that will be read; None: the model's own limit.

    Raises:
        ModelLoadError: the file is malformed, or the family or one of its features is not
            implemented here.
    """
    path = directory / "config.json"
    raw = text_part(read_json(path))
    if reason := why_not_native(raw, path):
        raise ModelLoadError(f"{directory}: {reason}; load it with backend 'hf'")
    family = FAMILIES[raw["model_type"]]
    return _resolve(family, _parse(path, raw, family), max_context)


_TEXT_TYPES = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2"}
"""Text parts that are a family under another name: positions of text alone are alike in all
sections of their rotary embedding."""


def text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of the config of a model of text and images the part about text, where that is native."""
    text = raw.get("text_config")
    if not isinstance(text, dict):
        return raw
    model_type = _TEXT_TYPES.get(str(text.get("model_type")), text.get("model_type"))
    if model_type not in FAMILIES:
        return raw
    common = ("tie_word_embeddings", "eos_token_id", "quantization_config")
    own = {name: raw[name] for name in common if name in raw}
    return own | text | {"model_type": model_type}


_OPTIONAL = frozenset[str]().union(*(family.heeds for family in FAMILIES.values()))
"""Fields that only some families heed."""


def _parse(path: Path, raw: Mapping[str, Any], family: Family) -> DecoderFields:
    """The fields that the family reads, with its defaults for missing ones."""
    heeded = {
        key: value for key, value in raw.items() if key not in _OPTIONAL or key in family.heeds
    }
    if heeded.get("layer_types", ()) is None:
        del heeded["layer_types"]
    if isinstance(pattern := heeded.get("hybrid_override_pattern"), str | list):
        heeded["layers_block_type"] = heeded.get("layers_block_type") or [*pattern]
    if heeded.get("rope_scaling") == {}:  # stands above rope_parameters where it says anything
        del heeded["rope_scaling"]
    if heeded.get("rope_parameters", {}) is None:  # the family's own
        del heeded["rope_parameters"]
    if heeded.keys() & {"norm_eps", "layer_norm_eps", "norm_epsilon", "layer_norm_epsilon"}:
        heeded.pop("rms_norm_eps", None)  # the family's own name counts
    return parse_fields(path, {**family.defaults, **heeded, **family.fixed}, DecoderFields)


def _resolve(family: Family, fields: DecoderFields, max_context: int | None) -> DecoderConfig:
    context, ropes = _ropes(family, fields, max_context)
    bias = bool(fields.attention_bias)
    experts = _experts(family, fields)
    output_bias = bias and family.output_bias
    return DecoderConfig(
        model_type=fields.model_type,
        vocab_size=fields.vocab_size,
        hidden_size=fields.hidden_size,
        intermediate_size=_feed_forward_size(family, fields),
        num_hidden_layers=fields.num_hidden_layers,
        num_attention_heads=fields.num_attention_heads,
        num_key_value_heads=fields.num_key_value_heads or fields.num_attention_heads,
        head_dim=fields.head_size,
        max_position_embeddings=context,
        rms_norm_eps=fields.rms_norm_eps,
        ropes=ropes,
        tie_word_embeddings=bool(fields.tie_word_embeddings),
        eos_token_ids=fields.eos_token_id,
        attention_bias=bias,
        output_bias=output_bias if fields.output_bias is None else fields.output_bias,
        mlp_bias=bool(fields.mlp_bias),
        has_head_norms=fields.use_qk_norm is not False,
        multipliers=_multipliers(fields),
        kinds=_kinds(family, fields, context),
        activation=ACTIVATIONS[fields.hidden_activation or fields.hidden_act],
        query_scale=_query_scale(family, fields),
        attention_cap=fields.attn_logit_softcapping,
        logits_cap=fields.final_logit_softcapping,
        logits_scale=fields.logit_scale or 1.0 / fields.logits_scaling,
        embedding_scale=(
            fields.hidden_size**0.5 if family.scales_embeddings else fields.embedding_multiplier
        ),
        residual_scale=fields.residual_multiplier,
        experts=experts,
        latent=_latent(fields),
        recurrent=_recurrent(family, fields),
        wide_heads=_wide_heads(family, fields),
        keys_are_values=bool(fields.attention_k_eq_v),
        reader_times=2 if fields.use_double_wide_mlp else 1,
        input_size=fields.hidden_size_per_layer_input,
        input_vocab=fields.vocab_size_per_layer_input,
    )


def _multipliers(fields: DecoderFields) -> Multipliers:
    gate, down = fields.mlp_multipliers
    return Multipliers(
        inputs=fields.attention_in_multiplier,
        key=fields.key_multiplier,
        output=fields.attention_out_multiplier,
        mixer=tuple(fields.ssm_in_multiplier * one for one in fields.ssm_multipliers),
        mixer_output=fields.ssm_out_multiplier,
        gate=gate,
        down=down,
    )


def _has_experts(family: Family, fields: DecoderFields) -> bool:
    """Some families have mixtures and whole feed-forward parts."""
    is_there = fields.enable_moe_block and fields.num_experts != 0
    if family.has_single_parts:
        is_there = any(FEED_FORWARD_TYPES.get(kind) for kind in fields.layer_types or ())
    return is_there and bool(family.names.router)


def _feed_forward_size(family: Family, fields: DecoderFields) -> int:
    if _has_experts(family, fields):
        return fields.moe_intermediate_size or fields.feed_forward_size
    return fields.shared_intermediate_size or fields.feed_forward_size


def _shared_size(family: Family, fields: DecoderFields) -> int:
    """Size of the shared experts, which every token uses; 0: there are none."""
    if not family.names.shared_down:
        return 0
    size = fields.shared_expert_intermediate_size or fields.shared_intermediate_size
    return size or (fields.n_shared_experts or 0) * _feed_forward_size(family, fields)


def _experts(family: Family, fields: DecoderFields) -> Experts | None:
    if not _has_experts(family, fields):
        return None
    assert fields.num_experts
    assert fields.num_experts_per_tok
    num_shared = _shared_size(family, fields) // _feed_forward_size(family, fields)
    is_grouped = fields.topk_method != "greedy" and fields.topk_group
    groups = (is_grouped and fields.n_group) or 1
    return Experts(
        fields.num_experts + num_shared,
        fields.num_experts_per_tok + num_shared,
        normalised=bool(fields.norm_topk_prob),
        num_shared=num_shared,
        shared_gate=bool(family.names.shared_router),
        scale=fields.routed_scaling_factor,
        num_dense=_num_dense(fields),
        dense_size=fields.feed_forward_size,
        has_bias=bool(family.names.router_bias) and fields.use_expert_bias is not False,
        groups=groups,
        chosen_groups=(groups > 1 and fields.topk_group) or 1,
    )


def _num_dense(fields: DecoderFields) -> int:
    types = fields.mlp_layer_types
    return fields.num_dense_layers if types is None else types.count("dense")


def _latent(fields: DecoderFields) -> Latent | None:
    if not fields.kv_lora_rank:
        return None
    sizes = fields.qk_nope_head_dim, fields.v_head_dim
    return Latent(fields.kv_lora_rank, fields.q_lora_rank or 0, *sizes)


def _query_scale(family: Family, fields: DecoderFields) -> float | None:
    """Factor of scores: yarn's, of latents, is squared here, and that of angles without it."""
    if fields.query_pre_attn_scalar is not None:
        return float(fields.query_pre_attn_scalar**-0.5)
    if not fields.kv_lora_rank:
        return fields.attention_multiplier
    (rope,) = _rope_fields(family, fields)
    scale = float((fields.qk_nope_head_dim + fields.rotated_size) ** -0.5)
    if rope.rope_type in (None, "default") or not rope.mscale_all_dim:
        return scale
    return scale * _mscale(rope.mscale_all_dim, rope.factor or 1.0) ** 2


# ------------------------------------------------------------------------------------------ layers


def _kinds(family: Family, fields: DecoderFields, context: int) -> tuple[LayerKind, ...]:
    """Kind of each layer, where texts are at most ``context`` long; empty if all are usual."""
    kinds, types = [], fields.layer_types if family.has_single_parts else None
    for index in range(min(fields.num_hidden_layers, _MOST_LAYERS)):
        mixes = types is None or types[index] not in FEED_FORWARD_TYPES
        feeds = not (family.has_single_parts and mixes)
        if not mixes or _is_recurrent(family, fields, index):
            kinds.append(LayerKind(None, is_recurrent=mixes, mixes=mixes, feeds=feeds))
            continue
        is_local = _is_local(family, fields, index)
        rope = 1 if family.local_rope and is_local else 0
        window = fields.sliding_window if is_local else None
        is_rotated = _is_rotated(family, fields, index)
        if window is not None and window >= context:
            window = None
        kind = LayerKind(rope if is_rotated else None, window, False, family.mixes_beside)
        is_wide = family.has_wide_heads and not is_local
        source = _source(family, fields, index)
        kinds.append(replace(kind, is_wide=is_wide, source=source, feeds=feeds))
    return () if set(kinds) == {USUAL_KIND} else tuple(kinds)


def _source(family: Family, fields: DecoderFields, index: int) -> int | None:
    """The last layer of the same type that has entries, of one that has none."""
    first = fields.num_hidden_layers - fields.num_kv_shared_layers
    if index < first:
        return None
    is_local = _is_local(family, fields, index)
    alike = (i for i in reversed(range(first)) if _is_local(family, fields, i) == is_local)
    return next(alike, -1)


def _wide_heads(family: Family, fields: DecoderFields) -> tuple[int, int] | None:
    """Key-value heads of layers with full attention, and numbers of one, where these have other
    heads: as transformers 5 writes them, or as they are published."""
    if not family.has_wide_heads:
        return None
    num_kv = fields.num_global_key_value_heads if fields.attention_k_eq_v else None
    size = fields.global_head_dim
    if fields.per_layer_config is not None:
        own = next(iter(fields.per_layer_config.values()), LayerFields())
        num_kv, size = own.num_key_value_heads, own.head_dim or fields.head_size
    return num_kv or fields.num_key_value_heads or fields.num_attention_heads, size


def _is_recurrent(family: Family, fields: DecoderFields, index: int) -> bool:
    if family.recurrent is None or family.mixes_beside:
        return False
    if fields.layer_types is not None:
        return fields.layer_types[index] in RECURRENT_TYPES[family.recurrent]
    if family.recurrent == "delta_net":
        return (index + 1) % fields.full_attention_interval != 0
    attending = fields.full_attn_idxs
    return family.has_single_parts or (attending is not None and index not in attending)


def _recurrent(family: Family, fields: DecoderFields) -> Recurrent | None:
    layers = range(min(fields.num_hidden_layers, _MOST_LAYERS))
    if not family.mixes_beside and not any(_is_recurrent(family, fields, i) for i in layers):
        return None
    if family.recurrent == "short_conv":
        return Recurrent("short_conv", fields.conv_L_cache, fields.hidden_size)
    if family.recurrent == "delta_net":
        return Recurrent(
            "delta_net",
            fields.linear_conv_kernel_dim,
            key_heads=fields.linear_num_key_heads,
            value_heads=fields.linear_num_value_heads,
            key_size=fields.linear_key_head_dim,
            value_size=fields.linear_value_head_dim,
            is_tiled=fields.linear_heads_tiled,
        )
    size = fields.mamba_d_head
    return Recurrent(
        "mamba2",
        fields.mamba_d_conv,
        key_heads=fields.mamba_n_groups,
        value_heads=fields.mamba_n_heads,
        key_size=fields.mamba_d_state,
        value_size=size if isinstance(size, int) else _mamba_size(fields) // fields.mamba_n_heads,
        has_bias=fields.mamba_conv_bias,
        has_norm=fields.mamba_rms_norm,
    )


def _mamba_size(fields: DecoderFields) -> int:
    return fields.mamba_d_ssm or fields.mamba_expand * fields.hidden_size


def _is_rotated(family: Family, fields: DecoderFields, index: int) -> bool:
    if "position_embedding_type" in family.heeds:
        return fields.position_embedding_type == "rope"
    if family.rotates_windows and fields.sliding_window is not None:
        return _is_local(family, fields, index)
    if fields.no_rope_layers is not None:
        return bool(fields.no_rope_layers[index])
    interval = fields.no_rope_layer_interval
    return interval is None or (index + 1) % interval != 0


def _is_local(family: Family, fields: DecoderFields, index: int) -> bool:
    """Whether a layer sees a window only. In some families the last one never does."""
    if family.has_wide_heads and index == fields.num_hidden_layers - 1:
        return False
    if fields.layer_types is not None:
        return fields.layer_types[index] == _SLIDING
    if fields.sliding_window is None or not _has_windows(family, fields):
        return False
    if family.windows == "upper":
        return index >= fields.max_window_layers
    if family.windows == "pattern":
        pattern = fields.sliding_window_pattern  # such as LLLG
        size = len(pattern) if isinstance(pattern, str) else pattern
        assert size
        return (index + 1) % size != 0
    if family.windows == "unrotated":
        return not _is_rotated(family, fields, index)
    return True


def _has_windows(family: Family, fields: DecoderFields) -> bool:
    switched_on = "use_sliding_window" not in family.heeds or bool(fields.use_sliding_window)
    return family.windows is not None and switched_on


# ------------------------------------------------------------------------------------------ rotary


def _ropes(
    family: Family, fields: DecoderFields, max_context: int | None
) -> tuple[int, tuple[RotaryEmbedding, ...]]:
    """The longest text, and the rotary embeddings of layers with full and windowed attention.

    Longrope has other factors for texts beyond the original context. The longest text that is
    allowed decides once which of them apply: the original context unless more is asked for.
    So it does where scaling is dynamic: up to the factor times the original context.
    Yarn and linear scaling extend the original context by their factor, also where a file's
    ``max_position_embeddings`` still is the original one, as model cards of Qwen2.5 advise.
    """
    context, ropes = fields.max_position_embeddings, list[RotaryEmbedding]()
    thetas = [fields.rope_theta, fields.rope_local_base_freq or fields.rope_theta]
    thetas = thetas[: 1 + family.local_rope]
    for rope, theta in zip(_rope_fields(family, fields), thetas, strict=True):
        is_long = False
        original = rope.original_max_position_embeddings or context
        if rope.rope_type == "longrope" and original < context:
            is_long = max_context is not None and max_context > original
            context = context if is_long else original
        longest = 0
        if rope.rope_type == "dynamic" and rope.alpha is None:
            longest = min(max_context or 0, int(context * (rope.factor or 1.0)))
            context = max(context, longest)
        is_known = rope.rope_type == "yarn" or rope.original_max_position_embeddings is not None
        if rope.rope_type in ("yarn", "linear") and is_known:
            context = max(context, int(original * (rope.factor or 1.0)))
        wide = _wide_heads(family, fields) if not ropes else None
        size = wide[1] if wide else fields.rotated_size
        if rope.rope_type != "proportional":
            size = int(size * (rope.partial_rotary_factor or fields.partial_rotary_factor or 1.0))
        theta = rope.rope_theta or theta or 10000.0
        trained = fields.max_position_embeddings
        ropes.append(RotaryEmbedding(theta, size, rope, trained, is_long, longest))
    return context, tuple(ropes)


def _rope_fields(family: Family, fields: DecoderFields) -> list[RopeFields]:
    """Rotary fields of layers with full attention, and of windowed ones if they differ."""
    if family.local_rope:
        layered = fields.layered_rope
        whole = (layered and layered.full_attention) or RopeFields()
        if fields.rope_scaling is not None:
            said = fields.rope_scaling.model_dump(exclude_unset=True)
            whole = whole.model_copy(update=said)
        return [whole, (layered and layered.sliding_attention) or RopeFields()]
    found = fields.rope_scaling or fields.rope_parameters or RopeFields()
    if fields.original_max_position_embeddings is not None:
        original = fields.original_max_position_embeddings
        found = found.model_copy(update={"original_max_position_embeddings": original})
    kind = family.rope_names.get(found.rope_type or "", found.rope_type)
    alpha = found.alpha if "alpha" in family.heeds else None
    return [found.model_copy(update={"rope_type": kind, "alpha": alpha})]


# ---------------------------------------------------------------------------------------- refusals


def _unsupported(raw: Mapping[str, Any], family: Family, fields: DecoderFields) -> str | None:
    """The feature of this checkpoint that the decoder lacks, or None."""
    for name, accepted in family.neutral.items():
        if raw.get(name) not in (None, [], *accepted):
            return f"{name} is not implemented ({raw[name]!r:.80})"
    if (activation := fields.hidden_activation or fields.hidden_act) not in ACTIVATIONS:
        return f"activation {activation!r:.80} is not implemented"
    if (activation == "xielu") != bool(family.names.activation):
        return f"activation {activation!r:.80} is not implemented in this family"
    if reason := why_not_read(fields.quantization_config):
        return reason
    return (
        _unsupported_layers(family, fields)
        or _unsupported_ropes(raw, family, fields)
        or _unsupported_experts(family, fields)
        or _unsupported_recurrence(family, fields)
        or (_unsupported_heads(family, fields) if family.has_wide_heads else None)
        or (_unsupported_latent(fields) if family.names.latent_up else None)
    )


def _unsupported_latent(fields: DecoderFields) -> str | None:
    if not (fields.kv_lora_rank and fields.qk_rope_head_dim):
        return "latent attention without a kv_lora_rank or qk_rope_head_dim is not implemented"
    if fields.q_lora_rank is None and fields.attention_bias:
        return "attention_bias without a q_lora_rank is not implemented"
    if not fields.rope_interleave:
        return f"rope_interleave is not implemented ({fields.rope_interleave})"
    types, count = fields.mlp_layer_types, min(fields.num_hidden_layers, _MOST_LAYERS)
    dense = _num_dense(fields)
    if types is not None and types != ("dense",) * dense + ("sparse",) * (count - dense):
        return f"mlp_layer_types {list(types)!r:.80}, not first dense ones, are not implemented"
    return None


def _unsupported_heads(family: Family, fields: DecoderFields) -> str | None:
    layers = range(min(fields.num_hidden_layers, _MOST_LAYERS))
    wide = {str(index) for index in layers if not _is_local(family, fields, index)}
    said = fields.per_layer_config or {}
    if said and (said.keys() != wide or len({*said.values()}) > 1):
        return "sizes of heads that differ between layers of one type are not implemented"
    if len(wide) == fields.num_hidden_layers:
        return "no layer with a window beside those without is not implemented"
    num_kv, size = _wide_heads(family, fields) or (1, 2)
    if size % 2 or fields.num_attention_heads % num_kv:
        return f"{fields.num_attention_heads} heads of {size} numbers, {num_kv} of keys and values"
    if any(_source(family, fields, index) == -1 for index in layers):
        return f"num_kv_shared_layers {fields.num_kv_shared_layers} leave a layer without entries"
    if fields.hidden_size_per_layer_input and fields.vocab_size_per_layer_input < fields.vocab_size:
        return f"vocab_size_per_layer_input {fields.vocab_size_per_layer_input} lacks some tokens"
    if _has_experts(family, fields) and fields.use_double_wide_mlp and fields.num_kv_shared_layers:
        return "experts beside feed-forward parts of two sizes are not implemented"
    return None


def _unsupported_layers(family: Family, fields: DecoderFields) -> str | None:
    num_layers = fields.num_hidden_layers
    most = num_layers if family.has_single_parts else _MOST_LAYERS
    for name in ("layer_types", "no_rope_layers"):
        listed = getattr(fields, name)
        if listed is not None and not num_layers <= len(listed) <= most:
            return f"{name} lists {len(listed)} layers, and there are {num_layers}"
    kinds, known = {*(fields.layer_types or ())}, {_FULL, _SLIDING}
    if family.recurrent:
        known = {_FULL, "attention", *RECURRENT_TYPES[family.recurrent]}
    if family.has_single_parts:
        known |= {"*", *FEED_FORWARD_TYPES}
        if len(kinds & FEED_FORWARD_TYPES.keys()) > 1:
            return "layers with experts beside others without are not implemented"
    for kind in kinds - known:
        return f"layers of type {kind!r:.80} are not implemented"
    has_window = fields.sliding_window is not None and _has_windows(family, fields)
    if _SLIDING in (fields.layer_types or ()) and not has_window:
        return f"layers of type {_SLIDING!r} without a window (sliding_window) are not implemented"
    return None


def _unsupported_recurrence(family: Family, fields: DecoderFields) -> str | None:
    sizes = _recurrent(family, fields)
    if sizes is None:
        return None
    if len(fields.ssm_multipliers) != 5 or len(fields.mlp_multipliers) != 2:
        return "so many multipliers are not implemented"
    if sizes.kind != "short_conv" and fields.hidden_act != "silu":  # their convolutions have it too
        return f"hidden_act {fields.hidden_act!r:.80} is not implemented in recurrent layers"
    is_said = sizes.kind == "mamba2" and not family.has_single_parts
    if is_said and sizes.num_outputs != (size := _mamba_size(fields)):
        heads = f"mamba_n_heads {sizes.value_heads} times mamba_d_head {sizes.value_size}"
        return f"{heads} is not mamba_d_ssm (or mamba_expand times hidden_size), {size}"
    if not 2 <= sizes.window <= _MOST_CONVOLVED:
        return f"a convolution of {sizes.window} inputs is not implemented"
    if sizes.key_heads and sizes.value_heads % sizes.key_heads:
        heads = f"{sizes.value_heads} value heads for {sizes.key_heads} key heads"
        return f"{heads} are not implemented"
    if max(sizes.key_size, sizes.value_size) > _MOST_OF_HEAD:
        return f"recurrent heads of more than {_MOST_OF_HEAD} numbers are not implemented"
    if sizes.channels % _CHANNELS or sizes.value_size % _CHANNELS:
        return (
            f"recurrent layers of {sizes.channels} channels and values of {sizes.value_size} "
            f"numbers, no multiples of {_CHANNELS}, are not implemented"
        )
    return None


def _unsupported_ropes(raw: Mapping[str, Any], family: Family, fields: DecoderFields) -> str | None:
    flat = fields.rope_parameters is not None and bool(fields.rope_parameters.model_fields_set)
    layered = fields.layered_rope is not None and bool(fields.layered_rope.model_fields_set)
    if family.local_rope and flat:
        return "rotary parameters that are not those of a layer type are not implemented"
    if layered and not family.local_rope:
        return "rotary parameters by layer type are not implemented"
    for rope in _rope_fields(family, fields):
        if rope.rope_type not in (None, *KINDS):
            return f"rotary scaling {rope.rope_type!r:.80} is not implemented"
        share = rope.partial_rotary_factor or raw.get("partial_rotary_factor")
        is_known = "partial_rotary_factor" in family.heeds or rope.rope_type == "proportional"
        if share not in (None, 1) and not is_known:
            return f"partial_rotary_factor is not implemented ({share!r:.80})"
        size = int(fields.rotated_size * (share or fields.partial_rotary_factor or 1))
        if size < 2 or size % 2:
            return f"rotary embedding of {size} numbers of a head is not implemented"
        if problem := _unsupported_scaling(raw, rope, size):
            return problem
    _, ropes = _ropes(family, fields, None)
    return None if all(map(_is_finite, ropes)) else "its rotary scaling gives no finite numbers"


def _unsupported_scaling(raw: Mapping[str, Any], rope: RopeFields, size: int) -> str | None:
    name = "original_max_position_embeddings"
    has_original = rope.rope_type in ("llama3", "yarn", "longrope")
    if has_original and raw.get(name) not in (None, rope.original_max_position_embeddings):
        return f"{name} beside that of the rotary scaling is not implemented"
    if rope.rope_type != "longrope":
        return None
    for name, factors in (("short_factor", rope.short_factor), ("long_factor", rope.long_factor)):
        if factors is None or len(factors) != size // 2:
            return f"{name} has {len(factors or ())} numbers, and {size // 2} are needed"
    return None


def _is_finite(rope: RotaryEmbedding) -> bool:
    if rope.kind != "longrope":  # a forged size takes no memory: pairs lie between the same ends
        rope = replace(rope, size=min(rope.size, _MOST_ROTATED))
    try:
        return math.isfinite(rope.amplitude) and bool(rope.inverse_frequencies().isfinite().all())
    except (ArithmeticError, ValueError):
        return False


def _unsupported_experts(family: Family, fields: DecoderFields) -> str | None:
    if not _has_experts(family, fields):
        return None
    count, chosen = fields.num_experts, fields.num_experts_per_tok
    if count is None or chosen is None or chosen > count:
        return f"{chosen} experts a token of {count} are not implemented"
    if (experts := _experts(family, fields)) and experts.groups > 1:
        each, rest = divmod(count, experts.groups)
        fits = chosen <= each * experts.chosen_groups <= count and each > 1 and not rest
        if not fits or experts.groups > _MOST_GROUPS:
            return f"{chosen} of {count} experts in {experts.groups} groups are not implemented"
    shared, size = _shared_size(family, fields), _feed_forward_size(family, fields)
    if shared % size:
        return f"a shared expert of {shared} beside others of {size} is not implemented"
    return None
