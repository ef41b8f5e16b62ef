"""The families of models that run natively: how each differs from Llama, and nothing else.

A family is a section of ``families.toml``: the names of its tensors, the fields of ``config.json``
that it heeds, and their defaults. The features are implemented once for all families, by
`foredraft.models.native.model` in torch and by the fused kernel. How to add a family:
docs/extend/add-a-family.md.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Names:
    """Names of a layer's tensors: without ``model.layers.N.`` in front and ``.weight`` behind.

    A tensor without a name does not exist. Matrices of several names are concatenated by rows.
    ``{expert}`` stands for the number of an expert; a name without it is of all experts. The bias
    of a router has its whole name. The first layers of some mixtures have no experts (``dense``);
    where ``dense_post_norm`` is named, all layers have such a part beside them. Of latent attention
    ``qkv`` gives queries and the latent, or ``query_low`` what ``query_up`` makes queries of, and
    ``latent_up`` makes keys and values of each head.
    """

    attention_norm: str = "input_layernorm"
    attention_post_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    mlp_post_norm: str = ""
    query_norm: str = ""
    key_norm: str = ""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    query_low: str = ""
    query_up: str = ""
    latent_up: tuple[str, ...] = ()
    output: str = "self_attn.o_proj"
    router: str = ""
    router_bias: str = ""
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    dense_gate_up: tuple[str, ...] = ()
    dense_down: str = ""
    shared_router: str = ""
    shared_gate_up: tuple[str, ...] = ()
    shared_down: str = ""
    recurrent_in: tuple[str, ...] = ()
    recurrent_out: str = ""
    convolution: str = ""
    recurrent_gates: tuple[str, ...] = ()
    recurrent_norm: str = ""
    sinks: str = ""
    activation: str = ""
    experts_norm: str = ""
    experts_post_norm: str = ""
    dense_post_norm: str = ""
    router_norm: str = ""
    expert_factors: str = ""
    factor: str = ""
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
        mixtures: the same of its mixtures of experts, where they have another.
        is_paired: rows of queries and keys lie such that rotary embedding turns neighbours, where
            transformers turns halves.
        keys: of fields of ``config.json``, beyond those of Llama; without the architecture.
        implied: fields of ``config.json`` that a file without keys for them implies, if they differ
            from `Family.defaults`; ``nulls`` names those that are null.
        only: the only values of keys that are implemented.
        ignored: keys that change nothing of a text model.
        norms: names of norms that differ from `GGUF_NORMS`; "final_norm" is one of them.
        may_be_dense: a file of the family may have no experts.
        mark: a key that tells the family from an older one of the same architecture, and the value
            of it that does, if not any.
        rope: fields of rotary scaling that files do not say.
        wide_size: the number of layers of the one model of the family whose scores are divided by
            the root of hidden size / heads, and not of the head size. Files do not say it.
    """

    architecture: str
    mixtures: str = ""
    is_paired: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)
    implied: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    norms: Mapping[str, str] = field(default_factory=dict)
    may_be_dense: bool = False
    mark: tuple[Any, ...] = ()
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
        neutral: fields of features that are not implemented, and the values that are accepted
            beside null.
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
    neutral: Mapping[str, Sequence[Any]] = field(default_factory=dict)
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


_OF_EACH_FAMILY = frozenset(
    {
        *("head_dim", "hidden_act", "intermediate_size", "num_key_value_heads", "rms_norm_eps"),
        *("rope_parameters", "rope_theta", "tie_word_embeddings"),
    }
)
"""Fields that each family heeds, and some have defaults for."""

TEXT = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
"""The descriptions of all families."""
_JOINED = ("reads", "ignored", "nulls")
"""Entries of words, to which each section adds its own."""


def _described(sections: Mapping[str, Any], name: str) -> dict[str, Any]:
    """All entries of a section, those of the sections that it is like included."""
    own = dict(sections[name])
    others = [_described(sections, other) for other in own.pop("like", ())]
    return reduce(_joined, [*others, own], {})


def _joined(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(base)
    for name, value in own.items():
        if name in _JOINED:
            value = f"{found.get(name, '')} {value}"
        found[name] = _joined(found.get(name, {}), value) if isinstance(value, dict) else value
    return found


def _family(model_type: str, said: dict[str, Any]) -> Family:
    names, gguf = said.pop("names", {}), said.pop("gguf", None) or {}
    lists = {name: tuple(value) for name, value in names.items() if isinstance(value, list)}
    reads = frozenset(said.pop("reads", "").split())
    form = _gguf(**gguf) if "architecture" in gguf else None
    return Family(model_type, Names(**names | lists), reads, gguf=form, **said)


def _gguf(nulls: str = "", ignored: str = "", mark: Sequence[Any] = (), **said: Any) -> Gguf:
    said["implied"] = said.get("implied", {}) | dict.fromkeys(nulls.split())
    return Gguf(ignored=frozenset(ignored.split()), mark=tuple(mark), **said)


def _families() -> dict[str, Family]:
    sections, found = tomllib.loads(TEXT), dict[str, Family]()
    for name in sections:
        try:
            if not name.startswith("_"):
                found[name] = _family(name, _described(sections, name))
        except (KeyError, TypeError) as error:
            raise ValueError(f"families.toml, [{name}]: {error}") from error
    return found


FAMILIES: Mapping[str, Family] = _families()
"""By ``model_type``."""


def family_of_gguf(
    architecture: object, has_experts: bool, metadata: Mapping[str, object]
) -> Family | None:
    """The family of a GGUF file; None: none of these.

    Args:
        metadata: of the file.
    """

    def has(key: str = "", value: object = None) -> bool:
        found = metadata.get(f"{architecture}.{key}")
        is_it = type(found) is type(value) and found == value
        return not key or (found is not None if value is None else is_it)

    found = [
        family
        for family in FAMILIES.values()
        if (gguf := family.gguf)
        and architecture in (gguf.architecture, gguf.mixtures or gguf.architecture)
        and (gguf.may_be_dense or bool(family.names.router) == has_experts)
        and has(*gguf.mark)
    ]
    return found[-1] if found else None
