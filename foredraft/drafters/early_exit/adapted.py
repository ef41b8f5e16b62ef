"""Early exit by way of an adapter: the first layers' states go through a layer that was trained.

The first layers work on the target's own cache, as they do without an adapter; the adapter's
entries lie beside them.

Shape legend: E hidden size, R output rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from foredraft.core.tree import TokenTree
from foredraft.drafters.base import DraftRequest, DraftRow, Observation
from foredraft.drafters.common.llama_layer import LlamaLayer
from foredraft.drafters.common.output_rows import OutputRows
from foredraft.drafters.early_exit.drafter import SharedCacheDrafter, SharedCachePredictor
from foredraft.drafters.early_exit.module import AdapterModule
from foredraft.models.base import HeadRow, HeadTarget, HeadWeights, LayeredTarget


class AdaptedPredictor(SharedCachePredictor):
    """The target's first layers, then an adapter.

    Args:
        module: the trained adapter.
        target: its target; it has the capabilities ``shallow`` and ``cache_layers``.
    """

    def __init__(self, module: AdapterModule, target: LayeredTarget) -> None:
        super().__init__(target, target.shallow(module.exit_layer))
        self._runner = cast(HeadTarget, target).head_runner(
            HeadWeights(
                [cast(LlamaLayer, layer).weights() for layer in module.layers],
                module.norm.weight.detach(),
                module.output.detach(),
                module.shape,
            )
        )
        self._rows = OutputRows(module.output_ids_R, target.vocab_size)
        self._tap = module.exit_layer - 1
        self._slots: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self.layers = self._runner.layers

    def start(self, request: DraftRequest) -> None:
        self._slots[request.request_id] = request.slot

    def observe(self, observations: Sequence[Observation]) -> None:
        reads = [
            HeadRow(self._slots[seen.request_id], seen.start, seen.end - seen.start)
            for seen in observations
        ]
        self._runner.run(reads, torch.cat([seen.hidden(self._tap) for seen in observations]))
        self._ends |= {seen.request_id: seen.end for seen in observations}

    def has_room(self, row: DraftRow) -> bool:
        return self._ends.get(row.request_id) == len(row.tokens) - 1 and super().has_room(row)

    def next_logits(
        self, rows: Sequence[DraftRow], drafts: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        states = self.next_states(rows, drafts)
        reads = [
            HeadRow(row.slot, len(row.tokens) - 1, 1, TokenTree.chain(draft), len(draft))
            for row, draft in zip(rows, drafts, strict=True)
        ]
        _, logits_NR = self._runner.run(reads, torch.stack(states))
        return [self._rows.spread(logits_R) for logits_R in logits_NR]

    def end(self, request_id: int) -> None:
        super().end(request_id)
        self._slots.pop(request_id, None)
        self._ends.pop(request_id, None)


class AdaptedDrafter(SharedCacheDrafter):
    """Drafts chains with the target's first layers and an adapter.

    Args:
        module: the trained adapter.
        target: its target.
        min_confidence: see `foredraft.drafters.common.chain.ChainDraft`.
    """

    def __init__(
        self, module: AdapterModule, target: LayeredTarget, min_confidence: float = 0.0
    ) -> None:
        self._adapted = AdaptedPredictor(module, target)
        super().__init__(self._adapted, min_confidence)
        self.taps, self.layers = module.taps, (self._adapted.layers,)

    def begin(self, request: DraftRequest) -> None:
        super().begin(request)
        self._adapted.start(request)

    def observe(self, observations: Sequence[Observation]) -> None:
        self._adapted.observe(observations)
