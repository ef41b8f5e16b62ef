"""How long a prompt takes until its first token: ours in each format of weights, and peers."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from foredraft.bench.contenders import Contender
from foredraft.bench.turns import Figure, take_turns
from foredraft.core.params import SamplingParams


@dataclass
class ReadingFigure(Figure[float]):
    """Seconds until the first token of prompts of one length."""

    name: str
    length: int

    def median_ms(self) -> float:
        return 1e3 * statistics.median(self.samples)

    def as_dict(self) -> dict[str, Any]:
        point = {"name": self.name, "tokens": self.length}
        if self.failure is not None:
            return point | {"failure": self.failure}
        return point | {
            "median_ms": self.median_ms(),
            "min_ms": 1e3 * min(self.samples),
        }


def time_reading(
    contenders: Sequence[Contender],
    lengths: Sequence[int],
    vocab: int,
    rounds: int,
    seed: int,
    advance: Callable[[], None],
) -> list[ReadingFigure]:
    """Each contender on the same prompts, one of each length a round.

    Prompts are random token ids, so that nothing of one is in a cache when the next comes.
    """
    numbers = random.Random(seed)
    figures = [ReadingFigure(one.name, length) for one in contenders for length in lengths]
    by_name = {one.name: one for one in contenders}
    params = SamplingParams(max_tokens=1)

    def new_prompts() -> dict[int, list[int]]:
        return {n: [numbers.randrange(vocab) for _ in range(n)] for n in lengths}

    prompts = new_prompts()

    def read(figure: ReadingFigure) -> float:
        return by_name[figure.name].run(prompts[figure.length], params).first_s

    def end_round() -> None:
        prompts.update(new_prompts())
        advance()

    take_turns(figures, rounds, read, end_round)
    return figures
