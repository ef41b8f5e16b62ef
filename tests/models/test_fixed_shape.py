"""The fixed-shape decoder computes what the eager one does, and the same bits in any company."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foredraft.core.errors import CapabilityError
from foredraft.core.tree import TokenTree
from foredraft.models.base import ScoreRow
from foredraft.models.native.model import FixedShapeDecoder, probe
from foredraft.models.native.target import NativeTarget
from foredraft.models.table import TableModel
from tests.models.checkpoints import made

TEXT = [(i * 7) % 250 + 3 for i in range(40)]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def checkpoint(request: pytest.FixtureRequest) -> Path:
    return made(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probe_accepts_this_machine(checkpoint: Path, dtype: torch.dtype) -> None:
    probe(NativeTarget.load(checkpoint, dtype, new_decoder=FixedShapeDecoder))


def test_equals_the_eager_decoder(checkpoint: Path) -> None:
    eager = NativeTarget.load(checkpoint)
    fixed = NativeTarget.load(checkpoint, new_decoder=FixedShapeDecoder)
    tree = TokenTree((5, 6, 7, 8), (-1, -1, 0, 1))
    scored = []
    for target in (eager, fixed):
        slot = target.cache.allocate()
        scored.append(target.score([ScoreRow(slot, TEXT, tree)])[0].logits_NV)
    assert torch.allclose(*scored, atol=1e-4)


def test_a_tree_node_has_the_bits_of_its_path_alone(checkpoint: Path) -> None:
    target = NativeTarget.load(checkpoint, torch.bfloat16, new_decoder=FixedShapeDecoder)
    tree = TokenTree((5, 6, 7, 8), (-1, -1, 0, 1))
    slots = [target.cache.allocate() for _ in range(3)]
    other = ScoreRow(slots[1], TEXT[:9])
    in_company = target.score([other, ScoreRow(slots[0], TEXT, tree)])[1].logits_NV
    for node, path in enumerate(tree.paths):
        chain = TokenTree.chain(tree.tokens[i] for i in path)
        alone = target.score([ScoreRow(slots[2], TEXT, chain)])[0].logits_NV
        assert torch.equal(in_company[node + 1], alone[-1])


def test_probe_refuses_a_target_whose_bits_depend_on_the_shape() -> None:
    class Noisy(TableModel):
        def score(self, rows, taps=()):  # type: ignore[no-untyped-def]
            scores = super().score(rows, taps)
            for score in scores:
                score.logits_NV.mul_(1 + 1e-12 * len(score.logits_NV))
            return scores

    model = Noisy.random(30, seed=1)
    noisy = Noisy(30, model.probs)
    with pytest.raises(CapabilityError, match="exact=True"):
        probe(noisy)
