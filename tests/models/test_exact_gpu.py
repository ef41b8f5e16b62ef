"""`exact=True` on a GPU: a text has the same bits however it is read.

`TRITON_INTERPRET=1` runs it on a CPU, where it compares numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from foredraft.core.tree import TokenTree
from foredraft.models.base import ScoreRow
from foredraft.models.native.cuda import ExactDecoder
from foredraft.models.native.model import probe
from foredraft.models.native.target import NativeTarget
from tests.models.checkpoints import made
from tests.models.on_triton import DEVICE, INTERPRETED, NEEDS_GPU

pytestmark = NEEDS_GPU
TEXT = [(i * 37 + 11) % 250 for i in range(90)]
OTHER = [(i * 13 + 5) % 250 for i in range(40)]


@pytest.fixture(scope="module")
def target() -> NativeTarget:
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    return NativeTarget.load(made("llama"), dtype, device=DEVICE, new_decoder=ExactDecoder)


def same(mine: Tensor, theirs: Tensor) -> bool:
    """Bit for bit on a card. numpy's products depend on a row's place among the others."""
    return torch.allclose(mine, theirs, atol=1e-5) if INTERPRETED else torch.equal(mine, theirs)


def read(target: NativeTarget, cuts: Sequence[int], company: bool = False) -> tuple[Tensor, ...]:
    """Logits behind the text, the last layer's outputs of it, and its keys."""
    cache, taps, start = target.cache, list[Tensor](), 0
    slot, other = cache.allocate(), cache.allocate()
    for size in cuts:
        rows = [ScoreRow(slot, TEXT[start : start + size])]
        if company:
            rows.insert(0, ScoreRow(other, [OTHER[start % 40]], TokenTree((5, 6, 7), (-1, -1, 0))))
        scores = target.score(rows, (target.num_layers - 1,))
        mine = scores[len(rows) - 1]
        taps.append(mine.taps[target.num_layers - 1])
        cache.keep(slot, size, ())
        if company:
            cache.keep(other, 1, ())
        start += size
    keys, _ = cache.store.get(0, cache.table(slot), len(TEXT))
    cache.free(slot)
    cache.free(other)
    return mine.logits_NV[-1], torch.cat(taps), keys


def test_bits_depend_on_no_cut_and_no_company(target: NativeTarget) -> None:
    whole = read(target, [90])
    for cuts, company in (([64, 26], False), ([7, 70, 13], True), ([80, *[1] * 10], True)):
        for mine, theirs in zip(read(target, cuts, company), whole, strict=True):
            assert same(mine, theirs)


def test_what_is_scored_together_is_in_its_order(target: NativeTarget) -> None:
    """Long rows and short ones, of which some want no logits."""
    slots = [target.cache.allocate() for _ in range(4)]
    rows = [
        ScoreRow(slots[0], TEXT),
        ScoreRow(slots[1], OTHER[:3], TokenTree.chain((8, 9))),
        ScoreRow(slots[2], OTHER, wants_logits=False),
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
