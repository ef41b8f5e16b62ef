"""What outlives a request, kept apart by tenant: nothing of one's text may draft for another."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sized
from typing import Generic, TypeVar

Kept = TypeVar("Kept", bound=Sized)
"""Its length is what there may be so much of."""


class PerTenant(Generic[Kept]):
    """One for each tenant. Those that were asked for longest ago go when there is too much in all.

    Args:
        new: makes a tenant's; None is a tenant, too: all requests that name none.
        most: of all lengths together.
    """

    def __init__(self, new: Callable[[str | None], Kept], most: int) -> None:
        self._new, self._most = new, most
        self._kept: OrderedDict[str | None, Kept] = OrderedDict()

    def of(self, tenant: str | None) -> Kept:
        """A tenant's, made if it is not there."""
        if tenant not in self._kept:
            self._kept[tenant] = self._new(tenant)
        self._kept.move_to_end(tenant)
        total = sum(map(len, self._kept.values()))
        while total > self._most and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            total -= len(dropped)
        return self._kept[tenant]
