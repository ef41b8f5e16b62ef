"""From a request to its rules. Unsupported ones are refused here, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from foredraft.core.errors import ConfigError
from foredraft.core.grammar import Grammar
from foredraft.core.params import SamplingParams
from foredraft.core.rules.bans import (
    AllowedTokens,
    BadWords,
    Ban,
    ModelBans,
    NoEndYet,
    ThinkingEnds,
)
from foredraft.core.rules.base import Rules, SamplingRules
from foredraft.core.rules.grammar import GrammarRule, Matcher
from foredraft.core.rules.penalties import Bias, Penalties
from foredraft.core.rules.row import RowRules


@dataclass(frozen=True)
class RuleBook:
    """Makes the rules of requests to one model.

    Attributes:
        vocab_size: of the model.
        encode: text to ids without special tokens around it; None: there is no tokenizer.
        new_matcher: makes the matcher of a grammar; None: there is no tokenizer.
        model_bans: tokens that the model's own generation config rules out; None: none.
    """

    vocab_size: int
    encode: Callable[[str], Sequence[int]] | None = None
    new_matcher: Callable[[Grammar], Matcher] | None = None
    model_bans: ModelBans | None = None

    def rules(
        self, params: SamplingParams, num_prompt: int = 0, stop_ids: Iterable[int] = ()
    ) -> Rules:
        """The rules of one request.

        Args:
            num_prompt: tokens of its prompt.
            stop_ids: tokens that end its reply.

        Raises:
            ConfigError: an id outside the vocabulary, words without a tokenizer, or parameters
                that contradict each other.
            GrammarError: the grammar cannot be read.
        """
        self._check_ids("logit_bias", params.logit_bias)
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("stop_token_ids", params.stop_token_ids)
        stops = frozenset(stop_ids)
        bias = Bias(params.logit_bias) if params.logit_bias else None
        penalties = Penalties(params, num_prompt) if Penalties.are_in(params) else None
        bans, grammar = self._bans(params, stops), self._grammar(params, stops, num_prompt)
        if bias or penalties or bans or grammar:
            return RowRules(params, num_prompt, bias, penalties, bans, grammar)
        return SamplingRules(params)

    def _bans(self, params: SamplingParams, stop_ids: frozenset[int]) -> list[Ban]:
        bans: list[Ban] = [
            *(self.model_bans.of_reply(params.max_tokens) if self.model_bans else ())
        ]
        if params.allowed_token_ids is not None:
            bans.append(AllowedTokens(params.allowed_token_ids, self.vocab_size))
        if params.bad_words:
            bans.append(BadWords(self._spelled(params.bad_words)))
        if params.thinking is not None:
            self._check_ids("thinking", params.thinking.end)
            bans.append(ThinkingEnds(params.thinking))
        if params.min_tokens and stop_ids:
            bans.append(NoEndYet(params.min_tokens, stop_ids))
        return bans

    def _grammar(
        self, params: SamplingParams, stop_ids: frozenset[int], num_prompt: int
    ) -> GrammarRule | None:
        if params.grammar is None:
            return None
        if self.new_matcher is None:
            raise ConfigError("grammar needs a tokenizer, and this engine has none")
        if params.ignore_eos:
            raise ConfigError(
                "ignore_eos and grammar contradict each other: a grammar has an end",
                field="ignore_eos",
            )
        return GrammarRule(self.new_matcher(params.grammar), stop_ids, num_prompt)

    def _spelled(self, words: Iterable[str]) -> list[tuple[int, ...]]:
        """Each word as it is written at the start of a text, and after a space."""
        if self.encode is None:
            raise ConfigError("bad_words need a tokenizer, and this engine has none")
        spelled = {tuple(self.encode(text)) for word in words for text in (word, f" {word}")}
        return sorted(sequence for sequence in spelled if sequence)

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        for token in ids:
            if token >= self.vocab_size:
                raise ConfigError(
                    f"{name} names token {token}; the vocabulary has {self.vocab_size}",
                    field=name,
                )
