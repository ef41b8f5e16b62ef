"""Where the time of a reply went: its steps in stretches of some tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.trace.files import Trace
from foredraft.trace.format import TracedRow, TracedStep

NUM_TOKENS = 32


@dataclass(frozen=True)
class Stretch:
    """Consecutive steps of one request, and their times.

    Attributes:
        first, last: numbers of the tokens of the reply, from 1.
        text: what they brought.
        drafters: drafters of these steps.
        draft_ms, score_ms, rest_ms: in all; ``rest_ms`` is verifying and learning.
        steps, drafted, accepted: counts.
    """

    first: int
    last: int
    text: str
    drafters: tuple[str, ...]
    draft_ms: float
    score_ms: float
    rest_ms: float
    steps: int
    drafted: int
    accepted: int

    @property
    def ms_per_token(self) -> float:
        return (self.draft_ms + self.score_ms + self.rest_ms) / (self.last - self.first + 1)


def stretches_of(trace: Trace, request_id: int, num_tokens: int = NUM_TOKENS) -> list[Stretch]:
    """The steps that a request had for itself, in stretches of at least ``num_tokens`` tokens.

    Steps that read the prompt are left out.
    """
    decoding = [
        step
        for step in trace.steps
        if len(step.rows) == 1
        and step.rows[0].request_id == request_id
        and _is_decoding(step.rows[0])
    ]
    found, taken, last = list[Stretch](), list[TracedStep](), 0
    for number, step in enumerate(decoding, start=1):
        taken.append(step)
        count = sum(len(each.rows[0].committed) for each in taken)
        if count >= num_tokens or number == len(decoding):
            found.append(_stretch(taken, last + 1))
            taken, last = [], last + count
    return found


def _stretch(steps: Sequence[TracedStep], first: int) -> Stretch:
    rows, times = [step.rows[0] for step in steps], [step.times for step in steps]
    tokens = [token for row in rows for token in row.committed]
    return Stretch(
        first,
        first + len(tokens) - 1,
        "".join(token.text for token in tokens),
        tuple(dict.fromkeys(row.drafter for row in rows if row.drafter and row.draft.tokens)),
        sum(time.draft_ms for time in times),
        sum(time.score_ms for time in times),
        sum(time.verify_ms + time.learn_ms for time in times),
        len(steps),
        sum(len(row.draft.tokens) for row in rows),
        sum(row.num_accepted for row in rows),
    )


def _is_decoding(row: TracedRow) -> bool:
    return row.num_read == 1 and bool(row.committed)
