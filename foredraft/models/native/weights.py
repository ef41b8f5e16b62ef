"""Checkpoint to tensors: safetensors only, complete, finite, and fused where that saves reads.

Shape legend: V vocabulary, E hidden size, Q query width, K key-value width, F feed-forward width,
D head size.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from foredraft.core.errors import ModelLoadError
from foredraft.models.native.config import DecoderConfig
from foredraft.models.native.int8 import Matrix, quantise, tensor_of

_CHECKED_ROWS = 1024


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Biases and head norms are None for families without them."""

    attention_norm_E: Tensor
    qkv_weight: Matrix  # [Q + 2K, E]
    qkv_bias: Tensor | None  # [Q + 2K]
    query_norm_D: Tensor | None
    key_norm_D: Tensor | None
    output_weight: Matrix  # [E, Q]
    output_bias: Tensor | None  # [E]
    mlp_norm_E: Tensor
    gate_up_weight: Matrix  # [2F, E], gate first
    down_weight: Matrix  # [E, F]


@dataclass(frozen=True)
class DecoderWeights:
    """All weights, in one dtype, or with all matrices but the embeddings as int8.

    ``head_VE`` is ``embedding_VE`` itself when they are tied, unless it is int8.

    Attributes:
        no_attention: layers whose attention is left out.
        no_mlp: layers whose feed-forward part is left out.
    """

    embedding_VE: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm_E: Tensor
    head_VE: Matrix
    no_attention: frozenset[int] = frozenset()
    no_mlp: frozenset[int] = frozenset()

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding_VE.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding_VE.device

    def tensors(self) -> list[Tensor]:
        """Every distinct tensor."""
        found = [self.embedding_VE, self.final_norm_E]
        if self.head_VE is not self.embedding_VE:
            found.append(tensor_of(self.head_VE))
        for layer in self.layers:
            found.extend(tensor_of(weight) for weight in vars(layer).values() if weight is not None)
        return found

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.dtype.itemsize for t in self.tensors())

    def select_layers(self, layers: Sequence[int]) -> DecoderWeights:
        """The same weights with only these layers: a view, nothing is copied."""
        return replace(self, layers=tuple(self.layers[i] for i in layers))

    def leave_out(self, attention: Collection[int], mlp: Collection[int]) -> DecoderWeights:
        """The same weights without the attention or the MLP of some layers: likewise a view."""
        kept = [i for i in range(len(self.layers)) if i not in attention or i not in mlp]
        return replace(
            self.select_layers(kept),
            no_attention=frozenset(new for new, old in enumerate(kept) if old in attention),
            no_mlp=frozenset(new for new, old in enumerate(kept) if old in mlp),
        )


def load_weights(
    directory: Path,
    config: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    int8: bool = False,
) -> DecoderWeights:
    """Read a checkpoint directory.

    Args:
        directory: where it lies.
        config: its shape.
        dtype: of the weights, and of the embeddings where the others are int8.
        device: where the weights go.
        int8: quantise the linear layers and the head, each as it is read.

    Raises:
        ModelLoadError: a tensor is missing, has another shape, or holds NaN or infinity.
            Attention kernels can hide such values, so they are looked for here.
    """
    reader = _Reader(directory, dtype, device, int8)
    weights = _assemble(reader, config)
    reader.raise_problems()
    return weights


def _assemble(reader: _Reader, config: DecoderConfig) -> DecoderWeights:
    vocab, hidden = config.vocab_size, config.hidden_size
    embedding_VE = reader.take("model.embed_tokens.weight", vocab, hidden)
    head_VE: Matrix
    if config.tie_word_embeddings:
        head_VE = reader.as_stored(embedding_VE)
    else:
        head_VE = reader.as_stored(reader.take("lm_head.weight", vocab, hidden))
    layers = [_assemble_layer(reader, config, i) for i in range(config.num_hidden_layers)]
    final_norm_E = reader.take("model.norm.weight", hidden)
    return DecoderWeights(embedding_VE, tuple(layers), final_norm_E, head_VE)


def _assemble_layer(reader: _Reader, config: DecoderConfig, index: int) -> LayerWeights:
    hidden, head_dim = config.hidden_size, config.head_dim
    query, key_value = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    feed_forward = config.intermediate_size
    prefix = f"model.layers.{index}."

    def take(name: str, *shape: int) -> Tensor:
        return reader.take(prefix + name, *shape)

    def take_matrix(name: str, *shape: int) -> Matrix:
        return reader.as_stored(take(name, *shape))

    def take_qkv(kind: str, *columns: int) -> Tensor:
        parts = (("q", query), ("k", key_value), ("v", key_value))
        named = [(f"{prefix}self_attn.{n}_proj.{kind}", rows) for n, rows in parts]
        return reader.take_stacked(named, *columns)

    gate_up = [(f"{prefix}mlp.{n}_proj.weight", feed_forward) for n in ("gate", "up")]
    return LayerWeights(
        attention_norm_E=take("input_layernorm.weight", hidden),
        qkv_weight=reader.as_stored(take_qkv("weight", hidden)),
        qkv_bias=take_qkv("bias") if config.attention_bias else None,
        query_norm_D=take("self_attn.q_norm.weight", head_dim) if config.qk_norm else None,
        key_norm_D=take("self_attn.k_norm.weight", head_dim) if config.qk_norm else None,
        output_weight=take_matrix("self_attn.o_proj.weight", hidden, query),
        output_bias=take("self_attn.o_proj.bias", hidden) if config.output_bias else None,
        mlp_norm_E=take("post_attention_layernorm.weight", hidden),
        gate_up_weight=reader.as_stored(reader.take_stacked(gate_up, hidden), len(gate_up)),
        down_weight=take_matrix("mlp.down_proj.weight", hidden, feed_forward),
    )


class _Reader:
    """Hands out tensors by name and collects everything that is wrong, to report it at once.

    Memory stays at one copy of the weights: each tensor is copied from the mapped file straight to
    its place, and the map is closed again (its pages would count a second time). For int8 that
    place is given up again as soon as the matrix is quantised.
    """

    def __init__(
        self, directory: Path, dtype: torch.dtype, device: torch.device | str, int8: bool
    ) -> None:
        self._directory, self._dtype, self._device, self._int8 = directory, dtype, device, int8
        self._problems: list[str] = []
        self._where: dict[str, Path] = {}
        for name in _file_names(directory):
            with _open(directory / name) as file:
                self._where |= dict.fromkeys(file.keys(), directory / name)

    def take(self, name: str, *shape: int) -> Tensor:
        """One tensor of this shape."""
        return self.take_stacked([(name, shape[0])], *shape[1:])

    def take_stacked(self, parts: Sequence[tuple[str, int]], *columns: int) -> Tensor:
        """Named tensors of so many rows each, one below the other."""
        num_rows = sum(rows for _, rows in parts)
        stacked = torch.empty((num_rows, *columns), dtype=self._dtype, device=self._device)
        first = 0
        for name, rows in parts:
            self._copy(name, stacked[first : first + rows])
            first += rows
        return stacked

    def as_stored(self, weight: Tensor, num_parts: int = 1) -> Matrix:
        """The matrix in the form that was asked for; see `foredraft.models.native.int8`."""
        return quantise(weight, num_parts) if self._int8 else weight

    def _copy(self, name: str, place: Tensor) -> None:
        if name not in self._where:
            self._problems.append(f"{name} is missing")
            return
        with _open(self._where[name]) as file:
            tensor: Tensor = file.get_tensor(name)
        if tensor.shape != place.shape:
            found, wanted = tuple(tensor.shape), tuple(place.shape)
            self._problems.append(f"{name} has shape {found}, not {wanted}")
            return
        place.copy_(tensor)
        # A sum is one pass; it is finite unless an element is not (or the weights are absurd
        # enough to overflow float32, which is as fatal). In pieces, as it converts to float32.
        for piece in torch.split(place, _CHECKED_ROWS):
            if not torch.isfinite(piece.sum(dtype=torch.float32)):
                self._problems.append(f"{name} holds NaN or infinite values")
                return

    def raise_problems(self) -> None:
        if self._problems:
            shown = "; ".join(self._problems[:3])
            more = f" and {len(self._problems) - 3} more" if len(self._problems) > 3 else ""
            raise ModelLoadError(
                f"{self._directory} does not hold the model its config.json describes: "
                f"{shown}{more}. Missing or damaged weights are never made up; get the whole "
                "checkpoint again"
            )


def _file_names(directory: Path) -> list[str]:
    """The checkpoint's files: those its index lists, or the one that holds everything."""
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return ["model.safetensors"]
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index} is no index of a sharded checkpoint: {error!r}") from error


def _open(path: Path) -> Any:
    if not path.is_file():
        raise ModelLoadError(f"{path} is missing; get the whole checkpoint")
    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(
            f"{path} cannot be read ({error}); it is damaged or was not downloaded to its end"
        ) from error
