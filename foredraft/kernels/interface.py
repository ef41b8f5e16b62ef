"""The C interface of the compiled libraries: structures and functions, for ctypes.

Structures are mirrored field by field from ``interface.h``. Those of draws and noise are in
`foredraft.core`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import POINTER, c_double, c_int32, c_int64, c_void_p
from typing import Any

from foredraft.core.draws import DrawRow

FORM_PLAIN, FORM_PACKED, FORM_TILED = range(3)
"""``ForedraftForm``."""
NOT_PACKED = -1
"""Of ``ForedraftFormat``."""
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "relu2": 2, "clipped_silu": 3, "xielu": 4}
"""``ForedraftActivation``."""

MOST_PARTS = 3
"""Of the matrix of queries, keys and values."""


class Matrix(ctypes.Structure):
    """``ForedraftMatrix`` of interface.h."""

    _fields_ = [("data", c_void_p), ("format", c_int64), ("step", c_int64)]


class Layer(ctypes.Structure):
    """``ForedraftLayer`` of interface.h."""

    _fields_ = [
        ("attention_norm", c_void_p),
        ("qkv", Matrix * MOST_PARTS),
        ("qkv_rows", c_int64 * MOST_PARTS),
        *((name, c_void_p) for name in ("qkv_bias", "query_norm", "key_norm")),
        ("output", Matrix),
        *((name, c_void_p) for name in ("output_bias", "mlp_norm")),
        *((name, Matrix) for name in ("gate", "up", "down")),
        *((name, c_void_p) for name in ("attention_post_norm", "mlp_post_norm", "router")),
        *((name, c_void_p) for name in ("router_bias", "attention_norm_bias", "mlp_norm_bias")),
        *((name, c_void_p) for name in ("sinks", "gate_bias", "up_bias", "down_bias")),
        ("activation", c_void_p),
        *((name, c_int64) for name in ("rope", "view", "number")),
        *((name, c_void_p) for name in ("convolution", "convolution_bias", "gates")),
        *((name, c_void_p) for name in ("decay_rates", "step_bias", "value_norm", "skips")),
        ("beside", c_void_p),
        *((name, c_int64) for name in ("kind", "is_reader", "feed_forward")),
        ("factor", c_double),
        *((name, Matrix) for name in ("input", "input_gate", "input_output")),
        *((name, c_void_p) for name in ("input_norm", "dense", "router_norm")),
        *((name, c_void_p) for name in ("expert_factors", "experts_post_norm")),
        *((name, Matrix) for name in ("query", "key_of_head", "value_of_head")),
    ]


class Heads(ctypes.Structure):
    """``ForedraftHeads`` of interface.h."""

    _fields_ = [("num_kv_heads", c_int64), ("head_dim", c_int64)]


class RecurrentSizes(ctypes.Structure):
    """``ForedraftRecurrent`` of interface.h."""

    _fields_ = [
        *((name, c_int64) for name in ("window", "channels", "key_heads", "value_heads")),
        *((name, c_int64) for name in ("key_size", "value_size", "is_tiled", "is_mamba")),
    ]


class LatentSizes(ctypes.Structure):
    """``ForedraftLatent`` of interface.h."""

    _fields_ = [(name, c_int64) for name in ("rank", "query_rank", "still", "values")]


class Model(ctypes.Structure):
    """``ForedraftModel`` of interface.h."""

    _fields_ = [
        *((name, c_int64) for name in ("hidden", "feed_forward", "num_layers", "num_heads")),
        ("heads", Heads * 2),
        *((name, c_int64) for name in ("vocab", "is_bf16")),
        *((name, c_int64) for name in ("form", "int8_activations")),
        ("norm_eps", c_double),
        ("layers", POINTER(Layer)),
        *((name, Matrix) for name in ("embedding", "head")),
        ("final_norm", c_void_p),
        ("screen", Matrix),
        ("num_ropes", c_int64),
        *((name, c_void_p) for name in ("inv_freq", "rope_sizes", "amplitudes")),
        ("num_views", c_int64),
        *((name, c_void_p) for name in ("windows", "view_kinds")),
        *((name, c_int64) for name in ("norms_all_heads", "activation", "num_experts")),
        *((name, c_int64) for name in ("chosen_experts", "normalises_chances")),
        *((name, c_double) for name in ("query_scale", "attention_cap", "logits_cap")),
        *((name, c_double) for name in ("logits_scale", "embedding_scale", "residual_scale")),
        ("gates_attention", c_int64),
        ("recurrent", RecurrentSizes),
        *((name, c_int64) for name in ("shared_experts", "shared_gate", "sigmoid_chances")),
        *((name, c_double) for name in ("chance_floor", "chance_scale")),
        *((name, c_int64) for name in ("dense_feed_forward", "layer_norms")),
        ("final_norm_bias", c_void_p),
        *((name, c_int64) for name in ("is_parallel", "norms_rotated", "keeps_inputs")),
        *((name, c_int64) for name in ("input_size", "input_width")),
        ("inputs", Matrix),
        ("input_norm", c_void_p),
        *((name, c_int64) for name in ("num_ids", "expert_groups", "chosen_groups")),
        ("latent", LatentSizes),
    ]


class Store(ctypes.Structure):
    """``ForedraftStore`` of interface.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("keys", "values")),
        *((name, c_int64) for name in ("block_stride", "layer_stride", "head_stride")),
    ]


class Save(ctypes.Structure):
    """``ForedraftSave`` of interface.h."""

    _fields_ = [("num_elements", c_int64), ("values", c_void_p)]


class StatesOfRow(ctypes.Structure):
    """``ForedraftStates`` of interface.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("state", "old_log", "new_log")),
        ("parents", POINTER(c_int32)),
        ("saves", POINTER(Save)),
        ("elements", c_void_p),
        *((name, c_int64) for name in ("num_old", "first_logged", "num_saves")),
        *((name, c_int64) for name in ("old_stride", "new_stride")),
    ]


class Forward(ctypes.Structure):
    """``ForedraftForward`` of interface.h."""

    _fields_ = [
        *((name, c_int64) for name in ("num_tokens", "num_wanted", "num_rows", "max_entries")),
        *((name, c_void_p) for name in ("token_ids", "positions", "entries", "tables", "prefixes")),
        *((name, c_void_p) for name in ("extra_starts", "extras", "wanted", "rows")),
        ("stores", Store * 2),
        ("block_entries", c_int64),
        ("logits", c_void_p),
        *((name, c_int64) for name in ("first_layer", "end_layer")),
        ("hidden", c_void_p),
        *((name, c_void_p) for name in ("taps", "workspace")),
        ("num_threads", c_int64),
        ("phase_seconds", POINTER(c_double)),
        ("num_draws", c_int64),
        ("draws", POINTER(DrawRow)),
        *((name, c_int64) for name in ("rounds_taps", "int8_entries")),
        ("states", POINTER(StatesOfRow)),
        ("matrices", c_void_p),
        *((name, c_int64) for name in ("num_first", "num_others")),
        ("others", c_void_p),
    ]


_SIZES = POINTER(Model), *[c_int64] * 4
FUNCTIONS: Mapping[str, Mapping[str, tuple[Any, Sequence[Any]]]] = {
    "decoder": {
        "forward": (c_int64, (POINTER(Model), POINTER(Forward))),
        "workspace_size": (c_int64, _SIZES),
        "use_huge_pages": (None, (c_void_p, c_int64)),
        "has_tiles": (c_int64, ()),
    },
    "heads": {
        "unit_rows": (None, (c_void_p, *[c_int64] * 4, c_double, c_void_p, c_int64)),
        "add_rows": (None, (c_void_p, c_void_p, c_int64, c_int64, c_void_p)),
        "candidates": (None, (c_void_p, *[c_int64] * 3, *[c_double] * 2, *[c_void_p] * 4)),
    },
}
"""Result and arguments of each library's functions ``foredraft_*``."""


def declared(library: ctypes.CDLL, name: str) -> ctypes.CDLL:
    """The library of this name, with its functions declared."""
    for function, (result, arguments) in FUNCTIONS[name].items():
        found = getattr(library, f"foredraft_{function}")
        found.restype, found.argtypes = result, arguments
    return library
