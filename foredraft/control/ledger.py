"""Bounds what speculation can lose.

Each step is booked with the time that it took and the time that its tokens would have taken without
drafts. A balance is left to lose: it begins with the time of four plain tokens (of 1.5
steps, in a batch where that is more), grows by a small share of all plain time and by what drafts
save, up to a limit, and shrinks by what they cost. A step may draft only if what it would lose with
nothing accepted is there. So, whatever happens,

    time spent <= (1 + share) * plain time + the beginning + what a step took beyond its forecast

by the times that the cost model and the drafters' own clocks gave. Given those it is arithmetic,
not chance. The limit keeps savings of long ago from paying for losses now.

A prompt that a draft model reads is an investment and has an account of its own: what is owed is
paid back by what drafts save beyond that limit, and by as small a share of plain time. While more
is owed than a reply is expected to save, no other text is read. So reading adds to the right side
what is owed at most, and the same share once more.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARE = 0.0075
"""Of all plain time that may be lost."""
FIRST_TOKENS, FIRST_STEPS = 4.0, 1.5
_MOST_STEPS = 8.0
_PAYS = 2.0
"""A prefill must be expected to save this multiple of its time."""


@dataclass
class Ledger:
    """See the module docstring. Times are milliseconds.

    Attributes:
        share: of the plain time that may be lost, at most.
        plain_ms: what all tokens so far would have taken without drafts.
        spent_ms: what they took.
        balance_ms: what may still be lost; None before `begin`.
        owed_ms: what draft models have read and drafts have not saved yet.
    """

    share: float = SHARE
    plain_ms: float = 0.0
    spent_ms: float = 0.0
    balance_ms: float | None = None
    owed_ms: float = 0.0

    @property
    def saved_ms(self) -> float:
        """Plain time less time spent; negative: speculation has lost so much."""
        return self.plain_ms - self.spent_ms

    def begin(self, plain_step_ms: float, num_rows: int) -> None:
        """The first rows are there, and what a step of them takes; does nothing later."""
        if self.balance_ms is None:
            self.balance_ms = max(FIRST_STEPS, FIRST_TOKENS / num_rows) * plain_step_ms

    def left_ms(self, plain_step_ms: float) -> float:
        """The remaining loss budget."""
        return FIRST_STEPS * plain_step_ms if self.balance_ms is None else self.balance_ms

    def can_lose(self, ms: float, plain_step_ms: float) -> bool:
        """Whether a step may be run that loses this much if nothing is accepted."""
        return ms <= self.left_ms(plain_step_ms)

    def can_invest(self, read_ms: float, saving_ms: float) -> bool:
        """Whether a draft model may read a text for this long.

        Args:
            saving_ms: what the rest of the reply is expected to save with it.
        """
        return _PAYS * read_ms <= saving_ms and self.owed_ms <= saving_ms

    def invest(self, read_ms: float) -> None:
        """A draft model has read for this long."""
        self.spent_ms += read_ms
        self.owed_ms += read_ms

    def book(self, spent_ms: float, plain_ms: float, plain_step_ms: float) -> None:
        """A step has been run.

        Args:
            spent_ms: what it took.
            plain_ms: what its tokens would have taken without drafts.
            plain_step_ms: what it would have taken without drafts.
        """
        self.spent_ms += spent_ms
        self.plain_ms += plain_ms
        before = self.left_ms(plain_step_ms)
        after = before + (1.0 + self.share) * plain_ms - spent_ms
        # Never lower a balance only because the limit, which is in plain steps, has shrunk.
        self.balance_ms = min(after, max(before, _MOST_STEPS * plain_step_ms))
        paid_ms = after - self.balance_ms + self.share * plain_ms
        self.owed_ms = max(0.0, self.owed_ms - paid_ms)
