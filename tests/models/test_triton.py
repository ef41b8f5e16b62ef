"""The kernels of GPUs compute what the eager decoder does, and company changes no bit.

On a CPU they run in Triton's interpreter, where it is installed: `TRITON_INTERPRET=1 pytest ...`.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from foredraft.core.params import SamplingParams
from foredraft.core.record import StepRecord
from foredraft.core.tree import EMPTY_TREE, ROOT, TokenTree
from foredraft.llm import LLM
from foredraft.models.base import ScoreRow
from foredraft.models.native.cuda import TILE, ExactDecoder, PagedDecoder
from foredraft.models.native.model import EagerDecoder
from foredraft.models.native.target import NativeTarget
from foredraft.options import LoadOptions
from tests.models.checkpoints import made, text
from tests.models.on_triton import DEVICE, INTERPRETED, NEEDS_GPU, TREE, Pair, entries

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


@pytest.fixture
def llamas() -> Pair:
    """Of one family: what decoders do, whatever their layers are."""
    eager, paged = (
        NativeTarget.load(made("llama"), device=DEVICE, new_decoder=new)
        for new in (EagerDecoder, PagedDecoder)
    )
    return Pair(eager, paged)


def test_a_random_course_of_steps_equals_the_eager_decoder(llamas: Pair) -> None:
    """Rows come, draft, keep, go back and leave; the cache grows on the way."""
    generator, slots = random.Random(5), list[int]()
    for _ in range(15):
        if len(slots) < 3 and generator.random() < 0.5:
            slots.append(llamas.open(text(generator.choice((0, 3, 40, 200)))))
        chosen = generator.sample(slots, generator.randint(min(1, len(slots)), len(slots)))
        if not chosen:
            continue
        trees = [random_tree(generator) for _ in chosen]
        rows = [ScoreRow(slot, [9], tree) for slot, tree in zip(chosen, trees, strict=True)]
        llamas.score(rows, generator.choice(((), (2, 0))))
        for slot, tree in zip(chosen, trees, strict=True):
            llamas.keep(slot, 1, generator.choice([(), *tree.paths]))
        if generator.random() < 0.1:
            slots.remove(chosen[0])
            llamas.free(chosen[0])
    assert llamas.num_replayed > 8


def random_tree(generator: random.Random) -> TokenTree:
    size = generator.choice((0, 0, 1, 3, 7, 12))
    parents = [generator.randrange(ROOT, node) for node in range(size)]
    return TokenTree(tuple(text(size)), tuple(parents))


def test_only_the_plans_entries_are_written(llamas: Pair) -> None:
    target = llamas.graphed
    cache, slots = target.cache, [llamas.open(text(30, seed=seed)) for seed in range(4)]
    target.score([ScoreRow(slots[2], [5], TREE), ScoreRow(slots[0], [6])])
    before = [entries(target, slot, 64) for slot in slots]
    target.score([ScoreRow(slots[2], [8], TREE), ScoreRow(slots[0], [9])])
    expected = [{30}, set(), {*range(30, 38)}, set()]
    for slot, written in zip(slots, expected, strict=True):
        for old, new in zip(before[slot], entries(target, slot, 64), strict=True):
            assert set((old != new).any(-1).any(0).nonzero()[:, 0].tolist()) <= written
    cache.check()


def test_a_broken_row_does_not_harm_the_next_user_of_its_slot(llamas: Pair) -> None:
    target, prompt, broken = llamas.graphed, text(20), text(60, seed=1)
    layer = target.weights.layers[0]
    slot = target.cache.allocate()
    kept = layer.attention_norm_E.clone()
    layer.attention_norm_E.fill_(torch.nan)
    target.score([ScoreRow(slot, broken)])
    target.cache.keep(slot, len(broken), ())
    [scores] = target.score([ScoreRow(slot, [3], TREE)])
    assert scores.logits_NV.isnan().all()
    layer.attention_norm_E.copy_(kept)
    target.cache.free(slot)
    assert llamas.open(prompt) == slot
    llamas.score([ScoreRow(slot, [3], TREE)])
    llamas.keep(slot, 1, (1, 4))
    llamas.score([ScoreRow(slot, [4])])


def test_logits_and_taps_belong_to_the_caller(llamas: Pair) -> None:
    target = llamas.graphed
    slot = target.cache.allocate()
    [first] = target.score([ScoreRow(slot, [5], TREE)], taps=(0,))
    kept = first.logits_NV.clone(), first.taps[0].clone()
    target.score([ScoreRow(slot, [6], TREE)], taps=(0,))
    assert torch.equal(first.logits_NV, kept[0])
    assert torch.equal(first.taps[0], kept[1])


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
