"""Models of well-known shapes with random weights: good for timing, and for nothing else.

The time of a forward depends on shapes and types only, so a machine can be measured without
downloading a model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.cli.options import load_llm as load_model
from foredraft.core.errors import ConfigError, unknown
from foredraft.llm import LLM
from foredraft.load import forward_cost, native_decoder, plan_native
from foredraft.models.native.config import (
    USUAL_KIND,
    DecoderConfig,
    Experts,
    LayerKind,
    RotaryEmbedding,
)
from foredraft.models.native.quant import PACKED, Matrix, Shelf, tensor_of
from foredraft.models.native.recurrent import MixerWeights, Recurrent
from foredraft.models.native.target import NativeTarget
from foredraft.models.native.weights import DecoderWeights, LayerWeights
from foredraft.options import LoadOptions
from foredraft.system.devices import resolve_device

_SPREAD = 0.02


class Shape(NamedTuple):
    """Sizes that the cost of a llama-shaped model depends on; ``intermediate_size`` is an
    expert's. With recurrent layers each fourth one attends."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    experts: Experts | None = None
    recurrent: Recurrent | None = None


def shapes() -> dict[str, Shape]:
    """Shapes by name."""
    return {
        "smollm2-135m": Shape(576, 1536, 30, 9, 3, 64, 49152, True),
        "smollm2-1.7b": Shape(2048, 8192, 24, 32, 32, 64, 49152, True),
        "qwen3.5-0.8b": Shape(
            *(1024, 3584, 24, 8, 2, 256, 65536, True),
            recurrent=Recurrent("delta_net", 4, 0, 16, 16, 128, 128),
        ),
        "attention-0.8b": Shape(1024, 3584, 24, 32, 8, 128, 65536, True),
        "llama-1b": Shape(2048, 8192, 16, 32, 8, 64, 128256, True),
        "llama-3b": Shape(3072, 8192, 28, 24, 8, 128, 128256, True),
        "llama-8b": Shape(4096, 14336, 32, 32, 8, 128, 128256, False),
        "moe-1b": Shape(1024, 512, 16, 16, 4, 64, 32000, False, Experts(32, 4, True)),
        "qwen3-30b-a3b": Shape(*(2048, 768, 48, 32, 4, 128, 151936, False), Experts(128, 8, True)),
        "olmoe-7b": Shape(2048, 1024, 16, 16, 16, 128, 50304, False, Experts(64, 8, False)),
    }


def random_config(name: str) -> DecoderConfig:
    """The config of a shape by its name.

    Raises:
        ConfigError: no such shape.
    """
    if name not in shapes():
        raise unknown("random-weight model", name, shapes())
    shape = shapes()[name]
    model_type = "mixtral" if shape.experts else "llama"
    kinds: tuple[LayerKind, ...] = ()
    if shape.recurrent:
        model_type, recurrent = "qwen3_5_text", LayerKind(None, is_recurrent=True)
        count = shape.num_hidden_layers
        kinds = tuple(recurrent if (i + 1) % 4 else LayerKind() for i in range(count))
    return DecoderConfig(
        **shape._asdict(),
        model_type=model_type,
        kinds=kinds,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        ropes=(RotaryEmbedding(10000.0, shape.head_dim),),
    )


def random_llm(name: str, options: LoadOptions) -> LLM:
    """A target of this shape, without a tokenizer.

    Args:
        name: of the shape; it takes the place of ``options.model``.
        options: as for `LLM.load`; drafters that read text or a draft model cannot be used.

    Raises:
        ConfigError: no such shape, or a draft model was asked for.
    """
    config = random_config(name)
    if options.draft_model is not None:
        raise ConfigError(
            f"draft model {options.draft_model!r} shares no vocabulary with random weights; leave "
            "it out, or time a real checkpoint"
        )
    label = f"{name} with random weights (timing only)"
    plan = plan_native(label, None, config, options, resolve_device(options.device))
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    assert not isinstance(plan.packed_bits, str)  # there is no file
    weights = random_weights(config, getattr(torch, plan.dtype), plan.device, plan.packed_bits)
    weights = replace(weights, activation_bits=plan.activation_bits)
    decoder = native_decoder(plan.decoder, options.threads)
    cache_dtype = getattr(torch, plan.cache_dtype)
    target = NativeTarget(config, weights, decoder, plan.max_context, cache_dtype=cache_dtype)
    weighs = options.calibrate and options.drafter != "none"
    cost = forward_cost(plan, target, options) if weighs else None
    return LLM(target, None, options, plan=plan, cost=cost)


def load_llm(options: LoadOptions, random_weights: str | None = None) -> LLM:
    """A model, or where ``random_weights`` names a shape a made-up one."""
    return random_llm(random_weights, options) if random_weights else load_model(options)


def random_weights(
    config: DecoderConfig, dtype: torch.dtype, device: torch.device | str, bits: int | None = None
) -> DecoderWeights:
    """Weights made on ``device`` itself; layers without biases and head norms."""
    shelf = Shelf()

    def table(rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, dtype=dtype, device=device).normal_(0.0, _SPREAD)

    def matrix(rows: int, columns: int, num_parts: int = 1) -> Matrix:
        weight = table(rows, columns)
        return PACKED[bits].of_weight(weight, num_parts, shelf) if bits else weight

    def ones() -> Tensor:
        return torch.ones(config.hidden_size, dtype=dtype, device=device)

    hidden, feed_forward = config.hidden_size, config.intermediate_size
    num_experts = config.experts.count if config.experts else 1
    query = config.num_attention_heads * config.head_dim
    rows = sum(config.qkv_rows(USUAL_KIND))

    def mixer(kind: LayerKind) -> MixerWeights | None:
        sizes = config.recurrent
        if sizes is None or not kind.is_recurrent:
            return None
        heads = sizes.value_heads
        return MixerWeights(
            torch.randn(sizes.channels, 1, sizes.window) / sizes.window,
            table(sizes.num_gates, hidden),
            *(torch.zeros(heads), torch.zeros(heads), torch.ones(sizes.value_size)),
        )

    def sizes_of(kind: LayerKind) -> tuple[int, int]:
        """Rows of the matrix that reads, and inputs of the one that gives."""
        if config.recurrent and kind.is_recurrent:
            return config.recurrent.num_inputs, config.recurrent.num_outputs
        return rows, query

    layers = [
        LayerWeights(
            attention_norm_E=ones(),
            qkv_weight=matrix(sizes_of(kind)[0], hidden),
            output_weight=matrix(hidden, sizes_of(kind)[1]),
            mlp_norm_E=ones(),
            gate_up_weight=matrix(num_experts * 2 * feed_forward, hidden, 2 * num_experts),
            down_weight=matrix(num_experts * hidden, feed_forward, num_experts),
            router_XE=table(num_experts, hidden) if config.experts else None,
            num_experts=num_experts,
            kind=kind,
            mixer=mixer(kind),
        )
        for kind in map(config.kind, range(config.num_hidden_layers))
    ]
    embedding_VE = table(config.vocab_size, hidden)
    shared = config.tie_word_embeddings and not bits
    head_VE: Matrix = embedding_VE if shared else table(config.vocab_size, hidden)
    if bits:
        head_VE = PACKED[max(bits, 8)].of_weight(tensor_of(head_VE), 1, shelf)
    return DecoderWeights(embedding_VE, tuple(layers), ones(), head_VE)
