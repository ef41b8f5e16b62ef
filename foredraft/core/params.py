"""What a request asks for: the distribution to draw from, and when to stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from foredraft.core.checks import (
    checked_flag,
    checked_int,
    checked_list,
    checked_real,
    checked_text,
    shown,
)
from foredraft.core.errors import ConfigError, unknown
from foredraft.core.rng import SEED_BITS

Coupling = Literal["seeded", "drawn"]

_MAX_STOPS = 256
_MAX_STOP_CHARACTERS = 1 << 16


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
        stop: strings that end the text, at most 256; they are not part of it.
        stop_token_ids: ids that end generation, beside the model's own end-of-text ids.
        ignore_eos: go on past the model's own end-of-text ids.
        coupling: "seeded" (the same seed gives the same text with and without speculation) or
            "drawn" (draft models draw their tokens: higher acceptance at high temperature, the
            same distribution, another text for the same seed).
        prediction: text that the reply is expected to repeat, for drafters that use one. It
            never changes the reply.

    Numbers and flags of numpy are taken, and kept as Python's.

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
    coupling: Coupling = "seeded"
    prediction: str | None = None

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "temperature": checked_real("temperature", self.temperature, low=0.0),
            "top_p": checked_real("top_p", self.top_p, low=0.0, high=1.0),
            "min_p": checked_real("min_p", self.min_p, low=0.0, high=1.0),
            "top_k": checked_int("top_k", self.top_k, low=0),
            "max_tokens": checked_int("max_tokens", self.max_tokens, low=1),
            "stop": _checked_stop(self.stop),
            "stop_token_ids": tuple(
                checked_int("stop_token_ids", token, low=0)
                for token in checked_list("stop_token_ids", self.stop_token_ids)
            ),
            "ignore_eos": checked_flag("ignore_eos", self.ignore_eos),
        }
        if checked["top_p"] == 0.0:
            raise ConfigError("top_p is 0, which keeps no token; use a value in (0, 1]")
        if self.seed is not None:
            checked["seed"] = checked_int("seed", self.seed, low=0, high=2**SEED_BITS - 1)
        if self.prediction is not None:
            checked["prediction"] = checked_text("prediction", self.prediction)
        if self.coupling not in ("seeded", "drawn"):
            raise unknown("coupling", str(self.coupling), ("seeded", "drawn"))
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, **options: Any) -> SamplingParams:
        """Build from keyword options; an unknown one is an error naming the nearest."""
        known = {field.name for field in fields(cls)}
        for name in options:
            if name not in known:
                raise unknown("sampling option", name, known)
        return cls(**options)


def checked_params(params: object) -> SamplingParams:
    """What a request asks for; the defaults for None.

    Raises:
        ConfigError: it is something else than `SamplingParams`.
    """
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise ConfigError(
            f"params must be SamplingParams(…), one for all prompts, not {shown(params)}"
        )
    return params


def _checked_stop(stop: object) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else checked_list("stop", stop)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ConfigError(f"stop strings must be non-empty text, not {shown(text)}")
        checked_text("stop", text)
    if len(texts) > _MAX_STOPS or sum(map(len, texts)) > _MAX_STOP_CHARACTERS:
        raise ConfigError(
            f"stop holds {len(texts)} strings of {sum(map(len, texts))} characters; it may hold "
            f"{_MAX_STOPS} of {_MAX_STOP_CHARACTERS} in all, as each step looks for every one"
        )
    return texts
