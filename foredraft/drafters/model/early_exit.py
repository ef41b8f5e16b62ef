"""Early exit: the target's own first layers, its final norm and its head draft a chain.

LayerSkip, M. Elhoushi et al., arXiv 2404.16710. Drafting writes its entries where the target would,
and verification goes on from the first layers' hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from foredraft.core.errors import ConfigError
from foredraft.core.proposal import NOT_READY, Proposal
from foredraft.core.traits import DrafterTraits
from foredraft.core.tree import TokenTree
from foredraft.drafters.base import BaseDrafter, Drafter, DraftRow
from foredraft.drafters.model.chain import ChainDraft
from foredraft.drafters.spec import DrafterContext, DrafterSpec
from foredraft.models.base import Computed, LayeredTarget, ScoreRow, offered

_MOST_PENDING = 256
"""A row with more unread tokens than this is not drafted for: its prompt is read first."""


class SharedCacheDrafter(BaseDrafter):
    """Drafts chains with the target's first layers on the target's own cache.

    Rows that still draft share each forward. The entries that it leaves behind are not committed;
    the hidden states that verification goes on from travel with the proposal, and are forgotten.

    Args:
        target: the target.
        exit_layer: how many of its layers draft.
        min_confidence: see `ChainDraft`.
    """

    def __init__(self, target: LayeredTarget, exit_layer: int, min_confidence: float = 0.0) -> None:
        self._cache, self._max_context = target.cache, target.max_context
        self._shallow, self._min_confidence = target.shallow(exit_layer), min_confidence
        share = exit_layer / target.num_layers
        self.traits = DrafterTraits(learns=False, round_share=share)

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        chains = [ChainDraft(row, self._min_confidence) for row in rows]
        active = able = [chain for chain in chains if chain.num_left and self._has_room(chain.row)]
        computed: dict[int, Computed] = {}
        while active:
            reads = [self._read(chain, computed.get(chain.row.request_id)) for chain in active]
            logits, done = self._shallow.score_last(reads)
            for chain, logits_V, states in zip(active, logits, done, strict=True):
                computed[chain.row.request_id] = states
                chain.extend(logits_V)
            active = [chain for chain in active if chain.num_left]
        return [
            replace(chain.build(), computed=computed[chain.row.request_id])
            if chain in able
            else NOT_READY
            for chain in chains
        ]

    def _has_room(self, row: DraftRow) -> bool:
        num_pending = len(row.tokens) - self._cache.length(row.slot)
        return num_pending <= _MOST_PENDING and len(row.tokens) + row.budget <= self._max_context

    def _read(self, chain: ChainDraft, computed: Computed | None) -> ScoreRow:
        row, tree = chain.row, TokenTree.chain(chain.tokens)
        pending = row.tokens[self._cache.length(row.slot) :]
        return ScoreRow(row.slot, pending, tree, computed=computed)


def _exit_layer(given: Any, num_layers: int) -> int:
    """A checked number of layers; a quarter of them where None is given."""
    if given is None:
        return max(1, num_layers // 4)
    if type(given) is not int or not 1 <= given < num_layers:
        raise ConfigError(
            f"exit_layer is {given!r}; the target has {num_layers} layers, so it must be a "
            f"whole number from 1 to {num_layers - 1}"
        )
    return given


def _build(context: DrafterContext) -> Drafter:
    options = dict(context.options)
    min_confidence = options.pop("min_confidence", 0.0)
    if isinstance(min_confidence, bool) or not isinstance(min_confidence, int | float):
        raise ConfigError(f"min_confidence is {min_confidence!r}; it must be a number")
    if not 0.0 <= min_confidence <= 1.0:
        raise ConfigError(f"min_confidence is {min_confidence}; it must be between 0 and 1")
    target = offered(context.target.capabilities.first_layers)
    exit_layer = _exit_layer(options.get("exit_layer"), target.num_layers)
    return SharedCacheDrafter(target, exit_layer, min_confidence)


DRAFTER = DrafterSpec(
    build=_build,
    summary="the target's own first layers draft a chain",
    options={
        "exit_layer": "how many of the first layers draft (a quarter of them)",
        "min_confidence": "end the draft where the likeliest token has less than this (0)",
    },
    num_draft_tokens=4,
    needs=("first_layers",),
)
