"""A model that two and three processes share has the bits of one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from examples.tensor_parallel.split import Processes, SplitTarget, part_of
from examples.tensor_parallel.tests import split_process
from foredraft.core.errors import ConfigError, EngineStoppedError
from foredraft.core.params import SamplingParams
from foredraft.core.tree import TokenTree
from foredraft.llm import LLM
from foredraft.load import LoadedModel
from foredraft.models.base import ScoreRow
from foredraft.models.native.config import Experts
from foredraft.models.native.model import EagerDecoder
from foredraft.models.native.target import NativeTarget
from foredraft.options import LoadOptions
from tests.models.checkpoints import some_layers

TEXT = [(i * 37 + 11) % 190 for i in range(32)]
TREES: dict[str, Any] = {"num_draft_tokens": 9, "drafter_options": {"shape": "best-first"}}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
SAMPLED = SamplingParams(temperature=0.7, seed=5, max_tokens=8, n=2)


@dataclass(frozen=True)
class Seen:
    """The results of a model of that many processes.

    Attributes:
        logits: of `TEXT`, by how it was read.
        texts: by drafter, of a greedy and two sampled replies.
        accepted: tokens of drafts, by drafter.
        forked: logits behind a branch of a tree, in a slot that shares its blocks.
    """

    logits: dict[str, Tensor]
    texts: dict[str, list[tuple[int, ...]]]
    accepted: dict[str, int]
    forked: Tensor


def read(target: SplitTarget | NativeTarget, sizes: Sequence[int]) -> Tensor:
    """Logits after each token, scored as chains of these sizes."""
    slot, start, parts = target.cache.allocate(), 0, []
    for size in sizes:
        chain = TokenTree.chain(TEXT[start + 1 : start + size])
        parts.append(target.score([ScoreRow(slot, [TEXT[start]], chain)])[0].logits_NV)
        target.cache.keep(slot, 1, range(size - 1))
        start += size
    target.cache.free(slot)
    return torch.cat(parts)


def forked(target: SplitTarget) -> Tensor:
    """A branch of a tree is kept, its entries move; a slot is forked, its block is copied."""
    cache, slot = target.cache, target.cache.allocate()
    target.score([ScoreRow(slot, TEXT[:5], TokenTree([7, 9, 8], [-1, -1, 1]))])
    cache.keep(slot, 5, [1, 2])
    other = cache.fork(slot)
    target.score([ScoreRow(slot, [3])])
    scores = target.score([ScoreRow(other, [4]), ScoreRow(slot, [5])])
    cache.free(slot)
    cache.free(other)
    return scores.logits_NV


def seen(target: SplitTarget, draft: LoadedModel) -> Seen:
    texts, accepted = {}, {}
    drafters = LoadOptions(drafter="none"), LoadOptions(drafter="draft_model", **TREES)
    for options, model in zip(drafters, (None, draft), strict=True):
        llm = LLM(target, None, replace(options, max_batch_size=4), draft=model)
        results = llm.generate([TEXT], GREEDY) + llm.generate([TEXT], SAMPLED)
        texts[options.drafter] = [result.token_ids for result in results]
        accepted[options.drafter] = sum(result.stats.accepted for result in results)
    ways = {"one by one": [1] * 32, "sixteen": [16] * 2, "mixed": [1, 16, 5, 3, 7]}
    logits = {name: read(target, sizes) for name, sizes in ways.items()}
    return Seen(logits, texts, accepted, forked(target))


@pytest.fixture
def others(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A second and a third process; this one is the first, and they `split_process.groups`."""
    command = [sys.executable, "-m", split_process.__name__, str(tmp_path / "meeting")]
    started = [subprocess.Popen([*command, str(place)]) for place in (1, 2)]
    try:
        yield started
    finally:
        for other in started:
            other.kill()
            other.wait()
        dist.destroy_process_group()


def test_two_and_three_processes_give_the_bits_of_one(
    others: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    config, weights = split_process.model()
    whole = NativeTarget(config, weights, EagerDecoder)
    draft = LoadedModel(some_layers(whole, [0]))
    alone, eager = seen(SplitTarget(config, weights, Processes()), draft), read(whole, [len(TEXT)])
    for logits in alone.logits.values():
        assert torch.equal(logits, alone.logits["one by one"])
        torch.testing.assert_close(logits, eager)
    assert alone.texts["draft_model"] == alone.texts["none"]
    assert alone.accepted["draft_model"] > 0
    for count, processes in split_process.groups(tmp_path / "meeting", 0).items():
        target = SplitTarget(config, weights, processes)
        assert target.cache.shape.num_kv_heads == config.num_key_value_heads // count
        together = seen(target, draft)
        assert together.texts == alone.texts
        assert together.accepted["draft_model"] > 0
        assert torch.equal(together.forked, alone.forked)
        for name, logits in together.logits.items():
            assert torch.equal(logits, alone.logits[name]), (count, name)
        if count < split_process.MOST:
            target.end()
    others[-1].kill()
    llm = LLM(target, None, LoadOptions(drafter="none"))
    for _ in range(2):  # no row is blamed, and there is no second try
        with pytest.raises(EngineStoppedError, match="processes of a split model are apart"):
            llm.generate([TEXT, TEXT], GREEDY)


@dataclass(frozen=True)
class SoMany(Processes):
    """Of which this is the first, without the others."""

    count: int = 1  # type: ignore[misc]


def test_a_part_is_a_part_of_every_matrix() -> None:
    config, weights = split_process.model()
    parts = [part_of(config, weights, processes)[1] for processes in (Processes(), SoMany(None, 3))]
    sizes = [sum(matrix.numel() for matrix in part.layers[0].tensors().values()) for part in parts]
    norms = 2 * config.hidden_size
    assert sizes[1] - norms == (sizes[0] - norms) / 3


@pytest.mark.parametrize(
    ("count", "change", "problem"),
    [
        (5, {}, "5 processes cannot share"),
        (2, {"vocab_size": 160}, "vocab_size is 160"),
        (2, {"num_key_value_heads": 3}, "the 3 key-value heads"),
        (2, {"experts": Experts(4, 2, True)}, "mixtures"),
    ],
)
def test_what_cannot_be_shared_is_refused(count: int, change: dict[str, Any], problem: str) -> None:
    config, weights = split_process.model()
    with pytest.raises(ConfigError, match=problem):
        part_of(replace(config, **change), weights, SoMany(None, count))
