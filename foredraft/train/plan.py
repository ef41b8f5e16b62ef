"""How to train, and what is said of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from foredraft.core.errors import ConfigError
from foredraft.models.files.progress import Progress
from foredraft.train.acceptance import Acceptance
from foredraft.train.losses import loss_named
from foredraft.train.optimiser import Rates
from foredraft.train.state import Counters


@dataclass(frozen=True)
class TrainPlan:
    """How to train.

    Attributes:
        tokens: to learn from, repetitions counted; None: as many as fit the time.
        minutes: of learning, over all resumptions; None: as long as the tokens take.
        batch_tokens: of one step, padding included.
        sequence: tokens of a row; longer texts are cut into windows.
        depth: draft tokens that are trained and measured.
        first_depth_until: share of the training in which only the first draft token is trained: it
            is learnt several times as fast alone, and the others stand on it.
        loss: see `losses`.
        renormalise: train on the target's distribution over the output rows alone.
        survival: weigh depths by how often drafting gets there; otherwise all weigh the same.
        output_rows: tokens that the head can name, the most frequent ones; 0: all.
        rates: learning rates.
        clip: largest norm of the gradient.
        average: decay of a running mean of the weights, which is then what is kept; 0: none.
        evaluations: how often acceptance is measured.
        held_out_texts: texts that it is measured on, at most.
        save_s: seconds between saved states.
        seed: of the order of the texts.
        float32: no bfloat16 products, also where they are fast.
    """

    tokens: int | None = None
    minutes: float | None = None
    batch_tokens: int = 1024
    sequence: int = 512
    depth: int = 3
    first_depth_until: float = 0.4
    loss: str = "lk"
    renormalise: bool = False
    survival: bool = True
    output_rows: int = 8192
    rates: Rates = field(default_factory=Rates)
    clip: float = 1.0
    average: float = 0.998
    evaluations: int = 20
    held_out_texts: int = 96
    save_s: float = 60.0
    seed: int = 0
    float32: bool = False

    def __post_init__(self) -> None:
        loss_named(self.loss)
        if self.tokens is None and self.minutes is None:
            raise ConfigError("say how long to train: tokens, minutes, or both")
        least = {"tokens": 1, "minutes": 0, "batch_tokens": 16, "sequence": 16, "depth": 1}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and not low <= value < math.inf:
                raise ConfigError(f"{name} is {value}; it must be at least {low}")
        if self.batch_tokens < self.sequence:
            raise ConfigError(
                f"a batch of {self.batch_tokens} tokens cannot hold a row of {self.sequence}; give "
                "larger batches or shorter sequences"
            )

    def done(self, counters: Counters) -> float:
        """The share that is behind us."""
        shares = [0.0]
        if self.tokens is not None:
            shares.append(counters.tokens / self.tokens)
        if self.minutes is not None:
            shares.append(counters.seconds / max(1e-9, 60 * self.minutes))
        return max(shares)

    def depth_at(self, counters: Counters) -> int:
        """Draft tokens to learn now."""
        return 1 if self.done(counters) < self.first_depth_until else self.depth


@dataclass(frozen=True)
class Status:
    """What a monitor is told after each step.

    Attributes:
        done: share of the training.
        loss: of the last steps.
        overlap: by depth, of the last steps.
        tokens_per_s: of learning.
        left_s: estimated seconds.
        acceptance: at the last evaluation.
    """

    done: float
    tokens: int
    loss: float
    overlap: tuple[float, ...]
    tokens_per_s: float
    left_s: float
    acceptance: Acceptance | None


class Monitor(Progress, Protocol):
    """Told how training goes, and asked whether it is to stop."""

    def step(self, status: Status) -> None: ...

    def evaluated(self, status: Status) -> None: ...

    def wants_stop(self) -> bool: ...


@dataclass(frozen=True)
class Result:
    """How a call of `Trainer.run` ended.

    Attributes:
        done: share of the training that is behind us.
        acceptance: of the weights that are kept.
    """

    done: float
    tokens: int
    seconds: float
    acceptance: Acceptance | None
