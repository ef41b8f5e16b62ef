"""The kernels of GPUs compute what the eager decoder does, and company changes no bit.

On a CPU they run in Triton's interpreter, where it is installed: `TRITON_INTERPRET=1 pytest ...`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foredraft.core.params import SamplingParams
from foredraft.core.record import StepRecord
from foredraft.core.tree import EMPTY_TREE, TokenTree
from foredraft.llm import LLM
from foredraft.models.base import ScoreRow
from foredraft.models.native.cuda import TILE, ExactDecoder, PagedDecoder
from foredraft.models.native.target import NativeTarget
from foredraft.options import LoadOptions
from tests.models.checkpoints import made, text
from tests.models.on_triton import DEVICE, INTERPRETED, NEEDS_GPU
from tests.models.test_graphed import TREE, Pair

pytestmark = NEEDS_GPU


@pytest.fixture(
    scope="module",
    params=[
        *("llama", "qwen3", "qwen2", "mistral-window", "gemma2", "phi3", "granite"),
        *("mixtral", "qwen3-moe"),
    ],
)
def checkpoint(request: pytest.FixtureRequest) -> Path:
    return made(request.param)


@pytest.fixture
def pair(checkpoint: Path) -> Pair:
    eager = NativeTarget.load(checkpoint, device=DEVICE)
    return Pair(eager, NativeTarget.load(checkpoint, device=DEVICE, new_decoder=PagedDecoder))


def test_steps_equal_the_eager_decoder(pair: Pair) -> None:
    slot, other = pair.open(text(20)), pair.open(text(150))
    for tree in (EMPTY_TREE, TokenTree.chain((5, 6, 7)), TREE):
        pair.score([ScoreRow(slot, [11], tree)])
        pair.keep(slot, 1, tree.paths[-1] if len(tree) else ())
    rows = [ScoreRow(slot, [11, 12], TREE), ScoreRow(other, [3], TokenTree.chain((4, 5)))]
    pair.score(rows, taps=(1,))
    assert pair.num_replayed == 4


def test_what_no_token_sees_may_be_anything(pair: Pair) -> None:
    target, slot = pair.graphed, pair.open(text(30))
    rows = [ScoreRow(slot, [5], TREE)]
    expected = target.score(rows)[0].logits_NV
    target.cache.will_write(slot, 34)
    for store in (target.cache.store.keys, target.cache.store.values):
        store[[*target.cache.table(slot)], :, :, 30:] = torch.nan
        store[-1] = torch.nan  # where padding writes
    assert torch.equal(target.score(rows)[0].logits_NV, expected)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter's products depend on a token's place")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_company_changes_no_bit(checkpoint: Path, dtype: torch.dtype) -> None:
    """Chains of 2 to 16, and paths through a tree, against the same tokens one by one."""
    target = NativeTarget.load(checkpoint, dtype, DEVICE, new_decoder=PagedDecoder)
    cache, slot, tokens = target.cache, target.cache.allocate(), text(16, seed=3)
    target.score([ScoreRow(slot, text(125))])
    cache.keep(slot, 125, ())

    def alone(some: list[int]) -> torch.Tensor:
        found = []
        for token in some:
            found.append(target.score([ScoreRow(slot, [token])])[0].logits_NV)
            cache.keep(slot, 1, ())
        cache.truncate(slot, 125)
        return torch.cat(found)

    expected = alone(tokens)
    for size in range(2, 17):
        row = ScoreRow(slot, tokens[:1], TokenTree.chain(tokens[1:size]))
        assert torch.equal(target.score([row])[0].logits_NV, expected[:size]), size
    scored = target.score([ScoreRow(slot, [5], TREE)])[0].logits_NV
    for node, path in enumerate(TREE.paths):
        along = alone([5, *(TREE.tokens[i] for i in path)])
        assert torch.equal(scored[node + 1], along[-1]), node


@pytest.mark.parametrize("decoder", [PagedDecoder, ExactDecoder])
def test_nothing_is_recorded_while_a_request_waits(decoder: type[PagedDecoder]) -> None:
    target = NativeTarget.load(made("llama"), device=DEVICE, new_decoder=decoder)
    llm = LLM(target, None, LoadOptions(drafter="suffix", num_draft_tokens=40))
    target.record([1])
    recorder = target.decoder
    assert isinstance(recorder, PagedDecoder)
    before, longest = recorder.num_recorded, 0

    def follow(step: StepRecord) -> None:
        nonlocal longest
        longest = max(longest, *(len(row.proposal.tree) for row in step.rows))

    llm.policy.trace = follow
    for temperature in (0.0, 1.0):
        llm.generate([text(9) * 5], SamplingParams(max_tokens=24, temperature=temperature, seed=1))
    slot = target.cache.allocate()
    target.cache.fill(slot, 300)
    for tree, taps in ((TREE, (1,)), (TokenTree.chain(range(TILE - 1)), ()), (EMPTY_TREE, (1,))):
        scores = target.score([ScoreRow(slot, [5], tree)], taps)
        assert scores[0].taps.keys() == {*taps}
    assert recorder.num_recorded == before
    assert recorder.num_replayed > 0
    assert 0 < longest < TILE  # more would have other bits than one token has
