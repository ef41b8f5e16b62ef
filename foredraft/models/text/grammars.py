"""Grammars by llguidance: compiled once for a tokenizer, followed by a matcher for each request.

The package is loaded when the first request names a grammar.

Shape legend: V vocabulary.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from foredraft.core.errors import ConfigError, GrammarError
from foredraft.core.grammar import MAX_OPTIONAL, Grammar
from foredraft.core.rules.grammar import Array, Matcher
from foredraft.system.priority import lower_priority

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    from foredraft.models.text.tokenizer import Tokenizer

_MAX_KEPT = 64
"""Compiled grammars that are kept, the most recently used."""
_MOST_SECONDS = 10.0
"""CPU time in which all that are kept were compiled: one takes up to 130 MB, some 100 a second."""
_NUM_WORKERS = 3
_MOST_OF_OWNER = 2
"""Of these, at most so many compile for one owner: no client can hold them all."""
_MAX_ROW_ITEMS = 4 * MAX_OPTIONAL
"""Parser items after one token. An optional property of a JSON object takes four, and a step takes
time in proportion: 30 ms at this bound."""
_NUM_PROBED = 4
"""Tokens that are tried after compilation: a parser that is too large shows after the first few."""
_TOO_LARGE = (
    "it leaves too many ways to go on at one place (such as thousands of optional properties): "
    "make properties required, or split the schema"
)
_NO_TEXT = "no text follows it, such as where a schema refers to itself alone"
_MAX_ERROR = 400
_LOOKS_SPECIAL = re.compile(r"<.*>", re.DOTALL).fullmatch
_JSON_SPACE = r"( |\n[ \t]{0,32})?"
"""Between the parts of JSON: without a bound, a reply may be white space to its end."""


@dataclass(frozen=True, eq=False)
class _Job:
    """A grammar that is compiled, or will be.

    Attributes:
        waiting: for how many calls of each owner.
    """

    grammar: Grammar
    compiled: Future[LLMatcher] = field(default_factory=Future)
    waiting: Counter[str | None] = field(default_factory=Counter)

    @property
    def has_failed(self) -> bool:
        done = self.compiled
        return done.done() and (done.cancelled() or done.exception() is not None)


class Grammars:
    """Makes matchers for the tokenizer of one model. Safe to use from several threads.

    Grammars are compiled by threads of their own, at low priority where the system has one for
    threads. llguidance releases the interpreter's lock while it compiles, so neither the engine
    nor an event loop waits. Nothing ends a compilation that has begun.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._jobs: OrderedDict[Grammar, _Job] = OrderedDict()
        self._seconds: dict[Grammar, float] = {}  # of CPU time, for those that are compiled
        self._queue, self._running = list[_Job](), list[str | None]()  # which owners compile
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(_NUM_WORKERS, "foredraft-grammar", lower_priority)

    def prepare(self) -> None:
        """Read the vocabulary before the first grammar comes, on a thread.

        It takes up to a second, in which the interpreter's lock is held.
        """
        self._pool.submit(lambda: self._ll_tokenizer)

    def compile(self, grammar: Grammar, owner: str | None = None) -> Future[LLMatcher]:
        """Have a grammar compiled, unless it is compiled or being compiled.

        Args:
            owner: of the request: few grammars of one are compiled at a time.

        Returns:
            A future, which others may share, with the matcher that `new_matcher` copies.
            It raises GrammarError where the grammar is malformed or too complex, and ConfigError
            where the model has no end-of-text token.
        """
        with self._lock:
            job = self._jobs.get(grammar)
            if job is None or job.has_failed:
                job = self._jobs[grammar] = _Job(grammar)
                self._queue.append(job)
            if job in self._queue:
                job.waiting[owner] += 1
            self._jobs.move_to_end(grammar)
            self._forget()
            self._start()
            return job.compiled

    def _forget(self) -> None:
        """Drop the least recently used where too many, or too large ones, are kept (locked)."""
        done = [each for each, job in self._jobs.items() if job.compiled.done()]
        while done and (
            len(self._jobs) > _MAX_KEPT
            or (len(done) > 1 and sum(self._seconds.values()) > _MOST_SECONDS)
        ):
            gone = done.pop(0)
            del self._jobs[gone]
            self._seconds.pop(gone, None)

    def give_up(self, compiled: Future[LLMatcher], owner: str | None = None) -> None:
        """End one call's wait for the future that it got; without any, no compilation begins."""
        with self._lock:
            # By the future: the grammar may have failed, and others wait for its next compilation.
            for job in [each for each in self._queue if each.compiled is compiled]:
                job.waiting[owner] -= 1
                if not +job.waiting:
                    self._queue.remove(job)
                    del self._jobs[job.grammar]

    def _start(self) -> None:
        """Begin the compilations that may begin, the oldest first. The caller holds the lock."""
        for job in [*self._queue]:
            free = [o for o in +job.waiting if self._running.count(o) < _MOST_OF_OWNER]
            if not free or len(self._running) == _NUM_WORKERS:
                continue
            self._queue.remove(job)
            if job.compiled.set_running_or_notify_cancel():
                self._running.append(free[0])
                try:
                    self._pool.submit(self._run, job, free[0])
                except RuntimeError as error:  # the interpreter exits: waiting calls end
                    self._running.remove(free[0])
                    job.compiled.set_exception(error)

    def _run(self, job: _Job, owner: str | None) -> None:
        began = time.thread_time()
        try:
            job.compiled.set_result(self._compile(job.grammar))
        except BaseException as error:
            # Jobs are kept: with a traceback the frames, and in them 170 MB of a refused grammar.
            job.compiled.set_exception(error.with_traceback(None))
        with self._lock:
            if not job.has_failed and self._jobs.get(job.grammar) is job:
                self._seconds[job.grammar] = time.thread_time() - began
                self._forget()
            self._running.remove(owner)
            self._start()

    def new_matcher(self, grammar: Grammar) -> Matcher:
        """A matcher at the beginning of a text. Waits until the grammar is compiled.

        Raises:
            GrammarError: the grammar is malformed, or too complex.
            ConfigError: the model has no end-of-text token.
        """
        compiled = self.compile(grammar).result()
        ends = frozenset(self._tokenizer.eos_token_ids)
        return _GuidanceMatcher(compiled.deep_copy(), self._vocab_size, ends)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        # The package may be missing, which `_ll_tokenizer` says in our words.
        tokenizer = self._ll_tokenizer
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_items_in_row=_MAX_ROW_ITEMS)
        try:
            matcher = LLMatcher(tokenizer, _source(grammar), log_level=0, limits=limits)
        except (ValueError, TypeError, RecursionError) as error:
            raise _error(grammar, error) from error
        _check(matcher, grammar)
        matcher.compute_bitmask()  # some errors show here only
        _check(matcher, grammar)
        _probe(matcher.deep_copy(), grammar)
        return matcher

    @cached_property
    def _ll_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        ends = list(self._tokenizer.eos_token_ids)
        if not ends:
            raise ConfigError(
                "grammar needs an end-of-text token, and this model names none", field="grammar"
            )
        try:
            n_vocab = max(self._vocab_size, self._tokenizer.vocab_size)
            spelled = _spelled_vocabulary(self._tokenizer, n_vocab)
            return LLTokenizer(
                spelled or self._tokenizer.definition, n_vocab=n_vocab, eos_token=ends
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
        raise _error(grammar, matcher.get_error())


def _probe(matcher: LLMatcher, grammar: Grammar) -> None:
    """Read some tokens that the grammar allows: a parser may outgrow its limits at once."""
    for _ in range(_NUM_PROBED):
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        _check(matcher, grammar)
        allowed = np.unpackbits(bits, bitorder="little")
        if matcher.is_stopped() or not allowed.any():
            return
        matcher.try_consume_tokens([int(allowed.argmax())])
        _check(matcher, grammar)


def _error(grammar: Grammar | None, error: object) -> GrammarError:
    """The error in few words: the library's message may hold its state and the whole grammar."""
    kind = f"grammar ({grammar.kind})" if grammar else "the grammar"
    text = " ".join(str(error).split())
    if "ParserTooComplex" in text or "items; max is" in text:
        return GrammarError(f"{kind} cannot be used: {_TOO_LARGE}", code="grammar_too_complex")
    text = _NO_TEXT if "NoExtensionBias" in text else text.partition(" <state>")[0]
    if len(text) > _MAX_ERROR:
        text = text[:_MAX_ERROR] + "…"
    return GrammarError(f"{kind} cannot be used: {text}")


class _SpelledVocabulary:
    """A tokenizer as llguidance's ``TokenizerWrapper`` takes it: the bytes of each token.

    Args:
        n_vocab: of the model; ids behind the tokenizer's are no tokens.
        special: ids of special tokens, whose text no grammar matches.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, n_vocab: int, special: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_token_ids[0]
        self.special_token_ids = special
        self.tokens = [tokenizer.token_bytes(token) for token in range(n_vocab)]

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _spelled_vocabulary(tokenizer: Tokenizer, n_vocab: int) -> TokenizerWrapper | None:
    """A tokenizer in which added tokens such as ``<tool_call>`` spell their text; None: not needed.

    llguidance takes every added token of the form ``<...>`` in a ``tokenizer.json`` for a special
    one. A grammar's text then never matches it, though its mask forces it.
    """
    from llguidance import TokenizerWrapper

    added = json.loads(tokenizer.definition).get("added_tokens", ())
    if not any(not token["special"] and _LOOKS_SPECIAL(token["content"]) for token in added):
        return None
    special = [token["id"] for token in added if token["special"]]
    return TokenizerWrapper(_SpelledVocabulary(tokenizer, n_vocab, special))


def _source(grammar: Grammar) -> str:
    """A grammar in llguidance's form: a list of grammars, of which the first one is the start."""
    described = _description(grammar)
    if not grammar.frame:
        return json.dumps({"grammars": [described]})
    frame = {"lark_grammar": grammar.frame}
    return json.dumps({"grammars": [frame, described | {"name": "answer"}]})


def _description(grammar: Grammar) -> dict[str, Any]:
    """One grammar of llguidance's list."""
    from llguidance import LLMatcher

    if grammar.kind == "lark":
        return {"lark_grammar": grammar.source}
    if grammar.kind == "choice":
        texts = (json.dumps(text, ensure_ascii=False) for text in grammar.choices)
        return {"lark_grammar": f"start: {' | '.join(texts)}"}
    if grammar.kind == "regex":
        source = LLMatcher.grammar_from_regex(_ascii_digits(grammar.source))
    else:
        schema = '{"type": "object"}' if grammar.kind == "json_object" else grammar.source
        # ``oneOf``, which pydantic writes for unions, means ``anyOf``: llguidance would refuse it.
        options: Any = {"whitespace_pattern": _JSON_SPACE, "lenient": False, "coerce_one_of": True}
        source = LLMatcher.grammar_from_json_schema(schema, overrides=options)
    described: dict[str, Any] = json.loads(source)["grammars"][0]
    return described


def _ascii_digits(pattern: str) -> str:
    r"""``\d`` as 0 to 9, as JSON Schema and other engines have it; llguidance has all scripts'."""
    digits = {r"\d": "[0-9]", r"\D": "[^0-9]"}
    return re.sub(r"\\.", lambda escape: digits.get(escape[0], escape[0]), pattern, flags=re.DOTALL)
