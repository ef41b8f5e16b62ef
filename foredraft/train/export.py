"""Trained heads in the layout that other engines load: speculators, which vLLM and SGLang read.

https://github.com/vllm-project/speculators: a ``config.json`` with ``speculators_config`` (the
algorithm, how tokens are proposed, whose head it is) beside the head's own sizes, and
``model.safetensors``. The target's embeddings are left out; a reader takes them from the target.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.core.errors import ConfigError, unknown
from foredraft.drafters.heads.eagle import LAYER_PREFIXES, EagleModule, names_of
from foredraft.drafters.trained import HeadInfo, read_head, read_info
from foredraft.system.files import write_tensors, write_text

FORMATS = ("speculators",)
_VERSION = "0.7.0"
"""Version of speculators that has this schema."""
_DRAFT_TOKENS = 3
_WHY_NOT = {
    "hidden_head": "its layer attends over the state alone and adds to state and embedding "
    "together, and its own state goes through a matrix of its own",
}
"""Reasons why similar kinds cannot be exported."""


def export_head(
    directory: Path, out: Path, format: str, verifier: str, architectures: Sequence[str]
) -> None:
    """Write a head's folder for other engines.

    Args:
        directory: the head.
        out: the folder to write; an existing head is overwritten, other files are not.
        format: one of `FORMATS`.
        verifier: the target's name in other engines: a hub id or a directory.
        architectures: of the target, as its ``config.json`` has them.

    Raises:
        ConfigError: the head is of a kind that the format has no place for, or ``out`` holds
            something else.
        ModelLoadError: the head is damaged.
        TrainingError: it cannot be written.
    """
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    info = read_info(directory)
    _check_kind(info, directory, format)
    _check_free(out)
    module = read_head(directory, EagleModule, info)
    config = published_config(module) | {
        "speculators_version": _VERSION,
        "torch_dtype": "bfloat16",
        "speculators_config": _proposing(verifier, architectures),
    }
    out.mkdir(parents=True, exist_ok=True)
    write_tensors(out / "model.safetensors", published_tensors(module), {"format": "pt"})
    write_text(out / "config.json", json.dumps(config, indent=2) + "\n")


def _proposing(verifier: str, architectures: Sequence[str]) -> Mapping[str, Any]:
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": _DRAFT_TOKENS,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [greedy],
        "verifier": {"name_or_path": verifier, "architectures": list(architectures)},
    }


def _check_kind(info: HeadInfo, directory: Path, format: str) -> None:
    if info.kind == EagleModule.kind:
        return
    why = f": {_WHY_NOT[info.kind]}" if info.kind in _WHY_NOT else ""
    raise ConfigError(
        f"{format} has no place for the head in {directory}, which is of kind {info.kind!r}{why}. "
        "Train one that it has a place for: foredraft train eagle"
    )


def _check_free(out: Path) -> None:
    if not out.exists() or not any(out.iterdir()):
        return
    path = out / "config.json"
    if not path.is_file() or "speculators_model_type" not in path.read_text(errors="replace"):
        raise ConfigError(f"{out} is there already and holds no exported head; choose another")


def published_tensors(module: EagleModule) -> dict[str, Tensor]:
    """A head's weights in bfloat16 under the names of speculators, with both maps."""
    own, shape, found = module.state_dict(), module.shape, dict[str, Tensor]()
    query, key = (
        count * shape.head_dim for count in (shape.num_attention_heads, shape.num_key_value_heads)
    )
    sizes = {"layer.qkv.weight": [query, key, key]}
    for mine, theirs in names_of(module, LAYER_PREFIXES[0]).items():
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
    """The head's part of a speculators ``config.json``; see `foredraft.train.export`."""
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
