"""EAGLE-3 as it is published: one layer that attends over a token and a fused state side by side.

Outputs of several of the target's layers, fused to one state, and the embedding of the token that
follows, each behind a norm, are what queries, keys and values are made of; the layer adds to the
state (arXiv 2503.01840). Behind the anchor the layer's own output takes the state's place. The
norms of EAGLE-3.1 are options here: one for each tapped layer, and whether the output goes on
behind the last norm.

`foredraft.drafters.eagle` is the same idea with a cheaper layer; heads of this shape are what other
engines load.

Shape legend: B texts, L tokens, E hidden size, P tapped layers, R output rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foredraft.core.errors import ConfigError, ModelLoadError, unknown
from foredraft.drafters.common.growing import GrowthLimits
from foredraft.drafters.heads.base import (
    HeadSource,
    Prediction,
    RowsHead,
    TextBatch,
    following,
    num_rows_of,
    rows_of,
)
from foredraft.drafters.heads.layers import (
    AnchoredAttention,
    Joined,
    JoinedTokens,
    LlamaLayer,
    RMSNorm,
)
from foredraft.drafters.heads.published import (
    CheckpointTensors,
    fill,
    final_norm,
    layer_names,
    shape_of,
    under_our_names,
)
from foredraft.drafters.heads.steps import GROWTH_OPTIONS, ModuleDrafter, built_with
from foredraft.drafters.heads.store import HEAD_OPTION
from foredraft.drafters.spec import DrafterSpec
from foredraft.models.base import (
    Capabilities,
    HeadRow,
    HeadTarget,
    HeadWeights,
    ModelShape,
    TargetParts,
)
from foredraft.models.files.json_files import read_json

CHOICES: Mapping[str, tuple[str, ...]] = {
    "tap_norms": ("each", "all", "none"),
    "residual": ("plain", "normed"),
    "returns": ("normed", "plain"),
}
"""Values of the options, those of a new head first."""
_HELP = {
    "taps": "layers of the target to read, such as 1,14,26",
    "tap_norms": "norms of their outputs: of each, of all together, or none (each)",
    "residual": "what the layer adds to: the state as it is, or behind its norm (plain)",
    "returns": "which output goes on to the next token: behind the last norm, or plain (normed)",
}


class WideLayer(LlamaLayer):
    """A `LlamaLayer` on [..., 2E]: an embedding, and the state that the layer adds to.

    Args:
        is_normed: it adds to the state behind its norm.
    """

    def __init__(self, shape: ModelShape, is_normed: bool) -> None:
        super().__init__(shape)
        self._is_normed = is_normed
        self.token_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.qkv = nn.Linear(2 * shape.hidden_size, self.qkv.out_features, bias=False)

    def weights(self) -> dict[str, Tensor]:
        """Without what makes queries, keys and values: they are handed in."""
        before = ("attention_norm", "token_norm", "qkv")
        return {n: w for n, w in super().weights().items() if not n.startswith(before)}

    def attention_input(self, x_BLE: Tensor) -> Tensor:
        embeddings, states = x_BLE.chunk(2, -1)
        return torch.cat((self.token_norm(embeddings), self.attention_norm(states)), -1)

    def added_to(self, states: Tensor) -> Tensor:
        """What the layer adds to, for states [..., E]."""
        return self.attention_norm(states) if self._is_normed else states

    def finish(self, x_BLE: Tensor, attended_BHLD: Tensor) -> Tensor:
        return super().finish(self.added_to(x_BLE.chunk(2, -1)[1]), attended_BHLD)


class EagleModule(RowsHead):
    """See the module docstring.

    Args:
        shape: of the target; feed-forward size, heads and rotary base are the layer's own.
        taps: the target's layers whose outputs it reads.
        num_rows: see `RowsHead`.
        tap_norms, residual, returns: see `CHOICES`.
    """

    kind = "eagle"

    def __init__(
        self,
        shape: ModelShape,
        taps: Sequence[int],
        num_rows: int | None,
        tap_norms: str = "each",
        residual: str = "plain",
        returns: str = "normed",
    ) -> None:
        super().__init__(shape, taps, num_rows)
        self._chosen = {"tap_norms": tap_norms, "residual": residual, "returns": returns}
        for name, value in self._chosen.items():
            if value not in CHOICES[name]:
                raise unknown(f"value of {name}", value, CHOICES[name])
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        count = {"each": len(self.taps), "all": 1, "none": 0}[tap_norms]
        size = hidden if tap_norms == "each" else hidden * len(self.taps)
        self.tap_norms = nn.ModuleList(RMSNorm(size, eps) for _ in range(count))
        self.join_taps = nn.Linear(len(self.taps) * hidden, hidden, bias=False)
        self.layer = WideLayer(shape, residual == "normed")
        self.norm = RMSNorm(hidden, eps)

    @classmethod
    def start(
        cls, source: HeadSource, output_ids: Sequence[int] | None, options: Mapping[str, Any]
    ) -> Self:
        more = dict(options)
        taps = more.pop("taps", None) or published_taps(source.shape.num_hidden_layers)
        module = cls(source.shape, taps, num_rows_of(output_ids), **more)
        module.take_output(source, output_ids)
        last, size = dict(source.layer(-1)), source.shape.hidden_size
        with torch.no_grad():
            module.norm.weight.fill_(1.0 / float(module.output.norm(dim=1).mean()))
            module.join_taps.weight.mul_(0.1)
            module.join_taps.weight[:, -size:] += torch.eye(size)
            module.layer.qkv.weight.mul_(0.1)
            module.layer.qkv.weight[:, size:] = last.pop("qkv.weight")
            module.layer.load_state_dict(last, strict=False)
        return module

    @classmethod
    def from_config(cls, shape: ModelShape, config: Mapping[str, Any]) -> Self:
        chosen = {name: str(config[name]) for name in CHOICES}
        return cls(shape, config["taps"], rows_of(config), **chosen)

    @property
    def config(self) -> dict[str, Any]:
        return {"taps": list(self.taps), "num_rows": self.num_rows, **self._chosen}

    @classmethod
    def option_help(cls) -> Mapping[str, str]:
        return _HELP

    def fused(self, taps: Sequence[Tensor]) -> Tensor:
        """One state [..., E] of the tapped layers' outputs."""
        states = [tap.to(self.output.dtype) for tap in taps]
        if self._chosen["tap_norms"] == "each":
            states = [norm(x) for norm, x in zip(self.tap_norms, states, strict=True)]
        joined = torch.cat(states, -1)
        if self._chosen["tap_norms"] == "all":
            joined = self.tap_norms[0](joined)
        fused: Tensor = self.join_taps(joined)
        return fused

    def next_state(self, x: Tensor, normed: Tensor) -> Tensor:
        """What goes on to the next token, of the layer's output and its norm."""
        return normed if self._chosen["returns"] == "normed" else x

    def predictions(self, batch: TextBatch, depth: int) -> list[Prediction]:
        state_BLE = self.fused([batch.taps[layer] for layer in self.taps])
        attention, found = AnchoredAttention(self.layer), list[Prediction]()
        for k in range(1, depth + 1):
            embeddings_BLE = following(batch.embeddings_BLE, k).to(state_BLE.dtype)
            x_BLE = attention.step(torch.cat((embeddings_BLE, state_BLE), -1), k - 1)
            normed_BLE = self.norm(x_BLE)
            state_BLE = self.next_state(x_BLE, normed_BLE)
            found.append(Prediction(normed_BLE, self.output, shift=k + 1, depth=k))
        return found


def published_taps(num_layers: int) -> tuple[int, ...]:
    """The layers that EAGLE-3's authors read: what goes into layers 2, L / 2 and L - 3."""
    return tuple(
        sorted({min(max(n - 1, 0), num_layers - 1) for n in (2, num_layers // 2, num_layers - 3)})
    )


class FirstLayer(LlamaLayer):
    """A `LlamaLayer` without a norm before its attention."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self.attention_norm = nn.Identity()

    def weights(self) -> dict[str, Tensor]:
        """Without what makes queries, keys and values: they are handed in."""
        return {name: w for name, w in super().weights().items() if name != "qkv.weight"}


class FirstEagleModule(nn.Module):
    """See the module docstring.

    Args:
        shape: of the target; feed-forward size, heads and rotary base are the layer's own.
        has_bias: whether there is one in the matrix that joins state and embedding.

    Attributes:
        output: the target's head [V, E].
    """

    output_ids_R: Tensor | None = None
    promise: tuple[float, float] | None = None

    def __init__(self, shape: ModelShape, has_bias: bool) -> None:
        super().__init__()
        self.shape, self.taps = shape, (shape.num_hidden_layers - 1,)
        hidden = shape.hidden_size
        self.target_norm = RMSNorm(hidden, shape.rms_norm_eps)
        self.join = nn.Linear(2 * hidden, hidden, bias=has_bias)
        self.layer = FirstLayer(shape)
        self.output = nn.Parameter(torch.zeros(shape.vocab_size, hidden))

    def predictions(self, batch: TextBatch, depth: int) -> list[Prediction]:
        """See `HeadModule.predictions`."""
        state_BLE = self.target_norm(batch.taps[self.taps[0]].to(self.output.dtype))
        attention, found = AnchoredAttention(self.layer), list[Prediction]()
        for k in range(1, depth + 1):
            embeddings_BLE = following(batch.embeddings_BLE, k).to(state_BLE.dtype)
            x_BLE = self.join(torch.cat((embeddings_BLE, state_BLE), -1))
            state_BLE = attention.step(x_BLE, k - 1)
            found.append(Prediction(state_BLE, self.output, shift=k + 1, depth=k))
        return found


class FirstEagleRunner:
    """See `foredraft.drafters.heads.steps.StepRunner`.

    Args:
        module: a trained head.
        target: its target.
    """

    def __init__(self, module: FirstEagleModule, target: HeadTarget) -> None:
        parts = target.parts
        self._parts, self._norm = parts, module.target_norm.to(parts.device).eval()
        bias: Tensor | None = module.join.bias
        self._join = _weight(module.join.weight, target)
        self._bias = None if bias is None else _weight(bias, target)
        self._qkv = _weight(module.layer.qkv.weight, target)
        weights = {n: _weight(w, target) for n, w in module.layer.weights().items()}
        self._runner = target.head_runner(
            HeadWeights([weights], None, _weight(module.output, target), module.shape)
        )
        self.layers = self._runner.layers

    @torch.no_grad()
    def text_inputs(self, following: Sequence[int], taps: Sequence[Tensor]) -> Tensor:
        return self.own_inputs(following, self._norm(taps[0].to(self._join.device)))

    @torch.no_grad()
    def own_inputs(self, tokens: Sequence[int], states_NE: Tensor) -> Tensor:
        embeddings_NE = self._parts.embed(torch.tensor(tokens))
        joined = torch.cat((embeddings_NE, states_NE.to(embeddings_NE)), 1)
        x_NE = F.linear(joined, self._join, self._bias)
        return torch.cat((x_NE, F.linear(x_NE, self._qkv)), 1)

    def run(self, rows: Sequence[HeadRow], inputs_TE: Tensor) -> tuple[Tensor, Tensor]:
        return self._runner.run(rows, inputs_TE)


def _weight(weight: Tensor, target: HeadTarget) -> Tensor:
    return weight.detach().to(target.parts.device, target.parts.dtype)


class FirstEagleDrafter(ModuleDrafter):
    """A `FirstEagleModule` drafts trees."""

    runner = FirstEagleRunner


class EagleRunner:
    """See `foredraft.drafters.heads.steps.StepRunner`.

    Queries, keys and values are made by the target's joins, and handed in.

    Args:
        module: a trained head.
        target: its target.
    """

    def __init__(self, module: EagleModule, target: HeadTarget) -> None:
        self._module, self._eps = module.to(target.parts.device).eval(), module.shape.rms_norm_eps
        layer = module.layer
        token, state = layer.qkv.weight.chunk(2, 1)
        token = token * layer.token_norm.weight
        tokens = JoinedTokens(target.parts, token, self._eps, target.vocab_size)
        state_norm = layer.get_parameter("attention_norm.weight")
        self._join = Joined(target, [state_norm], state, self._eps, tokens)
        self._fuse = _Fusion(module, target)
        self._runner = target.head_runner(
            HeadWeights(
                [layer.weights()], module.norm.weight.detach(), module.output.detach(), module.shape
            )
        )
        self.layers = self._runner.layers

    @torch.no_grad()
    def text_inputs(self, following: Sequence[int], taps: Sequence[Tensor]) -> Tensor:
        return self._inputs(self._fuse(taps), following)

    @torch.no_grad()
    def own_inputs(self, tokens: Sequence[int], states_NE: Tensor) -> Tensor:
        state_NE = self._module.next_state(states_NE, self._module.norm(states_NE))
        return self._inputs(state_NE, tokens)

    def _inputs(self, states_TE: Tensor, tokens: Sequence[int]) -> Tensor:
        """What the layer adds to beside queries, keys and values; [T, E + Q]."""
        added_to_TE = self._module.layer.added_to(states_TE)
        return torch.cat((added_to_TE, self._join([states_TE], tokens)), 1)

    def run(self, rows: Sequence[HeadRow], inputs_TE: Tensor) -> tuple[Tensor, Tensor]:
        return self._runner.run(rows, inputs_TE)


class _Fusion:
    """`EagleModule.fused` by the target's joins."""

    def __init__(self, module: EagleModule, target: HeadTarget) -> None:
        self._eps, weight = module.shape.rms_norm_eps, module.join_taps.weight
        count = len(module.tap_norms)
        norms = [module.get_parameter(f"tap_norms.{i}.weight") for i in range(count)]
        self._is_normed, self._joins_first = bool(norms), count != len(module.taps)
        no_norm = weight.new_ones(weight.shape[1])
        self._join = Joined(target, norms or [no_norm], weight, self._eps)

    def __call__(self, taps: Sequence[Tensor]) -> Tensor:
        """Float32 [T, E]."""
        if not self._joins_first:
            return self._join(taps)
        x_TK = torch.cat([tap.float() for tap in taps], -1)
        joined_TE = self._join([x_TK])
        if self._is_normed:
            return joined_TE
        # Joins bring what they join to a mean square of 1, and here there is to be no norm.
        return joined_TE * (x_TK.square().mean(-1, keepdim=True) + self._eps).sqrt()


class EagleDrafter(ModuleDrafter):
    """An `EagleModule` drafts trees."""

    runner = EagleRunner


_LAYERS = ("layers.0.", "midlayer.")
_TOKEN_NORM, _STATE_NORM = "input_layernorm.weight", "hidden_norm.weight"
_TARGETS = ("embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight")
"""What is the target's own and may be there as well."""
_MAPS = ("d2t", "t2d")
_SAMPLED_ROWS = 256
_ADVICE = "Train one for this target: foredraft train eagle"


@dataclass(frozen=True)
class _Published:
    """A checkpoint that is being read.

    Attributes:
        where: its directory, for messages.
        config: all of ``config.json``.
        shape: the layer's, with the target's vocabulary and number of layers.
        tensors: by name, those of the target left out.
        layer: what the layer's names begin with.
    """

    where: Path
    config: Mapping[str, Any]
    shape: ModelShape
    tensors: Mapping[str, Tensor]
    layer: str

    @property
    def what(self) -> str:
        return f"the EAGLE head in {self.where}"


def read_published(directory: Path, target: HeadTarget) -> EagleModule | FirstEagleModule:
    """A head from somebody's checkpoint: EAGLE-3, or EAGLE-1 and 2, told apart by their tensors.

    Args:
        target: its target.

    Raises:
        ConfigError: there is no such head, it is of another target, or something of it has no
            place here.
        ModelLoadError: the checkpoint is damaged.
    """
    parts, vocab_size = target.parts, target.vocab_size
    config = read_json(directory / "config.json")
    sizes = _sizes(config, directory)
    shape = shape_of({"vocab_size": vocab_size, **sizes}, directory / "config.json")
    _check_fits(shape, parts, vocab_size, directory)
    with ExitStack() as stack:
        tensors = CheckpointTensors(directory, stack)
        layer = next((p for p in _LAYERS if any(n.startswith(p) for n in tensors.names)), None)
        if layer is None or "fc.weight" not in tensors.names:
            raise ConfigError(
                f"{directory} holds no EAGLE head: there is no fc.weight beside a layer "
                f"{' or '.join(_LAYERS)}*. {_ADVICE}"
            )
        found = tensors.below("")
    _check_embeddings(found.get(_TARGETS[0]), parts, directory)
    own = {name: tensor for name, tensor in found.items() if name not in _TARGETS}
    shape = replace(shape, num_hidden_layers=len(target.capabilities.taps))
    published = _Published(directory, config, shape, own, layer)
    return _read_third(published, parts) if layer + _STATE_NORM in own else _read_first(
        published, parts
    )  # fmt: skip


def _sizes(config: Mapping[str, Any], directory: Path) -> Mapping[str, Any]:
    """The part of a config that has the layer's sizes; what cannot be run is refused."""
    kind = config.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise ConfigError(f"{directory} holds a speculator of type {kind!r:.40}, not 'eagle3'")
    sizes: Mapping[str, Any] = config.get("transformer_layer_config") or config
    rope = sizes.get("rope_scaling") or sizes.get("rope_parameters") or {}
    differs = {
        "num_hidden_layers": sizes.get("num_hidden_layers", 1) != 1,
        "hidden_act": sizes.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(sizes.get("attention_bias")),
        "rope_scaling": (rope.get("rope_type") or rope.get("type") or "default") != "default",
        "target_hidden_size": (config.get("target_hidden_size") or sizes.get("hidden_size"))
        != sizes.get("hidden_size"),
    }
    for name, is_other in differs.items():
        if is_other:
            value = config.get(name, sizes.get(name))
            raise ConfigError(
                f"the EAGLE head in {directory} has {name} {value!r:.60}, which is not run here: "
                f"one layer, silu, plain rotary embedding, as wide as the target. {_ADVICE}"
            )
    return sizes


def _check_fits(shape: ModelShape, parts: TargetParts, vocab_size: int, directory: Path) -> None:
    theirs, ours = (shape.hidden_size, shape.vocab_size), (parts.hidden_size, vocab_size)
    if theirs != ours:
        raise ConfigError(
            f"the EAGLE head in {directory} is for a target {theirs[0]} wide with {theirs[1]} "
            f"tokens, and this one is {ours[0]} wide with {ours[1]}"
        )


def _check_embeddings(stored_VE: Tensor | None, parts: TargetParts, directory: Path) -> None:
    """A head reads the target's embeddings: those that it brings must be the same."""
    if stored_VE is None:
        return
    ids = torch.arange(0, len(stored_VE), max(1, len(stored_VE) // _SAMPLED_ROWS))
    own = parts.embed(ids).float().cpu()
    theirs = stored_VE[ids].float()
    if own.shape != theirs.shape or (own - theirs).norm() > 0.01 * own.norm():
        raise ConfigError(
            f"the EAGLE head in {directory} brings other embeddings than the target's: it was "
            f"trained for another target, or with embeddings of its own. {_ADVICE}"
        )


# ---------------------------------------------------------------------------------- EAGLE-1, 2


def _read_first(published: _Published, parts: TargetParts) -> FirstEagleModule:
    has_bias = "fc.bias" in published.tensors
    names = {"join.weight": ("fc.weight",), **layer_names(published.layer)}
    del names["layer.attention_norm.weight"]
    if has_bias:
        names["join.bias"] = ("fc.bias",)
    weights = under_our_names(published.tensors, names, published.what, _ADVICE)
    weights |= {
        "target_norm.weight": final_norm(parts, published.shape.rms_norm_eps),
        "output": parts.head_rows(torch.arange(published.shape.vocab_size)),
    }
    module = FirstEagleModule(published.shape, has_bias)
    fill(module, weights, published.what)
    return module


# ------------------------------------------------------------------------------------- EAGLE-3


def _read_third(published: _Published, parts: TargetParts) -> EagleModule:
    tensors, shape, config = published.tensors, published.shape, published.config
    ids_R = _output_ids(published)
    num_norms = sum(name.startswith("fc_norm.") for name in tensors)
    tap_norms = "each" if num_norms else "all" if "input_norm.weight" in tensors else "none"
    width = tensors["fc.weight"].shape[-1]
    module = EagleModule(
        shape,
        _taps(config, width // shape.hidden_size, shape.num_hidden_layers, published.what),
        None if ids_R is None else len(ids_R),
        tap_norms,
        "normed" if config.get("norm_before_residual") else "plain",
        "normed" if config.get("norm_output") else "plain",
    )
    shared = () if "lm_head.weight" in tensors else ("output",)
    wanted = {n: t for n, t in names_of(module, published.layer).items() if n not in shared}
    own = {name: tensor for name, tensor in tensors.items() if name not in _MAPS}
    weights = under_our_names(own, wanted, published.what, _ADVICE)
    if shared:
        rows = torch.arange(shape.vocab_size) if ids_R is None else ids_R
        weights["output"] = parts.head_rows(rows)
    if ids_R is not None:
        # Rows in the order of their tokens.
        weights["output_ids_R"], order = ids_R.sort()
        weights["output"] = weights["output"][order.to(weights["output"].device)]
    fill(module, weights, published.what)
    return module


def names_of(module: EagleModule, layer: str) -> dict[str, tuple[str, ...]]:
    """Our names of a head's weights, and theirs.

    Args:
        layer: what the layer's names begin with, such as ``layers.0.``.
    """
    count = len(module.tap_norms)
    norms = [f"fc_norm.{i}.weight" for i in range(count)]
    if module.config["tap_norms"] == "all":
        norms = ["input_norm.weight"]
    return {
        **{f"tap_norms.{i}.weight": (name,) for i, name in enumerate(norms)},
        "join_taps.weight": ("fc.weight",),
        "norm.weight": ("norm.weight",),
        "output": ("lm_head.weight",),
        **layer_names(layer),
        "layer.attention_norm.weight": (layer + _STATE_NORM,),
        "layer.token_norm.weight": (layer + _TOKEN_NORM,),
    }


def _taps(config: Mapping[str, Any], count: int, num_layers: int, what: str) -> Sequence[int]:
    key = "eagle_aux_hidden_state_layer_ids"
    read, inner = config.get(key), (config.get("eagle_config") or {}).get(key)
    taps = [int(n) - 1 for n in read] if read else [*(inner or published_taps(num_layers))]
    if len(taps) != count or taps != sorted(set(taps)) or not 0 <= taps[0] <= taps[-1] < num_layers:
        raise ConfigError(
            f"{what} reads {count} layers of its target, and its config names the outputs of "
            f"{taps}; there are {num_layers}, and they have to ascend"
        )
    return taps


def _output_ids(published: _Published) -> Tensor | None:
    """The token of each output row; None: all of them."""
    offsets_R, has_row_V = (published.tensors.get(name) for name in _MAPS)
    if offsets_R is None:
        return None
    ids_R, whole = torch.arange(len(offsets_R)) + offsets_R.long(), published.shape.vocab_size
    named = sorted(set(ids_R.tolist()))
    if not named or named[0] < 0 or named[-1] >= whole or len(named) < len(ids_R):
        raise ModelLoadError(f"{published.what}: d2t does not name {len(ids_R)} of {whole} tokens")
    agree = has_row_V is None or has_row_V.nonzero().flatten().tolist() == named
    if not agree:
        raise ModelLoadError(f"{published.what}: d2t and t2d name different tokens")
    return None if len(ids_R) == whole else ids_R


# ------------------------------------------------------------------------------------- writing


def published_tensors(module: EagleModule) -> dict[str, Tensor]:
    """A head's weights in bfloat16 under the names of speculators, with both maps."""
    own, shape, found = module.state_dict(), module.shape, dict[str, Tensor]()
    query, key = (
        count * shape.head_dim for count in (shape.num_attention_heads, shape.num_key_value_heads)
    )
    sizes = {"layer.qkv.weight": [query, key, key]}
    for mine, theirs in names_of(module, _LAYERS[0]).items():
        each = len(own[mine]) // len(theirs)
        pieces = own[mine].split(sizes.get(mine, each))
        found |= {n: p.bfloat16().contiguous() for n, p in zip(theirs, pieces, strict=True)}
    if module.output_ids_R is not None:
        ids_R = module.output_ids_R.cpu()
        has_row_V = torch.zeros(shape.vocab_size, dtype=torch.bool)
        has_row_V[ids_R] = True
        found |= {"d2t": ids_R - torch.arange(len(ids_R)), "t2d": has_row_V}
    return found


def published_config(module: EagleModule) -> dict[str, Any]:
    """What a speculators ``config.json`` says of a head itself; see `foredraft.train.export`."""
    shape, chosen = module.shape, module.config
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": len(module.output),
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in module.taps],
        "fc_norm": chosen["tap_norms"] == "each",
        "norm_before_fc": chosen["tap_norms"] == "all",
        "norm_before_residual": chosen["residual"] == "normed",
        "norm_output": chosen["returns"] == "normed",
        "transformer_layer_config": {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "num_hidden_layers": 1,
            "vocab_size": shape.vocab_size,
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_attention_heads": shape.num_attention_heads,
            "num_key_value_heads": shape.num_key_value_heads,
            "head_dim": shape.head_dim,
            "rms_norm_eps": shape.rms_norm_eps,
            "rope_theta": shape.rope_theta,
        },
    }


def _drafter(
    module: EagleModule | FirstEagleModule, target: HeadTarget, limits: GrowthLimits
) -> ModuleDrafter:
    kind = FirstEagleDrafter if isinstance(module, FirstEagleModule) else EagleDrafter
    return kind(module, target, limits)


DRAFTER = DrafterSpec(
    build=built_with(EagleModule, _drafter, read_published),
    summary="EAGLE heads in their published shape, those of other trainers included",
    options={**HEAD_OPTION, **GROWTH_OPTIONS},
    num_draft_tokens=16,
    needs=Capabilities(parts=True, cache_layers=True),
    trained=EagleModule.kind,
    head=EagleModule,
)
