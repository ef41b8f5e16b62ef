"""Parts of a simulated engine, which fail at random."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from foredraft.cache.base import NO_MEMORY, KVShape
from foredraft.cache.layers import MOST_REPEATED
from foredraft.control.base import Allowance, Controller, Row
from foredraft.core.errors import CacheFullError
from foredraft.core.proposal import NOT_READY, Proposal
from foredraft.core.record import RowStep, StepRecord
from foredraft.core.traits import OWN, DrafterTraits
from foredraft.core.tree import TokenTree
from foredraft.drafters.base import DraftRow
from foredraft.models.base import ScoreRow, Scores
from foredraft.models.table import TableModel, TokenCache

VOCAB_SIZE = 8
ORDER = 2


class InjectedError(RuntimeError):
    """A fault that the simulator made."""


class Interrupted(KeyboardInterrupt):
    """A simulated Ctrl-C."""


class Dice(random.Random):
    """All chance of a simulation.

    Attributes:
        interrupting: how likely a step is interrupted at each place where one can be.
    """

    interrupting = 0.0

    def happens(self, probability: float) -> bool:
        return self.random() < probability

    def interrupt(self) -> None:
        """Here a step may be interrupted."""
        if self.interrupting and self.happens(self.interrupting):
            raise Interrupted


@cache
def logits_of(model: int) -> dict[tuple[int, ...], Tensor]:
    """Logits after each pair of tokens; for some models one pair leads to NaN."""
    dice = Dice(f"model {model}")
    table: dict[tuple[int, ...], Tensor] = {}
    for first in range(VOCAB_SIZE):
        for second in range(VOCAB_SIZE):
            weights = [dice.expovariate(1.0) for _ in range(VOCAB_SIZE)]
            table[first, second] = torch.tensor(weights, dtype=torch.float64).log()
    if dice.happens(0.3):
        table[dice.randrange(VOCAB_SIZE), dice.randrange(VOCAB_SIZE)].fill_(torch.nan)
    return table


class SimTarget(TableModel):
    """A table whose forwards fail now and then."""

    def __init__(self, model: int, dice: Dice | None = None, failing: float = 0.0) -> None:
        super().__init__(VOCAB_SIZE, lambda context: [1.0] * VOCAB_SIZE)
        self._table, self._dice, self._failing = logits_of(model), dice, failing

    def score(self, rows: Sequence[ScoreRow], taps: Sequence[int] = ()) -> Scores:
        if self._dice is not None and self._dice.happens(self._failing):
            raise InjectedError("device lost")
        if self._dice is not None:
            self._dice.interrupt()
        return super().score(rows, taps)

    def _score_row(self, row: ScoreRow, taps: Sequence[int]) -> Scores:
        scores = super()._score_row(row, taps)
        if isinstance(self.cache, SimCache) and self.cache.spoils(row.slot):
            scores.logits_NV.fill_(torch.nan)
        return scores

    def _logits_after(self, context: tuple[int, ...]) -> Tensor:
        return self._table[(0, *context)[-ORDER:]]


class SimCache(TokenCache):
    """Memory for so many tokens in all, which is refused at times though there is some.

    Entries go bad now and then, and so do all that are computed from them, until logits say so.
    """

    def __init__(
        self, max_tokens: int | None, block_size: int, dice: Dice, failing: float, spoiling: float
    ) -> None:
        super().__init__(max_tokens=max_tokens, block_size=block_size)
        self._dice, self._failing, self._spoiling = dice, failing, spoiling
        self._origins: dict[int, list[int]] = {}  # of bad entries, by block; 0: it is good
        self._num_origins = 0

    def reserve(self, slot: int, num_tokens: int) -> None:
        self._refuse_at_times()
        self._dice.interrupt()
        super().reserve(slot, num_tokens)

    def keep(self, slot: int, num_pending: int, path: Sequence[int]) -> None:
        self._dice.interrupt()
        super().keep(slot, num_pending, path)

    def allocate(self) -> int:
        self._refuse_at_times()
        return super().allocate()

    def write(self, slot: int, tokens: Sequence[int]) -> None:
        super().write(slot, tokens)
        start = self.length(slot)
        origin = max(self.origins(slot, 0, start), default=0)
        if not origin and self._dice.happens(self._spoiling):
            self._num_origins += 1
            origin = self._num_origins
        for entry in range(start, start + len(tokens)):
            block, place = divmod(entry, self.block_size)
            self._origins[self.table(slot)[block]][place] = origin

    def spoils(self, slot: int) -> bool:
        """Whether the last forward of a slot read or wrote a bad entry, and its logits say so."""
        state = self.slot(slot)
        is_bad = bool(self.origins(slot, 0, state.length + state.written))
        return is_bad and self._dice.happens(0.1)

    def origins(self, slot: int, start: int, end: int) -> set[int]:
        """Where the bad entries of a slot come from."""
        places = (divmod(entry, self.block_size) for entry in range(start, end))
        found = {self._origins[self.table(slot)[block]][place] for block, place in places}
        return found - {0}

    def _make_room(self, blocks: Sequence[int]) -> None:
        super()._make_room(blocks)
        for block in blocks:
            self._origins[block] = [0] * self.block_size

    def _copy_block(self, source: int, target: int) -> None:
        super()._copy_block(source, target)
        self._origins[target] = self._origins[source].copy()

    def _refuse_at_times(self) -> None:
        if self._dice.happens(self._failing):
            raise self._dice.choice([CacheFullError, MemoryError])("injected: no memory now")


class SimController:
    """Allows anything, more than there is room for too, and fails at all it does now and then.

    Attributes:
        said: the drafter of each request, as it said last.
    """

    def __init__(
        self, dice: Dice, most: int, failing: float, names: Sequence[str] = (OWN,)
    ) -> None:
        self._dice, self._most, self._failing = dice, most, failing
        self._names: list[str | None] = [*names, *([None] if len(names) > 1 else [])]
        self.said: dict[int, str | None] = {}

    def begin(self, row: Row, others: Sequence[Row]) -> str | None:
        self.said[row.request_id] = None  # no drafter, if it fails now
        self._fail()
        self.said[row.request_id] = self._dice.choice(self._names)
        return self.said[row.request_id]

    def allow(self, rows: Sequence[Row], others: Sequence[Row] = ()) -> list[Allowance]:
        self._fail()
        allowed = []
        for row in rows:
            name = row.drafter
            if len(self._names) > 1 and self._dice.happens(0.2):
                name = self.said[row.request_id] = self._dice.choice(self._names)
            most = self._dice.randint(0, self._most)
            allowed.append(Allowance(name, most, num_forced=self._dice.choice([0, most])))
        return allowed

    def observe(self, record: StepRecord) -> None:
        self._fail()

    def end(self, request_id: int) -> None:
        self.said.pop(request_id, None)
        self._fail()

    def _fail(self) -> None:
        self._dice.interrupt()
        if self._dice.happens(self._failing):
            raise InjectedError("the controller is lost")


class Noting:
    """A controller, and the drafter of each request as it said last.

    Args:
        controller: the one that decides.
    """

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self.said: dict[int, str | None] = {}

    def begin(self, row: Row, others: Sequence[Row]) -> str | None:
        self.said[row.request_id] = self._controller.begin(row, others)
        return self.said[row.request_id]

    def allow(self, rows: Sequence[Row], others: Sequence[Row] = ()) -> list[Allowance]:
        allowed = self._controller.allow(rows, others)
        pairs = zip(rows, allowed, strict=True)
        self.said |= {row.request_id: allowance.drafter for row, allowance in pairs}
        return allowed

    def observe(self, record: StepRecord) -> None:
        self._controller.observe(record)

    def end(self, request_id: int) -> None:
        self.said.pop(request_id, None)
        self._controller.end(request_id)


class SimDrafter:
    """Drafts random trees, nonsense now and then, and fails anywhere; notes whom it follows.

    Attributes:
        followed: the requests that it follows.
        complaint: what is wrong, if anything is: what it raises only ends its drafts.
        asked: budgets of the step under way, by request, where it could draft.
    """

    taps: Sequence[int] = ()
    layers: Sequence[Any] = ()
    traits = DrafterTraits()

    def __init__(self, dice: Dice, failing: float, nonsense: float) -> None:
        self._dice, self._failing, self._nonsense = dice, failing, nonsense
        self.followed: set[int] = set()
        self.complaint = ""
        self.asked: dict[int, int] = {}

    def begin(self, row: DraftRow) -> None:
        assert row.request_id not in self.followed
        self.followed.add(row.request_id)
        self._fail("begin")

    def propose(self, rows: Sequence[DraftRow]) -> Any:
        assert all(row.request_id in self.followed for row in rows)
        self.asked |= {row.request_id: row.budget for row in rows}
        self._fail("propose")
        drafts = [
            self._nonsense_for(row) or self._draft(row) if self._is_ready(row) else NOT_READY
            for row in rows
        ]
        if self._dice.happens(self._nonsense):
            return drafts[1:]
        for row, draft in zip(rows, drafts, strict=True):
            if draft is NOT_READY:
                del self.asked[row.request_id]
        return drafts

    def _is_ready(self, row: DraftRow) -> bool:
        """Whether it can draft for a row; else it counts as not asked. For some it never can."""
        return row.request_id % 11 != 10 and not self._dice.happens(0.05)

    def observe(self, observations: Sequence[RowStep]) -> None:
        for seen in observations:
            assert seen.request_id in self.followed
            assert tuple(seen.tokens[len(seen.tokens) - len(seen.committed) :]) == seen.committed
        self._fail("observe")

    def end(self, request_id: int) -> None:
        self._dice.interrupt()
        self.followed.remove(request_id)
        if self._dice.happens(self._failing):
            raise InjectedError("end")

    def _draft(self, row: DraftRow) -> Proposal:
        """A tree of any shape, now and then drawn where that is allowed."""
        size = self._dice.randint(0, row.budget)
        if row.params.coupling == "drawn" and size:
            draft, parent = row.draft(), -1
            for _ in range(size):
                added = draft.extend(parent, torch.zeros(VOCAB_SIZE, dtype=torch.float64))
                if not added:
                    break
                (parent,) = added
            return draft.build()
        tokens: list[int] = []
        parents: list[int] = []
        for node in range(size):
            parent = node - 1 if self._dice.happens(0.7) else self._dice.randint(-1, node - 1)
            siblings = {tokens[i] for i in range(node) if parents[i] == parent}
            free = [token for token in range(VOCAB_SIZE) if token not in siblings]
            if not free:
                break
            tokens.append(self._dice.choice(free))
            parents.append(parent)
        return Proposal.chosen(TokenTree(tuple(tokens), tuple(parents)))

    def _nonsense_for(self, row: DraftRow) -> Any:
        if not self._dice.happens(self._nonsense):
            return None
        return self._dice.choice(
            [
                Proposal.chosen(TokenTree.chain([VOCAB_SIZE])),
                Proposal.chosen(TokenTree.chain([0] * (row.budget + 1))),
                "no proposal",
            ]
        )

    def _fail(self, where: str) -> None:
        self._dice.interrupt()
        if self._dice.happens(self._failing):
            raise InjectedError(where)


class SimHead(SimDrafter):
    """Keeps a token for each position in layers of the cache, late at times, and checks them."""

    def __init__(self, dice: Dice, failing: float, nonsense: float, cache: TokenCache) -> None:
        super().__init__(dice, failing, nonsense)
        self.layers = (cache.add_layers(KVShape(1, 1, 1), torch.float32),)
        self.traits = DrafterTraits(skips_gaps=dice.happens(0.7))
        self._requests: dict[int, DraftRow] = {}
        self._waiting: dict[int, tuple[int, list[int]]] = {}  # start and tokens, by request

    def begin(self, row: DraftRow) -> None:
        self._requests[row.request_id] = row
        super().begin(row)

    def propose(self, rows: Sequence[DraftRow]) -> Any:
        for row in rows:
            self._catch_up(row.request_id)
            if not self._holds(row):
                self.complaint = "entries of another text"
        return super().propose(rows)

    def observe(self, observations: Sequence[RowStep]) -> None:
        super().observe(observations)
        for seen in observations:
            start, tokens = self._waiting.setdefault(seen.request_id, (seen.context, []))
            if start + len(tokens) != seen.context:
                self.complaint = "it has missed a part of the text"
            tokens += seen.tokens[seen.context : seen.end]
            if self._dice.happens(0.5):
                self._catch_up(seen.request_id)

    def end(self, request_id: int) -> None:
        with contextlib.suppress(*NO_MEMORY):
            self._catch_up(request_id)
        self._waiting.pop(request_id, None)
        self._requests.pop(request_id, None)
        super().end(request_id)

    def _catch_up(self, request_id: int) -> None:
        """Write what waits, from where it may be written on."""
        if request_id not in self._waiting:
            return
        (layers,), slot = self.layers, self._requests[request_id].slot
        start, tokens = self._waiting[request_id]
        first = layers.next_start(slot, start, len(tokens))
        assert self.traits.skips_gaps or first == start, "it follows a text that it lacks"
        if first < start + len(tokens):
            values = torch.tensor(tokens[first - start :], dtype=torch.float32).view(1, -1, 1)
            layers.write(0, slot, first, values, -values)
        del self._waiting[request_id]

    def _holds(self, row: DraftRow) -> bool:
        """Whether its entries are the text's, but for a few that were late and repeat the last."""
        (layers,) = self.layers
        first, end = layers.first(row.slot), layers.covered(row.slot)
        if not end:
            return True
        held = layers.read(0, row.slot, end)[0].flatten().tolist()
        wrong = [i for i, token in enumerate(row.tokens[first:end]) if held[i] != token]
        # The first one may repeat an entry that is not held any more.
        before = row.tokens[max(0, first - MOST_REPEATED) : first]
        return all(held[i] == held[i - 1] if i else held[0] in before for i in wrong)


class SimSelfDraft(SimDrafter):
    """Drafts on the target's own cache: its guesses stand behind the text until the target's
    forward writes the same entries. It keeps nothing of a text and may join any, anywhere."""

    traits = DrafterTraits(promise=(0.8, 0.6), round_share=0.4, learns=False)

    def __init__(self, dice: Dice, failing: float, nonsense: float, cache: TokenCache) -> None:
        super().__init__(dice, failing, nonsense)
        self._cache = cache
        self._first_lengths: dict[int, int] = {}

    def begin(self, row: DraftRow) -> None:
        self._first_lengths[row.request_id] = len(row.tokens)
        super().begin(row)

    def observe(self, observations: Sequence[RowStep]) -> None:
        self.complaint = "it learns nothing, and is told of steps"

    def _is_ready(self, row: DraftRow) -> bool:
        """Not before the prompt is read, nor in the step that reads it from the cache's end."""
        is_first = len(row.tokens) == self._first_lengths[row.request_id]
        return not is_first and self._cache.length(row.slot) == len(row.tokens) - 1

    def _draft(self, row: DraftRow) -> Proposal:
        if list(self._cache.context(row.slot)) != list(row.tokens[:-1]):
            self.complaint = "the cache holds another text than the one that it drafts for"
        guesses = [self._dice.randrange(VOCAB_SIZE) for _ in range(row.budget)]
        entries = (row.tokens[-1], *guesses)[: row.budget]
        self._cache.reserve(row.slot, len(entries))
        self._cache.write(row.slot, entries)
        return super()._draft(row)
