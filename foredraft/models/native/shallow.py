"""The first layers draft on the target's own cache, and the full forward goes on from them.

A shallow forward writes the first layers' entries behind those that count, just where the full
forward of the same tokens would, and remembers what it gave. The next full forward of the slot
recognises these tokens and starts with the layer after. The numbers are those that it would have
computed itself, so nothing but time is saved.

Shape legend: T tokens of a forward, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from foredraft.cache.kv import KVCache
from foredraft.models.base import ScoreRow
from foredraft.models.native.plan import ForwardPlan, RowSpan, plan_forward, tail


class PartialDecoder(Protocol):
    """A decoder that heeds `ForwardPlan.layers`."""

    def forward(
        self, plan: ForwardPlan, cache: KVCache, taps: Sequence[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]: ...


@dataclass(frozen=True)
class _Known:
    """What the first layers made of a slot's uncommitted tokens.

    Attributes:
        revision: of the slot; any commit, truncation or reuse of the slot changes it.
        first_entry: where the tokens start in the slot.
        tokens: what identifies each of them (see `_identities`).
        hidden_TE: the output of layer ``exit_layer - 1`` for each.
    """

    revision: int
    first_entry: int
    exit_layer: int
    tokens: list[tuple[int, int, tuple[int, ...]]]
    hidden_TE: Tensor


class ShallowStates:
    """Runs the first layers, and remembers their output until the slot's next full forward.

    Args:
        decoder: the target's.
        cache: the target's.
        num_layers: of the target.
    """

    def __init__(self, decoder: PartialDecoder, cache: KVCache, num_layers: int) -> None:
        self._decoder, self._cache, self._num_layers = decoder, cache, num_layers
        self._known: dict[int, _Known] = {}

    def score_last(self, rows: Sequence[ScoreRow], exit_layer: int) -> list[Tensor]:
        """Run the first ``exit_layer`` layers, final norm and head; logits [V] of last tokens.

        Tokens that an earlier call put into the same entries are not computed again.
        """
        plan = plan_forward(rows, [self._cache.length(row.slot) for row in rows])
        known = [self._take(plan, span, exit_layer, len(span.tokens) - 1) for span in plan.rows]
        rest = tail(plan, [*map(_count, known)])
        rest = replace(rest, heads=[span.tokens.stop - 1 for span in rest.rows])
        logits_RV, hidden_TE = self._run(rest, exit_layer)
        for span, new, states in zip(plan.rows, rest.rows, known, strict=True):
            states.append(hidden_TE[new.tokens.start : new.tokens.stop])
            self._known[span.slot] = _Known(
                self._cache.revision(span.slot),
                span.entries.start,
                exit_layer,
                _identities(plan, span),
                torch.cat(states),
            )
        return list(logits_RV)

    def resume(self, plan: ForwardPlan, taps: Sequence[int]) -> ForwardPlan:
        """What is left of a full forward: run it instead of ``plan``.

        Runs the first layers for the tokens that they have not seen. A plan without any known
        token, or one that taps these layers, comes back as it is.
        """
        exits = [self._known[s.slot].exit_layer for s in plan.rows if s.slot in self._known]
        exit_layer = min(exits, default=0)
        known = [self._take(plan, span, exit_layer, len(span.tokens)) for span in plan.rows]
        if not any(known) or any(tap < exit_layer for tap in taps):
            return plan
        rest = tail(plan, [*map(_count, known)])
        new = iter(self._split(rest, exit_layer))
        for span, states in zip(plan.rows, known, strict=True):
            if _count(states) < len(span.tokens):
                states.append(next(new))
        hidden_TE = torch.cat([part for states in known for part in states])
        return replace(plan, layers=range(exit_layer, self._num_layers), hidden_TE=hidden_TE)

    def _split(self, plan: ForwardPlan, exit_layer: int) -> Sequence[Tensor]:
        """What the first layers make of each row; [tokens of the row, E]."""
        if not plan.rows:
            return ()
        _, hidden_TE = self._run(plan, exit_layer)
        return [hidden_TE[span.tokens.start : span.tokens.stop] for span in plan.rows]

    def _run(self, plan: ForwardPlan, exit_layer: int) -> tuple[Tensor, Tensor]:
        """Logits of the plan's heads, and the output of the last of the first layers [T, E]."""
        last = exit_layer - 1
        plan = replace(plan, layers=range(exit_layer))
        logits_NV, tapped = self._decoder.forward(plan, self._cache, (last,))
        return logits_NV, tapped[last]

    def _take(self, plan: ForwardPlan, span: RowSpan, exit_layer: int, limit: int) -> list[Tensor]:
        """Forget the row's slot, and return what is known of the row's own first tokens.

        Forgotten first: the forward to come overwrites the entries, and may fail half-way.
        """
        known = self._known.pop(span.slot, None)
        if (
            known is None
            or known.revision != self._cache.revision(span.slot)
            or known.first_entry != span.entries.start
            or known.exit_layer != exit_layer
        ):
            return []
        count = 0
        for mine, theirs in zip(known.tokens[:limit], _identities(plan, span), strict=False):
            if mine != theirs:
                break
            count += 1
        return [known.hidden_TE[:count]] if count else []


def _identities(plan: ForwardPlan, span: RowSpan) -> list[tuple[int, int, tuple[int, ...]]]:
    """What each token of a row is and sees; with the entry, that fixes its numbers."""
    tokens = slice(span.tokens.start, span.tokens.stop)
    return [*zip(plan.token_ids[tokens], plan.prefixes[tokens], plan.extras[tokens], strict=True)]


def _count(states: Sequence[Tensor]) -> int:
    return sum(map(len, states))


class ShallowView:
    """The first layers of a target as a `foredraft.models.base.ShallowTarget`.

    Args:
        states: the target's.
        cache: the target's.
        exit_layer: how many layers.
    """

    def __init__(self, states: ShallowStates, cache: KVCache, exit_layer: int) -> None:
        self._states, self._cache, self.exit_layer = states, cache, exit_layer

    @torch.no_grad()
    def score_last(self, rows: Sequence[ScoreRow]) -> list[Tensor]:
        for row in rows:
            self._cache.reserve(row.slot, len(row.pending) + len(row.tree))
        return self._states.score_last(rows, self.exit_layer)
