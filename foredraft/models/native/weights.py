"""A decoder's weights, and how those of a checkpoint are loaded.

Files are safetensors or GGUF, complete and finite. Matrices that read the same inputs are fused.
Those of a GGUF file are packed without rounding: each of its formats has a layout that holds the
same numbers.

Shape legend: V vocabulary, E hidden size, Q query width, K key-value width, F feed-forward width,
D head size. Of quantised matrices: R rows, K inputs, N bytes of a block, B blocks of 32 or 16
inputs, C chunks of 64.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from foredraft.core.errors import ModelLoadError
from foredraft.models import families
from foredraft.models.files.gguf_blocks import Bytes, Kind
from foredraft.models.files.kept import NOTHING_KEPT, KeptFiles, recipe_of
from foredraft.models.files.progress import Pace, Progress, SilentProgress
from foredraft.models.files.safety import Checkpoint
from foredraft.models.files.stored import packed_reader, read_blocks, read_tensor
from foredraft.models.files.tensors import FLOATS, StoredTensor
from foredraft.models.native import quant
from foredraft.models.native.config import USUAL_KIND, DecoderConfig, Latent, LayerKind
from foredraft.models.native.quant import (
    CENTRED4,
    FORMS,
    INT4,
    PACKED,
    SCALE_INPUTS,
    TILES,
    Blocks,
    Form,
    Matrix,
    PackedMatrix,
    Shelf,
    Stack,
    StackedMatrix,
    as_tensor,
    of_tensors,
    tensor_of,
    to_tensors,
)
from foredraft.models.native.recurrent import MixerWeights, Recurrent
from foredraft.models.native.source_blocks import stacked_blocks

AS_STORED: Literal["file"] = "file"
Bits = int | Literal["file"] | None
"""The form of matrices: packed in so many bits (`foredraft.models.native.quant.PACKED`), quantised
as the checkpoint has them, or plain."""

_CHECKED_ROWS = 1024
_MUCH_TO_READ = 1 << 30
"""Bytes of weights that are worth a word where they are read as they are."""
_HEAD_BITS = 8
_MIXER = "mixer@"
"""Before the fields of `LayerWeights.mixer`."""
_EMBEDDING_FIELD = "embedding_VE"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_OF_EXPERTS = "expert"
"""In the names of experts, and of those that each token reads."""
_INPUTS, _INPUT_PROJECTION, _INPUT_PROJECTION_NORM = (
    "model.embed_tokens_per_layer.weight",
    "model.per_layer_model_projection.weight",
    "model.per_layer_projection_norm.weight",
)
_KEPT_IN_8_BITS = {_HEAD: "head", _INPUT_PROJECTION: "projection of embeddings"}
"""Matrices that are rounded to 8 bits where all are as stored and these are floats."""
_NOTHING = torch.empty(0, 0)
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Norms and biases are None for families without them.

    The feed-forward matrices of a mixture hold those of all X experts, one below the other. Those
    of a part that the layer lacks have no rows.

    Attributes:
        num_experts: X; 1: there are none.
        num_heads: that matrices lie below each other of in ``key_weight`` and ``value_weight``.
        kind: how it attends.
        dense_gate_up, dense_down: of the part that all tokens read beside experts.
        expert_factors_X: of what experts give.
        input_weight: what the embedding of a token tells it, beside its table.
        input_gate: how much of that counts, by the hidden states.
        input_output: what is added to them.
        factor_1: of all that it gives.
        query_weight: makes queries of what ``qkv_weight`` gives, behind ``query_norm_D``; None:
            that gives queries.
        key_weight: of each head: what latents are multiplied with, by its query.
        value_weight: of each head: its value, by a latent.
    """

    attention_norm_E: Tensor | None
    qkv_weight: Stack  # [Q + 2K, E]
    output_weight: Matrix  # [E, Q]
    mlp_norm_E: Tensor | None
    gate_up_weight: Stack  # [2F, E], gate first; or [X 2F, E]
    down_weight: Matrix  # [E, F], or [X E, F]
    qkv_bias: Tensor | None = None  # [Q + 2K]
    query_norm_D: Tensor | None = None  # or [Q], of all heads together
    key_norm_D: Tensor | None = None
    output_bias: Tensor | None = None  # [E]
    attention_post_norm_E: Tensor | None = None
    mlp_post_norm_E: Tensor | None = None
    router_XE: Tensor | None = None
    router_bias_X: Tensor | None = None
    attention_norm_bias_E: Tensor | None = None
    mlp_norm_bias_E: Tensor | None = None
    sinks_H: Tensor | None = None
    gate_up_bias: Tensor | None = None  # [2F], or [X 2F]
    down_bias: Tensor | None = None  # [E], or [X E]
    activation_4: Tensor | None = None  # of xIELU, see `foredraft.models.native.model.xielu`
    num_experts: int = 1
    kind: LayerKind = USUAL_KIND
    mixer: MixerWeights | None = None
    beside_in: Stack | None = None  # projections of a recurrent part beside attention
    beside_out: Matrix | None = None
    dense_gate_up: Stack | None = None
    dense_down: Matrix | None = None
    dense_post_norm_E: Tensor | None = None
    experts_norm_E: Tensor | None = None
    experts_post_norm_E: Tensor | None = None
    router_norm_E: Tensor | None = None
    expert_factors_X: Tensor | None = None
    input_weight: Matrix | None = None  # [P, E]
    input_gate: Matrix | None = None  # [P, E]
    input_output: Matrix | None = None  # [E, P]
    input_norm_E: Tensor | None = None
    factor_1: Tensor | None = None
    num_heads: int = 0
    query_weight: Matrix | None = None  # [Q, query rank]
    key_weight: Matrix | None = None  # [H C, N]
    value_weight: Matrix | None = None  # [H value size, C]

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """All that there are, by their fields and layouts (see `quant.to_tensors`)."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        mixer = self.mixer.tensors() if self.mixer else {}
        return {
            key: tensor
            for name, matrix in found.items()
            if name not in ("kind", "mixer", "num_experts", "num_heads")
            if matrix is not None and matrix.shape[0]
            for key, tensor in to_tensors(prefix + name, matrix).items()
        } | {f"{prefix}{_MIXER}{name}": tensor for name, tensor in mixer.items()}

    def with_fields(self, changed: Mapping[str, Any]) -> LayerWeights:
        """The same layer with others in place of the fields so named."""
        own = {name: value for name, value in changed.items() if not name.startswith(_MIXER)}
        mixer = {name: value for name, value in changed.items() if name not in own}
        if mixer and self.mixer:
            named = {name.removeprefix(_MIXER): value for name, value in mixer.items()}
            own["mixer"] = replace(self.mixer, **named)
        return replace(self, **own)

    @property
    def num_gate_parts(self) -> int:
        """Matrices of as many rows in ``gate_up_weight``."""
        is_gated = self.gate_up_weight.shape[0] != self.num_experts * self.down_weight.shape[1]
        return (1 + is_gated) * self.num_experts

    @property
    def matrices(self) -> dict[str, tuple[Stack, int]]:
        """By field: a matrix, and how many lie one below the other in it."""
        parts = {
            "qkv_weight": 1,
            "output_weight": 1,
            "gate_up_weight": self.num_gate_parts,
            "down_weight": self.num_experts,
            "beside_in": 1,
            "beside_out": 1,
            "dense_gate_up": 2,
            "dense_down": 1,
            "input_weight": 1,
            "input_gate": 1,
            "input_output": 1,
            "query_weight": 1,
            "key_weight": self.num_heads,
            "value_weight": self.num_heads,
        }
        found = ((name, getattr(self, name), count) for name, count in parts.items())
        return {name: (one, n) for name, one, n in found if one is not None and one.shape[0]}

    def with_matrices(self, new: Callable[[str, Stack, int], Matrix]) -> LayerWeights:
        """The same layer with other matrices, made of a field's name and what `matrices` has."""
        own: dict[str, Any] = {name: new(name, *found) for name, found in self.matrices.items()}
        return replace(self, **own)


@dataclass(frozen=True)
class DecoderWeights:
    """All weights, in one dtype, or with matrices in few bits.

    ``head_VE`` is ``embedding_VE`` itself when they are tied, unless it alone is packed.

    Attributes:
        embedding_VE: in a dtype, or as the model comes.
        no_attention: layers whose attention is left out.
        screen_VE: of drafts the head in fewer bits, which finds the tokens whose logits are then
            computed with the head itself; None: there is none.
        states_dtype: of activations and cache; None: as the embeddings.
        activation_bits: of what matrices in few bits are multiplied with: 16, with a scale for each
            token, or 8, with one for each 32 inputs.
        inputs_VW: the tables that tell each layer of a token, one beside the other.
        input_norm_P: of what embeddings tell layers.
    """

    embedding_VE: Matrix
    layers: tuple[LayerWeights, ...]
    final_norm_E: Tensor
    head_VE: Matrix
    final_norm_bias_E: Tensor | None = None
    no_attention: frozenset[int] = frozenset()
    screen_VE: PackedMatrix | None = None
    states_dtype: torch.dtype | None = None
    activation_bits: int = 16
    inputs_VW: Matrix | None = None
    input_norm_P: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and cache."""
        return self.states_dtype or tensor_of(self.embedding_VE).dtype

    @property
    def device(self) -> torch.device:
        return self.final_norm_E.device

    def tensors(self) -> dict[str, Tensor]:
        """Every distinct tensor but the screen's; `with_tensors` takes them by these names."""
        names = ["final_norm_E", "final_norm_bias_E", "inputs_VW", "input_norm_P"]
        names += ["head_VE"] if self.head_VE is not self.embedding_VE else []
        found = to_tensors(_EMBEDDING_FIELD, self.embedding_VE)
        for name in names:
            if (matrix := getattr(self, name)) is not None:
                found |= to_tensors(name, matrix)
        for index, layer in enumerate(self.layers):
            found |= layer.tensors(f"{index}.")
        return found

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> DecoderWeights:
        """The same weights with other tensors, of any layout, in place of those so named."""
        own: dict[str, Any] = {}
        layers: dict[int, dict[str, Any]] = {}
        for name, matrix in of_tensors(tensors).items():
            index, _, field = name.rpartition(".")
            (layers.setdefault(int(index), {}) if index else own)[field] = matrix
        if self.head_VE is self.embedding_VE and _EMBEDDING_FIELD in own:
            own.setdefault("head_VE", own[_EMBEDDING_FIELD])
        own["layers"] = tuple(
            layer.with_fields(layers.get(i, {})) for i, layer in enumerate(self.layers)
        )
        return replace(self, **own)

    def matrices(self) -> list[Tensor]:
        """Embeddings, head and the linear layers' weights, as stored."""
        return [tensor for tensor in self.tensors().values() if tensor.dim() > 1]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.dtype.itemsize for t in self.tensors().values())

    @property
    def bits(self) -> int:
        """Of a weight of the layers; those of embeddings and head may be more."""
        mixing = (each.output_weight for each in self.layers if each.kind.mixes)
        matrix = next(mixing, self.last_matrix)
        if isinstance(matrix, PackedMatrix):
            return matrix.bits
        return 8 * matrix.dtype.itemsize

    @property
    def last_matrix(self) -> Matrix:
        """Of the last layer, to know the weights by."""
        last = self.layers[-1]
        return last.output_weight if last.kind.mixes else last.down_weight


def load_weights(
    source: Path | Checkpoint,
    config: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    bits: Bits = None,
    kept: KeptFiles = NOTHING_KEPT,
    progress: Progress | None = None,
    inputs_VW: Matrix | None = None,
) -> DecoderWeights:
    """Read a checkpoint.

    Args:
        source: the checkpoint; a directory is checked first.
        config: its shape.
        dtype: of the weights, and of the embeddings where the others are packed. Of activations
            alone where weights are as stored: then norms are float32.
        device: where the weights go.
        bits: 8 or 4: quantise the linear layers, and the head to 8, each as it is read. Weights
            that the model has in that many bits stay as they are. 16: bfloat16 laid out for tiles.
            `AS_STORED`: the formats of a GGUF file, if `why_not_as_stored` returns None for it.
        kept: where weights on CPU are kept in the last such form, and taken from at the next start.
        progress: shows the conversion to this form, if none was kept.
        inputs_VW: the tables that tell layers of tokens, which are larger than all else; None:
            they are read.

    Raises:
        ModelLoadError: a tensor is missing, has another shape or no float type, or holds NaN or
            infinity. Attention kernels can hide such values, so they are looked for here.
    """
    checkpoint = Checkpoint.of(source)
    config, unused = fit(checkpoint, config)
    checkpoint.warn_of_unused(_without_own_layers(unused, config.num_hidden_layers))
    name = f"weights-{dtype}-{bits}".replace("torch.", "")
    recipe = recipe_of(sys.modules[__name__], quant, families, families.TEXT, config)
    states_dtype = dtype if bits == AS_STORED else None
    if bits is None:  # a checkpoint is read as fast as a copy of it
        kept = NOTHING_KEPT
    if (tensors := kept.tensors(name, recipe)) is not None:
        outline = _assemble(Reader(checkpoint, dtype, "meta", bits=None), config)
        return replace(outline.with_tensors(tensors), states_dtype=states_dtype)
    if progress is not None and bits is not None:
        progress.stage("laying out the weights for this machine")
    elif progress is not None and checkpoint.num_bytes >= _MUCH_TO_READ:
        progress.stage("reading the weights")
    reader = Reader(checkpoint, dtype, device, bits, progress or SilentProgress())
    weights = replace(_assemble(reader, config, inputs_VW), states_dtype=states_dtype)
    reader.raise_problems()
    kept.keep(name, recipe, weights.tensors(), instead_of="weights-*")
    return weights


def _without_own_layers(names: Iterable[str], num_layers: int) -> list[str]:
    """Without those of layers that predict further tokens, which are read where they draft."""
    names, behind = [*names], f"model.layers.{num_layers}."
    own = ("mtp.", "model.mtp_layers.", *([behind] if f"{behind}eh_proj.weight" in names else []))
    return [name for name in names if not name.startswith(own)]


def rounded(weights: DecoderWeights, bits: int) -> DecoderWeights:
    """The same weights in 8 or 4 bits, the head in 8; embeddings, norms and biases are shared.

    For weights that come from no checkpoint, such as made-up ones: see `load_weights`.
    """
    shelf = Shelf()

    def matrix(_: str, weight: Stack, num_parts: int, bits: int = bits) -> PackedMatrix:
        return PACKED[bits].of_weight(as_tensor(weight, weights.dtype), num_parts, shelf)

    layers = tuple(layer.with_matrices(matrix) for layer in weights.layers)
    return replace(weights, layers=layers, head_VE=matrix("", weights.head_VE, 1, max(bits, 8)))


class WeightCounts(NamedTuple):
    """Weights of a model.

    Attributes:
        all: with a tied head counted once.
        matrices: of the linear layers and the LM head, with all experts.
        read: those that one token is multiplied with: of experts only the ones that it chooses.
        held: all, those twice that are held twice.
    """

    all: int
    matrices: int
    read: int
    held: int


@cache
def count_weights(config: DecoderConfig) -> WeightCounts:
    """Numbers of weights of a model of this config."""
    reader = Reader(None, torch.float32, "meta", bits=None)
    outline = _assemble(reader, config)
    matrices = read = prod(outline.head_VE.shape)
    of_experts, chosen = ("gate_up_weight", "down_weight"), config.experts
    for layer in outline.layers:
        for name, (matrix, _) in layer.matrices.items():
            size = prod(matrix.shape)
            matrices += size
            if chosen and layer.num_experts > 1 and name in of_experts:
                size = size // layer.num_experts * chosen.per_token
            read += size
    num_weights = sum(map(prod, reader.asked.values()))
    return WeightCounts(num_weights, matrices, read, reader.num_held)


def asked_shapes(config: DecoderConfig) -> Mapping[str, tuple[int, ...]]:
    """The tensors that a model of this config is made of; of experts those of the first alone."""
    reader = Reader(None, torch.float32, "meta", bits=None, tensors={})
    _assemble(reader, config)
    return reader.asked


def weight_bytes(config: DecoderConfig, itemsize: int, bits: Bits) -> tuple[int, int]:
    """Bytes of weights in memory, and those of them that a forward of one token reads.

    Args:
        itemsize: of the dtype.
        bits: see `load_weights`; of weights as stored see `stored_weight_bytes`.
    """
    assert bits != AS_STORED
    counts, head = count_weights(config), config.vocab_size * config.hidden_size
    if bits is None:
        return counts.held * itemsize, counts.read * itemsize
    stored, read = (
        int(
            head * PACKED[max(bits, 8)].bytes_per_weight
            + (matrices - head) * PACKED[bits].bytes_per_weight
        )
        for matrices in (counts.matrices, counts.read)
    )
    others = counts.held - counts.matrices  # embeddings, norms, biases
    if config.tie_word_embeddings:  # the head is a copy
        others += head
    return stored + others * itemsize, read


def stored_weight_bytes(
    checkpoint: Checkpoint, config: DecoderConfig, itemsize: int
) -> tuple[int, int]:
    """The same of weights as they are stored; the vectors are float32."""
    are_alone, found = are_experts_alone(checkpoint), dict[str, float]()
    for name, tensor in checkpoint.tensors.items():
        is_plain = name in (_EMBEDDING, _INPUTS) or (are_alone and len(tensor.shape) > 1)
        each: float = itemsize if is_plain else 4
        if tensor.is_quantised:
            each = FORMS[tensor.dtype].bytes_per_weight
            if (sizes := config.latent) and f"{config.family.names.latent_up[0]}." in name:
                share = sizes.still / (sizes.still + sizes.value_size)  # is rounded
                each += share * (PACKED[_HEAD_BITS].bytes_per_weight - each)
        elif name in _KEPT_IN_8_BITS and not are_alone:
            each = PACKED[_HEAD_BITS].bytes_per_weight
        found[name] = prod(tensor.shape) * each
    table, head = checkpoint.tensors[_EMBEDDING], _head(checkpoint, config)
    if not (head.is_quantised or are_alone):
        found[_HEAD] = prod(head.shape) * PACKED[_HEAD_BITS].bytes_per_weight
    in_memory, unread = sum(found.values()), found.get(_INPUTS, 0.0)
    if not (config.tie_word_embeddings and (table.is_quantised or are_alone)):
        unread += found[_EMBEDDING]
    if config.experts:
        of_experts = sum(size for name, size in found.items() if _OF_EXPERTS in name)
        unread += of_experts * (1 - config.experts.per_token / config.experts.count)
    return int(in_memory), int(in_memory - unread)


def _head(checkpoint: Checkpoint, config: DecoderConfig) -> StoredTensor:
    return checkpoint.tensors[_EMBEDDING if config.tie_word_embeddings else _HEAD]


def rounded_as_stored(checkpoint: Checkpoint, config: DecoderConfig) -> str | None:
    """A note on matrices in floats that are rounded to 8 bits; None: there are none."""
    tensors = {**checkpoint.tensors, _HEAD: _head(checkpoint, config)}
    found = [
        f"its {what}, stored as {tensor.dtype}, is kept in 8 bits"
        for name, what in _KEPT_IN_8_BITS.items()
        if (tensor := tensors.get(name)) and not tensor.is_quantised
    ]
    if not found or are_experts_alone(checkpoint):
        return None
    return f"{' and '.join(found)}; weights 'bf16' rounds less"


def fit(checkpoint: Checkpoint, config: DecoderConfig) -> tuple[DecoderConfig, frozenset[str]]:
    """Compare a config with the headers of the weight files; allocates and reads next to nothing.

    Returns:
        The config as the files have it: where they hold a head that differs from the embeddings,
        it is taken, whatever ``tie_word_embeddings`` says (transformers does the same). And the
        names of the tensors that the model does not use.

    Raises:
        ModelLoadError: the files do not hold the model that the config describes.
    """
    num_stored = _num_stored_layers(checkpoint)
    if config.num_hidden_layers > num_stored:
        raise ModelLoadError(
            f"{checkpoint.directory}: num_hidden_layers is {config.num_hidden_layers}, and the "
            f"weight files hold {num_stored} layers. Correct config.json, or get the whole "
            "checkpoint again"
        )
    outline = Reader(checkpoint, torch.float32, "meta", bits=None)
    _assemble(outline, config)
    outline.raise_problems()
    unused = checkpoint.tensors.keys() - outline.asked.keys()
    if config.tie_word_embeddings and _HEAD in checkpoint.tensors:
        if not _is_tied(checkpoint):
            return fit(checkpoint, replace(config, tie_word_embeddings=False))
        unused -= {_HEAD}
    return config, frozenset(unused)


def _num_stored_layers(checkpoint: Checkpoint) -> int:
    found = (_LAYER.match(name) for name in checkpoint.tensors)
    last = max((int(match[1]) + 1 for match in found if match), default=0)
    return min(last, len(checkpoint.tensors))


def _is_tied(checkpoint: Checkpoint) -> bool:
    head, embedding = checkpoint.tensors[_HEAD], checkpoint.tensors[_EMBEDDING]
    if (head.shape, head.dtype) != (embedding.shape, embedding.dtype):
        return False
    return torch.equal(read_tensor(head, _HEAD), read_tensor(embedding, _EMBEDDING))


def _assemble(
    reader: Reader, config: DecoderConfig, inputs_VW: Matrix | None = None
) -> DecoderWeights:
    vocab, hidden = config.vocab_size, config.hidden_size
    embedding_VE = reader.take_table(_EMBEDDING, vocab, hidden)
    if config.tie_word_embeddings:
        head_VE = reader.as_head(embedding_VE, _EMBEDDING)
    else:
        head_VE = reader.as_head(reader.take_table(_HEAD, vocab, hidden), _HEAD)
    layers = [
        assemble_layer(reader, config, index, f"model.layers.{index}.")
        for index in range(config.num_hidden_layers)
    ]
    names = config.family.names
    final_norm_E = reader.take(f"{names.final_norm}.weight", hidden)
    bias_E = reader.take(f"{names.final_norm}.bias", hidden) if config.family.norm_biases else None
    weights = DecoderWeights(embedding_VE, tuple(layers), final_norm_E, head_VE, bias_E)
    if not (size := config.input_size):
        return weights
    if inputs_VW is None:
        width = size * config.num_hidden_layers
        inputs_VW = reader.take_table(_INPUTS, config.input_vocab, width)
    norm_P = reader.take(_INPUT_PROJECTION_NORM, size)
    return replace(weights, inputs_VW=inputs_VW, input_norm_P=norm_P)


@dataclass(frozen=True)
class _Part:
    """A tensor of a checkpoint that becomes some rows of a matrix.

    Attributes:
        rows: that it becomes.
        shape: as stored; None: so many rows.
        change: makes them of it; None: they are there.
        moves_rows: ``change`` does nothing else, or turns matrices first whose formats have rows.
        is_rounded: it is kept in 8 bits where all are as stored, for it has no stored rows.
        pieces: of each stored row, which become rows.
        scale: of all rows, or of each; None: they stay.
    """

    name: str
    rows: int
    shape: tuple[int, ...] | None = None
    change: Callable[[Tensor], Tensor] | None = None
    scale: Tensor | float | None = None
    moves_rows: bool = False
    is_rounded: bool = False
    pieces: int = 1

    @property
    def is_stored(self) -> bool:
        """Whether the rows are as they are stored."""
        return self.change is None and self.scale is None

    @property
    def fits_stored(self) -> bool:
        """Whether it may be where all are as stored: each row is, or it is rounded."""
        has_rows = self.scale is None and (self.change is None or self.moves_rows)
        return has_rows or self.is_rounded

    def order(self) -> Tensor | None:
        """Of each row its number among the stored ones; None: its own."""
        if self.change is None:
            return None
        count, *others = self.shape or (self.rows,)
        shape = (count, 1, *others[1:]) if len(others) > 1 else (count, self.pieces)
        return self.change(torch.arange(prod(shape)).view(shape)).flatten()

    def times(self, factor: float) -> _Part:
        """The same rows times a factor."""
        return self if factor == 1.0 else replace(self, scale=factor)


def assemble_layer(reader: Reader, config: DecoderConfig, index: int, prefix: str) -> LayerWeights:
    """A layer of a checkpoint.

    Args:
        index: of the layer that it is like.
        prefix: of its names.
    """
    return _Layer(reader, config, index, prefix).weights()


class _Layer:
    """Reads a layer; see `assemble_layer`."""

    def __init__(self, reader: Reader, config: DecoderConfig, index: int, prefix: str) -> None:
        self._reader, self._config, self._prefix = reader, config, prefix
        names = config.family.names
        self._family, self._names = config.family, names.apart if reader.is_apart else names
        self._kind, self._index = config.kind(index), index
        self._num_experts, self._feed_forward = config.feed_forward(index)
        experts = config.experts
        has_experts = experts and self._kind.feeds and index >= experts.num_dense
        self._experts = experts if has_experts else None

    def weights(self) -> LayerWeights:
        names, take = self._names, self._reader.take
        return LayerWeights(
            attention_norm_E=self._norm(names.attention_norm),
            attention_norm_bias_E=self._norm_bias(names.attention_norm),
            **self._mixing(),
            mlp_norm_E=self._norm(names.mlp_norm),
            mlp_norm_bias_E=self._norm_bias(names.mlp_norm),
            **self._mlp(),
            attention_post_norm_E=self._norm(names.attention_post_norm),
            mlp_post_norm_E=self._norm(names.mlp_post_norm),
            **(self._inputs() if self._config.input_size else {}),
            factor_1=take(f"{self._prefix}{names.factor}", 1) if names.factor else None,
            **(self._router() if self._experts else {}),
            **(self._beside_experts() if self._config.dense_beside else {}),
            num_experts=self._num_experts,
            kind=self._kind,
        )

    def _mixing(self) -> dict[str, Any]:
        if not self._kind.mixes:
            return {"qkv_weight": _NOTHING, "output_weight": _NOTHING}
        if self._kind.is_recurrent:
            return self._recurrent()
        found = self._latent(sizes) if (sizes := self._config.latent) else self._attention()
        if self._kind.mixes_beside:
            beside = self._recurrent()
            found |= {
                "mixer": beside["mixer"],
                "beside_in": beside["qkv_weight"],
                "beside_out": beside["output_weight"],
            }
        return found

    def _norm(self, name: str, size: int | None = None) -> Tensor | None:
        if not name:
            return None
        return self._reader.take(f"{self._prefix}{name}.weight", size or self._config.hidden_size)

    def _norm_bias(self, name: str) -> Tensor | None:
        if not name or not self._family.norm_biases:
            return None
        return self._reader.take(f"{self._prefix}{name}.bias", self._config.hidden_size)

    def _parts(self, names: Sequence[str], rows: Sequence[int], kind: str) -> list[_Part]:
        """Tensors by their names; one name for several matrices stands for a tensor of all rows."""
        rows = rows if len(names) == len(rows) else [sum(rows)]
        pairs = zip(names, rows, strict=True)
        return [_Part(f"{self._prefix}{name}.{kind}", count) for name, count in pairs]

    def _single(self, parts: Sequence[_Part], num_inputs: int, num_parts: int = 1) -> Matrix:
        matrix = self._reader.take_matrix(parts, num_inputs, num_parts)
        assert not isinstance(matrix, StackedMatrix)
        return matrix

    def _attention(self) -> dict[str, Any]:
        config, names, take = self._config, self._names, self._reader.take
        hidden = config.hidden_size
        rows, (_, size) = config.qkv_rows(self._kind), config.heads(self._kind)
        query_norm, key_norm = config.head_norm_sizes(self._kind) or (0, 0)
        times, own = config.multipliers, names.qkv
        if len(own) > len(rows):  # it reads another's entries
            own = own[: len(rows)]
        elif config.keys_are_values and self._kind.is_wide:
            own = (*own[:2], own[1])

        out, out_bias = (
            self._parts([names.output], [hidden], kind)[0].times(times.output)
            for kind in ("weight", "bias")
        )

        def qkv(kind: str) -> list[_Part]:
            parts = self._parts(own, rows, kind)
            by = times.inputs if kind == "weight" else 1.0
            if len(parts) == len(rows):
                factors = (by, by * times.key, by)
                parts = [part.times(by) for part, by in zip(parts, factors, strict=False)]
            if not self._family.is_paired:
                return parts
            change = partial(_halves, size=size, rotated=config.ropes[0].size)
            turned = [replace(part, change=change, moves_rows=True) for part in parts[:2]]
            return turned + parts[2:]

        num_query, sinks = config.num_attention_heads, f"{self._prefix}{names.sinks}"
        return {
            "qkv_weight": self._reader.take_matrix(qkv("weight"), hidden),
            "qkv_bias": self._reader.take_stacked(qkv("bias")) if config.attention_bias else None,
            "query_norm_D": self._norm(names.query_norm, query_norm) if query_norm else None,
            "key_norm_D": self._norm(names.key_norm, key_norm) if key_norm else None,
            "output_weight": self._single([out], num_query * size),
            "output_bias": self._reader.take_stacked([out_bias]) if config.output_bias else None,
            "sinks_H": take(sinks, num_query) if names.sinks else None,
        }

    def _latent(self, sizes: Latent) -> dict[str, Any]:
        """Attention to latents. Of heads and entries numbers that turn come first, by halves."""
        config, names, low = self._config, self._names, sizes.query_rank
        heads, hidden = config.num_attention_heads, config.hidden_size
        size = sizes.still + (rotated := config.ropes[0].size)
        rows, own = (low or heads * size, config.head_dim), names.qkv
        if low:
            own = (names.query_low, own[1])

        def in_order(part: _Part, size: int) -> _Part:
            change = partial(_halves, size=size, rotated=rotated, behind=rotated)
            return replace(part, change=change, moves_rows=True)

        def inputs(kind: str) -> list[_Part]:
            query, entry = self._parts(own, rows, kind)
            return [query if low else in_order(query, size), in_order(entry, config.head_dim)]

        found = self._of_heads(sizes, heads)
        if low:
            (up,) = self._parts([names.query_up], [heads * size], "weight")
            found["query_weight"] = self._single([in_order(up, size)], low)
            found["query_norm_D"] = self._norm(names.query_norm, low)
        if config.attention_bias:
            bias = self._parts([names.output], [hidden], "bias")
            found["qkv_bias"] = self._reader.take_stacked(inputs("bias"))
            found["output_bias"] = self._reader.take_stacked(bias)
        out = self._parts([names.output], [hidden], "weight")
        return found | {
            "qkv_weight": self._reader.take_matrix(inputs("weight"), hidden),
            "key_norm_D": self._norm(names.key_norm, sizes.rank),
            "output_weight": self._single(out, heads * sizes.value_size),
        }

    def _of_heads(self, sizes: Latent, heads: int) -> dict[str, Any]:
        """Projections from latents to each head's keys and values; of keys inputs are rows."""
        own = self._family.names.latent_up
        is_whole = self._reader.has(f"{self._prefix}{own[0]}.weight")
        own = own if is_whole else self._names.latent_up
        names = [f"{self._prefix}{name}.weight" for name in own]
        rank, still, value = sizes.rank, sizes.still, sizes.value_size
        rows = heads * rank, heads * value
        if len(names) == 2:
            keys, values = map(_Part, names, rows)
        else:
            shape = (heads * (still + value), rank)
            each = partial(_of_heads, heads=heads, still=still)
            keys = _Part(names[0], rows[0], shape, partial(each, is_key=True), is_rounded=True)
            values = _Part(names[0], rows[1], shape, partial(each, is_key=False), moves_rows=True)
        return {
            "num_heads": heads,
            "key_weight": self._single([keys], still, heads),
            "value_weight": self._single([values], rank, heads),
        }

    def _inputs(self) -> dict[str, Any]:
        """Weights of the layer's per-layer embeddings, without the table of all layers."""
        config, names = self._config, self._names
        hidden, size, count = config.hidden_size, config.input_size, config.num_hidden_layers
        cut = partial(_nth, number=self._index, count=count)
        own = _Part(_INPUT_PROJECTION, size, (count * size, hidden), cut, moves_rows=True)
        gate, output = (
            self._parts([name], [rows], "weight")
            for name, rows in ((names.input_gate, size), (names.input_output, hidden))
        )
        return {
            "input_weight": self._single([own], hidden),
            "input_gate": self._single(gate, hidden),
            "input_output": self._single(output, size),
            "input_norm_E": self._norm(names.input_norm),
        }

    # ---- feed-forward parts

    def _mlp(self) -> dict[str, Any]:
        config, names, family, count = self._config, self._names, self._family, self._num_experts
        if not self._kind.feeds:
            return {"gate_up_weight": _NOTHING, "down_weight": _NOTHING}
        hidden, rows = config.hidden_size, self._feed_forward
        if self._experts is None and names.dense_down:
            names = replace(names, gate_up=names.dense_gate_up, down=names.dense_down)
        gates = [rows, rows] if family.is_gated else [rows]

        def parts(up: bool, kind: str) -> list[_Part]:
            own = [*names.gate_up] if up else [names.down]
            each = gates if up else [hidden]
            if self._experts is not None:
                return self._of_experts(up, own, each, kind)
            first, *others = self._parts(own, each, kind)
            times = config.multipliers
            return [first.times(times.gate if up else times.down), *others]

        reader, each = self._reader, len(gates) * count
        found: dict[str, Any] = {
            "gate_up_weight": reader.take_matrix(parts(True, "weight"), hidden, each),
            "down_weight": self._single(parts(False, "weight"), rows, count),
        }
        if config.mlp_bias:
            found["gate_up_bias"] = reader.take_stacked(parts(True, "bias"))
            found["down_bias"] = reader.take_stacked(parts(False, "bias"))
        if name := names.activation:
            learned = (
                f"{self._prefix}{name}.{one}" for one in ("alpha_p", "alpha_n", "beta", "eps")
            )
            found["activation_4"] = reader.take_stacked([_Part(one, 1) for one in learned])
        return found

    def _of_experts(
        self, is_up: bool, names: Sequence[str], rows: Sequence[int], kind: str
    ) -> list[_Part]:
        experts = self._experts
        assert experts is not None
        count = experts.count - experts.num_shared
        before, each, _ = names[0].partition(".{expert}")
        both = "gate_up" if self._family.is_gated else "up"
        fused = f"{self._prefix}{before}.{both if is_up else 'down'}_proj"
        inputs = self._config.hidden_size if is_up else self._feed_forward
        shape = (count, sum(rows), inputs)
        if each and self._reader.has(fused):  # as transformers 5 holds them
            parts = [_Part(fused, count * sum(rows), shape)]
        elif each:
            most = min(count, self._reader.num_stored + 1)  # a forged count takes no memory
            of_each = [[name.format(expert=expert) for name in names] for expert in range(most)]
            parts = [part for own in of_each for part in self._parts(own, rows, kind)]
        elif self._family.has_transposed_experts:
            parts = [self._transposed(names[0], sum(rows), count, is_up, kind)]
        else:
            parts = [_Part(f"{self._prefix}{names[0]}.{kind}", count * sum(rows), shape)]
        return parts + (self._shared(is_up, experts.num_shared) if experts.num_shared else [])

    def _transposed(self, name: str, rows: int, count: int, is_up: bool, kind: str) -> _Part:
        if kind == "bias":
            change = partial(_unwoven, count=count) if is_up else None
            return _Part(f"{self._prefix}{name}_bias", count * rows, (count, rows), change)
        inputs = self._config.hidden_size if is_up else self._feed_forward
        turn = partial(_turned, is_woven=is_up)
        shape = (count, inputs, rows)
        return _Part(f"{self._prefix}{name}", count * rows, shape, turn, moves_rows=True)

    def _shared(self, is_up: bool, count: int) -> list[_Part]:
        """The shared experts, which every token uses, cut into ``count`` experts."""
        names, rows, hidden = self._names, self._feed_forward, self._config.hidden_size
        if not is_up:
            cut = partial(_cut_inputs, count=count) if count > 1 else None
            name = f"{self._prefix}{names.shared_down}.weight"
            shape = (hidden, count * rows)
            # Pieces of rows are whole blocks where experts have the same format.
            has_blocks = self._reader.is_apart
            return [_Part(name, count * hidden, shape, cut, moves_rows=has_blocks, pieces=count)]
        is_gated = self._family.is_gated
        parts = self._parts(names.shared_gate_up, [count * rows] * (1 + is_gated), "weight")
        if count == 1 or not is_gated:
            return parts
        if len(parts) == 1:
            cut = partial(_cut_gates, count=count)
            return [replace(parts[0], change=cut, moves_rows=True)]
        nth = [partial(_nth, number=i, count=count) for i in range(count)]
        shape = (count * rows, hidden)
        return [
            _Part(part.name, rows, shape, cut, moves_rows=True) for cut in nth for part in parts
        ]

    def _router(self) -> dict[str, Any]:
        experts, names, prefix = self._experts, self._names, self._prefix
        assert experts is not None
        count = experts.count - experts.num_shared
        parts = [_Part(f"{prefix}{names.router}.weight", count)]
        if experts.shared_gate:
            parts.append(_Part(f"{prefix}{names.shared_router}.weight", 1))
        has_bias = experts.has_bias
        return {
            "router_XE": self._reader.take_stacked(parts, self._config.hidden_size),
            "router_bias_X": (
                self._reader.take(f"{prefix}{names.router_bias}", count) if has_bias else None
            ),
        }

    def _beside_experts(self) -> dict[str, Any]:
        """The part that all tokens read, and norms and factors of a layer with both."""
        names, config, take = self._names, self._config, self._reader.take
        hidden, size = config.hidden_size, config.dense_beside
        gates = self._parts(names.dense_gate_up, [size, size], "weight")
        down = self._parts([names.dense_down], [hidden], "weight")
        return {
            "dense_gate_up": self._reader.take_matrix(gates, hidden, 2),
            "dense_down": self._single(down, size),
            "dense_post_norm_E": self._norm(names.dense_post_norm),
            "experts_norm_E": self._norm(names.experts_norm),
            "experts_post_norm_E": self._norm(names.experts_post_norm),
            "router_norm_E": take(f"{self._prefix}{names.router_norm}", hidden),
            "expert_factors_X": take(f"{self._prefix}{names.expert_factors}", self._num_experts),
        }

    # ---- recurrent layers

    def _recurrent(self) -> dict[str, Any]:
        names, hidden, sizes = self._names, self._config.hidden_size, self._config.recurrent
        assert sizes is not None
        rows = (sizes.channels, sizes.num_inputs - sizes.channels)
        inputs = self._parts(names.recurrent_in, rows, "weight")
        (out,) = self._parts([names.recurrent_out], [hidden], "weight")
        out = out.times(self._config.multipliers.mixer_output)
        if self._family.interleaved and len(inputs) == 1:
            by_kind = partial(_by_kind, sizes=sizes)
            inputs = [replace(inputs[0], change=by_kind, moves_rows=True)]
        if sizes.kind == "mamba2":
            inputs = [self._of_mamba(slice(None, -sizes.value_heads))]
        return {
            "qkv_weight": self._reader.take_matrix(inputs, hidden),
            "output_weight": self._single([out], sizes.num_outputs),
            "mixer": self._mixer(sizes),
        }

    def _of_mamba(self, rows: slice) -> _Part:
        """Some rows of its input projection, in the order of a delta net's."""
        sizes, (name,) = self._config.recurrent, self._names.recurrent_in
        assert sizes is not None
        shape = (sizes.num_inputs + sizes.value_heads, self._config.hidden_size)
        name, times = f"{self._prefix}{name}.weight", self._config.multipliers.mixer
        if not self._reader.fits(name, *shape):  # a forged size takes no memory
            return _Part(name, len(range(shape[0])[rows]), shape)
        order = mamba_order(sizes)[rows]
        scale = None
        if set(times) != {1.0}:
            keys, outputs = sizes.key_heads * sizes.key_size, sizes.num_outputs
            counts = torch.tensor([outputs, outputs, keys, keys, sizes.value_heads])
            scale = torch.tensor(times).repeat_interleave(counts)[order]
        return _Part(name, len(order), shape, lambda stored: stored[order], scale, moves_rows=True)

    def _mixer(self, sizes: Recurrent) -> MixerWeights:
        names, prefix, reader = self._names, self._prefix, self._reader
        conv, (channels, heads) = prefix + names.convolution, (sizes.channels, sizes.value_heads)
        part = conv.rpartition(".")[0]

        def in_order(stored: Tensor) -> Tensor:
            return stored[mamba_order(sizes)[:channels] - sizes.num_outputs]

        def channelwise(kind: str, *shape: int) -> Tensor:
            change = in_order if sizes.kind == "mamba2" else None
            stored = _Part(f"{conv}.{kind}", channels, (channels, *shape), change)
            return reader.take_stacked([stored], *shape)

        conv_C1K = channelwise("weight", 1, sizes.window)
        if sizes.kind == "short_conv":
            return MixerWeights(conv_C1K)
        is_mamba = sizes.kind == "mamba2"
        if is_mamba:
            gates = [self._of_mamba(slice(-heads, None))]
        else:
            gates = self._parts(names.recurrent_gates, [heads] * 2, "weight")
        if self._family.interleaved:
            gates = [replace(gates[0], change=partial(_by_kind, sizes=sizes, is_gates=True))]
        return MixerWeights(
            conv_C1K,
            reader.take_stacked(gates, self._config.hidden_size),
            reader.take(f"{part}.A_log", heads),
            reader.take(f"{part}.dt_bias", heads),
            (
                reader.take(f"{prefix}{names.recurrent_norm}.weight", sizes.norm_size)
                if sizes.has_norm
                else None
            ),
            bias_C=channelwise("bias") if sizes.has_bias else None,
            skips_H=reader.take(f"{part}.D", heads) if is_mamba else None,
        )


def _halves(rows: Tensor, size: int, rotated: int, behind: int = 0) -> Tensor:
    """Rows of heads in which neighbours turn as those in which halves do, with the ``behind`` last
    ones in front."""
    heads = rows.reshape(-1, size, *rows.shape[1:])
    order = torch.arange(size).roll(behind)
    order[:rotated] = order[:rotated].view(-1, 2).T.flatten()
    return heads[:, order].flatten(0, 1)


def _of_heads(stored: Tensor, heads: int, still: int, is_key: bool) -> Tensor:
    """Of rows of keys and values, head by head: those of values, or the transposed ones of keys."""
    each = stored.view(heads, -1, stored.shape[1])
    found = each[:, :still].transpose(1, 2) if is_key else each[:, still:]
    return found.flatten(0, 1)


def _turned(stored: Tensor, is_woven: bool) -> Tensor:
    """[X, inputs, outputs] as [X outputs, inputs]; of woven rows gates come first."""
    rows = stored.transpose(1, 2)
    if is_woven:
        rows = torch.cat((rows[:, ::2], rows[:, 1::2]), 1)
    return rows.flatten(0, 1)


def _unwoven(stored: Tensor, count: int) -> Tensor:
    """Biases of gates and others that take turns: gates first."""
    return stored.reshape(count, -1, 2).transpose(1, 2).flatten()


def _nth(stored: Tensor, number: int, count: int) -> Tensor:
    return stored.chunk(count)[number]


def _cut_inputs(stored: Tensor, count: int) -> Tensor:
    """[E, n F] as n matrices [E, F] that are added up."""
    return torch.cat(stored.chunk(count, 1))


def _cut_gates(stored: Tensor, count: int) -> Tensor:
    """[2 n F, E], gates first, as n matrices [2 F, E]."""
    gates, others = (half.chunk(count) for half in stored.chunk(2))
    return torch.cat([part for pair in zip(gates, others, strict=True) for part in pair])


def _by_kind(stored: Tensor, sizes: Recurrent, is_gates: bool = False) -> Tensor:
    """Rows that lie by key head, as all queries, all keys, all values and all gates."""
    shared = sizes.value_heads // sizes.key_heads
    values = shared * sizes.value_size
    parts = [sizes.key_size, sizes.key_size, values, values]
    by_head = stored.reshape(sizes.key_heads, -1, stored.shape[-1])
    each = torch.split(by_head, [shared, shared] if is_gates else parts, 1)
    return torch.cat([part.flatten(0, 1) for part in each])


def mamba_order(sizes: Recurrent) -> Tensor:
    """Rows of Mamba-2's input projection (gates, x, B, C, steps): C, B, x, gates, steps."""
    keys, outputs = sizes.key_heads * sizes.key_size, sizes.num_outputs
    gates, x, b, c, steps = torch.split(
        torch.arange(sizes.num_inputs + sizes.value_heads),
        [outputs, outputs, keys, keys, sizes.value_heads],
    )
    return torch.cat((c, b, x, gates, steps))


class Reader:
    """Hands out tensors by name and collects everything that is wrong, to report it at once.

    On the meta device it reads nothing, and finds what is missing or misshapen all the same. There
    it needs no checkpoint: then each tensor is taken to be there, or only some ``tensors`` are.

    Memory stays at one copy of the weights: each tensor is copied from the mapped file straight to
    its place, and the map is closed again (its pages would count a second time). For few
    bits that place is given up again as soon as the matrix is quantised.
    """

    def __init__(
        self,
        checkpoint: Checkpoint | None,
        dtype: torch.dtype,
        device: torch.device | str,
        bits: Bits,
        progress: Progress | None = None,
        tensors: Mapping[str, StoredTensor] | None = None,
    ) -> None:
        self._device, self._bits = device, bits
        self._directory = checkpoint.directory if checkpoint else Path()
        self._tensors = checkpoint.tensors if checkpoint else tensors
        self._plain_head = bool(checkpoint and bits == AS_STORED and are_experts_alone(checkpoint))
        self._dtype = torch.float32 if bits == AS_STORED else dtype
        self._table_dtype = dtype
        self._pace = Pace(progress or SilentProgress(), checkpoint.num_bytes if checkpoint else 0)
        self._bytes_at_hand = 0
        self._shelf = Shelf()
        self._problems: list[str] = []
        self.is_apart = self._tensors is not None and all(
            tensor.gguf is not None for tensor in self._tensors.values()
        )
        """Whether names are those of `Names.apart`."""
        self.asked: dict[str, tuple[int, ...]] = {}
        """Shapes of the tensors that were asked for, by name."""
        self.num_held = 0
        """Numbers that were asked for, those twice that were asked for twice."""
        self.changed: list[str] = []
        """Matrices whose rows are not as they are stored."""

    @property
    def num_stored(self) -> int:
        """Tensors of the checkpoint."""
        return sys.maxsize if self._tensors is None else len(self._tensors)

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of this name."""
        return name in (self._tensors or ())

    def fits(self, name: str, *shape: int) -> bool:
        """Whether it has one of this shape."""
        return self._problem(name, shape) is None

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """One tensor of this shape."""
        return self.take_stacked([_Part(name, shape[0])], *shape[1:], dtype=dtype)

    def take_stacked(
        self, parts: Sequence[_Part], *columns: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Tensors one below the other; nothing if one is not there."""
        are_there = self._are_there(parts, *columns)
        num_rows = sum(part.rows for part in parts) if are_there else 0
        dtype = dtype or self._dtype
        stacked = torch.empty((num_rows, *columns), dtype=dtype, device=self._device)
        if num_rows and not stacked.is_meta:
            places = torch.split(stacked, [part.rows for part in parts])
            for part, place in zip(parts, places, strict=True):
                self._copy(part, place)
        return stacked

    def _are_there(self, parts: Sequence[_Part], *columns: int) -> bool:
        shapes = {part.name: part.shape or (part.rows, *columns) for part in parts}
        problems = [self._problem(name, shape) for name, shape in shapes.items()]
        self._problems += filter(None, problems)
        self._pace.add(self._bytes_at_hand)
        new = shapes.keys() & (self._tensors or {}).keys() - self.asked.keys()
        self._bytes_at_hand = sum((self._tensors or {})[name].num_bytes for name in new)
        self.asked |= shapes
        self.num_held += sum(part.rows for part in parts) * prod(columns)
        return not any(problems)

    def take_table(self, name: str, *shape: int) -> Matrix:
        """Embeddings or a head: one tensor of this shape, quantised where all are as stored."""
        stored = (self._tensors or {}).get(name)
        if self._bits != AS_STORED or stored is None or not stored.is_quantised:
            return self.take(name, *shape, dtype=self._table_dtype)
        matrix = self.take_matrix([_Part(name, shape[0])], shape[1])
        assert not isinstance(matrix, StackedMatrix)
        return matrix

    def take_matrix(self, parts: Sequence[_Part], num_inputs: int, num_parts: int = 1) -> Stack:
        """Weights, one below the other, in the form that was asked for.

        Args:
            num_inputs: of each row.
            num_parts: see `foredraft.models.native.quant.Form.of_weight`.
        """
        self.changed += [part.name for part in parts if not part.fits_stored]
        if self._bits == AS_STORED:
            return self._as_stored(parts, num_inputs, num_parts)
        weight = self.take_stacked(parts, num_inputs)
        return self._packed(weight, parts, num_parts, self._bits)

    def as_head(self, weight: Matrix, name: str) -> Matrix:
        """The head in the form that was asked for: it keeps 8 bits where others have 4."""
        if self._bits is None or isinstance(weight, PackedMatrix) or self._plain_head:
            return weight
        bits = _HEAD_BITS if self._bits == AS_STORED else max(self._bits, _HEAD_BITS)
        return self._packed(weight, [_Part(name, weight.shape[0])], 1, bits)

    def _as_stored(self, parts: Sequence[_Part], num_inputs: int, num_parts: int) -> Stack:
        if not self._are_there(parts, num_inputs):
            return torch.empty(0, num_inputs)
        assert self._tensors is not None
        stored = [(part, self._tensors[part.name]) for part in parts]
        if not all(tensor.is_quantised and not part.is_rounded for part, tensor in stored):
            weight = self.take_stacked(parts, num_inputs, dtype=self._table_dtype)
            if self._plain_head:  # beside experts that are
                return weight
            return PACKED[_HEAD_BITS].of_weight(weight, num_parts, self._shelf)
        return _matrix_as_stored(stored, num_parts, self._shelf)

    def _packed(self, weight: Tensor, parts: Sequence[_Part], num_parts: int, bits: Bits) -> Matrix:
        if bits is None or bits == AS_STORED or self._problems:
            return weight
        assert self._tensors is not None
        kind, names = PACKED[bits], [part.name for part in parts]
        if not all(part.is_stored for part in parts):
            return kind.of_weight(weight, num_parts, self._shelf)
        if self._bits == INT4.bits and kind is not TILES:
            blocks = stacked_blocks(self._directory, names, weight)
            if blocks and (blocks.minima_RB is not None) == (kind is INT4):
                return kind.of_blocks(blocks, weight.shape[1], num_parts, self._shelf)
        stored = [(part, self._tensors[part.name]) for part in parts]
        if kind is not TILES and all(holds(kind, tensor) for _, tensor in stored):
            return _packed(kind, stored, num_parts, self._shelf)
        return kind.of_weight(weight, num_parts, self._shelf)

    def _problem(self, name: str, shape: tuple[int, ...]) -> str | None:
        if self._tensors is None:
            return None
        stored = self._tensors.get(name)
        if stored is None:
            return f"{name} is missing"
        if without_ones(stored.shape) != without_ones(shape):
            return f"{name} has shape {stored.shape}, not {shape}"
        if not stored.is_readable:
            return f"{name} is stored as {stored.dtype}, and only {', '.join(FLOATS)} are read"
        return None

    def _copy(self, part: _Part, place: Tensor) -> None:
        assert self._tensors is not None
        name = part.name
        tensor = read_tensor(self._tensors[name], name)
        if part.change is not None:
            tensor = part.change(tensor.reshape(part.shape or (part.rows, *place.shape[1:])))
        place.copy_(tensor.reshape(place.shape))
        if part.scale is not None:
            each = part.scale if isinstance(part.scale, float) else part.scale.to(place)
            place.mul_(each if isinstance(each, float) or place.dim() == 1 else each[:, None])
        # A sum is one pass; it is finite unless an element is not (or the weights are absurd
        # enough to overflow float32, which is as fatal). In pieces, as it converts to float32.
        for piece in torch.split(place, _CHECKED_ROWS):
            if not torch.isfinite(piece.sum(dtype=torch.float32)):
                self._problems.append(f"{name} holds NaN or infinite values")
                return

    def raise_problems(self) -> None:
        self._pace.add(self._bytes_at_hand)
        if self._problems:
            shown = "; ".join(self._problems[:3])
            more = f" and {len(self._problems) - 3} more" if len(self._problems) > 3 else ""
            raise ModelLoadError(
                f"{self._directory} does not hold the model its config.json describes: "
                f"{shown}{more}. Missing or damaged weights are never made up; get the whole "
                "checkpoint again"
            )


def without_ones(shape: Sequence[int]) -> list[int]:
    """GGUF files leave out the one of a convolution's channels."""
    return [size for size in shape if size != 1]


Numbers = np.ndarray[Any, Any]
_RowsOf = Callable[[slice | Tensor], Blocks]


def why_not_as_stored(checkpoint: Checkpoint, config: DecoderConfig) -> str | None:
    """Why the weights of a checkpoint cannot be kept as they come; None: they can."""
    names, are_alone = config.family.names, are_experts_alone(checkpoint)
    own = names.router, names.shared_router, names.convolution
    small = [f".{name}.weight" for name in own if name]
    small += [f".{name}.weight" for name in (*names.recurrent_gates, "eh_proj")]
    small += [_EMBEDDING, _INPUTS, *_KEPT_IN_8_BITS]
    if checkpoint.is_adapted:
        return "an adapter is merged into its weights"
    outline = Reader(checkpoint, torch.float32, "meta", bits=None)
    _assemble(outline, config)
    if outline.changed:
        return f"{outline.changed[0]} is not used as it is stored, but in another order or scaled"
    for name, tensor in checkpoint.tensors.items():
        may_be_floats = name.endswith(tuple(small))
        may_be_floats |= are_alone and (_OF_EXPERTS not in name or name.endswith("_bias"))
        if len(tensor.shape) > 1 and not (tensor.is_quantised or may_be_floats):
            return f"{name} is stored as {tensor.dtype}, and only formats of few bits are kept"
    for index in range(config.num_hidden_layers if config.experts else 0):
        names = names.apart
        for of_experts in (
            (*names.gate_up, *names.shared_gate_up),
            (names.down, names.shared_down),
        ):
            parts = [f"model.layers.{index}.{name}.weight".format(expert=0) for name in of_experts]
            found = (checkpoint.tensors.get(part) for part in parts)
            if len({FORMS[one.dtype] for one in found if one}) > 1:
                return f"the experts of layer {index} have matrices in formats of their own"
    return None


def are_experts_alone(checkpoint: Checkpoint) -> bool:
    """Whether experts are in few bits, and all else is in floats: it is then held as it is."""
    names = [name for name, tensor in checkpoint.tensors.items() if tensor.is_quantised]
    return bool(names) and all(_OF_EXPERTS in name for name in names)


def formats_of(checkpoint: Checkpoint) -> list[str]:
    """The formats of the matrices, the one of most weights first."""
    counts: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        if tensor.is_quantised or (len(tensor.shape) == 2 and tensor.dtype != "F32"):
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + prod(tensor.shape)
    return sorted(counts, key=lambda name: -counts[name])


def holds(form: Form, tensor: StoredTensor) -> bool:
    """Whether a form has the very numbers of a tensor's format."""
    own = FORMS.get(tensor.dtype) if tensor.is_quantised else None
    return own is form or (own is CENTRED4 and form is INT4)


def _matrix_as_stored(
    stored: Sequence[tuple[_Part, StoredTensor]], num_parts: int, shelf: Shelf
) -> PackedMatrix | StackedMatrix:
    """Matrices of as many inputs, one below the other, packed without rounding.

    Args:
        num_parts: see `foredraft.models.native.quant.Form.of_weight`.

    Raises:
        ModelLoadError: a scale is no finite number.
    """
    forms = [FORMS[tensor.dtype] for _, tensor in stored]
    if len(set(forms)) == 1:
        return _packed(forms[0], stored, num_parts, shelf)
    each = zip(forms, stored, strict=True)
    return StackedMatrix(tuple(_packed(form, [one], 1, shelf) for form, one in each))


def _packed(
    form: Form, stored: Sequence[tuple[_Part, StoredTensor]], num_parts: int, shelf: Shelf
) -> PackedMatrix:
    """The same in a form that `holds` them all."""
    found = [
        (part.rows, _in_order(_rows_of(tensor, form, part.pieces), part.order()))
        for part, tensor in stored
    ]
    one = stored[0][1]

    def rows_of(wanted: slice) -> Blocks:
        """Of all matrices as if they were one."""
        pieces = list[Blocks]()
        first = 0
        for count, blocks_of in found:
            begin, end = max(wanted.start - first, 0), min(wanted.stop - first, count)
            if begin < end:
                pieces.append(blocks_of(slice(begin, end)))
            first += count
        rows = Blocks.stacked(pieces)
        if not rows.is_finite():
            raise ModelLoadError(
                f"{one.file}: a scale of its {one.dtype} weights is no number that "
                "float16 holds. If a new download has it too, weights 'bf16' read the file"
            )
        return rows

    shape = (sum(part.rows for part, _ in stored), one.shape[1])
    return form.of_rows(rows_of, shape, num_parts, shelf)


def _in_order(rows_of: _RowsOf, order_R: Tensor | None) -> _RowsOf:
    return rows_of if order_R is None else lambda rows: rows_of(order_R[rows])


def _rows_of(tensor: StoredTensor, form: Form, pieces: int) -> _RowsOf:
    if tensor.gguf is not None:
        kind, blocks = tensor.gguf.kind, read_blocks(tensor)
        blocks = blocks.reshape(len(blocks) * pieces, -1, blocks.shape[-1])
        return lambda rows: unpacked(kind, blocks[rows], form)
    assert tensor.packed is not None
    reader, repeats = packed_reader(tensor), tensor.packed.group // SCALE_INPUTS

    def of_groups(rows: slice | Tensor) -> Blocks:
        found = reader.rows(rows)
        if form.is_signed:
            least, most = found.integers_RK.aminmax()
            if not -(1 << form.bits - 1) <= least <= most < 1 << form.bits - 1:
                raise ModelLoadError(
                    f"{tensor.file} holds {tensor.dtype} weights from {least} to {most}: "
                    "config.json says something else of zero points. weights 'bf16' read the file"
                )
        integers_RK = found.integers_RK.to(torch.int8)
        integers_RBK = integers_RK.view(len(integers_RK), -1, SCALE_INPUTS)

        def halves(numbers_RG: Tensor) -> Tensor:
            exact_RG = numbers_RG.half()
            exact_RG[exact_RG != numbers_RG] = torch.inf
            return exact_RG.repeat_interleave(repeats, 1)

        minima = found.minima_RG
        blocks = Blocks(
            integers_RBK, halves(found.scales_RG), None if minima is None else halves(minima)
        )
        return blocks.from_minimum() if form is INT4 and minima is None else blocks

    return of_groups


def unpacked(kind: Kind, blocks_N: Bytes, form: Form) -> Blocks:
    """Some rows [R, blocks of a row, N] as a form has them that `holds` their format."""
    assert kind.unpack is not None
    with np.errstate(all="ignore"):  # scales are looked at afterwards
        found = kind.unpack(blocks_N)
    integers, scales, minima = found.integers_SK, found.scales_S, found.minima_S
    num_rows, block_inputs = len(blocks_N), integers.shape[-1]

    def tensor(numbers: Numbers) -> Tensor:
        return torch.from_numpy(numbers.reshape(num_rows, -1))

    if scales.dtype == np.float32:  # powers of two
        scales = _as_halves(scales, integers)

    integers = np.ascontiguousarray(integers).view(np.int8)
    rows = Blocks(
        torch.from_numpy(integers.reshape(num_rows, -1, block_inputs)),
        tensor(scales),
        minima_RB=None if minima is None else tensor(minima),
        steps_RS=None if found.step is None else tensor(found.step),
        minimum_steps_RS=None if found.minimum_step is None else tensor(found.minimum_step),
    )
    return rows.from_minimum() if form is INT4 and rows.minima_RB is None else rows


def _as_halves(scales_S: Numbers, integers_SK: Numbers) -> Numbers:
    """Powers of two as float16; infinite where that does not hold one that weights need."""
    with np.errstate(over="ignore"):
        halves_S = scales_S.astype(np.float16)
    halves_S[(halves_S != scales_S) & integers_SK.any(-1)] = np.inf
    return halves_S
