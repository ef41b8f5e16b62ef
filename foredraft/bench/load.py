"""Many requests at once, by several contenders on one loaded model, in short turns.

Each contender has an engine of its own and keeps a fixed number of requests in flight: when one
ends, the next begins. They take turns of some steps, and a contender's clock stands still while
others run. So slow phases of the machine affect all contenders alike, and differences of 1 % can be
measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from foredraft.core.params import SamplingParams
from foredraft.core.record import RowStep, StepRecord
from foredraft.llm import LLM
from foredraft.system.machine import energy_joules

TURN_S = 0.12
"""Seconds of its own time that a contender runs before the next one."""


@dataclass(frozen=True)
class Load:
    """The load that every contender serves.

    Attributes:
        prompts: token ids of each request.
        params: of all of them; request number n adds n to the seed.
        concurrency: requests in flight.
        stays_full: whether the prompts come again until each of them has ended once, so that there
            are as many in flight at the end as at the beginning; what is under way then is dropped.
    """

    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    concurrency: int
    stays_full: bool = False

    def params_of(self, number: int) -> SamplingParams:
        return replace(self.params, seed=(self.params.seed or 0) + number)


@dataclass(frozen=True)
class Finished:
    """One request; seconds are of its contender's clock, from when it was handed in."""

    number: int
    token_ids: tuple[int, ...]
    first_s: float
    total_s: float


@dataclass(frozen=True)
class ServedStep:
    """Milliseconds of one step, and its rows.

    Attributes:
        wall_ms: all of it, as its caller sees it.
        draft_ms: in the drafter, proposing and observing.
        kernel_ms: of the target's forward in compiled code, where the decoder says so.
        num_rows: requests that took part.
        is_decoding: no prompt was read.
        rows: of these requests, where they are known.
    """

    wall_ms: float
    draft_ms: float
    kernel_ms: float
    num_rows: int
    drafted: int
    committed: int
    is_decoding: bool
    rows: Sequence[RowStep] = ()


@dataclass
class Served:
    """Results of a contender under a load so far.

    Attributes:
        joules: the processor's energy during its turns; None where it cannot be read.
    """

    seconds: float = 0.0
    finished: list[Finished] = field(default_factory=list)
    steps: list[ServedStep] = field(default_factory=list)
    joules: float | None = None

    @property
    def token_joules(self) -> float | None:
        """Of a token, prefill included."""
        tokens = sum(step.committed for step in self.steps)
        return self.joules / tokens if self.joules and tokens else None


class Server(Protocol):
    """Something that serves loads, a turn at a time."""

    @property
    def name(self) -> str: ...

    def begin(self, load: Load) -> None:
        """Begin a load; the previous one has ended."""

    def turn(self, seconds: float) -> bool:
        """Serve for about that many seconds; returns whether requests are left."""

    @property
    def served(self) -> Served: ...


class OurServer:
    """foredraft with one drafter, on a target that others share.

    Args:
        new_llm: makes it for a number of requests in flight, with the records of its steps.
    """

    def __init__(self, name: str, new_llm: Callable[[int, Callable[[StepRecord], None]], LLM]):
        self.name = name
        self._new_llm = new_llm
        self.served = Served()

    def begin(self, load: Load) -> None:
        self.served, self._load = Served(), load
        self._records: list[tuple[StepRecord, float]] = []

        def note(record: StepRecord) -> None:
            self._records.append((record, 1e3 * sum(phases().values())))

        self.llm = self._new_llm(load.concurrency, note)
        phases = getattr(getattr(self.llm.target, "decoder", None), "phase_seconds", dict)
        self._next = 0  # number of the request that is handed in next
        self._ended = 0  # of those that all contenders have to answer
        self._started: dict[int, tuple[int, float]] = {}
        self.numbers: dict[int, int] = {}  # of requests, by their ids
        self._first: dict[int, float] = {}

    def turn(self, seconds: float) -> bool:
        until = self.served.seconds + seconds
        num_asked = len(self._load.prompts)
        while self.served.seconds < until and self._ended < num_asked:
            self._hand_in()
            self._step()
        if self._ended < num_asked:
            return True
        for request_id in self._started:
            self.llm.engine.cancel(request_id)
        self._started.clear()
        return False

    def _hand_in(self) -> None:
        prompts = self._load.prompts
        last = float("inf") if self._load.stays_full else len(prompts)
        while self._next < last and len(self._started) < self._load.concurrency:
            params, policy = self._load.params_of(self._next), self.llm.policy
            prompt = prompts[self._next % len(prompts)]
            request_id = self.llm.engine.submit(prompt, params, policy=policy)
            self._started[request_id] = (self._next, self.served.seconds)
            self.numbers[request_id] = self._next
            self._next += 1

    def _step(self) -> None:
        self._records.clear()
        began = time.perf_counter()
        events = self.llm.engine.step(self.llm.policy)
        wall_s = time.perf_counter() - began
        self.served.seconds += wall_s
        self.served.steps.append(_as_step(self._records, 1e3 * wall_s))
        for event in events:
            number, started = self._started[event.request_id]
            taken = self.served.seconds - started
            if event.token_ids:
                self._first.setdefault(event.request_id, taken)
            if event.result is None:
                continue
            if event.result.error:
                raise RuntimeError(f"{self.name}: {event.result.error}")
            first = self._first.get(event.request_id, taken)
            done = Finished(number, tuple(event.result.token_ids), first, taken)
            del self._started[event.request_id]
            if number < len(self._load.prompts):
                self.served.finished.append(done)
                self._ended += 1


def _as_step(records: Sequence[tuple[StepRecord, float]], wall_ms: float) -> ServedStep:
    rows = [row for record, _ in records for row in record.rows]
    return ServedStep(
        wall_ms=wall_ms,
        draft_ms=sum(r.times.draft_ms + r.times.learn_ms for r, _ in records),
        kernel_ms=sum(kernel_ms for _, kernel_ms in records),
        num_rows=len(rows),
        drafted=sum(len(row.proposal.tree) for row in rows),
        committed=sum(len(row.committed) for row in rows),
        is_decoding=all(record.is_decoding for record, _ in records),
        rows=rows,
    )


def serve(
    contenders: Sequence[Server],
    load: Load,
    advance: Callable[[str], None],
    beside: Callable[[], None] = lambda: None,
) -> None:
    """One load, by all contenders in turns; afterwards each has it in ``served``.

    Args:
        advance: called with a line of progress at the end of each request.
        beside: called once a round of turns.
    """
    for contender in contenders:
        contender.begin(load)
    busy, ended = [*contenders], dict.fromkeys((c.name for c in contenders), 0)
    while busy:
        beside()
        for contender in [*busy]:
            before = energy_joules()
            goes_on, after = contender.turn(TURN_S), energy_joules()
            if before is not None and after is not None:
                contender.served.joules = (contender.served.joules or 0.0) + max(0, after - before)
            if not goes_on:
                busy.remove(contender)
            finished = len(contender.served.finished)
            for _ in range(finished - ended[contender.name]):
                advance(f"{load.concurrency} at once: {contender.name}")
            ended[contender.name] = finished
        busy = busy[1:] + busy[:1]
