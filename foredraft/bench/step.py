"""What a forward of n tokens costs: ours, our drafters', and our peers', in rotating order."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from foredraft.bench.timers import Stopwatch
from foredraft.bench.turns import Figure, take_turns
from foredraft.core.params import SamplingParams
from foredraft.core.tree import TokenTree
from foredraft.drafters.base import Drafter, DraftRequest, DraftRow
from foredraft.models.base import ScoreRow, Target, read


@dataclass(frozen=True)
class Size:
    """One point of the table: ``rows`` rows of ``tokens`` tokens each."""

    rows: int
    tokens: int


class Stepper(Protocol):
    """Something whose forward can be timed again and again from the same state."""

    @property
    def name(self) -> str: ...

    def fits(self, size: Size) -> bool:
        """Whether it can run this size at all."""
        ...

    def step(self, size: Size) -> dict[str, float]:
        """One forward; seconds by part, with the whole under "total".

        Raises:
            PeerFailed: it is a peer's, which crashed.
        """
        ...


class TargetStepper:
    """A `Target` after ``context`` tokens of text.

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
        rows = [ScoreRow(slot, [7], tree) for slot in self._slots[: size.rows]]
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
        drafter.begin(DraftRequest(0, self._tokens, slot=self._slot))

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
    steppers: Sequence[Stepper], sizes: Sequence[Size], rounds: int, advance: Callable[[], None]
) -> list[StepFigure]:
    """Each stepper at each size, once a round, so that a slow moment of the machine hits all."""
    figures = [StepFigure(s.name, size) for s in steppers for size in sizes if s.fits(size)]
    by_name = {stepper.name: stepper for stepper in steppers}
    take_turns(figures, rounds, lambda one: by_name[one.name].step(one.size), advance)
    return figures


def text(length: int) -> list[int]:
    """Some token ids that repeat now and then, as text does."""
    return [(i * i * 31 + i * 7) % 97 + 3 for i in range(length)]
