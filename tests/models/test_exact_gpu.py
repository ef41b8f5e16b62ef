"""`exact=True` on a GPU: a text has the same bits however it is read.

`TRITON_INTERPRET=1` runs it on a CPU, where it compares numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.random_model import random_config, random_weights
from foredraft.core.tree import TokenTree
from foredraft.models.base import ScoreRow
from foredraft.models.native.cuda import ExactDecoder
from foredraft.models.native.model import probe
from foredraft.models.native.target import NativeTarget
from tests.models.checkpoints import made
from tests.models.on_triton import DEVICE, INTERPRETED, NEEDS_GPU, TREE

pytestmark = NEEDS_GPU
LONG = [(i * 37 + 11) % 250 for i in range(330)]
TEXT = LONG[: 40 if INTERPRETED else 90]
CUTS = (
    [([20, 20], False), ([7, 20, 13], True), ([38, 1, 1], True)]
    if INTERPRETED
    else [([64, 26], False), ([7, 70, 13], True), ([80, *[1] * 10], True)]
)
OTHER = [(i * 13 + 5) % 250 for i in range(40)]


@pytest.fixture(scope="module")
def target() -> NativeTarget:
    if not INTERPRETED:
        return NativeTarget.load(
            made("llama"), torch.bfloat16, device=DEVICE, new_decoder=ExactDecoder
        )
    like = random_config("smollm2-135m")
    config = replace(  # a head of a token is a program, of which there are few a second
        like,
        **dict.fromkeys(("hidden_size", "intermediate_size"), 32),
        **dict.fromkeys(("num_hidden_layers", "num_key_value_heads"), 1),
        vocab_size=256,
        num_attention_heads=2,
        head_dim=16,
        ropes=tuple(replace(rope, size=16) for rope in like.ropes),
    )
    weights = random_weights(config, torch.float32, DEVICE)
    memory = 2048 * config.kv_shape.bytes_per_token(torch.float32)
    return NativeTarget(config, weights, ExactDecoder, 512, memory)


def same(mine: Tensor, theirs: Tensor) -> bool:
    """Bit for bit on a card. numpy's products depend on a row's place among the others."""
    return torch.allclose(mine, theirs, atol=1e-5) if INTERPRETED else torch.equal(mine, theirs)


def read(
    target: NativeTarget, cuts: Sequence[int], company: bool = False, text: Sequence[int] = TEXT
) -> tuple[Tensor, ...]:
    """Logits behind the text, the last layer's outputs of it, and its keys."""
    cache, taps, start = target.cache, list[Tensor](), 0
    slot, other = cache.allocate(), cache.allocate()
    for size in cuts:
        rows = [ScoreRow(slot, text[start : start + size])]
        if company:
            rows.insert(0, ScoreRow(other, [OTHER[start % 40]], TokenTree((5, 6, 7), (-1, -1, 0))))
        scores = target.score(rows, (target.num_layers - 1,))
        mine = scores[len(rows) - 1]
        taps.append(mine.taps[target.num_layers - 1])
        cache.keep(slot, size, ())
        if company:
            cache.keep(other, 1, ())
        start += size
    keys, _ = cache.store.get(0, cache.table(slot), len(text))
    cache.free(slot)
    cache.free(other)
    return mine.logits_NV[-1], torch.cat(taps), keys


def test_bits_depend_on_no_cut_and_no_company(target: NativeTarget) -> None:
    whole = read(target, [len(TEXT)])
    for cuts, company in CUTS:
        for mine, theirs in zip(read(target, cuts, company), whole, strict=True):
            assert same(mine, theirs)


def test_long_prompts_have_the_same_bits_in_large_pieces(target: NativeTarget) -> None:
    """256, 64 and 10 tokens, or pieces of 64 and less."""
    whole = read(target, [330], text=LONG)
    assert isinstance(target.decoder, ExactDecoder)
    sizes = {(bucket.tokens, bucket.num_wanted) for bucket in target.decoder._graphs}
    assert {(256, 16), (64, 16), (16, None)} <= sizes
    for mine, theirs in zip(read(target, [*[64] * 5, 10], text=LONG), whole, strict=True):
        assert same(mine, theirs)


@pytest.mark.parametrize("length", [20, 62])
def test_a_tree_behind_a_prompt_is_not_cut(target: NativeTarget, length: int) -> None:
    slots = [target.cache.allocate() for _ in range(2)]
    together = target.score([ScoreRow(slots[0], LONG[:length], TREE)])[0].logits_NV
    target.score([ScoreRow(slots[1], LONG[: length - 1], wants_logits=False)])
    target.cache.keep(slots[1], length - 1, ())
    after = target.score([ScoreRow(slots[1], LONG[length - 1 : length], TREE)])[0].logits_NV
    assert same(together, after)
    for slot in slots:
        target.cache.free(slot)


def test_what_is_scored_together_is_in_its_order(target: NativeTarget) -> None:
    """Long rows and short ones, of which some want no logits."""
    slots = [target.cache.allocate() for _ in range(4)]
    rows = [
        ScoreRow(slots[0], LONG[:70]),
        ScoreRow(slots[1], OTHER[:3], TokenTree.chain((8, 9))),
        ScoreRow(slots[2], OTHER[:20], wants_logits=False),
        ScoreRow(slots[3], OTHER[:1]),
    ]
    together = target.score(rows, (0,))
    alone = [target.score([row], (0,))[0] for row in rows]
    for mine, theirs in zip(together, alone, strict=True):
        assert same(mine.logits_NV, theirs.logits_NV)
        assert same(mine.taps[0], theirs.taps[0])
    for slot in slots:
        target.cache.free(slot)


@pytest.mark.skipif(INTERPRETED, reason="compares bits")
def test_the_probe_accepts_it(target: NativeTarget) -> None:
    probe(target)
