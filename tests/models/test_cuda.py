"""Tests that need a GPU: recorded graphs replay with new inputs, and exact mode keeps bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foredraft.core.errors import CapabilityError
from foredraft.core.params import SamplingParams
from foredraft.core.tree import EMPTY_TREE, ROOT, TokenTree
from foredraft.llm import LLM
from foredraft.models.base import ScoreRow
from foredraft.models.native.cuda import PagedDecoder
from foredraft.models.native.target import NativeTarget
from foredraft.options import LoadOptions
from tests.models.checkpoints import made, text

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

TREE = TokenTree((7, 8, 9, 8, 10, 11, 8), (ROOT, ROOT, 0, 0, 1, 2, 4))
TREES = (EMPTY_TREE, TokenTree.chain((3, 4, 5)), TREE)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def checkpoint(request: pytest.FixtureRequest) -> Path:
    return made(request.param)


def decoder_of(target: NativeTarget) -> PagedDecoder:
    assert isinstance(target.decoder, PagedDecoder)
    return target.decoder


def course(target: NativeTarget) -> list[torch.Tensor]:
    """Logits of two rows over some steps: chains, trees, kept paths, and a cache that grows."""
    cache, found = target.cache, []
    slots = [cache.allocate() for _ in range(2)]
    for slot in slots:
        target.score([ScoreRow(slot, text(120, seed=slot))])
        cache.keep(slot, 120, ())
    for number in range(40):
        trees = [TREES[number % 3], TREES[number // 3 % 3]]
        pending = [text(1, seed=number), text(1, seed=-number)]
        rows = [ScoreRow(*parts) for parts in zip(slots, pending, trees, strict=True)]
        for row, scores in zip(rows, target.score(rows), strict=True):
            found.append(scores.logits_NV)
            cache.keep(row.slot, 1, row.tree.paths[-1] if len(row.tree) else ())
    for slot in slots:
        cache.free(slot)
    return found


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 0.08)], ids=str
)
def test_replayed_graphs_equal_the_eager_decoder(
    checkpoint: Path, dtype: torch.dtype, tolerance: float
) -> None:
    """Relative to the largest logit, over a course in which each graph is used again and again."""
    eager = NativeTarget.load(checkpoint, dtype, "cuda")
    graphed = NativeTarget.load(checkpoint, dtype, "cuda", PagedDecoder)
    expected = course(eager)
    for _ in range(2):  # the second time on graphs that are there already
        for actual, wanted in zip(course(graphed), expected, strict=True):
            assert torch.isfinite(actual).all()
            assert (actual - wanted).abs().max() <= tolerance * wanted.abs().max()
    decoder = decoder_of(graphed)
    assert 0 < decoder.num_recorded < decoder.num_replayed / 2


def test_dropped_graphs_make_room_for_others(checkpoint: Path) -> None:
    eager = NativeTarget.load(checkpoint, torch.float32, "cuda")

    graphed = NativeTarget.load(checkpoint, torch.float32, "cuda", PagedDecoder)
    decoder_of(graphed).max_graphs = 1
    for actual, wanted in zip(course(graphed), course(eager), strict=True):
        assert torch.allclose(actual, wanted, atol=2e-3 * wanted.abs().max().item())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_exact_texts_are_equal_with_and_without_drafts(
    checkpoint: Path, temperature: float
) -> None:
    prompts = [text(30) * 2, text(12, seed=1) * 3, text(5)]
    params = SamplingParams(max_tokens=24, seed=3, temperature=temperature)
    try:
        llm = LLM.load(str(checkpoint), device="cuda", exact=True, drafter="none", calibrate=False)
    except CapabilityError as refusal:
        pytest.skip(f"refused here: {refusal}")
    assert llm.plan is not None
    assert llm.plan.is_exact
    alone = [llm.generate([prompt], params)[0].token_ids for prompt in prompts]
    for name in ("none", "ngram", "token_recycling"):
        drafting = llm.with_drafter(LoadOptions(model=str(checkpoint), drafter=name))
        assert [r.token_ids for r in drafting.generate(prompts, params)] == alone


def test_a_loaded_model_runs_on_graphs_by_default(checkpoint: Path) -> None:
    llm = LLM.load(str(checkpoint), device="cuda")
    assert llm.plan is not None
    assert (llm.plan.decoder, llm.plan.dtype) == ("graphed", "bfloat16")
    assert len(llm.generate(text(20), SamplingParams(max_tokens=8))[0].token_ids) > 0
