"""What a simulated engine is made of: everything that fails in the world, by the roll of dice."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from foredraft.control.base import OWN, Allowance, Row
from foredraft.core.errors import CacheFullError
from foredraft.core.proposal import Proposal
from foredraft.core.record import StepRecord
from foredraft.core.tree import TokenTree
from foredraft.drafters.base import DraftRequest, DraftRow, Observation
from foredraft.models.base import ScoreRow, Scores
from foredraft.models.table import TableModel, TokenCache

VOCAB_SIZE = 8
ORDER = 2


class InjectedError(RuntimeError):
    """A fault that the simulator made."""


class Dice(random.Random):
    """All chance of a simulation."""

    def happens(self, probability: float) -> bool:
        return self.random() < probability


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
        return super().score(rows, taps)

    def _logits_after(self, context: tuple[int, ...]) -> Tensor:
        return self._table[(0, *context)[-ORDER:]]


class SimCache(TokenCache):
    """Memory for so many tokens in all, which is refused at times though there is some."""

    def __init__(self, max_tokens: int | None, block_size: int, dice: Dice, failing: float) -> None:
        super().__init__(max_tokens=max_tokens, block_size=block_size)
        self._dice, self._failing = dice, failing

    def reserve(self, slot: int, num_tokens: int) -> None:
        self._refuse_at_times()
        super().reserve(slot, num_tokens)

    def allocate(self) -> int:
        self._refuse_at_times()
        return super().allocate()

    def _refuse_at_times(self) -> None:
        if self._dice.happens(self._failing):
            raise self._dice.choice([CacheFullError, MemoryError])("injected: no memory now")


class SimController:
    """Allows anything, more than there is room for too, and fails at all it does now and then."""

    def __init__(self, dice: Dice, most: int, failing: float) -> None:
        self._dice, self._most, self._failing = dice, most, failing

    def begin(self, row: Row, others: Sequence[Row]) -> str:
        self._fail()
        return OWN

    def allow(self, rows: Sequence[Row], others: Sequence[Row] = ()) -> list[Allowance]:
        self._fail()
        return [Allowance(row.drafter, self._dice.randint(0, self._most)) for row in rows]

    def observe(self, record: StepRecord) -> None:
        self._fail()

    def end(self, request_id: int) -> None:
        self._fail()

    def _fail(self) -> None:
        if self._dice.happens(self._failing):
            raise InjectedError("the controller is lost")


class SimDrafter:
    """Drafts random trees, nonsense now and then, and fails anywhere; notes whom it follows."""

    taps: Sequence[int] = ()
    layers: Sequence[Any] = ()
    look_ahead = 0

    def __init__(self, dice: Dice, failing: float, nonsense: float) -> None:
        self._dice, self._failing, self._nonsense = dice, failing, nonsense
        self.followed: set[int] = set()

    def begin(self, request: DraftRequest) -> None:
        assert request.request_id not in self.followed
        self.followed.add(request.request_id)
        self._fail("begin")

    def propose(self, rows: Sequence[DraftRow]) -> Any:
        assert all(row.request_id in self.followed for row in rows)
        self._fail("propose")
        drafts = [self._nonsense_for(row) or self._draft(row) for row in rows]
        return drafts[1:] if self._dice.happens(self._nonsense) else drafts

    def observe(self, observations: Sequence[Observation]) -> None:
        for seen in observations:
            assert seen.request_id in self.followed
            assert tuple(seen.tokens[len(seen.tokens) - len(seen.committed) :]) == seen.committed
        self._fail("observe")

    def end(self, request_id: int) -> None:
        self.followed.remove(request_id)
        self._fail("end")

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
        if self._dice.happens(self._failing):
            raise InjectedError(where)
