"""Next tokens drawn in the forward: those that are drawn from its logits afterwards."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from foredraft.core.choices import DrawKey
from foredraft.core.sampling import draw_rows
from foredraft.core.tree import ROOT, TokenTree
from foredraft.models.base import ScoreRow
from foredraft.models.native.cpu import FusedDecoder
from foredraft.models.native.target import NativeTarget
from tests.models.checkpoints import made, need_kernel


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return made("llama")


def target(checkpoint: Path, num_threads: int = 1) -> NativeTarget:
    need_kernel()
    decoder = partial(FusedDecoder, num_threads=num_threads)
    return NativeTarget.load(checkpoint, torch.float32, new_decoder=decoder)


def rows(model: NativeTarget) -> list[ScoreRow]:
    """With and without drafts, a chunk that says nothing, and one that wants no draw."""
    slots = [model.cache.allocate() for _ in range(7)]
    tree, chain = TokenTree((4, 5, 6), (ROOT, ROOT, 0)), TokenTree.chain((4, 5))
    return [
        ScoreRow(slots[0], [1, 2, 3], draw=DrawKey(5, 3, 1.25)),
        ScoreRow(slots[1], [4], tree, draw=DrawKey(1 << 63, 1, 0.0)),
        ScoreRow(slots[2], [1, 2], wants_logits=False, draw=DrawKey(1, 2, 1.0)),
        ScoreRow(slots[3], [9], tree),
        ScoreRow(slots[4], [7, 8], tree, draw=DrawKey(0, 1 << 40, 0.5)),
        ScoreRow(slots[5], [2], draw=DrawKey(7, 7, 0.0)),
        ScoreRow(slots[6], [2, 3], chain, draw=DrawKey(9, 2, 1.5)),
    ]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_forward_draws_what_its_logits_give(checkpoint: Path, num_threads: int) -> None:
    model = target(checkpoint, num_threads)
    asked = rows(model)
    scores = model.score(asked)
    wanted = [
        (place, row.draw.ahead(ahead)[:3])
        for row, places in zip(asked, scores.row_wanted, strict=True)
        if row.draw
        for ahead, place in enumerate(places if row.tree.is_chain else places[:1])
    ]
    assert len(wanted) == 4 + 3  # of the chain behind each node
    laws = draw_rows(scores.logits_NV, wanted)
    expected = {place: law for (place, _), law in zip(wanted, laws, strict=True)}
    assert scores.drawn is not None
    for place, law in enumerate(scores.drawn):
        alone = expected.get(place)
        assert (law is None) == (alone is None)
        if law is not None and alone is not None:
            assert (law.drawn, law.token, law.scale) == (alone.drawn, alone.token, alone.scale)
            assert torch.equal(law.given_V, scores.logits_NV[place])


def test_a_row_without_a_largest_logit_gets_no_draw(checkpoint: Path) -> None:
    model = target(checkpoint)
    model.weights.head_VE[3] = torch.nan  # read in place
    scores = model.score(rows(model)[:2])
    assert scores.drawn == [None] * len(scores.logits_NV)


def test_a_decoder_that_draws_nothing_leaves_it_to_others(checkpoint: Path) -> None:
    eager = NativeTarget.load(checkpoint, torch.float32)
    assert eager.score(rows(eager)).drawn is None
    assert eager.score([ScoreRow(eager.cache.allocate(), [1])]).drawn is None
