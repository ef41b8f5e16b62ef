"""Several loaded drafters, one of which follows each request: whoever the controller names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from foredraft.cache.base import CacheLayers
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import NO_PROPOSAL, Proposal
from foredraft.drafters.base import Drafter, DraftRequest, DraftRow, Observation

FirstDrafter = Callable[[int, SamplingParams], str | None]
"""Which drafter follows a new request, by its id and parameters; None: none."""


@dataclass(frozen=True)
class Loaded:
    """A drafter to switch to.

    Attributes:
        joins_late: whether it can begin in the middle of a text, which it then takes for a prompt.
    """

    drafter: Drafter
    joins_late: bool


class SwitchDrafter:
    """See the module docstring. A request that nobody follows costs nothing.

    `DraftRow.drafter` names who is to follow a row from this step on. One that cannot join a text
    in the middle comes with a request's beginning or not at all.

    Args:
        loaded: the drafters by name.
        first: decides for a new request.
    """

    def __init__(self, loaded: Mapping[str, Loaded], first: FirstDrafter) -> None:
        self._loaded, self._first = dict(loaded), first
        self._requests: dict[int, DraftRequest] = {}
        self._at: dict[int, str | None] = {}
        drafters = [each.drafter for each in self._loaded.values()]
        self.layers: Sequence[CacheLayers] = [layer for d in drafters for layer in d.layers]
        self.look_ahead = max((d.look_ahead for d in drafters), default=0)

    @property
    def taps(self) -> Sequence[int]:
        """Of those that follow anybody."""
        names = {name for name in self._at.values() if name is not None}
        return sorted({tap for name in names for tap in self._loaded[name].drafter.taps})

    def follower(self, request_id: int) -> str | None:
        return self._at.get(request_id)

    def is_whole(self, request_id: int) -> bool:
        name = self._at.get(request_id)
        mine = [] if name is None else self._loaded[name].drafter.layers
        return len(mine) == len(self.layers)

    def begin(self, request: DraftRequest) -> None:
        self._requests[request.request_id] = request
        self._at[request.request_id] = None
        name = self._first(request.request_id, request.params)
        if name is not None:
            self._at[request.request_id] = name
            self._loaded[name].drafter.begin(request)

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        for row in rows:
            if row.drafter != "" and row.drafter != self._at[row.request_id]:
                self._move(row)
        found: dict[int, Proposal] = {}
        for name, drafter in self._active():
            mine = [r for r in rows if r.budget > 0 and self._at[r.request_id] == name]
            if mine:
                proposals = drafter.propose(mine)
                found |= dict(zip((row.request_id for row in mine), proposals, strict=True))
        return [found.get(row.request_id, NO_PROPOSAL) for row in rows]

    def observe(self, observations: Sequence[Observation]) -> None:
        for name, drafter in self._active():
            mine = [seen for seen in observations if self._at[seen.request_id] == name]
            if mine:
                drafter.observe(mine)

    def end(self, request_id: int) -> None:
        self._requests.pop(request_id, None)
        name = self._at.pop(request_id, None)
        if name is not None:
            self._loaded[name].drafter.end(request_id)

    def _active(self) -> list[tuple[str, Drafter]]:
        names = {*self._at.values()}
        return [(name, each.drafter) for name, each in self._loaded.items() if name in names]

    def _move(self, row: DraftRow) -> None:
        """Let another drafter follow, from the text as it is now."""
        before = self._at[row.request_id]
        self._at[row.request_id] = None
        if before is not None:
            self._loaded[before].drafter.end(row.request_id)
        if row.drafter and self._loaded[row.drafter].joins_late:
            request = self._requests[row.request_id]
            tokens = tuple(row.tokens)
            # All but the last, which is pending: it comes with an observation like all later ones.
            begun = replace(request, tokens=tokens, num_cached=len(tokens) - 1)
            self._at[row.request_id] = row.drafter
            self._loaded[row.drafter].drafter.begin(begun)
