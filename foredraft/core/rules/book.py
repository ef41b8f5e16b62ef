"""From a request to its rules. Unsupported ones are refused here, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from foredraft.core.errors import ConfigError
from foredraft.core.grammar import Grammar
from foredraft.core.params import SamplingParams
from foredraft.core.rules.bans import (
    AllowedTokens,
    Ban,
    ModelBans,
    bad_words,
    no_end_before,
    thinking_ends,
)
from foredraft.core.rules.base import Rules
from foredraft.core.rules.grammar import GrammarRule, Matcher
from foredraft.core.rules.penalties import Bias, Penalties
from foredraft.core.rules.row import RowRules

NewRules: TypeAlias = Callable[[SamplingParams, int, Iterable[int]], Rules]
"""Makes the rules of one request, as `new_rules` does once its model is known."""


def new_rules(
    params: SamplingParams,
    num_prompt: int = 0,
    stop_ids: Iterable[int] = (),
    *,
    vocab_size: int,
    encode: Callable[[str], Sequence[int]] | None = None,
    new_matcher: Callable[[Grammar], Matcher] | None = None,
    model_bans: ModelBans | None = None,
) -> Rules:
    """The rules of one request to a model: ``params`` themselves if they look at no text.

    Args:
        num_prompt: tokens of its prompt.
        stop_ids: tokens that end its reply.
        vocab_size: of the model, without ids that its tokenizer does not have.
        encode: text to ids without special tokens around it; None: there is no tokenizer.
        new_matcher: makes the matcher of a grammar; None: there is no tokenizer.
        model_bans: tokens that the model's own generation config rules out; None: none.

    Raises:
        ConfigError: an id outside the vocabulary, words without a tokenizer, or parameters that
            contradict each other.
        GrammarError: the grammar cannot be read.
    """
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
        _check_ids(name, getattr(params, name) or (), vocab_size)
    stops = frozenset(stop_ids)
    bias = Bias(params.logit_bias) if params.logit_bias else None
    penalties = Penalties(params, num_prompt) if Penalties.are_in(params) else None
    bans: list[Ban] = [*(model_bans.of_reply(params.max_tokens) if model_bans else ())]
    if params.allowed_token_ids is not None:
        bans.append(AllowedTokens(params.allowed_token_ids, vocab_size))
    if params.bad_words:
        bans.append(bad_words(_spelled(params.bad_words, encode)))
    if params.thinking is not None:
        _check_ids("thinking", params.thinking.end, vocab_size)
        bans.append(thinking_ends(params.thinking))
    if params.min_tokens and stops:
        bans.append(no_end_before(params.min_tokens, stops))
    grammar = None
    if params.grammar is not None:
        grammar = GrammarRule(_matcher(params, new_matcher), stops, num_prompt)
    if bias or penalties or bans or grammar:
        return RowRules(params, num_prompt, bias, penalties, bans, grammar)
    return params


def _matcher(params: SamplingParams, new_matcher: Callable[[Grammar], Matcher] | None) -> Matcher:
    assert params.grammar is not None
    if new_matcher is None:
        raise ConfigError("grammar needs a tokenizer, and this engine has none")
    if params.ignore_eos:
        raise ConfigError(
            "ignore_eos and grammar contradict each other: a grammar has an end",
            field="ignore_eos",
        )
    return new_matcher(params.grammar)


def _spelled(
    words: Iterable[str], encode: Callable[[str], Sequence[int]] | None
) -> list[tuple[int, ...]]:
    """Each word as it is written at the start of a text, and after a space."""
    if encode is None:
        raise ConfigError("bad_words need a tokenizer, and this engine has none")
    spelled = {tuple(encode(text)) for word in words for text in (word, f" {word}")}
    return sorted(sequence for sequence in spelled if sequence)


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if token >= vocab_size:
            raise ConfigError(
                f"{name} names token {token}; the vocabulary has {vocab_size}", field=name
            )
