"""Parameters of a request: the distribution to draw from, and when to stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from foredraft.core.checks import (
    checked_flag,
    checked_int,
    checked_list,
    checked_real,
    checked_text,
    shown,
)
from foredraft.core.errors import ConfigError, unknown
from foredraft.core.grammar import Grammar
from foredraft.core.rng import SEED_BITS

if TYPE_CHECKING:
    from torch import Tensor

    from foredraft.core.sampling import Law

Coupling = Literal["seeded", "drawn"]

_MAX_STOPS = 256
_MAX_STOP_CHARACTERS = 1 << 16
MAX_BIASES = 1024
_MAX_BIAS = 100.0
_MAX_N = 128
_MAX_LOGPROBS = 20
_MAX_PENALTY = 2.0
_COLDEST = 1e-30
"""Colder laws scale by what the dtype can hold (`foredraft.core.sampling.law_of`)."""
_REFUSED = {
    "best_of": "best_of ranks whole replies after the fact; ask for n replies and choose yourself",
    "beam_width": "beam search is not sampling from the model, so nothing here does it",
    "num_beams": "beam search is not sampling from the model, so nothing here does it",
    "use_beam_search": "beam search is not sampling from the model, so nothing here does it",
}
"""Parameters of other engines that are not supported, each with the reason."""


class _ByModel:
    """A default that the model's own default replaces, where it has one (`SamplingParams.by`)."""


class _Real(_ByModel, float):
    """A replaceable default that is a float."""


class _Whole(_ByModel, int):
    """A replaceable default that is an int."""


@dataclass(frozen=True)
class ThinkingLimit:
    """The most tokens of a reply's thoughts.

    Attributes:
        num_tokens: of the thoughts, with the mark that opens them.
        begin: the mark that opens them; empty: the prompt has done so.
        end: what is written behind so many, if the first of these tokens is not among them.
    """

    num_tokens: int
    begin: tuple[int, ...]
    end: tuple[int, ...]


@dataclass(frozen=True)
class SamplingParams:
    """The distribution to draw from, and when to stop.

    Rules apply in this order, each to the logits that the one before left: the bans
    (grammar, allowed_token_ids, bad_words, min_tokens), logit_bias, the repetition, frequency and
    presence penalties, temperature, top-k, top-p, min-p. Each filter works on the renormalised
    result of the one before. Tokens that tie with the last one kept are kept too, so the outcome
    never depends on a sort's tie-breaking.

    Attributes:
        temperature: 0 is greedy: all probability on the most likely token.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens with at least this mass, in (0, 1].
        min_p: drop tokens below this fraction of the most likely one's probability, in [0, 1].
        repetition_penalty: above 1 makes tokens of prompt and reply less likely: their logits are
            divided by it where positive and multiplied where negative. In [0.01, 100].
        presence_penalty: subtracted from the logits of tokens that the reply holds, in [-2, 2].
        frequency_penalty: subtracted once for each time that the reply holds them, in [-2, 2].
        logit_bias: added to the logits of these tokens, each in [-100, 100]; at most 1024.
        allowed_token_ids: the only tokens that can occur; None allows all.
        bad_words: texts that the reply may not contain, spelled as the tokenizer spells them at
            the start of a text and after a space; at most 256.
        grammar: the form of the reply, see `Grammar`.
        seed: 0 <= seed < 2**64; None draws a fresh one, reported in the result.
        n: replies to each prompt. Reply i (from 0) has the seed ``seed + i``, modulo 2**64.
        max_tokens: most tokens to generate, at least 1.
        min_tokens: nothing ends the reply before it has this many tokens: until then neither an
            end-of-text id nor one of ``stop_token_ids`` can occur, and stop strings are not
            looked for.
        stop: strings that end the text, at most 256.
        stop_token_ids: ids that end generation, beside the model's own end-of-text ids.
        include_stop: whether the text ends with the stop string or the stop id's own text (what
            others call ``include_stop_str_in_output``).
        ignore_eos: go on past the model's own end-of-text ids.
        skip_special_tokens: whether special tokens are no text of the reply.
        thinking: the most tokens of the reply's thoughts; None: no limit.
        logprobs: report log probabilities of the reply's tokens, and of this many likeliest ones at
            each position, 0 to 20; None reports none. They are those of the model's own
            distribution (`TokenLogprobs`).
        prompt_logprobs: the same for the prompt's tokens.
        coupling: "seeded" (the same seed gives the same text with and without speculation) or
            "drawn" (draft models draw their tokens: higher acceptance at high temperature, the
            same distribution, another text for the same seed).
        prediction: text that the reply is expected to repeat, for drafters that use one. It
            never changes the reply.
        speculation: the drafter: "auto" (the controller chooses), "off" (none), or the name of a
            loaded drafter. It never changes a seeded reply.
        max_draft_tokens: most draft tokens of a step, at least 0; None: the controller decides.

    If temperature and filters are all that is asked for, the parameters are the request's `Rules`:
    they look at no text. `new_rules` makes the rules of other requests.

    The model's own defaults stand for temperature, top_k, top_p, min_p and repetition_penalty where
    they are not given (`LoadOptions.sampling_defaults`).

    Numbers and flags of numpy are taken, and kept as Python's. docs/start/sampling.md has every
    parameter beside every way of drafting and verifying.

    Raises:
        ConfigError: a value is out of range or of the wrong type.
    """

    temperature: float = _Real(0.0)
    top_k: int = _Whole(0)
    top_p: float = _Real(1.0)
    min_p: float = _Real(0.0)
    repetition_penalty: float = _Real(1.0)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    grammar: Grammar | None = None
    seed: int | None = None
    n: int = 1
    max_tokens: int = 256
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    thinking: ThinkingLimit | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    coupling: Coupling = "seeded"
    prediction: str | None = None
    speculation: str = "auto"
    max_draft_tokens: int | None = None

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            name: check(name, value)
            for name, check in _CHECKS.items()
            if (value := getattr(self, name)) is not None or name not in _OPTIONAL
        }
        if checked["top_p"] == 0.0:
            raise ConfigError(
                "top_p is 0, which keeps no token; use a value in (0, 1]", field="top_p"
            )
        if checked["min_tokens"] > checked["max_tokens"]:
            raise ConfigError(
                f"min_tokens is {checked['min_tokens']} and max_tokens {checked['max_tokens']}",
                field="min_tokens",
            )
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise ConfigError(
                "grammar must be a Grammar, such as Grammar.json_schema(…), not "
                f"{shown(self.grammar)}",
                field="grammar",
            )
        if self.coupling not in ("seeded", "drawn"):
            raise unknown("coupling", str(self.coupling), ("seeded", "drawn"))
        for name, value in checked.items():
            if not isinstance(getattr(self, name), _ByModel):
                object.__setattr__(self, name, value)

    bans: ClassVar[bool] = False
    filters_only: ClassVar[bool] = True

    @property
    def has_filters(self) -> bool:
        """Whether top_k, top_p or min_p leaves tokens out."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @cached_property
    def scale(self) -> float | None:
        """See `Rules.scale`."""
        if self.temperature == 0.0:
            return 0.0
        is_plain = not self.has_filters and self.temperature >= _COLDEST
        return 1.0 / self.temperature if is_plain else None

    def law(self, logits_V: Tensor, text: Sequence[int], drafted: Sequence[int] = ()) -> Law:
        """See `Rules.law`."""
        from foredraft.core.sampling import law_of  # torch, without which parameters are checked

        return law_of(logits_V, self)

    def permits(self, token: int, text: Sequence[int], drafted: Sequence[int] = ()) -> bool:
        """See `Rules.permits`: nothing is banned."""
        return True

    def forced(self, text: Sequence[int]) -> Sequence[int]:
        """See `Rules.forced`: there are none."""
        return ()

    def is_complete(self, text: Sequence[int]) -> bool:
        """See `Rules.is_complete`: a reply without a grammar may always go on."""
        return False

    @classmethod
    def of(cls, **options: Any) -> SamplingParams:
        """Build from keyword options; an unknown one is an error naming the nearest."""
        known = {field.name for field in fields(cls)}
        for name in options:
            if name in _REFUSED:
                raise ConfigError(f"{name} is not offered: {_REFUSED[name]}", field=name)
            if name not in known:
                raise unknown("sampling option", name, known)
        return cls(**options)

    def by(self, defaults: Mapping[str, float] | None) -> SamplingParams:
        """A copy with a model's own defaults for parameters that were not given.

        Args:
            defaults: of parameters by name; None: the model's are not wanted.
        """
        unset = self.left_to(defaults or {})
        return replace(self, **unset) if unset else self  # type: ignore[arg-type]

    def left_to(self, defaults: Mapping[str, float]) -> dict[str, float]:
        """Those of a model's own defaults that count, because nothing else was given."""
        items = defaults.items()
        return {name: value for name, value in items if isinstance(getattr(self, name), _ByModel)}

    def of_length(self, max_tokens: int) -> SamplingParams:
        """A copy with another ``max_tokens``; ``min_tokens`` is lowered to it if it is larger."""
        return replace(self, max_tokens=max_tokens, min_tokens=min(self.min_tokens, max_tokens))

    def each(self) -> list[SamplingParams]:
        """``n`` requests for one reply each, with the seeds that `n` names."""
        if self.n == 1:
            return [self]
        seeds = [
            None if self.seed is None else (self.seed + i) % 2**SEED_BITS for i in range(self.n)
        ]
        return [replace(self, n=1, seed=seed) for seed in seeds]


def checked_params(params: object) -> SamplingParams:
    """``params``, or the defaults for None.

    Raises:
        ConfigError: it is not a `SamplingParams`.
    """
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise ConfigError(
            f"params must be SamplingParams(…), one for all prompts, not {shown(params)}"
        )
    return params


def _checked_stop(name: str, stop: object) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else checked_list(name, stop)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ConfigError(
                f"{name} strings must be non-empty text, not {shown(text)}", field=name
            )
        checked_text(name, text)
    if len(texts) > _MAX_STOPS or sum(map(len, texts)) > _MAX_STOP_CHARACTERS:
        raise ConfigError(
            f"{name} holds {len(texts)} strings of {sum(map(len, texts))} characters; it may hold "
            f"{_MAX_STOPS} of {_MAX_STOP_CHARACTERS} in all, as each step looks for every one",
            field=name,
        )
    return texts


def _checked_ids(name: str, ids: object) -> tuple[int, ...]:
    return tuple(checked_int(name, token, low=0) for token in checked_list(name, ids))


class _Allowed(tuple[int, ...]):
    """Ids that have been checked. A request is copied often, and a long list is checked once."""


def _checked_allowed(name: str, ids: object) -> tuple[int, ...]:
    if isinstance(ids, _Allowed):
        return ids
    checked = _Allowed(_checked_ids(name, ids))
    if not checked:
        raise ConfigError(f"{name} is empty, which allows no token; None allows all", field=name)
    return checked


class _Biases(dict[int, float]):
    """Biases that have been checked; see `_Allowed`."""


def _checked_bias(name: str, biases: object) -> Mapping[int, float]:
    if isinstance(biases, _Biases):
        return biases
    if not isinstance(biases, Mapping):
        raise ConfigError(f"{name} must map token ids to numbers, not {shown(biases)}", field=name)
    if len(biases) > MAX_BIASES:
        raise ConfigError(
            f"{name} names {len(biases)} tokens; it may name {MAX_BIASES}", field=name
        )
    return _Biases(
        {
            checked_int(name, token, low=0): checked_real(name, bias, -_MAX_BIAS, _MAX_BIAS)
            for token, bias in biases.items()
        }
    )


def _real(low: float, high: float = float("inf")) -> Callable[[str, Any], float]:
    return lambda name, value: checked_real(name, value, low, high)


def _int(low: int, high: int | None = None) -> Callable[[str, Any], int]:
    return lambda name, value: checked_int(name, value, low, high)


_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "temperature": _real(0.0),
    "top_k": _int(0),
    "top_p": _real(0.0, 1.0),
    "min_p": _real(0.0, 1.0),
    "repetition_penalty": _real(0.01, 100.0),
    "presence_penalty": _real(-_MAX_PENALTY, _MAX_PENALTY),
    "frequency_penalty": _real(-_MAX_PENALTY, _MAX_PENALTY),
    "logit_bias": _checked_bias,
    "allowed_token_ids": _checked_allowed,
    "bad_words": _checked_stop,
    "seed": _int(0, 2**SEED_BITS - 1),
    "n": _int(1, _MAX_N),
    "max_tokens": _int(1),
    "min_tokens": _int(0),
    "stop": _checked_stop,
    "stop_token_ids": _checked_ids,
    "include_stop": checked_flag,
    "ignore_eos": checked_flag,
    "skip_special_tokens": checked_flag,
    "logprobs": _int(0, _MAX_LOGPROBS),
    "prompt_logprobs": _int(0, _MAX_LOGPROBS),
    "prediction": checked_text,
    "speculation": lambda name, value: checked_text(name, value).replace("-", "_"),
    "max_draft_tokens": _int(0),
}
"""The check of each field."""
_OPTIONAL = (
    *("allowed_token_ids", "seed", "logprobs", "prompt_logprobs", "prediction"),
    "max_draft_tokens",
)
"""Fields that may be None."""
