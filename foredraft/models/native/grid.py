"""A forward laid out on a grid of fixed shape, so that it can be recorded once and replayed.

Each row of a `ForwardPlan` becomes a row of the grid, padded to the same number of tokens; rows are
padded too. Everything that differs between two forwards of one shape is numbers in one small
tensor: which token, where it is written, what it sees. A padding token sees its row's entries and
itself, so that no row of the mask is empty, and writes into a block that nobody reads.

Shape legend: R rows of the grid, T tokens of one of its rows, N = R * T tokens of the grid,
C cache entries attended to, M cache blocks that hold them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.cache.store import Entries
from foredraft.models.native.plan import ForwardPlan

MAX_ROW_TOKENS = 64
"""What a token sees of its own forward is one bit a token of a 64-bit number."""
_MAX_TOKENS = 256
"""Larger forwards are bound by arithmetic, not by launches: nothing is gained by recording them."""
_MAX_PENDING = 8
"""A row with more tokens to read than this is a prompt, whose size hardly comes twice."""
_MIN_CONTEXT = 256


class GridInputs(NamedTuple):
    """What differs between two forwards of one shape; int64, each [N] but for the last.

    Attributes:
        token_ids: vocabulary ids.
        positions: for rotary embedding.
        blocks: the cache block that a token writes to.
        offsets: the entry of that block.
        visible: bit u says whether a token sees token u of its own row.
        heads: tokens of the grid whose logits are wanted, in the plan's order.
        places: where the plan's tokens are in the grid.
        starts: the first R: how many entries a row's tokens all see before their own.
        tables: [R M] the blocks that each row attends to.
    """

    token_ids: Tensor
    positions: Tensor
    blocks: Tensor
    offsets: Tensor
    visible: Tensor
    heads: Tensor
    places: Tensor
    starts: Tensor
    tables: Tensor

    @classmethod
    def of(cls, numbers: Tensor, bucket: Bucket) -> GridInputs:
        """Views of what `grid_inputs` laid out."""
        num_kinds = len(cls._fields) - 1
        kinds_IN = numbers[: num_kinds * bucket.size].view(num_kinds, -1)
        return cls._make([*kinds_IN, numbers[num_kinds * bucket.size :]])


@dataclass(frozen=True)
class Bucket:
    """A shape that forwards are padded to; equal buckets share a recording.

    Attributes:
        rows: R.
        tokens: T.
        context: C; no token of the forward sees an entry beyond.
        taps: layers whose output is wanted, ascending.
        is_chain: of `paged`, whether no row branches.
    """

    rows: int
    tokens: int
    context: int
    taps: tuple[int, ...]
    is_chain: bool = False

    @property
    def size(self) -> int:
        """N."""
        return self.rows * self.tokens


def fits_grid(plan: ForwardPlan) -> bool:
    """Whether ``plan`` is the forward of a decoding step, which will come again in its shape."""
    if plan.layers is not None or plan.hidden_TE is not None or not plan.heads:
        return False
    rows, tokens = padded_shape(plan)
    return (
        tokens <= MAX_ROW_TOKENS
        and rows * tokens <= _MAX_TOKENS
        and all(map(_has_few_pending, plan.rows, plan.row_heads))
    )


def choose_bucket(plan: ForwardPlan, block_size: int, taps: Sequence[int] = ()) -> Bucket:
    """The smallest bucket that ``plan`` fits.

    Args:
        plan: for which `fits_grid`.
        block_size: entries of a cache block.
        taps: layers whose output is wanted.
    """
    rows, tokens = padded_shape(plan)
    seen = max(plan.entries[row.start] for row in plan.rows) + tokens
    context = max(_MIN_CONTEXT, power_of_two(seen), block_size)
    return Bucket(rows, tokens, context, tuple(sorted(set(taps))))


def grid_inputs(plan: ForwardPlan, bucket: Bucket, cache: Entries) -> Tensor:
    """The plan's numbers, padded: all of `GridInputs` one after another, int64 on the CPU."""
    size, block_size = bucket.size, cache.store.block_size
    numbers = {name: [0] * size for name in GridInputs._fields}
    numbers["blocks"] = [cache.store.num_blocks] * size
    numbers["visible"] = [_signed(1 << token) for token in range(bucket.tokens)] * bucket.rows
    numbers["tables"] = []
    places: list[int] = []
    for grid_row, row in enumerate(plan.rows):
        first, count = grid_row * bucket.tokens, len(row)
        here, there = slice(row.start, row.stop), slice(first, first + count)
        table, entries = cache.table(plan.slot(row)), plan.entries[here]
        numbers["token_ids"][there] = plan.token_ids[here]
        numbers["positions"][there] = plan.positions[here]
        numbers["blocks"][there] = [table[entry // block_size] for entry in entries]
        numbers["offsets"][there] = [entry % block_size for entry in entries]
        numbers["visible"][there] = [_visible(plan, entries[0], token) for token in row]
        numbers["starts"][grid_row] = entries[0]
        numbers["tables"] += _padded_table(table, bucket.context // block_size)
        places.extend(range(first, first + count))
    numbers["tables"] += numbers["tables"][-1:] * (
        (bucket.rows - len(plan.rows)) * (bucket.context // block_size)
    )
    numbers["places"][: len(places)] = places
    numbers["heads"][: len(plan.heads)] = [places[token] for token in plan.heads]
    return torch.tensor([number for name in GridInputs._fields for number in numbers[name]])


def _padded_table(table: array[int], count: int) -> list[int]:
    """The first ``count`` blocks; behind the last one itself, which is as finite as it is."""
    return [*table[:count], *table[-1:] * (count - len(table))]


def attention_bias(
    inputs: GridInputs, bucket: Bucket, dtype: torch.dtype, window: int | None = None
) -> Tensor:
    """[R, T, C] to add to attention scores: 0 where a token sees an entry, else minus infinity.

    A token sees the entries of the last ``window`` positions only. These are tensor operations of
    fixed shape, and nothing asks the device for a value.
    """
    rows, tokens, context = bucket.rows, bucket.tokens, bucket.context
    device = inputs.starts.device
    starts_R11 = inputs.starts[:rows, None, None]
    own_T = torch.arange(tokens, device=device)
    seen_R1C = torch.arange(context, device=device) < starts_R11
    sees_RTT = (inputs.visible.view(rows, tokens, 1) >> own_T) & 1 != 0
    own_entries_RTT = (starts_R11 + own_T).expand(rows, tokens, tokens)
    seen_RTC = seen_R1C.repeat(1, tokens, 1).scatter_(2, own_entries_RTT, sees_RTT)
    if window is not None:
        positions_RT = inputs.positions.view(rows, tokens)
        places_RC = torch.arange(context, device=device).expand(rows, context)
        places_RC = places_RC.scatter(1, own_entries_RTT[:, 0], positions_RT)
        seen_RTC &= places_RC[:, None] > positions_RT[..., None] - window
    bias_RTC = torch.zeros(seen_RTC.shape, dtype=dtype, device=device)
    return bias_RTC.masked_fill_(~seen_RTC, float("-inf"))


def _visible(plan: ForwardPlan, start: int, token: int) -> int:
    """The bits of `GridInputs.visible` of a token whose row writes from entry ``start`` on."""
    bits = (1 << plan.prefixes[token] - start) - 1
    for entry in plan.extras[token]:
        bits |= 1 << entry - start
    return _signed(bits)


def _signed(bits: int) -> int:
    """The int64 with these 64 bits."""
    return bits - (1 << 64) if bits >> 63 else bits


def padded_shape(plan: ForwardPlan) -> tuple[int, int]:
    """Rows and tokens of a row, each rounded up to a power of two."""
    return power_of_two(len(plan.rows)), power_of_two(max(map(len, plan.rows)))


def _has_few_pending(row: range, heads: range) -> bool:
    """Logits are wanted after the last pending token and after each node, or nowhere in the row."""
    return len(row) - max(len(heads) - 1, 0) <= _MAX_PENDING


def power_of_two(count: int) -> int:
    """The smallest power of two that is not below ``count``."""
    return 1 << (count - 1).bit_length()
