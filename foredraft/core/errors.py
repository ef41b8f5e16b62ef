"""Errors a person sees: what is wrong, with which value, what to do about it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ForedraftError(Exception):
    """Base of every error foredraft raises on purpose.

    Attributes:
        field: the option, parameter or field of a request that cannot be used; None: no single one.
        code: names the problem for programs, where the class alone does not.
    """

    def __init__(self, *args: object, field: str | None = None, code: str | None = None) -> None:
        super().__init__(*args)
        self.field, self.code = field, code


class ConfigError(ForedraftError, ValueError):
    """An option, parameter or name that cannot be used as given."""


class PromptError(ForedraftError, ValueError):
    """A prompt that cannot be generated from (empty, or longer than the context)."""

    @classmethod
    def too_long(cls, count: int, most: int, limit: str) -> PromptError:
        """One of ``count`` tokens; ``limit`` says why ``most`` are allowed."""
        # The words by which clients know to shorten a conversation and ask again.
        said = f"the prompt is too long: {count} tokens > {most} maximum ({limit}): shorten it"
        return cls(said, field="prompt", code="context_length_exceeded")


class ModelLoadError(ForedraftError, RuntimeError):
    """A checkpoint that cannot be loaded safely and completely."""


class VocabularyMismatchError(ConfigError):
    """Target and draft model do not share one vocabulary."""


class CapabilityError(ConfigError):
    """A drafter needs something that the target does not offer."""


class CacheFullError(ForedraftError, MemoryError):
    """The cache's memory is in use by other requests; nothing has changed."""


class MalformedProposalError(ForedraftError, ValueError):
    """A drafter returned a tree that cannot be scored."""


class TrainingError(ForedraftError, RuntimeError):
    """Training cannot go on. Files that were written before are complete."""


class QueueFullError(ForedraftError, RuntimeError):
    """The limit of requests in the engine is reached. Try again later."""


class EngineStoppedError(ForedraftError, RuntimeError):
    """The engine accepts no more requests: it was closed, or it failed."""


class NonFiniteScoresError(ForedraftError, ArithmeticError):
    """The target produced NaN or infinite logits where a token must be drawn."""


class NoTokenError(ForedraftError, ArithmeticError):
    """A request's rules leave no token that could come next."""


class GrammarError(ConfigError):
    """A grammar that cannot be read, or is too complex to be followed."""

    def __init__(self, *args: object, code: str | None = None) -> None:
        super().__init__(*args, field="grammar", code=code)


def nearest(name: str, options: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the closest option, or ``""`` when nothing is close."""
    by_folded = {option.lower(): option for option in options}
    begun = [folded for folded in by_folded if name and folded.startswith(name.lower())]
    close = begun or difflib.get_close_matches(name.lower(), by_folded, n=1, cutoff=0.5)
    return f"; did you mean {by_folded[close[0]]!r}?" if close else ""


def unknown(kind: str, name: str, options: Iterable[str], meant: str | None = None) -> ConfigError:
    """The error for a name that is not among ``options`` (``kind`` says what was named).

    Args:
        meant: what others call so here, where the nearest option is sought for that.
    """
    known = sorted(options)
    hint = nearest(name if meant is None else meant, known)
    return ConfigError(f"unknown {kind} {name!r}{hint} (known: {', '.join(known) or 'none'})")
