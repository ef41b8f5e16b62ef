"""Decoding beside busy neighbours, which take turns on the cores with us."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from foredraft.bench.contenders import Contender
from foredraft.bench.step import text
from foredraft.bench.turns import Figure, take_turns
from foredraft.core.params import SamplingParams

PROMPT_TOKENS = 64
_NEIGHBOUR = "while True: pass"


@dataclass
class BusyFigure(Figure[float]):
    """Tokens a second of one contender beside so many busy processes."""

    name: str
    neighbours: int

    def tokens_per_s(self) -> float:
        return statistics.median(self.samples)

    def as_dict(self) -> dict[str, Any]:
        point = {"name": self.name, "neighbours": self.neighbours}
        if self.failure is not None:
            return point | {"failure": self.failure}
        return point | {
            "tokens_per_s": self.tokens_per_s(),
            "most": max(self.samples),
        }


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """As many processes that do nothing but compute."""
    with contextlib.ExitStack() as running:
        for _ in range(count):
            process = subprocess.Popen([sys.executable, "-c", _NEIGHBOUR])
            running.callback(process.wait)
            running.callback(process.kill)
        yield


def time_beside(
    contenders: Sequence[Contender],
    neighbours: Sequence[int],
    num_tokens: int,
    rounds: int,
    advance: Callable[[], None],
) -> list[BusyFigure]:
    """Plain decoding of every contender in turns, beside each number of neighbours."""
    figures: list[BusyFigure] = []
    params = SamplingParams.of(max_tokens=num_tokens, ignore_eos=True)
    by_name = {one.name: one for one in contenders}

    def decode(figure: BusyFigure) -> float:
        run = by_name[figure.name].run(text(PROMPT_TOKENS), params)
        return run.num_decoded / run.decode_s

    for count in neighbours:
        own = [BusyFigure(one.name, count) for one in contenders]
        with busy_processes(count):  # the first turn also finds out how many threads pay
            take_turns(own, rounds, decode, advance)
        figures += own
    return figures
