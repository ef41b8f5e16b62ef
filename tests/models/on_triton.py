"""Kernels of Triton run on a GPU, or on the CPU by its interpreter."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from foredraft.core.tree import ROOT, TokenTree
from foredraft.models.base import ScoreRow
from foredraft.models.native.cuda import PagedDecoder
from foredraft.models.native.target import NativeTarget

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NEEDS_GPU = pytest.mark.skipif(
    not (torch.cuda.is_available() or INTERPRETED), reason="needs a GPU, or TRITON_INTERPRET=1"
)
DEVICE = "cpu" if INTERPRETED else "cuda"
TREE = TokenTree((7, 8, 9, 8, 10, 11, 8), (ROOT, ROOT, 0, 0, 1, 2, 4))


@dataclass
class Pair:
    """An eager and a graphed target that are fed the same; every step compares them."""

    eager: NativeTarget
    graphed: NativeTarget
    slots: list[int] = field(default_factory=list)

    def open(self, tokens: Sequence[int] = ()) -> int:
        """A slot of both that holds ``tokens``."""
        slot, other = self.eager.cache.allocate(), self.graphed.cache.allocate()
        assert slot == other
        if tokens:
            self.score([ScoreRow(slot, tokens)])
            self.keep(slot, len(tokens))
        return slot

    def score(self, rows: Sequence[ScoreRow], taps: Sequence[int] = ()) -> None:
        pairs = zip(self.eager.score(rows, taps), self.graphed.score(rows, taps), strict=True)
        for expected, actual in pairs:
            assert actual.logits_NV.dtype == torch.float32
            assert_close(actual.logits_NV, expected.logits_NV)
            assert actual.taps.keys() == expected.taps.keys()
            for layer, tapped_TE in actual.taps.items():
                assert_close(tapped_TE, expected.taps[layer])

    def keep(self, slot: int, num_pending: int, path: Sequence[int] = ()) -> None:
        for target in (self.eager, self.graphed):
            target.cache.keep(slot, num_pending, path)
        counted = self.eager.cache.length(slot)
        for expected, actual in zip(
            *(entries(target, slot, counted) for target in (self.eager, self.graphed)), strict=True
        ):
            assert_close(actual, expected)

    def free(self, slot: int) -> None:
        self.eager.cache.free(slot)
        self.graphed.cache.free(slot)

    @property
    def num_replayed(self) -> int:
        decoder = self.graphed.decoder
        assert isinstance(decoder, PagedDecoder)
        return decoder.num_replayed


def entries(target: NativeTarget, slot: int, end: int) -> list[Tensor]:
    """Keys and values [H, end, D] of a slot, layer by layer."""
    store, table = target.cache.store, target.cache.table(slot)
    return [x for layer in range(store.shape.num_layers) for x in store.get(layer, table, end)]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert torch.allclose(actual, expected, rtol=0.0, atol=1e-4)
