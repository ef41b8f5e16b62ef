"""One forward laid out flat: every row's pending tokens and tree nodes, one after another.

No padding and no per-shape branch: prefill, plain decoding, chains and trees are all tokens that
see a prefix of their slot's cache entries and, within a tree, their ancestors.

Shape legend: T tokens of the forward, H tokens whose logits are wanted, E hidden size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from foredraft.cache.kv import KVCache
from foredraft.core.draws import DrawRow
from foredraft.models.base import ScoreRow, Shortlist


@dataclass
class ForwardPlan:
    """The layout of a forward: each token's id, cache entry and attention mask.

    A row is the half-open range of its tokens among the T of the forward. All of them are of one
    slot, they write entries in a row, and they see none behind these.

    Attributes:
        token_ids: [T] vocabulary ids.
        positions: [T] positions for rotary embedding.
        slots: [T] cache slot.
        entries: [T] cache entry to write.
        prefixes: [T] the number of leading entries of its slot that a token sees, its own included
            if it is pending.
        extras: [T] entries seen beyond the prefix, ascending: a tree node's ancestors and itself.
        wanted: [H] tokens whose logits are wanted.
        rows: the tokens of each row.
        row_wanted: of each row its half-open range among the H wanted logits.
        hidden_TE: the first layer's input, as of a draft head; None: the tokens' embeddings.
        draws: to be filled in from the logits, for decoders that do so.
        shortlists: of each draw, of which each wanted token has one then; the first ids are the
            same for all, and no other logits are computed. Empty: every token may be drawn.
    """

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    prefixes: list[int] = field(default_factory=list)
    extras: list[tuple[int, ...]] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    rows: list[range] = field(default_factory=list)
    row_wanted: list[range] = field(default_factory=list)
    hidden_TE: Tensor | None = None
    draws: ctypes.Array[DrawRow] | None = None
    shortlists: Sequence[Shortlist] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def shortlist_sizes(self) -> tuple[int, int]:
        """First ids, and most others of a shortlist; nothing where every token may be drawn."""
        if not self.shortlists:
            return 0, 0
        return self.shortlists[0].num_first, max(len(each.others) for each in self.shortlists)

    def slot(self, row: range) -> int:
        """A row's cache slot."""
        return self.slots[row.start]

    def end(self, row: range) -> int:
        """The entry behind the last one that a row writes."""
        return self.entries[row.stop - 1] + 1

    @cached_property
    def token_ids_T(self) -> Tensor:
        return torch.tensor(self.token_ids)

    @cached_property
    def positions_T(self) -> Tensor:
        return torch.tensor(self.positions)

    def part(self, spans: Sequence[range]) -> ForwardPlan:
        """The forward of some tokens alone, a row for each span that is not empty.

        The entries that these tokens see are in the cache, or are among them.
        """
        all_wanted, part = {*self.wanted}, ForwardPlan()
        for span in filter(None, spans):
            first, here = len(part), slice(span.start, span.stop)
            for name in ("token_ids", "positions", "slots", "entries", "prefixes", "extras"):
                getattr(part, name).extend(getattr(self, name)[here])
            wanted = [first + token - span.start for token in span if token in all_wanted]
            part.row_wanted.append(range(len(part.wanted), len(part.wanted) + len(wanted)))
            part.wanted.extend(wanted)
            part.rows.append(range(first, len(part)))
        return part

    def mask(self, row: range, window: int | None = None) -> Tensor | None:
        """Which entries before the row's `end` each of its tokens sees; None: all of them.

        Args:
            window: of what a token sees only the last so many, its own entry included.

        Returns:
            bool [tokens of the row, entries], True where seen.
        """
        first, end = row.start, self.end(row)
        sees_all = self.prefixes[first] + len(self.extras[first]) == end
        if len(row) == 1 and sees_all and (window or end) >= end:
            return None
        prefixes = torch.tensor(self.prefixes[first : row.stop])
        mask = torch.arange(end)[None, :] < prefixes[:, None]
        for i, token in enumerate(row):
            if self.extras[token]:
                mask[i, list(self.extras[token])] = True
                if window is not None:
                    mask[i, self._behind_window(token, window)] = False
        if window is not None and not all(self.extras[first : row.stop]):
            # Of a token without extras, all at once: a prompt has as many as it has tokens.
            pending = torch.tensor([not self.extras[token] for token in row])[:, None]
            behind = torch.arange(end)[None, :] < prefixes[:, None] - window
            mask &= ~(behind & pending)
        return mask

    def _behind_window(self, token: int, window: int) -> list[int]:
        """Entries of a token's mask that its sliding window excludes."""
        prefix, extras = self.prefixes[token], self.extras[token]
        num_hidden = max(0, prefix + len(extras) - window)
        return [*range(min(num_hidden, prefix)), *extras[: max(0, num_hidden - prefix)]]


def plan_forward(rows: Sequence[ScoreRow], starts: Sequence[int]) -> ForwardPlan:
    """Lay out a forward.

    Args:
        rows: what to score.
        starts: for each row, how many entries its slot already holds.
    """
    plan = ForwardPlan()
    for row, start in zip(rows, starts, strict=True):
        _add_row(plan, row, start)
    return plan


def plan_head(count: int) -> ForwardPlan:
    """Of so many tokens of which all logits are wanted; for a head alone."""
    zeros, tokens = [0] * count, range(count)
    nothing: list[tuple[int, ...]] = [()] * count
    numbers = (zeros, zeros, zeros, zeros, zeros, nothing, [*tokens])
    return ForwardPlan(*numbers, rows=[tokens], row_wanted=[tokens])


def _add_row(plan: ForwardPlan, row: ScoreRow, start: int) -> None:
    first, num_pending = len(plan), len(row.pending)
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
    num_before = len(plan.wanted)
    if row.wants_logits:
        plan.wanted.extend(range(first + num_pending - 1, len(plan)))
    plan.rows.append(range(first, len(plan)))
    plan.row_wanted.append(range(num_before, len(plan.wanted)))


def announce(plan: ForwardPlan, cache: KVCache) -> None:
    """Make room for what a forward writes, and let its slots know."""
    ends = [(plan.slot(row), plan.end(row)) for row in plan.rows]
    for slot, end in ends:
        cache.reserve(slot, end - cache.length(slot))
    for slot, end in ends:
        cache.will_write(slot, end - cache.length(slot))
