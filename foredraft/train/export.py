"""EAGLE heads in the layout of speculators, which vLLM and SGLang load.

The target's embeddings are left out: readers take them from the target.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.core.errors import ConfigError
from foredraft.drafters.heads.eagle import LAYER_PREFIXES, EagleModule, names_of
from foredraft.drafters.trained import WEIGHTS, check_kind, read_head, read_info
from foredraft.system.files import write_tensors, write_text


def export_head(directory: Path, out: Path) -> None:
    """Write a trained EAGLE head for other engines.

    Raises:
        ConfigError: the head is of another kind, or ``out`` is there already.
        ModelLoadError: the head is damaged.
        TrainingError: it cannot be written.
    """
    info = read_info(directory)
    check_kind(info, EagleModule.kind, directory)
    if out.exists():
        raise ConfigError(f"{out} is there already: name a new folder")
    head = read_head(directory, EagleModule, info)
    out.mkdir(parents=True)
    try:
        write_tensors(out / WEIGHTS, published_tensors(head), {"format": "pt"})
        config = published_config(head, info.target.name)
        write_text(out / "config.json", json.dumps(config, indent=2) + "\n")
    except BaseException:
        shutil.rmtree(out)
        raise


def published_tensors(head: EagleModule) -> dict[str, Tensor]:
    """Weights in bfloat16 by their published names, and the token of each output row."""
    own, shape, found = head.state_dict(), head.shape, dict[str, Tensor]()
    heads = (shape.num_attention_heads, shape.num_key_value_heads, shape.num_key_value_heads)
    for mine, theirs in names_of(head, LAYER_PREFIXES[0]).items():
        equal = [len(own[mine]) // len(theirs)] * len(theirs)
        sizes = [n * shape.head_dim for n in heads] if mine == "layer.qkv.weight" else equal
        pieces = own[mine].bfloat16().split(sizes)
        found |= dict(zip(theirs, pieces, strict=True))
    if (ids_R := head.output_ids_R) is not None:
        has_row_V = torch.zeros(shape.vocab_size, dtype=torch.bool)
        has_row_V[ids_R] = True
        found |= {"d2t": ids_R - torch.arange(len(ids_R)), "t2d": has_row_V}
    return found


def published_config(head: EagleModule, target: str) -> dict[str, Any]:
    """The ``config.json`` of a published head of the target of this name."""
    chosen, layer = head.config, asdict(head.shape) | {"num_hidden_layers": 1}
    # A head has no longest text: readers bound this number by their target's.
    layer |= {"model_type": "llama", "hidden_act": "silu", "max_position_embeddings": 131_072}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.7.0",
        "torch_dtype": "bfloat16",
        "draft_vocab_size": len(head.output),
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in head.taps],
        "fc_norm": chosen["tap_norms"] == "each",
        "norm_before_fc": chosen["tap_norms"] == "all",
        "norm_before_residual": chosen["residual"] == "normed",
        "norm_output": chosen["returns"] == "normed",
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": target, "architectures": ["LlamaForCausalLM"]},
        },
    }
