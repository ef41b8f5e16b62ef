"""The small model of `test_split`, and what its second and third processes do."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.random_model import random_config, random_weights
from examples.tensor_parallel.split import Processes, follow
from foredraft.models.native.config import DecoderConfig, RotaryEmbedding
from foredraft.models.native.weights import DecoderWeights

MOST = 3


def model() -> tuple[DecoderConfig, DecoderWeights]:
    """Six key-value heads: two and three processes can share them."""
    config = replace(
        random_config("smollm2-135m"),
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=12,
        num_key_value_heads=6,
        head_dim=32,
        ropes=(RotaryEmbedding(10000.0, 32),),
        vocab_size=192,
    )
    torch.manual_seed(3)
    weights = random_weights(config, torch.float32, "cpu")
    for matrix in weights.tensors().values():
        if matrix.ndim == 2:
            matrix *= 6.0
    return config, weights


def groups(meeting: Path, place: int) -> dict[int, Processes]:
    """All three processes, and the first two of them; by their number."""
    waits = timedelta(seconds=120)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=place, world_size=MOST, timeout=waits
    )
    both = dist.new_group([0, 1], timeout=waits)
    return {2: Processes(both if place < 2 else None), 3: Processes(dist.group.WORLD)}


def main() -> None:
    torch.set_num_threads(1)
    meeting, place = Path(sys.argv[1]), int(sys.argv[2])
    for count, processes in groups(meeting, place).items():
        if place < count:
            follow(*model(), processes)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
