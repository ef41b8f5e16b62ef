"""The first layers draft on the target's own cache, and the full forward goes on from them.

A shallow forward writes the first layers' entries behind those that count, just where the full
forward of the same tokens would, and hands out what it gave. Who brings that along to the next
forward of the slot gets it started with the layer after. The numbers are those that it would have
computed itself, so nothing but time is saved; what does not fit the slot as it is now is ignored.

Shape legend: T tokens of a forward, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import eq

import torch
from torch import Tensor

from foredraft.cache.kv import KVCache
from foredraft.models.base import Computed, ScoreRow
from foredraft.models.native.model import Decoder
from foredraft.models.native.plan import ForwardPlan, announce, plan_forward

_Identity = tuple[int, int, tuple[int, ...]]


@dataclass(frozen=True)
class FirstLayers:
    """What the first layers made of a slot's uncommitted tokens (see `Computed`).

    Attributes:
        cache: that holds their entries.
        revision: of the slot; whatever changes the slot, another forward included, changes it.
        first_entry: where the tokens start in the slot.
        exit_layer: how many layers.
        tokens: what identifies each of them (see `_identities`).
        hidden_TE: the output of layer ``exit_layer - 1`` for each.
    """

    cache: KVCache
    revision: int
    first_entry: int
    exit_layer: int
    tokens: list[_Identity]
    hidden_TE: Tensor

    def is_of(self, cache: KVCache, slot: int, entry: int) -> bool:
        """Whether the tokens' entries are still where a row would write its own from ``entry``."""
        return (
            self.cache is cache
            and self.revision == cache.revision(slot)
            and self.first_entry == entry
        )


class ShallowView:
    """The first layers of a target as a `foredraft.models.base.ShallowTarget`.

    Args:
        decoder: the target's.
        cache: the target's.
        exit_layer: how many layers.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, exit_layer: int) -> None:
        self._decoder, self._cache, self.exit_layer = decoder, cache, exit_layer

    @torch.no_grad()
    def score_last(self, rows: Sequence[ScoreRow]) -> tuple[list[Tensor], list[Computed]]:
        plan = plan_forward(rows, [self._cache.length(row.slot) for row in rows])
        known = [
            _known(row.computed, plan, span[:-1], self._cache, self.exit_layer)
            for row, span in zip(rows, plan.rows, strict=True)
        ]
        announce(plan, self._cache)
        rest = _unknown(plan, known)
        rest = replace(rest, heads=[span.stop - 1 for span in rest.rows])
        logits_RV, new = run_first(self._decoder, rest, self._cache, self.exit_layer)
        computed: list[Computed] = [
            FirstLayers(
                self._cache,
                self._cache.revision(plan.slot(span)),
                plan.entries[span.start],
                self.exit_layer,
                _identities(plan, span),
                torch.cat((known_TE, new_TE)) if len(known_TE) else new_TE,
            )
            for span, known_TE, new_TE in zip(plan.rows, known, new, strict=True)
        ]
        return list(logits_RV), computed


@dataclass(frozen=True)
class Resumption:
    """What is left to do of a full forward.

    Attributes:
        exit_layer: the first layer that has not seen the known tokens.
        known: for each row, the output [T, E] of the layer before it for the row's first tokens;
            [0] of a row without any.
    """

    exit_layer: int
    known: list[Tensor]

    def rest(
        self, plan: ForwardPlan, decoder: Decoder, cache: KVCache, num_layers: int
    ) -> ForwardPlan:
        """Run the first layers for the tokens they have not seen; what is then left of ``plan``."""
        new = _unknown(plan, self.known)
        parts = iter(run_first(decoder, new, cache, self.exit_layer)[1] if new.rows else ())
        states = list[Tensor]()
        for span, known_TE in zip(plan.rows, self.known, strict=True):
            states += [known_TE] if len(known_TE) else []
            states += [next(parts)] if len(known_TE) < len(span) else []
        layers = range(self.exit_layer, num_layers)
        return replace(plan, layers=layers, hidden_TE=torch.cat(states))


def resumption(
    rows: Sequence[ScoreRow], plan: ForwardPlan, cache: KVCache, taps: Sequence[int]
) -> Resumption | None:
    """How ``plan`` may go on from what its rows bring along; None: it starts at the first layer.

    To be asked before the forward is announced to the cache.
    """
    exits = [
        row.computed.exit_layer
        for row, span in zip(rows, plan.rows, strict=True)
        if isinstance(row.computed, FirstLayers)
        and row.computed.is_of(cache, row.slot, plan.entries[span.start])
    ]
    exit_layer = min(exits, default=0)
    if not exits or any(tap < exit_layer - 1 for tap in taps):
        return None
    known = [
        _known(row.computed, plan, span, cache, exit_layer)
        for row, span in zip(rows, plan.rows, strict=True)
    ]
    return Resumption(exit_layer, known) if any(map(len, known)) else None


def run_first(
    decoder: Decoder, plan: ForwardPlan, cache: KVCache, exit_layer: int
) -> tuple[Tensor, Sequence[Tensor]]:
    """Logits of the plan's heads, and of each row the output of the last of the first layers."""
    last = exit_layer - 1
    logits_NV, tapped = decoder.forward(replace(plan, layers=range(exit_layer)), cache, (last,))
    return logits_NV, torch.split(tapped[last], [*map(len, plan.rows)])


def _known(
    known: Computed | None, plan: ForwardPlan, span: range, cache: KVCache, exit_layer: int
) -> Tensor:
    """What a row brings along of the first of these tokens of its own: [T, E], or [0]."""
    if not isinstance(known, FirstLayers) or known.exit_layer != exit_layer or not span:
        return torch.empty(0)
    if not known.is_of(cache, plan.slot(span), plan.entries[span.start]):
        return torch.empty(0)
    same = [*map(eq, known.tokens, _identities(plan, span)), False]
    return known.hidden_TE[: same.index(False)]


def _unknown(plan: ForwardPlan, known: Sequence[Tensor]) -> ForwardPlan:
    """The forward of the tokens behind those that are known of each row; it wants no logits."""
    rest = zip(plan.rows, known, strict=True)
    return replace(plan, heads=[]).part([span[len(known_TE) :] for span, known_TE in rest])


def _identities(plan: ForwardPlan, span: range) -> list[_Identity]:
    """What each token of a row is and sees; with the entry, that fixes its numbers."""
    tokens = slice(span.start, span.stop)
    return [*zip(plan.token_ids[tokens], plan.prefixes[tokens], plan.extras[tokens], strict=True)]
