"""Replay a trace with other settings, to see what they would have done.

Seeded text does not depend on drafting, so the same tokens would have been committed; only the
steps that bring them differ. With fewer draft tokens a step keeps the first nodes of what was
drafted (drafters order them by likelihood), and if the recorded draft was longer, its remainder
becomes the next step's draft. Drafts beyond the recorded nodes are unknown, so the result for more
draft tokens than were allowed is a lower bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from foredraft.core.cost import CostModel
from foredraft.core.errors import ConfigError
from foredraft.trace.files import Trace
from foredraft.trace.format import TracedRow, TracedStep

SIZES = (0, 1, 2, 4, 8, 16)
"""Numbers of draft tokens to try."""
_WORTH_SAYING = 1.05
_MOST_SENTENCES = 3


def step_cost(steps: Sequence[TracedStep]) -> tuple[CostModel, bool]:
    """The time of a step of one row by its tokens, and whether all drafts were of one size.

    Raises:
        ConfigError: no step decoded one request alone.
    """
    found = [
        (1 + len(step.rows[0].draft.tokens), step.times.total_ms)
        for step in steps
        if len(step.rows) == 1 and is_decoding(step.rows[0])
    ]
    if not found:
        raise ConfigError("the trace has no step that decoded one request alone")
    usual = 3.0 * median(ms for _, ms in found)  # longer ones were interrupted
    kept = [(size, ms) for size, ms in found if ms <= usual]
    return CostModel.through(kept), len({size for size, _ in kept}) < 2


@dataclass(frozen=True)
class Outcome:
    """The measured or replayed result of a setting.

    Attributes:
        ms: by the model of costs.
        is_bound: more could have been accepted: the trace does not hold such long drafts.
    """

    num_draft_tokens: int
    steps: int
    drafted: int
    accepted: int
    committed: int
    ms: float
    is_bound: bool

    @property
    def committed_per_step(self) -> float:
        return self.committed / self.steps if self.steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        return 1e3 * self.committed / self.ms if self.ms else 0.0


def replay(steps: Sequence[TracedStep], num_draft_tokens: int, cost: CostModel) -> Outcome:
    """The same text with at most ``num_draft_tokens`` nodes a step."""
    rows = [row for step in steps for row in step.rows if is_decoding(row)]
    done = [piece for row in rows for piece in pieces(row, num_draft_tokens)]
    return Outcome(
        num_draft_tokens=num_draft_tokens,
        steps=len(done),
        drafted=sum(nodes for nodes, _ in done),
        accepted=sum(committed - 1 for _, committed in done),
        committed=sum(committed for _, committed in done),
        ms=sum(cost.ms([(1 + nodes, 0)]) for nodes, _ in done),
        is_bound=num_draft_tokens > max((row.budget for row in rows), default=0),
    )


@dataclass(frozen=True)
class Stretch:
    """Consecutive steps of one request, and their times.

    Attributes:
        first, last: numbers of the tokens of the reply, from 1.
        text: what they brought.
        drafters: drafters of these steps.
        draft_ms, score_ms, rest_ms: in all; ``rest_ms`` is verifying and learning.
        recorded: what was done, by the model of costs.
        best: the best of the numbers of draft tokens that were tried; ``recorded`` if none is
            better.
    """

    first: int
    last: int
    text: str
    drafters: tuple[str, ...]
    draft_ms: float
    score_ms: float
    rest_ms: float
    recorded: Outcome
    best: Outcome

    @property
    def ms_per_token(self) -> float:
        return (self.draft_ms + self.score_ms + self.rest_ms) / (self.last - self.first + 1)

    @property
    def sentence(self) -> str:
        """A sentence: the faster setting, and the reason."""
        done, best = self.recorded, self.best
        steps = max(1, done.steps)
        who = " and ".join(self.drafters) or "the drafter"
        start = " ".join(self.text.split())[:30]
        most = best.num_draft_tokens
        instead = f"with {most} at most" if most else "without drafts"
        return (
            f"from token {self.first} to {self.last} (“{start}…”) {who} drafted "
            f"{done.drafted / steps:.1f} a step, of which {done.accepted / steps:.1f} held; "
            f"{instead} it would have taken {best.ms / 1e3:.2f} s instead of {done.ms / 1e3:.2f}"
        )


@dataclass(frozen=True)
class Replay:
    """A replayed trace: its slow stretches, and other numbers of draft tokens.

    Attributes:
        cost: of a step of one row, by its tokens.
        is_flat: all recorded steps had the same number of nodes, so what one costs is not known.
        recorded: the most draft tokens that were allowed.
        settings: the whole trace with other numbers of them, and as recorded.
    """

    trace: Trace
    cost: CostModel
    is_flat: bool
    recorded: int
    settings: tuple[Outcome, ...]

    @classmethod
    def of(cls, trace: Trace) -> Replay:
        """Replay a trace.

        Raises:
            ConfigError: no step decoded one request alone.
        """
        cost, is_flat = step_cost(trace.steps)
        recorded = max((row.budget for step in trace.steps for row in step.rows), default=0)
        sizes = sorted({size for size in SIZES if size < recorded} | {recorded})
        settings = tuple(replay(trace.steps, size, cost) for size in sizes)
        return cls(trace, cost, is_flat, recorded, settings)

    @cached_property
    def stretches(self) -> Mapping[int, Sequence[Stretch]]:
        """By request, of the steps that it had for itself."""
        return {each: _stretches_of(self.trace, each, self.cost) for each in self.trace.request_ids}

    def slowest(self, request_id: int) -> list[Stretch]:
        """The slowest stretches of a request that would have been faster with other drafts."""

        def rate(stretch: Stretch) -> float:
            return stretch.recorded.tokens_per_s

        worse = [
            each
            for each in self.stretches[request_id]
            if each.best.tokens_per_s > _WORTH_SAYING * rate(each)
        ]
        return sorted(worse, key=rate)[:_MOST_SENTENCES]


def _stretches_of(trace: Trace, request_id: int, cost: CostModel) -> list[Stretch]:
    steps = [
        step
        for step in trace.steps
        if len(step.rows) == 1 and step.rows[0].request_id == request_id
    ]
    return stretches(steps, cost, SIZES)


def stretches(
    steps: Sequence[TracedStep], cost: CostModel, sizes: Sequence[int], num_tokens: int = 32
) -> list[Stretch]:
    """The steps of one request in stretches of a least number of tokens.

    Args:
        steps: that hold one row each; those that read the prompt are left out.
        sizes: numbers of draft tokens to try.
    """
    found, taken, last = list[Stretch](), list[TracedStep](), 0
    decoding = [step for step in steps if is_decoding(step.rows[0])]
    for number, step in enumerate(decoding, start=1):
        taken.append(step)
        count = sum(len(each.rows[0].committed) for each in taken)
        if count >= num_tokens or number == len(decoding):
            found.append(_stretch(taken, cost, sizes, last + 1))
            taken, last = [], last + count
    return found


def _stretch(
    steps: Sequence[TracedStep], cost: CostModel, sizes: Sequence[int], first: int
) -> Stretch:
    rows, times = [step.rows[0] for step in steps], [step.times for step in steps]
    tokens = [token for row in rows for token in row.committed]
    most = max(len(row.draft.tokens) for row in rows)
    recorded = replay(steps, most, cost)
    tried = [replay(steps, size, cost) for size in sizes if size < most]
    return Stretch(
        first,
        first + len(tokens) - 1,
        "".join(token.text for token in tokens),
        tuple(dict.fromkeys(row.drafter for row in rows if row.drafter and row.draft.tokens)),
        sum(time.draft_ms for time in times),
        sum(time.score_ms for time in times),
        sum(time.verify_ms + time.learn_ms for time in times),
        recorded,
        max([recorded, *tried], key=lambda outcome: outcome.tokens_per_s),
    )


def is_decoding(row: TracedRow) -> bool:
    return row.num_read == 1 and bool(row.committed)


def pieces(row: TracedRow, num_draft_tokens: int) -> Iterator[tuple[int, int]]:
    """(nodes, committed) of the replayed steps that replace one recorded step."""
    parent, at = -1, 0
    while at < len(row.committed):
        kept = [*_below(row.draft.parents, parent)][:num_draft_tokens]
        ahead = row.path[at : row.num_accepted]
        accepted = next((i for i, node in enumerate(ahead) if node not in kept), len(ahead))
        taken = min(accepted + 1, len(row.committed) - at)
        yield len(kept), taken
        at += taken
        if at <= len(row.path):
            parent = row.path[at - 1]


def _below(parents: Iterable[int], top: int) -> Iterator[int]:
    inside = {top}
    for node, parent in enumerate(parents):
        if parent in inside:
            inside.add(node)
            yield node
