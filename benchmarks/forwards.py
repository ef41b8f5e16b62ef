"""Time of a forward of n tokens: ours, our drafters', and our peers', in rotating order."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from benchmarks.floor import Machine, measure_machine
from benchmarks.timing import Figure, Stopwatch, take_turns
from foredraft.bench.report import Report, Table
from foredraft.core.params import SamplingParams
from foredraft.core.tree import TokenTree
from foredraft.drafters.base import Drafter, DraftRow
from foredraft.models.base import ScoreRow, Target, read

if TYPE_CHECKING:
    from foredraft.llm import LLM


@dataclass(frozen=True)
class Size:
    """One point of the table: ``rows`` rows of ``tokens`` tokens each."""

    rows: int
    tokens: int


class TimedStepper(Protocol):
    """Something whose forward can be timed again and again from the same state."""

    @property
    def name(self) -> str: ...

    def fits(self, size: Size) -> bool:
        """Whether it can run this size at all."""

    def step(self, size: Size) -> dict[str, float]:
        """One forward; seconds by part, with the whole under "total".

        Raises:
            PeerFailed: it is a peer's, which crashed.
        """


class TargetStepper:
    """A `Target` after ``context`` tokens of text. Rows go on unlike, or they would share experts.

    Args:
        phases: reads the seconds of each phase of the last forward, where the decoder keeps them.
    """

    def __init__(
        self,
        name: str,
        target: Target,
        context: int,
        max_rows: int,
        phases: Callable[[], dict[str, float]] | None = None,
    ) -> None:
        self.name = name
        self._target, self._phases = target, phases
        self._slots = [target.cache.allocate() for _ in range(max_rows)]
        for slot in self._slots:
            read(target, slot, text(context))

    def fits(self, size: Size) -> bool:
        return size.rows <= len(self._slots)

    def step(self, size: Size) -> dict[str, float]:
        tree = TokenTree.chain(text(size.tokens)[1:])
        rows = [ScoreRow(slot, [7 + slot], tree) for slot in self._slots[: size.rows]]
        watch = Stopwatch()
        with watch:
            self._target.score(rows)
        total = watch.seconds
        parts = self._phases() if self._phases else {}
        python = {"python": total - sum(parts.values())} if parts else {}
        return {"total": total} | parts | python

    def close(self) -> None:
        for slot in self._slots:
            self._target.cache.free(slot)


class DrafterStepper:
    """A drafter's own `propose`, with ``tokens - 1`` nodes for it to draft."""

    def __init__(self, name: str, drafter: Drafter, target: Target, context: int) -> None:
        self.name = f"{name} (draft)"
        self._drafter = drafter
        self._tokens = tuple(text(context))
        self._slot = target.cache.allocate()
        drafter.begin(DraftRow.of(0, self._tokens, slot=self._slot))

    def fits(self, size: Size) -> bool:
        return size.rows == 1 and size.tokens > 1

    def step(self, size: Size) -> dict[str, float]:
        row = DraftRow.of(0, self._tokens, SamplingParams(), size.tokens - 1, slot=self._slot)
        watch = Stopwatch()
        with watch:
            self._drafter.propose([row])
        return {"total": watch.seconds}


@dataclass
class StepFigure(Figure[dict[str, float]]):
    """Times of one stepper at one size."""

    name: str
    size: Size

    def median_ms(self, part: str = "total") -> float:
        return 1e3 * statistics.median(sample.get(part, 0.0) for sample in self.samples)

    @property
    def parts(self) -> list[str]:
        return [part for part in (self.samples or [{}])[0] if part != "total"]

    def as_dict(self) -> dict[str, Any]:
        point = {"name": self.name, "rows": self.size.rows, "tokens": self.size.tokens}
        if self.failure is not None:
            return point | {"failure": self.failure}
        best = 1e3 * min(sample["total"] for sample in self.samples)
        return point | {
            "median_ms": self.median_ms(),
            "min_ms": best,
            "parts_ms": {part: self.median_ms(part) for part in self.parts},
        }


def time_steps(
    steppers: Sequence[TimedStepper],
    sizes: Sequence[Size],
    rounds: int,
    advance: Callable[[], None],
) -> list[StepFigure]:
    """Each stepper at each size, once a round, so that a slow moment of the machine hits all."""
    figures = [StepFigure(s.name, size) for s in steppers for size in sizes if s.fits(size)]
    by_name = {stepper.name: stepper for stepper in steppers}
    take_turns(figures, rounds, lambda one: by_name[one.name].step(one.size), advance)
    return figures


def text(length: int) -> list[int]:
    """Some token ids that repeat now and then, as text does."""
    return [(i * i * 31 + i * 7) % 97 + 3 for i in range(length)]


def own_steppers(
    llms: Mapping[str, LLM], contexts: Sequence[int], sizes: Sequence[Size]
) -> list[TimedStepper]:
    """Steppers of each loaded target at each context, and of the drafter where there is one target.

    Args:
        llms: by the name that tables show.
    """
    from foredraft.drafters import build_drafter

    max_rows = max(size.rows for size in sizes)
    steppers: list[TimedStepper] = []
    for context in contexts:
        behind = f" at {context}" if len(contexts) > 1 else ""
        for name, llm in llms.items():
            phases = getattr(getattr(llm.target, "decoder", None), "phase_seconds", None)
            steppers.append(TargetStepper(name + behind, llm.target, context, max_rows, phases))
    if len(llms) == 1:
        [llm] = llms.values()
        if llm.drafter_name != "none":
            drafter = build_drafter(llm.drafter_name, llm.drafter_context)
            steppers.append(DrafterStepper(llm.drafter_name, drafter, llm.target, contexts[0]))
    return steppers


def step_report(
    llms: Mapping[str, LLM],
    figures: Sequence[StepFigure],
    contexts: Sequence[int],
    sizes: Sequence[Size],
) -> Report:
    """Times of forwards beside what the machine could do at best."""
    llm = next(iter(llms.values()))
    assert llm.plan is not None
    machine = measure_machine(llm.plan.device, getattr(torch, llm.plan.dtype))
    floors = {name: floors_ms(each, machine, sizes) for name, each in llms.items()}
    rows = [_shown(figure, figures, floors) for figure in figures]
    parts = dict.fromkeys(part for figure in figures for part in figure.parts)
    columns = {"what": "{name}", "rows": "{rows:d}", "tokens": "{tokens:d}", "ms": "{ms:.2f}",
               "vs 1": "{vs_1:.2f}x", "floor": "{floor:.2f}"}  # fmt: skip
    columns |= {part: f"{{{part}:.2f}}" for part in parts}
    about = (
        f"{llm.plan.name}, {llm.plan.number_format}, {llm.plan.decoder} kernels; reads "
        f"{machine.bytes_per_s / 1e9:.1f} GB/s, multiplies {machine.flops_per_s / 1e9:.0f} "
        "GFLOP/s; median ms of a forward"
    )
    first = next(iter(floors.values()))
    return Report(
        tables=[Table("", rows, columns), Table("figures", [f.as_dict() for f in figures])],
        facts={
            "model": llm.plan.name,
            "weights": llm.plan.weights,
            "context": contexts[0] if len(contexts) == 1 else ",".join(map(str, contexts)),
            "machine_rates": vars(machine),
            "floor_ms": {str(n): ms for n, ms in first.items()},
        },
        lines=[about],
    )


def floors_ms(llm: LLM, machine: Machine, sizes: Sequence[Size]) -> dict[int, float]:
    """By tokens of a forward, the least milliseconds it can take."""
    plan = llm.plan
    assert plan is not None
    # Integer products run at a rate of their own, which nothing here measures.
    num_parameters = 0 if plan.weight_bits else plan.num_parameters
    counts = sorted({size.rows * size.tokens for size in sizes})
    return {n: machine.floor_ms(plan.read_bytes, num_parameters, n) for n in counts}


def _shown(
    figure: StepFigure, figures: Sequence[StepFigure], floors: Mapping[str, Mapping[int, float]]
) -> dict[str, Any]:
    """A figure as a row of the table on the terminal."""
    size = figure.size
    row: dict[str, Any] = {"name": figure.name, "rows": size.rows, "tokens": size.tokens}
    if figure.failure is not None:
        return row | {"failure": figure.failure}
    row |= {"ms": figure.median_ms()} | {part: figure.median_ms(part) for part in figure.parts}
    for other in figures:
        if (other.name, other.size) == (figure.name, Size(size.rows, 1)) and not other.failure:
            row["vs_1"] = row["ms"] / other.median_ms()
    floor = floors.get(figure.name.partition(" at ")[0])
    return row if floor is None else row | {"floor": floor[size.rows * size.tokens]}
