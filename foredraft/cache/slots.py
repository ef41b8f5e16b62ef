"""The state of one slot of a cache."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from foredraft.cache.layers import StoredLayers


@dataclass(eq=False)
class EntryRun:
    """Contiguous range of positions of a slot that a drafter's extra layers hold.

    Attributes:
        first: where it begins.
        ends: where it ends, by layer.
        noted: end of the part that the blocks' valid lengths include.
        table: the blocks from the one of ``first`` on, where that is not the text's first; see
            `StoredLayers.table`.
    """

    first: int
    ends: list[int]
    noted: int = 0
    table: array[int] | None = None

    @property
    def end(self) -> int:
        """Where it ends in all layers; 0 where there is none."""
        end = min(self.ends, default=0)
        return end if end > self.first else 0

    def go_on(self, start: int, end: int) -> None:
        """Prepare for entries from ``start`` on; a gap starts a new run.

        Args:
            end: end of the existing entries.
        """
        if not self.first <= start <= end:
            self.first, self.ends, self.noted = start, [start] * len(self.ends), 0

    def cut(self, length: int) -> None:
        """Forget the entries from ``length`` on."""
        self.ends, self.noted = [min(end, length) for end in self.ends], min(self.noted, length)
        if min(self.ends, default=0) <= self.first:
            self.first, self.ends = 0, [0] * len(self.ends)


@dataclass(eq=False)
class Slot:
    """One row's state in a cache.

    Attributes:
        revision: changes with whatever is in the slot, and is never used again.
        owner: the owner of its text; None: its blocks are never shared.
        table: the blocks of its entries, in their order, as C integers.
        length: number of valid entries.
        written: entries that the last forward wrote behind them.
        names: names of its leading full blocks, as far as they are published.
        runs: its runs in extra layers.
    """

    revision: int
    owner: bytes | None = None
    table: array[int] = field(default_factory=lambda: array("i"))
    length: int = 0
    written: int = 0
    names: list[bytes] = field(default_factory=list)
    runs: WeakKeyDictionary[StoredLayers, EntryRun] = field(default_factory=WeakKeyDictionary)
