"""One forward laid out flat: every row's pending tokens and tree nodes, one after another.

No padding and no per-shape branch: prefill, plain decoding, chains and trees are all tokens that
see a prefix of their slot's cache entries and, within a tree, their ancestors.

Shape legend: T tokens of the forward, H tokens whose logits are wanted, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from foredraft.core.draws import DrawRows
from foredraft.models.base import ScoreRow


@dataclass(frozen=True)
class RowSpan:
    """Where one row lies in the flat forward.

    Attributes:
        slot: the row's cache slot.
        tokens: its half-open range among the T tokens.
        entries: the half-open range of cache entries that it writes. The row's tokens see entries
            below ``entries.stop`` only.
        heads: its half-open range among the H wanted logits.
    """

    slot: int
    tokens: range
    entries: range
    heads: range


@dataclass(frozen=True)
class ForwardPlan:
    """What each token is, where it goes and what it sees.

    Attributes:
        token_ids: [T] vocabulary ids.
        positions: [T] positions for rotary embedding.
        slots: [T] cache slot.
        entries: [T] cache entry to write.
        prefixes: [T] how many leading entries of its slot a token sees, itself included when it
            is pending.
        extras: [T] entries seen beyond the prefix, ascending: a tree node's ancestors and itself.
        heads: [H] tokens whose logits are wanted.
        rows: one span a row.
        layers: the layers to run; None: all.
        hidden_TE: what the layer before ``layers`` gave; None: start from the embeddings.
        draws: to be filled in from the logits, for decoders that do so.
    """

    token_ids: list[int]
    positions: list[int]
    slots: list[int]
    entries: list[int]
    prefixes: list[int]
    extras: list[tuple[int, ...]]
    heads: list[int]
    rows: list[RowSpan]
    layers: range | None = None
    hidden_TE: Tensor | None = None
    draws: DrawRows | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_beginning(self) -> bool:
        """Whether another plan goes on from here: taps are then in the decoder's own precision."""
        return self.layers is not None and self.layers.start == 0

    def layers_to_run(self, num_layers: int) -> range:
        """`layers`, or all of a model's ``num_layers``."""
        return range(num_layers) if self.layers is None else self.layers

    @cached_property
    def token_ids_T(self) -> Tensor:
        return torch.tensor(self.token_ids)

    @cached_property
    def positions_T(self) -> Tensor:
        return torch.tensor(self.positions)

    def mask(self, row: RowSpan) -> Tensor | None:
        """Which entries below ``row.entries.stop`` each token of the row sees; None: all of them.

        Returns:
            bool [tokens of the row, entries], True where seen.
        """
        first = row.tokens.start
        sees_all = self.prefixes[first] + len(self.extras[first]) == row.entries.stop
        if len(row.tokens) == 1 and sees_all:
            return None
        entry = torch.arange(row.entries.stop)
        prefixes = torch.tensor(self.prefixes[row.tokens.start : row.tokens.stop])
        mask = entry[None, :] < prefixes[:, None]
        for i, token in enumerate(row.tokens):
            if self.extras[token]:
                mask[i, list(self.extras[token])] = True
        return mask


def plan_forward(rows: Sequence[ScoreRow], starts: Sequence[int]) -> ForwardPlan:
    """Lay out a forward.

    Args:
        rows: what to score.
        starts: for each row, how many entries its slot already holds.
    """
    plan = ForwardPlan([], [], [], [], [], [], [], [])
    for row, start in zip(rows, starts, strict=True):
        _add_row(plan, row, start)
    return plan


def tail(plan: ForwardPlan, known: Sequence[int]) -> ForwardPlan:
    """The same forward without the first ``known`` tokens of each row.

    The entries of these must be in the cache already. Wants no logits; a row of which nothing is
    left is not in it.
    """
    rest = ForwardPlan([], [], [], [], [], [], [], [])
    for row, count in zip(plan.rows, known, strict=True):
        left, first = slice(row.tokens.start + count, row.tokens.stop), len(rest)
        rest.token_ids.extend(plan.token_ids[left])
        rest.positions.extend(plan.positions[left])
        rest.slots.extend(plan.slots[left])
        rest.entries.extend(plan.entries[left])
        rest.prefixes.extend(plan.prefixes[left])
        rest.extras.extend(plan.extras[left])
        if count < len(row.tokens):
            tokens = range(first, len(rest))
            rest.rows.append(RowSpan(row.slot, tokens, row.entries[count:], range(0)))
    return rest


def plan_head(hidden_TE: Tensor, num_layers: int) -> ForwardPlan:
    """A plan that runs none of the layers and wants all logits. It touches no cache."""
    count = len(hidden_TE)
    zeros, tokens = [0] * count, range(count)
    rows = [RowSpan(0, tokens, range(1), tokens)]
    nothing: list[tuple[int, ...]] = [()] * count
    return ForwardPlan(
        *(zeros, zeros, zeros, zeros, zeros, nothing, [*tokens], rows),
        layers=range(num_layers, num_layers),
        hidden_TE=hidden_TE,
    )


def _add_row(plan: ForwardPlan, row: ScoreRow, start: int) -> None:
    first, num_pending = len(plan), len(row.pending)
    if num_pending == 1 and not row.tree.tokens:
        _add_token(plan, row, start)
        return
    root = start + num_pending  # entries from here on belong to tree nodes
    plan.token_ids.extend((*row.pending, *row.tree.tokens))
    plan.positions.extend(range(start, root))
    plan.positions.extend(root - 1 + depth for depth in row.tree.depths)
    plan.prefixes.extend(range(start + 1, root + 1))
    plan.prefixes.extend([root] * len(row.tree))
    plan.extras.extend([()] * num_pending)
    plan.extras.extend(tuple(root + node for node in path) for path in row.tree.paths)
    entries = range(start, root + len(row.tree))
    plan.entries.extend(entries)
    plan.slots.extend([row.slot] * len(entries))
    heads = range(len(plan.heads), len(plan.heads))
    if row.wants_logits:
        plan.heads.extend(range(first + num_pending - 1, len(plan)))
        heads = range(heads.start, len(plan.heads))
    plan.rows.append(RowSpan(row.slot, range(first, len(plan)), entries, heads))


def _add_token(plan: ForwardPlan, row: ScoreRow, start: int) -> None:
    """A row that decodes and drafts nothing: most rows of a full batch."""
    token, head = len(plan.token_ids), len(plan.heads)
    plan.token_ids.append(row.pending[0])
    plan.positions.append(start)
    plan.prefixes.append(start + 1)
    plan.extras.append(())
    plan.entries.append(start)
    plan.slots.append(row.slot)
    if row.wants_logits:
        plan.heads.append(token)
    heads = range(head, len(plan.heads))
    plan.rows.append(RowSpan(row.slot, range(token, token + 1), range(start, start + 1), heads))
