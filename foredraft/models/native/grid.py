"""A forward laid out on a grid of fixed shape, so that it can be recorded once and replayed.

Each row of a `ForwardPlan` becomes a row of the grid, padded to the same number of tokens; rows are
padded too. Everything that differs between two forwards of one shape is numbers in one small
tensor: which token, where it is written, what it sees. A padding token sees its row's entries and
itself, so that no row of the mask is empty, and writes into a scratch entry that nobody reads.

Shape legend: R rows of the grid, T tokens of one of its rows, N = R * T tokens of the grid,
C cache entries attended to, I kinds of numbers in `GridInputs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.models.native.plan import ForwardPlan, RowSpan

MAX_ROW_TOKENS = 64
"""What a token sees of its own forward is one bit a token of a 64-bit number."""
_MAX_TOKENS = 256
"""Larger forwards are bound by arithmetic, not by launches: nothing is gained by recording them."""
_MAX_PENDING = 8
"""A row with more tokens to read than this is a prompt, whose size hardly comes twice."""
_MIN_CONTEXT = 256
_SCRATCH = 8
"""Entries at a slot's end that no token attends to, not even with weight 0: padding writes there.
One would do, but attention's kernels like multiples of eight."""


class GridInputs(NamedTuple):
    """What differs between two forwards of one shape; int64, each [N].

    Attributes:
        token_ids: vocabulary ids.
        positions: for rotary embedding.
        slots: the cache slot that a token writes to.
        entries: the entry of that slot.
        visible: bit u says whether a token sees token u of its own row.
        heads: tokens of the grid whose logits are wanted, in the plan's order.
        places: where the plan's tokens are in the grid.
        starts: the first R: how many entries a row's tokens all see before their own.
        row_slots: the first R: the slot that each row attends to.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    entries: Tensor
    visible: Tensor
    heads: Tensor
    places: Tensor
    starts: Tensor
    row_slots: Tensor


@dataclass(frozen=True)
class Bucket:
    """A shape that forwards are padded to; equal buckets share a recording.

    Attributes:
        rows: R.
        tokens: T.
        context: C; no token of the forward sees an entry beyond.
        gathers: the rows' keys and values are copied together first. False: row i of the grid is
            slot i of the cache, which is read where it lies.
        taps: layers whose output is wanted, ascending.
    """

    rows: int
    tokens: int
    context: int
    gathers: bool
    taps: tuple[int, ...]

    @property
    def size(self) -> int:
        """N."""
        return self.rows * self.tokens


def fits_grid(plan: ForwardPlan) -> bool:
    """Whether ``plan`` is the forward of a decoding step, which will come again in its shape."""
    if plan.layers is not None or plan.hidden_TE is not None or not plan.heads:
        return False
    rows, tokens = _padded_shape(plan)
    return (
        tokens <= MAX_ROW_TOKENS
        and rows * tokens <= _MAX_TOKENS
        and all(_num_pending(row) <= _MAX_PENDING for row in plan.rows)
    )


def needed_capacity(plan: ForwardPlan) -> int:
    """Entries that a cache must hold for the padded rows and a scratch entry behind them."""
    _, tokens = _padded_shape(plan)
    return max(row.entries.start for row in plan.rows) + tokens + _SCRATCH


def choose_bucket(
    plan: ForwardPlan, num_slots: int, capacity: int, taps: Sequence[int] = ()
) -> Bucket:
    """The smallest bucket that ``plan`` fits.

    Args:
        plan: for which `fits_grid`.
        num_slots: slots of the cache.
        capacity: entries of a slot, at least `needed_capacity`.
        taps: layers whose output is wanted.
    """
    rows, tokens = _padded_shape(plan)
    first_slots = min(rows, num_slots)
    gathers = any(row.slot >= first_slots for row in plan.rows)
    seen = max(row.entries.start for row in plan.rows) + tokens
    return Bucket(
        rows=rows if gathers else first_slots,
        tokens=tokens,
        context=min(max(_MIN_CONTEXT, power_of_two(seen)), capacity - _SCRATCH),
        gathers=gathers,
        taps=tuple(sorted(set(taps))),
    )


def grid_inputs(plan: ForwardPlan, bucket: Bucket, scratch_entry: int) -> Tensor:
    """The plan's numbers, padded: `GridInputs` stacked into one int64 tensor [I, N] on the CPU.

    Args:
        scratch_entry: an entry that counts in no slot of the plan; padding tokens write there.
    """
    size, per_row = bucket.size, bucket.tokens
    spare = plan.rows[0].slot
    numbers = {name: [0] * size for name in GridInputs._fields}
    numbers["slots"] = [spare] * size
    numbers["row_slots"] = [spare] * size
    numbers["entries"] = [scratch_entry] * size
    numbers["visible"] = [_signed(1 << token) for token in range(per_row)] * bucket.rows
    places: list[int] = []
    for index, row in enumerate(plan.rows):
        grid_row = index if bucket.gathers else row.slot
        first, count = grid_row * per_row, len(row.tokens)
        here, there = slice(row.tokens.start, row.tokens.stop), slice(first, first + count)
        numbers["token_ids"][there] = plan.token_ids[here]
        numbers["positions"][there] = plan.positions[here]
        numbers["entries"][there] = plan.entries[here]
        numbers["visible"][there] = [_visible(plan, row, token) for token in row.tokens]
        numbers["slots"][first : first + per_row] = [row.slot] * per_row
        numbers["starts"][grid_row] = row.entries.start
        numbers["row_slots"][grid_row] = row.slot
        places.extend(range(first, first + count))
    numbers["places"][: len(places)] = places
    numbers["heads"][: len(plan.heads)] = [places[token] for token in plan.heads]
    return torch.tensor([numbers[name] for name in GridInputs._fields])


def attention_bias(inputs: GridInputs, bucket: Bucket, dtype: torch.dtype) -> Tensor:
    """[R, T, C] to add to attention scores: 0 where a token sees an entry, else minus infinity.

    Only tensor operations of fixed shape, and nothing that asks the device for a value.
    """
    rows, tokens, context = bucket.rows, bucket.tokens, bucket.context
    device = inputs.starts.device
    starts_R11 = inputs.starts[:rows, None, None]
    own_T = torch.arange(tokens, device=device)
    seen_R1C = torch.arange(context, device=device) < starts_R11
    sees_RTT = (inputs.visible.view(rows, tokens, 1) >> own_T) & 1 != 0
    own_entries_RTT = (starts_R11 + own_T).expand(rows, tokens, tokens)
    seen_RTC = seen_R1C.repeat(1, tokens, 1).scatter_(2, own_entries_RTT, sees_RTT)
    bias_RTC = torch.zeros(seen_RTC.shape, dtype=dtype, device=device)
    return bias_RTC.masked_fill_(~seen_RTC, float("-inf"))


def _visible(plan: ForwardPlan, row: RowSpan, token: int) -> int:
    """The bits of `GridInputs.visible`."""
    start = row.entries.start
    bits = (1 << plan.prefixes[token] - start) - 1
    for entry in plan.extras[token]:
        bits |= 1 << entry - start
    return _signed(bits)


def _signed(bits: int) -> int:
    """The int64 with these 64 bits."""
    return bits - (1 << 64) if bits >> 63 else bits


def _padded_shape(plan: ForwardPlan) -> tuple[int, int]:
    """Rows and tokens of a row, each rounded up to a power of two."""
    return power_of_two(len(plan.rows)), power_of_two(max(len(r.tokens) for r in plan.rows))


def _num_pending(row: RowSpan) -> int:
    """Logits are wanted after the last pending token and after each node, or nowhere in the row."""
    return len(row.tokens) - max(len(row.heads) - 1, 0)


def power_of_two(count: int) -> int:
    """The smallest power of two that is not below ``count``."""
    return 1 << (count - 1).bit_length()
