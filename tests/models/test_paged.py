"""A step as the kernels of GPUs get it: buckets, lengths and paths, without GPU or Triton."""

from __future__ import annotations

import pytest
import torch

from foredraft.core.tree import ROOT, TokenTree
from foredraft.models.base import ScoreRow
from foredraft.models.native.cuda import Bucket, GridInputs, grid_inputs, paged_bucket
from foredraft.models.native.plan import ForwardPlan, plan_forward
from foredraft.models.native.target import NativeTarget
from tests.models.checkpoints import made

TREE = TokenTree((7, 8, 9, 8), (ROOT, ROOT, 0, 2))


@pytest.mark.parametrize(
    ("sizes", "start", "bucket"),
    [
        ([1], 10, Bucket(1, 16, 256, (), True)),
        ([16], 10, Bucket(1, 16, 256, (), True)),
        ([17], 10, Bucket(1, 32, 256, (), True)),
        ([1, 1, 1], 10, Bucket(16, 1, 256, (), True)),
        ([3, 1], 300, Bucket(4, 4, 1024, (), True)),
        ([1] * 32, 1023, Bucket(32, 1, 1024, (), True)),
    ],
)
def test_a_step_has_at_least_sixteen_tokens(sizes: list[int], start: int, bucket: Bucket) -> None:
    rows = [ScoreRow(i, [5], TokenTree.chain([6] * (n - 1))) for i, n in enumerate(sizes)]
    assert paged_bucket(plan_forward(rows, [start] * len(rows)), 64) == bucket


def test_paths_lead_through_the_tree() -> None:
    target = NativeTarget.load(made("llama"))
    cache, slot = target.cache, target.cache.allocate()
    target.score([ScoreRow(slot, [3] * 70)])
    cache.keep(slot, 70, ())
    cache.reserve(slot, 5)
    plan = plan_forward([ScoreRow(slot, [5], TREE)], [70])
    bucket = paged_bucket(plan, cache.store.block_size)
    assert not bucket.is_chain
    inputs = GridInputs.of(grid_inputs(plan, bucket, cache), bucket)
    assert inputs.token_ids[:6].tolist() == [5, 7, 8, 9, 8, 0]
    assert inputs.lengths.tolist() == [71, 72, 72, 73, 74, *[0] * 11]
    assert [inputs.paths[i, :4].tolist() for i in range(5)] == [
        *([0, 0, 0, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 1, 3, 0], [0, 1, 3, 4])
    ]
    assert inputs.starts[0] == 70
    assert inputs.blocks[5:].unique().tolist() == [cache.store.num_blocks]


@pytest.mark.parametrize("window", [1, 3, 12, 40])
def test_a_prompts_window_hides_what_lies_behind_it(window: int) -> None:
    rows = [ScoreRow(0, [1] * 9, TREE)]
    plan: ForwardPlan = plan_forward(rows, [20])
    mask = plan.mask(plan.rows[0], window)
    assert mask is not None
    for i, token in enumerate(plan.rows[0]):
        seen = [*range(plan.prefixes[token]), *plan.extras[token]][-window:]
        assert mask[i].nonzero()[:, 0].tolist() == seen
    assert mask.dtype == torch.bool
