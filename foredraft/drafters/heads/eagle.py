"""EAGLE-3 as it is published: one layer that attends over a token and a fused state side by side.

Outputs of several of the target's layers are fused to one state. Queries, keys and values are
computed from this state and the embedding of the next token, each after a norm; the layer adds to
the state (arXiv 2503.01840). After the anchor the layer's own output replaces the state. The norms
of EAGLE-3.1 are options here: one for each tapped layer, and whether the normed output is passed to
the next token.

`foredraft.drafters.heads.hidden_head` is the same idea with a cheaper layer; other engines load
heads of this shape.

Shape legend: B texts, L tokens, E hidden size, P tapped layers, R output rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import BaseModel, Field
from torch import Tensor, nn

from foredraft.core.errors import ConfigError, ModelLoadError
from foredraft.drafters.heads.base import (
    LARGEST_SIZE,
    HeadModule,
    HeadOption,
)
from foredraft.drafters.heads.layers import (
    Joined,
    JoinedTokens,
    LlamaLayer,
    RMSNorm,
    head_weights,
)
from foredraft.drafters.heads.published import (
    Count,
    Rope,
    Sizes,
    check_fits,
    checkpoint_tensors,
    fill,
    final_norm,
    layer_names,
    under_our_names,
)
from foredraft.drafters.heads.steps import StepRunner, stepwise_drafter
from foredraft.models.base import HeadTarget, HeadWeights, ModelShape, TargetParts
from foredraft.models.files.json_files import parse_fields, read_json


class WideLayer(LlamaLayer):
    """A `LlamaLayer` on [..., 2E]: an embedding, and the state that the layer adds to.

    Args:
        is_normed: whether it adds to the state after its norm.
    """

    def __init__(self, shape: ModelShape, is_normed: bool) -> None:
        super().__init__(shape)
        self._is_normed = is_normed
        self.token_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.qkv = nn.Linear(2 * shape.hidden_size, self.qkv.out_features, bias=False)

    def weights(self) -> dict[str, Tensor]:
        """Weights without the projections to queries, keys and values, which are precomputed."""
        before = ("attention_norm", "token_norm", "qkv")
        return {n: w for n, w in super().weights().items() if not n.startswith(before)}

    def attention_input(self, x_BLE: Tensor) -> Tensor:
        embeddings, states = x_BLE.chunk(2, -1)
        return torch.cat((self.token_norm(embeddings), self.attention_norm(states)), -1)

    def added_to(self, states: Tensor) -> Tensor:
        """Residual input of the layer, for states [..., E]."""
        return self.attention_norm(states) if self._is_normed else states

    def finish(self, x_BLE: Tensor, attended_BHLD: Tensor) -> Tensor:
        return super().finish(self.added_to(x_BLE.chunk(2, -1)[1]), attended_BHLD)


class EagleModule(HeadModule):
    """See the module docstring.

    Args:
        shape: of the target; feed-forward size, heads and rotary base are the layer's own.
        tap_norms, residual, returns: see `OPTIONS`.
    """

    kind = "eagle"
    training_file = "foredraft.train.heads.eagle"
    OPTIONS: ClassVar = {
        "taps": HeadOption(
            "layers of the target to read, such as 1,14,26",
            lambda shape: published_taps(shape.num_hidden_layers),
            is_layers=True,
        ),
        "tap_norms": HeadOption(
            "norms of their outputs: of each, of all together, or none (each)",
            "each",
            ("each", "all", "none"),
        ),
        "residual": HeadOption(
            "residual input of the layer: the state as it is, or after its norm (plain)",
            "plain",
            ("plain", "normed"),
        ),
        "returns": HeadOption(
            "output passed to the next token: after the last norm, or plain (normed)",
            "normed",
            ("normed", "plain"),
        ),
    }

    def __init__(
        self,
        shape: ModelShape,
        num_rows: int | None,
        taps: Sequence[int],
        tap_norms: str,
        residual: str,
        returns: str,
    ) -> None:
        self._tap_norms, self._returns = tap_norms, returns
        chosen = {"tap_norms": tap_norms, "residual": residual, "returns": returns}
        super().__init__(shape, taps, num_rows=num_rows, taps=[*taps], **chosen)
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        count = {"each": len(self.taps), "all": 1, "none": 0}[tap_norms]
        size = hidden if tap_norms == "each" else hidden * len(self.taps)
        self.tap_norms = nn.ModuleList(RMSNorm(size, eps) for _ in range(count))
        self.join_taps = nn.Linear(len(self.taps) * hidden, hidden, bias=False)
        self.layer = WideLayer(shape, residual == "normed")
        self.norm = RMSNorm(hidden, eps)

    def fused(self, taps: Sequence[Tensor]) -> Tensor:
        """One state [..., E] of the tapped layers' outputs."""
        states = [tap.to(self.output.dtype) for tap in taps]
        if self._tap_norms == "each":
            states = [norm(x) for norm, x in zip(self.tap_norms, states, strict=True)]
        joined = torch.cat(states, -1)
        if self._tap_norms == "all":
            joined = self.tap_norms[0](joined)
        fused: Tensor = self.join_taps(joined)
        return fused

    def next_state(self, x: Tensor, normed: Tensor) -> Tensor:
        """State passed to the next token: the layer's output or its norm."""
        return normed if self._returns == "normed" else x

    def _fusion(self, target: HeadTarget) -> Callable[[Sequence[Tensor]], Tensor]:
        """`fused` by the target's joins: float32 [T, E]."""
        eps, weight = self.shape.rms_norm_eps, self.join_taps.weight
        norms = [norm.get_parameter("weight") for norm in self.tap_norms]
        join = Joined(target, norms or [weight.new_ones(weight.shape[1])], weight, eps)

        def of_all(taps: Sequence[Tensor]) -> Tensor:
            x_TK = torch.cat([tap.float() for tap in taps], -1)
            joined_TE = join([x_TK])
            if norms:
                return joined_TE
            # Joins norm their inputs to a mean square of 1; this head has no norm: it is undone.
            return joined_TE * (x_TK.square().mean(-1, keepdim=True) + eps).sqrt()

        return join if len(norms) == len(self.taps) else of_all

    def runner(self, target: HeadTarget) -> StepRunner:
        layer, eps = self.to(target.parts.device).eval().layer, self.shape.rms_norm_eps
        token, state = layer.qkv.weight.chunk(2, 1)
        tokens = JoinedTokens(target, token * layer.token_norm.weight, eps)
        join = Joined(target, [layer.get_parameter("attention_norm.weight")], state, eps, tokens)
        fuse = self._fusion(target)

        def inputs(states_TE: Tensor, following: Sequence[int]) -> Tensor:
            """Residual input beside queries, keys and values; [T, E + Q]."""
            return torch.cat((layer.added_to(states_TE), join([states_TE], following)), 1)

        def of_text(taps: Sequence[Tensor], following: Sequence[int]) -> Tensor:
            return inputs(fuse(taps), following)

        def of_own(states_NE: Tensor, drafted: Sequence[int]) -> Tensor:
            return inputs(self.next_state(states_NE, self.norm(states_NE)), drafted)

        weights = head_weights([layer], self.norm, self.output, self.shape)
        return StepRunner(target.head_runner(weights), of_text, of_own)


def published_taps(num_layers: int) -> tuple[int, ...]:
    """The layers that EAGLE-3's authors tap: the inputs of layers 2, L / 2 and L - 3."""
    return tuple(
        sorted({min(max(n - 1, 0), num_layers - 1) for n in (2, num_layers // 2, num_layers - 3)})
    )


class FirstLayer(LlamaLayer):
    """A `LlamaLayer` without a norm before its attention."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self.attention_norm = nn.Identity()

    def weights(self) -> dict[str, Tensor]:
        """Weights without the projections to queries, keys and values, which are precomputed."""
        return {name: w for name, w in super().weights().items() if name != "qkv.weight"}


class FirstEagleModule(nn.Module):
    """See the module docstring.

    Args:
        shape: of the target; feed-forward size, heads and rotary base are the layer's own.
        has_bias: whether there is one in the matrix that joins state and embedding.

    Attributes:
        output: the target's head [V, E].
    """

    taps: tuple[int, ...]
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

    def runner(self, target: HeadTarget) -> StepRunner:
        parts, norm = target.parts, self.target_norm.to(target.parts.device).eval()
        join_EK, qkv = _weight(self.join.weight, target), _weight(self.layer.qkv.weight, target)
        bias_E = None if self.join.bias is None else _weight(self.join.bias, target)

        def of_own(states_NE: Tensor, drafted: Sequence[int]) -> Tensor:
            embeddings_NE = parts.embed(torch.as_tensor(drafted))
            joined = torch.cat((embeddings_NE, states_NE.to(embeddings_NE)), 1)
            x_NE = F.linear(joined, join_EK, bias_E)
            return torch.cat((x_NE, F.linear(x_NE, qkv)), 1)

        def of_text(taps: Sequence[Tensor], following: Sequence[int]) -> Tensor:
            return of_own(norm(taps[0].to(join_EK.device)), following)

        layer = {name: _weight(w, target) for name, w in self.layer.weights().items()}
        weights = HeadWeights([layer], None, _weight(self.output, target), self.shape)
        return StepRunner(target.head_runner(weights), of_text, of_own)


def _weight(weight: Tensor, target: HeadTarget) -> Tensor:
    return weight.detach().to(target.parts.device, target.parts.dtype)


LAYER_PREFIXES = ("layers.0.", "midlayer.")
_TOKEN_NORM, _STATE_NORM = "input_layernorm.weight", "hidden_norm.weight"
_TARGETS = ("embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight")
"""Tensors of the target that a checkpoint may contain as well."""
_MAPS = ("d2t", "t2d")
_SAMPLED_ROWS = 256
_ADVICE = "Train one for this target: foredraft train eagle"


@dataclass(frozen=True)
class _Published:
    """A checkpoint that is being read.

    Attributes:
        where: its directory, for messages.
        shape: the layer's, with the target's vocabulary and number of layers.
        tensors: by name, those of the target left out.
        layer: prefix of the layer's names.
    """

    where: Path
    config: _Config
    shape: ModelShape
    tensors: Mapping[str, Tensor]
    layer: str

    @property
    def what(self) -> str:
        return f"the EAGLE head in {self.where}"


def read_published(directory: Path, target: HeadTarget) -> EagleModule | FirstEagleModule:
    """Read a published checkpoint: EAGLE-3, or EAGLE-1 and 2, told apart by their tensors.

    Raises:
        ConfigError: there is no such head, it is of another target, or a part of it is not
            supported.
        ModelLoadError: the checkpoint is damaged.
    """
    parts = target.parts
    config, shape = _read_config(directory, target.vocab_size)
    check_fits(shape, target, f"the EAGLE head in {directory}")
    found = checkpoint_tensors(directory)
    layer = next((p for p in LAYER_PREFIXES if any(n.startswith(p) for n in found)), None)
    if layer is None or "fc.weight" not in found:
        raise ConfigError(
            f"{directory} holds no EAGLE head: there is no fc.weight beside a layer "
            f"{' or '.join(LAYER_PREFIXES)}*. {_ADVICE}"
        )
    _check_embeddings(found.get(_TARGETS[0]), parts, directory)
    own = {name: tensor for name, tensor in found.items() if name not in _TARGETS}
    shape = replace(shape, num_hidden_layers=len(target.capabilities.taps))
    published = _Published(directory, config, shape, own, layer)
    return _read_third(published, parts) if layer + _STATE_NORM in own else _read_first(
        published, parts
    )  # fmt: skip


class _Layer(Sizes):
    """Fields of a config about the layer."""

    hidden_act: str = "silu"
    attention_bias: bool | None = False


_LayerIds = list[Annotated[int, Field(ge=0, le=LARGEST_SIZE)]]


class _Inner(BaseModel):
    eagle_aux_hidden_state_layer_ids: _LayerIds | None = None


class _Config(BaseModel):
    """Fields of a config about the head; further keys are ignored."""

    speculators_model_type: str = "eagle3"
    transformer_layer_config: dict[str, Any] | None = None
    target_hidden_size: Count | None = None
    eagle_aux_hidden_state_layer_ids: _LayerIds | None = None
    eagle_config: _Inner | None = None
    norm_before_residual: bool | None = None
    norm_output: bool | None = None


def _read_config(directory: Path, vocab_size: int) -> tuple[_Config, ModelShape]:
    """Config and shape of a head, read before its weights; unsupported heads are refused."""
    path = directory / "config.json"
    content = read_json(path)
    config = parse_fields(path, content, _Config)
    if config.speculators_model_type != "eagle3":
        kind = config.speculators_model_type
        raise ConfigError(f"{directory} holds a speculator of type {kind!r:.40}, not 'eagle3'")
    sizes = config.transformer_layer_config or content
    layer = parse_fields(path, {"vocab_size": vocab_size, **sizes}, _Layer)
    width = config.target_hidden_size or layer.hidden_size
    rope = layer.rope_scaling or layer.rope_parameters or Rope()
    differs = {
        "num_hidden_layers": layer.num_hidden_layers != 1,
        "hidden_act": layer.hidden_act != "silu",
        "attention_bias": bool(layer.attention_bias),
        "rope_scaling": not rope.is_plain,
        "target_hidden_size": width != layer.hidden_size,
    }
    for name, is_other in differs.items():
        if is_other:
            value = content.get(name, sizes.get(name))
            raise ConfigError(
                f"the EAGLE head in {directory} has {name} {value!r:.60}, which is not run here: "
                f"one layer, silu, plain rotary embedding, as wide as the target. {_ADVICE}"
            )
    return config, layer.shape


def _check_embeddings(stored_VE: Tensor | None, parts: TargetParts, directory: Path) -> None:
    """Check that a checkpoint's embeddings equal the target's, which the head reads."""
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
    with torch.device("meta"):
        module = FirstEagleModule(published.shape, has_bias)
    fill(module, weights, published.what)
    return module


# ------------------------------------------------------------------------------------- EAGLE-3


def _read_third(published: _Published, parts: TargetParts) -> EagleModule:
    tensors, shape, config = published.tensors, published.shape, published.config
    ids_R = _output_ids(published)
    num_norms = sum(name.startswith("fc_norm.") for name in tensors)
    width = tensors["fc.weight"].shape[-1]
    recipe = {
        "num_rows": None if ids_R is None else len(ids_R),
        "taps": _taps(config, width // shape.hidden_size, shape.num_hidden_layers, published.what),
        "tap_norms": "each" if num_norms else "all" if "input_norm.weight" in tensors else "none",
        "residual": "normed" if config.norm_before_residual else "plain",
        "returns": "normed" if config.norm_output else "plain",
    }
    with torch.device("meta"):
        module = EagleModule.from_config(shape, recipe)
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
        layer: prefix of the layer's names, such as ``layers.0.``.
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


def _taps(config: _Config, count: int, num_layers: int, what: str) -> Sequence[int]:
    read = config.eagle_aux_hidden_state_layer_ids
    inner = (config.eagle_config or _Inner()).eagle_aux_hidden_state_layer_ids
    taps = [n - 1 for n in read] if read else [*(inner or published_taps(num_layers))]
    if (
        not taps
        or len(taps) != count
        or taps != sorted(set(taps))
        or not 0 <= taps[0] <= taps[-1] < num_layers
    ):
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


DRAFTER = stepwise_drafter(
    EagleModule,
    summary="EAGLE heads in their published shape, those of other trainers included",
    num_draft_tokens=16,
    read=read_published,
)
