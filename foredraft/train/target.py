"""A target for training: its embedding and LM head, copies of its layers, and hidden states of
texts.

Shape legend: T tokens of all texts, L tokens of one, E hidden size, V vocabulary, R some rows of
the head.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from foredraft.core.errors import CapabilityError
from foredraft.drafters.trained import TargetIdentity, identify
from foredraft.models.base import ModelShape, ScoreRow, Target, check_taps
from foredraft.models.native.config import USUAL_KIND
from foredraft.models.native.quant import Stack, as_tensor
from foredraft.models.native.target import NativeTarget
from foredraft.models.native.weights import LayerWeights
from foredraft.train.texts import Ids

_LOGITS_AT_ONCE = 1 << 24
"""Logits over the whole vocabulary that are there at one time."""
_LEAST_HEAD = 16
"""Numbers of a head, of which any has a multiple."""


@dataclass(frozen=True)
class States:
    """The target's hidden states of one text.

    Attributes:
        layers: output [L, E] of each layer that was asked for.
        normaliser_L: float32 log of the sum of exponentials of the logits after each token.
    """

    layers: Mapping[int, Tensor]
    normaliser_L: Tensor


class TrainingTarget:
    """A loaded target, as training sees it, and the source of a new head's weights.

    Args:
        weights: digest of all its weights (`foredraft.models.files.digest.weights_digest`).
        tokenizer: fingerprint of its tokenizer, where it has one.

    Attributes:
        parts: its embedding, final norm and head.

    Raises:
        CapabilityError: it is of another kind.
    """

    def __init__(
        self, target: Target, name: str, weights: str, tokenizer: str | None = None
    ) -> None:
        if not isinstance(target, NativeTarget):
            raise CapabilityError(
                f"training needs a target that runs on the native decoder, and {name!r} runs "
                f"through {type(target).__name__}: its layers cannot be read one by one"
            )
        self._target, self.name, self.parts = target, name, target.parts
        self._config, self._weights = target.config, target.weights
        self._digest, self._tokenizer = weights, tokenizer
        self.max_context, self.device = target.max_context, target.weights.device
        self.last_layer = target.config.num_hidden_layers - 1

    @cached_property
    def identity(self) -> TargetIdentity:
        return replace(identify(self._target, self.name, self._tokenizer), weights=self._digest)

    @cached_property
    def forward_key(self) -> str:
        """Tells this target's states from those of all others.

        Two targets share states only where all weights, the configuration, the type of the numbers
        and the format of the matrices are the same.
        """
        matrices = [self._weights.head_VE, self._weights.layers[0].qkv_weight]
        formats = [type(matrix).__name__ for matrix in matrices]
        described = f"{self._digest} {self._config!r} {self._weights.dtype} {formats}"
        return hashlib.sha256(described.encode()).hexdigest()[:32]

    @property
    def shape(self) -> ModelShape:
        config = self._config
        shape = ModelShape(**{each.name: getattr(config, each.name) for each in fields(ModelShape)})
        if config.latent is None:
            return shape
        heads = config.num_attention_heads  # which have keys of their own here
        size = max(_LEAST_HEAD, config.hidden_size // heads // _LEAST_HEAD * _LEAST_HEAD)
        return replace(shape, num_key_value_heads=math.gcd(heads, 4), head_dim=size)

    def check_taps(self, taps: Sequence[int]) -> None:
        """Refuse layers that it does not have.

        Raises:
            ConfigError: there is one.
        """
        check_taps(taps, self._target.capabilities.taps)

    # ---------------------------------------------------------------- copies, for new heads

    def embedding(self) -> Tensor:
        """[V, E], float32."""
        return _floats(self._weights.embedding_VE).clone()

    def head(self) -> Tensor:
        """[V, E], float32; the embedding itself where the two are tied."""
        return _floats(self._weights.head_VE).clone()

    def final_norm(self) -> Tensor:
        """[E], float32."""
        return self._weights.final_norm_E.float() + self._target.config.family.norm_offset

    def layer(self, index: int) -> Mapping[str, Tensor]:
        """Weights of a layer under the names of `LlamaLayer`; -1 is the last layer.

        They are without what else the family has, and of the first expert only. A layer without
        attention, or without experts, has those of the nearest one that is like Llama's. Where none
        is (latents, gates), attention is random, and adds nothing before it is trained.

        Raises:
            CapabilityError: no layer has a feed-forward part.
        """
        layers, config = self._weights.layers, self._config
        offset, intermediate_size = config.family.norm_offset, config.intermediate_size
        most = max(each.num_experts for each in layers)
        fed = self._nearest(index, lambda layer: layer.kind.feeds and layer.num_experts == most)
        if fed is None:
            raise CapabilityError(
                f"a head begins as layers of its model that feed forward, and {config.model_type} "
                "has none; draft with 'suffix' or 'self_draft'"
            )
        gate_up, down = (_floats(weight) for weight in (fed.gate_up_weight, fed.down_weight))
        if not config.family.is_gated:
            gate_up = torch.cat((gate_up, gate_up))
        norms = {
            "attention_norm.weight": layers[index].attention_norm_E,
            "mlp_norm.weight": layers[index].mlp_norm_E,
        }
        return {
            **{
                name: torch.ones(config.hidden_size) if norm_E is None else norm_E.float() + offset
                for name, norm_E in norms.items()
            },
            "gate_up.weight": gate_up[: 2 * intermediate_size].clone(),
            "down.weight": down[: config.hidden_size].clone(),
            **self._attention(index),
        }

    def _nearest(self, index: int, fits: Callable[[LayerWeights], bool]) -> LayerWeights | None:
        """The layer nearest to one, of those with weights of their own that fit."""
        layers = self._weights.layers
        found = [i for i, each in enumerate(layers) if fits(each) and each.kind.source is None]
        nearest = min(found, key=lambda i: abs(i - index % len(layers)), default=None)
        return None if nearest is None else layers[nearest]

    def _attention(self, index: int) -> dict[str, Tensor]:
        config, shape = self._config, self.shape
        rows, size = config.qkv_rows(USUAL_KIND), shape.num_attention_heads * shape.head_dim
        if config.latent is None and not config.family.gates_attention:
            layer = self._nearest(
                index, lambda each: each.kind.attends and config.qkv_rows(each.kind) == rows
            )
            if layer is not None:
                qkv, out = (_floats(weight) for weight in (layer.qkv_weight, layer.output_weight))
                return {"qkv.weight": qkv.clone(), "output.weight": out.clone()}
        generator = torch.Generator().manual_seed(index % (1 + self.last_layer))
        num_rows = size + 2 * shape.num_key_value_heads * shape.head_dim
        qkv = torch.randn(num_rows, shape.hidden_size, generator=generator)
        out = torch.zeros(shape.hidden_size, size)
        return {"qkv.weight": qkv / shape.hidden_size**0.5, "output.weight": out}

    # ------------------------------------------------------------------- reading texts

    def read(
        self, texts: Sequence[Ids], taps: Sequence[int], num_prompts: Sequence[int] | None = None
    ) -> list[States]:
        """The states of some texts, in one forward.

        Args:
            num_prompts: tokens of each text's prompt, for which no normaliser is computed but at
                the last one; None: computed everywhere.

        Raises:
            ConfigError: a layer that it does not have.
        """
        cache, layers = self._target.cache, sorted({*taps, self.last_layer})
        slots: list[int] = []
        try:
            slots += [cache.allocate() for _ in texts]
            rows = [
                ScoreRow(slot, ids.tolist(), wants_logits=False)
                for slot, ids in zip(slots, texts, strict=True)
            ]
            scores = self._target.score(rows, layers)
        finally:
            for slot in slots:
                cache.free(slot)
        wanted_T = torch.ones(sum(map(len, texts)), dtype=torch.bool)
        for span, num_prompt in zip(scores.tokens, num_prompts or (), strict=False):
            wanted_T[span.start : span.start + max(0, num_prompt - 1)] = False
        last_TE = scores.taps[self.last_layer]
        normaliser_T = torch.zeros(len(last_TE), device=last_TE.device)
        normaliser_T[wanted_T] = self._normaliser(last_TE[wanted_T])
        return [
            States(scores[i].taps, normaliser_T[span.start : span.stop])
            for i, span in enumerate(scores.tokens)
        ]

    @torch.no_grad()
    def _normaliser(self, last_TE: Tensor) -> Tensor:
        """[T], by the target's own product: its kernel is faster at it than torch is."""
        size = max(1, _LOGITS_AT_ONCE // self.shape.vocab_size)
        pieces = torch.split(self.parts.norm(last_TE), size)
        found = [self.parts.logits(piece).logsumexp(-1) for piece in pieces if len(piece)]
        return torch.cat(found) if found else torch.empty(0)


def _floats(matrix: Stack) -> Tensor:
    return as_tensor(matrix, torch.float32).float()
