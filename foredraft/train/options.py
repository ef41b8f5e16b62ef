"""Options of training: what `foredraft train` takes. Nothing heavy is imported for them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from foredraft.core.errors import ConfigError, unknown

if TYPE_CHECKING:
    from foredraft.drafters.heads.base import HeadModule
    from foredraft.train.folder import Counters

_TEXTS_PER_MINUTE = 16
"""Held-out texts that are measured on in a training of few minutes."""
_READING_SHARE = 0.5
"""Largest share of the minutes left after writing the text that is spent on reading it."""
_MEASURING_SHARE = 0.2
"""Largest share of the minutes for learning that is spent on measuring."""


@dataclass(frozen=True)
class Rates:
    """Learning rates at their highest.

    Attributes:
        matrices: of hidden matrices, by Muon (arXiv 2502.16982: scaled so that a step is as large
            as one of AdamW).
        tables: of rows that belong to tokens, by AdamW.
        vectors: of norms and biases, and whatever is left, by AdamW.
        weight_decay: of matrices.
    """

    matrices: float = 1e-2
    tables: float = 8e-3
    vectors: float = 8e-3
    weight_decay: float = 0.01


@dataclass(frozen=True)
class TrainOptions:
    """How to train a head.

    Attributes:
        tokens: to learn from, repetitions counted; None: as many as fit the time.
        minutes: of the whole run, over all resumptions: loading the target, writing and reading
            text, learning, measuring; None: as long as the tokens take.
        batch_tokens: of one step, padding included.
        sequence: tokens of a row; longer texts are cut into windows.
        depth: draft tokens that are trained and measured.
        first_depth_until: share of the training in which only the first draft token is trained: it
            is learnt several times as fast alone, and the others stand on it.
        loss: see `losses`.
        output_rows: tokens that the head can name, the most frequent ones; 0: all.
        rates: learning rates.
        clip: largest norm of the gradient.
        average: decay of a running mean of the weights, which is then what is kept; 0: none.
        evaluations: how often acceptance is measured, at most: in short trainings less often.
        held_out_texts: texts that it is measured on, at most: in short trainings fewer.
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
        from foredraft.train.losses import loss_named

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
        """The share of the learning that is behind us, 0 to 1 and above."""
        shares = [0.0]
        if self.tokens is not None:
            shares.append(counters.tokens / self.tokens)
        if self.minutes is not None:
            spent_s = counters.seconds + counters.measuring_s
            shares.append(spent_s / self._learning_s(counters))
        return max(shares)

    def depth_at(self, counters: Counters) -> int:
        """Draft tokens to learn now."""
        return 1 if self.done(counters) < self.first_depth_until else self.depth

    def left_s(self, counters: Counters) -> float:
        """Estimated seconds until the end of the run; infinity: unknown."""
        left = [math.inf]
        if self.tokens is not None and counters.tokens:
            pace = (counters.seconds + counters.measuring_s) / counters.tokens
            left.append(pace * (self.tokens - counters.tokens) + counters.last_measuring_s)
        if self.minutes is not None:
            left.append(60 * self.minutes - counters.total_s)
        return max(0.0, min(left))

    def reading_s(self, counters: Counters, elapsed_s: float) -> float:
        """Seconds that reading text may take now.

        Args:
            elapsed_s: of this run, which ``counters`` do not know of yet.
        """
        if self.minutes is None:
            return math.inf
        return _READING_SHARE * max(0.0, 60 * self.minutes - counters.total_s - elapsed_s)

    @property
    def num_held_out(self) -> int:
        """Texts to measure on, at most."""
        if self.minutes is None:
            return self.held_out_texts
        return min(self.held_out_texts, max(4, int(_TEXTS_PER_MINUTE * self.minutes)))

    def next_evaluation(self, counters: Counters) -> float:
        """The share of the learning at which acceptance is measured next."""
        every = 1 / self.evaluations
        if self.minutes is not None:
            share = counters.last_measuring_s / self._learning_s(counters)
            every = min(1.0, max(every, share / _MEASURING_SHARE))
        measured = max(0.0, counters.evaluated)
        return min(1.0, (math.floor(measured / every + 1e-6) + 1) * every)

    def _learning_s(self, counters: Counters) -> float:
        """Seconds to learn and to measure in; the last measurement comes after them."""
        assert self.minutes is not None
        return max(1e-9, 60 * self.minutes - counters.prepared_s - counters.last_measuring_s)


@dataclass(frozen=True)
class WriteOptions:
    """Options of the text that a target generates for training.

    Attributes:
        tokens: of replies, such as 2M; those that are there already count.
        temperatures: taken in turns, with commas.
        max_tokens: of a reply.
        max_prompt_tokens: longer prompts are passed over; less where the target's context is short.
        seed: of all draws.
        passes: how often each prompt is answered, at most; None: until there are enough tokens.
        shard: texts of a shard: what a kill costs at most. They are written at the same time, as
            far as the target takes them.
    """

    tokens: int
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    max_tokens: int = 256
    max_prompt_tokens: int = 1000
    seed: int = 0
    passes: int | None = None
    shard: int = 64

    def __post_init__(self) -> None:
        if not self.temperatures or min(self.temperatures) < 0:
            raise ConfigError(f"temperatures are {self.temperatures}; give some, 0 or higher")

    def prompt_limit(self, max_context: int) -> int:
        """Most tokens of a prompt in a context of that size, so that a reply still fits."""
        return min(self.max_prompt_tokens, max_context - min(self.max_tokens, max_context // 2))


@dataclass(frozen=True)
class TableOptions:
    """How to learn a table.

    Attributes:
        min_count: times that a context's likeliest successor must have come.
        megabytes: of the file, at most; the contexts that gain most over shorter ones are kept.
    """

    min_count: int = 2
    megabytes: float = 4.0


def checked_options(module: type[HeadModule], options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that a kind of head takes; layers such as ``5,14,29`` become lists of numbers.

    Raises:
        ConfigError: it has no such option, or layers are no numbers.
    """
    for name in options:
        if name not in module.OPTIONS and not module.OPTIONS:
            raise ConfigError(f"{module.kind} has no options, and {name!r} was given")
        if name not in module.OPTIONS:
            raise unknown(f"option of {module.kind!r}", name, module.OPTIONS)
    return {name: module.OPTIONS[name].parsed(name, value) for name, value in options.items()}
