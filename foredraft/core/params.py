"""What a request asks for: the distribution to draw from, and when to stop."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from foredraft.core.errors import ConfigError, unknown
from foredraft.core.rng import SEED_BITS


@dataclass(frozen=True)
class SamplingParams:
    """What distribution to draw from and when to stop.

    Filters apply in the order temperature, top-k, top-p, min-p, each on the renormalised result
    of the one before (the order of transformers). Tokens that tie with the last one kept are kept
    too, so the outcome never depends on a sort's tie-breaking.

    Attributes:
        temperature: 0 is greedy: all probability on the most likely token.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens with at least this mass, in (0, 1].
        min_p: drop tokens below this fraction of the most likely one's probability, in [0, 1].
        seed: 0 <= seed < 2**64; None draws a fresh one, reported in the result.
        max_tokens: most tokens to generate, at least 1.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: ids that end generation, beside the model's own end-of-text ids.
        ignore_eos: go on past the model's own end-of-text ids.
        coupling: "seeded" (the same seed gives the same text with and without speculation) or
            "drawn" (draft models draw their tokens: higher acceptance at high temperature, the
            same distribution, another text for the same seed).
        prediction: text that the reply is expected to repeat, for drafters that use one. It
            never changes the reply.

    Raises:
        ConfigError: a value is out of range or of the wrong type.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 256
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    coupling: Literal["seeded", "drawn"] = "seeded"
    prediction: str | None = None

    def __post_init__(self) -> None:
        _check_real("temperature", self.temperature, low=0.0)
        _check_real("top_p", self.top_p, low=0.0, high=1.0)
        _check_real("min_p", self.min_p, low=0.0, high=1.0)
        if self.top_p == 0.0:
            raise ConfigError("top_p is 0, which keeps no token; use a value in (0, 1]")
        _check_int("top_k", self.top_k, low=0)
        _check_int("max_tokens", self.max_tokens, low=1)
        if self.seed is not None:
            _check_int("seed", self.seed, low=0, high=2**SEED_BITS - 1)
        stop = (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop)
        stop_token_ids = _tuple("stop_token_ids", self.stop_token_ids)
        for text in stop:
            if not isinstance(text, str) or not text:
                raise ConfigError(f"stop strings must be non-empty text, not {text!r}")
        for token in stop_token_ids:
            _check_int("stop_token_ids", token, low=0)
        if self.coupling not in ("seeded", "drawn"):
            raise unknown("coupling", str(self.coupling), ("seeded", "drawn"))
        if not isinstance(self.prediction, str | None):
            raise ConfigError(f"prediction must be text, not {self.prediction!r}")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", stop_token_ids)

    @classmethod
    def of(cls, **options: Any) -> SamplingParams:
        """Build from keyword options; an unknown one is an error naming the nearest."""
        known = {field.name for field in fields(cls)}
        for name in options:
            if name not in known:
                raise unknown("sampling option", name, known)
        return cls(**options)


def _check_real(name: str, value: object, low: float, high: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        raise ConfigError(f"{name} must be a finite number, not {value!r}")
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value}; it must be {_range(low, high)}")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond the largest float
        return False


def _tuple(name: str, values: Any) -> tuple[Any, ...]:
    if not isinstance(values, Iterable):
        raise ConfigError(f"{name} must be a list, not {values!r}")
    return tuple(values)


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    if type(value) is not int:
        raise ConfigError(f"{name} must be a whole number, not {value!r}")
    if value < low or (high is not None and value > high):
        raise ConfigError(f"{name} is {value}; it must be {_range(low, high)}")


def _range(low: float, high: float | None) -> str:
    return f"at least {low}" if high is None or high == math.inf else f"between {low} and {high}"
