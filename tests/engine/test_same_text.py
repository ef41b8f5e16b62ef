"""Real decoders: the same text alone, with others, in chunks, preempted, and from the cache."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft.control.fixed import FixedBudget
from foredraft.core.params import SamplingParams
from foredraft.drafters.text.ngram import NgramDrafter
from foredraft.engine.engine import Engine
from foredraft.models.native.cpu import FusedDecoder
from foredraft.models.native.model import EagerDecoder
from foredraft.models.native.target import NativeTarget
from tests.engine.helpers import engine_of, generate
from tests.models.checkpoints import NATIVE_CONFIGS, need_kernel, save_checkpoint

PARAMS = SamplingParams(temperature=1.0, seed=4, max_tokens=140, ignore_eos=True)
PROMPTS = [[(7 * i + j) % 90 + 3 for j in range(5 + 9 * (i % 5))] for i in range(5)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_checkpoint(path, NATIVE_CONFIGS["llama"]())
    return path


def new_target(directory: Path, kind: str, num_blocks: int | None = None) -> NativeTarget:
    """The eager decoder in float32, or the fused kernel in bfloat16, perhaps with an int8 cache.

    Memory for so many blocks.
    """
    if kind != "eager":
        need_kernel()
    load = partial(
        NativeTarget.load,
        directory,
        torch.float32 if kind == "eager" else torch.bfloat16,
        new_decoder=EagerDecoder if kind == "eager" else FusedDecoder,
        cache_dtype=torch.int8 if kind == "int8 cache" else None,
    )
    target = load()
    if num_blocks is None:
        return target
    return load(cache_memory=num_blocks * target.cache.store.block_bytes)


def new_engine(target: NativeTarget, **options: Any) -> Engine:
    budget = FixedBudget(3)
    return engine_of(target, NgramDrafter(min_ngram_size=1), budget, **options)


@pytest.mark.parametrize("kind", ["eager", "fused", "int8 cache"])
def test_the_same_seed_gives_the_same_text(directory: Path, kind: str) -> None:
    target = new_target(directory, kind)
    alone = [generate(new_engine(target), [p], PARAMS)[0].token_ids for p in PROMPTS]
    together = new_engine(target, max_batch_size=16, max_step_tokens=16)
    assert [r.token_ids for r in generate(together, PROMPTS, PARAMS)] == alone
    short = new_engine(new_target(directory, kind, num_blocks=6), max_batch_size=16)
    assert [r.token_ids for r in generate(short, PROMPTS, PARAMS)] == alone
    assert short.stats().preemptions > 0
