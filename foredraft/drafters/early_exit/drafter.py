"""Self-speculation: some of the target's own layers draft, all of them verify.

With ``exit_layer`` the first layers, the final norm and the head draft (LayerSkip, arXiv
2404.16710). They work on the target's own cache, and verification goes on from what they computed.
With ``skip`` chosen attention and MLP sublayers are left out (Draft & Verify, arXiv 2309.08168).
What comes after a gap differs from the target's, so this draft has a cache of its own.

Shape legend: V vocabulary, E hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from foredraft.core.errors import ConfigError
from foredraft.core.proposal import Proposal
from foredraft.core.tree import TokenTree
from foredraft.drafters.base import DraftRow
from foredraft.drafters.common.chain import ChainDrafter
from foredraft.models.base import (
    Computed,
    LayeredTarget,
    ScoreRow,
    ShallowTarget,
)

_MOST_PENDING = 256
"""A row with more unread tokens than this is not drafted for: its prompt is read first."""

_SUBLAYERS = re.compile(r"([am]?)(\d+)(?:-(\d+))?")


class SharedCachePredictor:
    """The target's first layers, on the target's own cache.

    The cache entries that it leaves behind are not committed. What else can be reused of a draft
    is handed out with it, and forgotten.

    Args:
        target: the target.
        shallow: its first layers.
    """

    def __init__(self, target: LayeredTarget, shallow: ShallowTarget) -> None:
        self._cache, self._max_context = target.cache, target.max_context
        self._shallow = shallow
        self._computed: dict[int, Computed] = {}

    def begin(self, request_id: int) -> None:
        pass

    def has_room(self, row: DraftRow) -> bool:
        num_pending = len(row.tokens) - self._cache.length(row.slot)
        return num_pending <= _MOST_PENDING and len(row.tokens) + row.budget <= self._max_context

    def next_logits(
        self, rows: Sequence[DraftRow], drafts: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        logits, computed = self._shallow.score_last(self._reads(rows, drafts))
        self._computed |= {row.request_id: c for row, c in zip(rows, computed, strict=True)}
        return logits

    def next_states(
        self, rows: Sequence[DraftRow], drafts: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """What the layers make of the last token of each row and its draft so far; [E]."""
        states, computed = self._shallow.read_last(self._reads(rows, drafts))
        self._computed |= {row.request_id: c for row, c in zip(rows, computed, strict=True)}
        return states

    def _reads(self, rows: Sequence[DraftRow], drafts: Sequence[Sequence[int]]) -> list[ScoreRow]:
        # Popped: after a failure nothing is left to go on from.
        return [
            ScoreRow(
                row.slot,
                row.tokens[self._cache.length(row.slot) :],
                TokenTree.chain(draft),
                computed=self._computed.pop(row.request_id, None),
            )
            for row, draft in zip(rows, drafts, strict=True)
        ]

    def take_computed(self, request_id: int) -> Computed | None:
        """What the last draft of a request has computed of it."""
        return self._computed.pop(request_id, None)

    def end(self, request_id: int) -> None:
        self._computed.pop(request_id, None)


class SharedCacheDrafter(ChainDrafter):
    """Drafts on the target's own cache; verification goes on from what drafting computed."""

    def __init__(self, predictor: SharedCachePredictor, min_confidence: float = 0.0) -> None:
        super().__init__(predictor, min_confidence)
        self._shared = predictor

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        proposals = super().propose(rows)
        return [
            replace(proposal, computed=self._shared.take_computed(row.request_id))
            for proposal, row in zip(proposals, rows, strict=True)
        ]


def parse_skip(skip: object, num_layers: int) -> tuple[frozenset[int], frozenset[int]]:
    """Layers without attention and layers without MLP, from text such as ``"a4-6,m5,9"``.

    Args:
        skip: parts separated by commas: ``a`` for attention, ``m`` for MLP, neither for the whole
            layer, and a layer number from 0 or a range with both ends.

    Raises:
        ConfigError: it cannot be read, names a layer that does not exist, or leaves no layer.
    """
    left_out: dict[str, set[int]] = {"a": set(), "m": set()}
    for part in str(skip).replace(" ", "").split(","):
        found = _SUBLAYERS.fullmatch(part)
        if not found:
            raise ConfigError(f"skip is {skip!r}; write it like 'a4-6,m5,9': {part!r} is no part")
        first, last = int(found[2]), int(found[3] or found[2])
        if not first <= last < num_layers:
            raise ConfigError(f"skip part {part!r}: the target has layers 0 to {num_layers - 1}")
        for kind in found[1] or "am":
            left_out[kind] |= set(range(first, last + 1))
    if len(left_out["a"] & left_out["m"]) == num_layers:
        raise ConfigError(f"skip {skip!r} leaves no layer to draft with")
    return frozenset(left_out["a"]), frozenset(left_out["m"])
