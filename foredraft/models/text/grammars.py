"""Grammars by llguidance: compiled once for a tokenizer, followed by a matcher for each request.

The package is an extra (``pip install 'foredraft[structured]'``): nothing here is loaded before a
request names a grammar.

Shape legend: V vocabulary.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from foredraft.core.errors import ConfigError, GrammarError, MissingPackageError
from foredraft.core.grammar import Grammar
from foredraft.core.rules.grammar import Array, Matcher

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from foredraft.models.text.tokenizer import Tokenizer

_MAX_KEPT = 64
"""Compiled grammars, the latest used."""
_MAX_ERROR = 400
_JSON_SPACE = r"( |\n[ \t]{0,32})?"
"""Between the parts of JSON: without a bound, a reply may be white space to its end."""


class Grammars:
    """Makes matchers for the tokenizer of one model. Safe to use from several threads.

    Args:
        tokenizer: of the model.
        vocab_size: of the model, V.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def new_matcher(self, grammar: Grammar) -> Matcher:
        """A matcher at the beginning of a text.

        Raises:
            GrammarError: the grammar is malformed, or too complex.
            MissingPackageError: llguidance is not installed.
            ConfigError: the model has no end-of-text token.
        """
        with self._lock:
            compiled = self._compiled.pop(grammar, None) or self._compile(grammar)
            self._compiled[grammar] = compiled
            if len(self._compiled) > _MAX_KEPT:
                self._compiled.popitem(last=False)
            ends = frozenset(self._tokenizer.eos_token_ids)
            return _GuidanceMatcher(compiled.deep_copy(), self._vocab_size, ends)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        # The extra may be missing, which `_ll_tokenizer` says in our words.
        tokenizer = self._ll_tokenizer
        from llguidance import LLMatcher

        try:
            source = _SOURCES[grammar.kind](grammar)
            matcher = LLMatcher(tokenizer, source, log_level=0)
        except (ValueError, TypeError, RecursionError) as error:
            raise GrammarError(_said(grammar, error)) from error
        _check(matcher, grammar)
        matcher.compute_bitmask()  # what is wrong with it may show here only
        _check(matcher, grammar)
        return matcher

    @cached_property
    def _ll_tokenizer(self) -> LLTokenizer:
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise MissingPackageError(
                "grammars need the package llguidance, which is not installed: "
                "pip install 'foredraft[structured]'"
            ) from error
        ends = list(self._tokenizer.eos_token_ids)
        if not ends:
            raise ConfigError(
                "grammar needs an end-of-text token, and this model names none", field="grammar"
            )
        try:
            return LLTokenizer(
                self._tokenizer.definition,
                n_vocab=max(self._vocab_size, self._tokenizer.vocab_size),
                eos_token=ends,
            )
        except (ValueError, RuntimeError) as error:
            raise ConfigError(
                f"grammars cannot be used with this model's tokenizer: {error}"
            ) from error


class _GuidanceMatcher:
    """See `Matcher`."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, ends: frozenset[int]) -> None:
        self._matcher, self._vocab_size, self._ends = matcher, vocab_size, ends

    def mask(self) -> Array:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        _check(self._matcher)
        return np.unpackbits(bits, bitorder="little")[: self._vocab_size].view(bool)

    def permits(self, token: int) -> bool:
        if token in self._ends:
            return bool(self._matcher.is_accepting())
        permitted: int = self._matcher.validate_tokens([token])
        _check(self._matcher)
        return permitted == 1

    def consume(self, token: int) -> bool:
        if token in self._ends:
            return False
        done: int = self._matcher.try_consume_tokens([token])
        _check(self._matcher)
        return done == 1

    def copy(self) -> Matcher:
        return _GuidanceMatcher(self._matcher.deep_copy(), self._vocab_size, self._ends)

    def forced(self) -> Sequence[int]:
        tokens: list[int] = self._matcher.compute_ff_tokens()
        return tokens

    def is_complete(self) -> bool:
        return bool(self._matcher.is_stopped())


def _check(matcher: LLMatcher, grammar: Grammar | None = None) -> None:
    if matcher.is_error():
        raise GrammarError(_said(grammar, matcher.get_error()))


def _said(grammar: Grammar | None, error: object) -> str:
    """What went wrong, in few words: what the library writes may hold the whole grammar."""
    kind = f"grammar ({grammar.kind})" if grammar else "the grammar"
    text = " ".join(str(error).split())
    return f"{kind} cannot be used: {text[:_MAX_ERROR]}{'…' if len(text) > _MAX_ERROR else ''}"


def _json_source(schema: str) -> str:
    from llguidance import LLMatcher

    options: Any = {"whitespace_pattern": _JSON_SPACE, "lenient": False}
    return str(LLMatcher.grammar_from_json_schema(schema, overrides=options))


def _regex_source(grammar: Grammar) -> str:
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_regex(grammar.source))


def _lark_source(source: str) -> str:
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_lark(source))


def _choice_source(grammar: Grammar) -> str:
    texts = (json.dumps(text, ensure_ascii=False) for text in grammar.choices)
    return _lark_source(f"start: {' | '.join(texts)}")


_SOURCES: dict[str, Callable[[Grammar], str]] = {
    "json_schema": lambda grammar: _json_source(grammar.source),
    "json_object": lambda grammar: _json_source('{"type": "object"}'),
    "regex": _regex_source,
    "choice": _choice_source,
    "lark": lambda grammar: _lark_source(grammar.source),
}
