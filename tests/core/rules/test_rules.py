"""Rules that depend on the text, each compared with a slow reference."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.core.errors import ConfigError, NoTokenError
from foredraft.core.grammar import Grammar
from foredraft.core.params import SamplingParams
from foredraft.core.rules.book import new_rules
from tests.core.reference import reference_probs, ruled_logits

VOCAB = 6
STOPS = (4, 5)


def encode(text: str) -> list[int]:
    """Letters a to f; a space changes the first letter's id, as real tokenizers do."""
    return [(ord(letter) - ord("a") + text.startswith(" ")) % VOCAB for letter in text.strip()]


rules_of = partial(new_rules, vocab_size=VOCAB, encode=encode)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([0.5, 1.3, 4.0]),
        "presence_penalty": st.sampled_from([-1.0, 0.7]),
        "frequency_penalty": st.sampled_from([-0.5, 0.4]),
        "logit_bias": st.dictionaries(st.integers(0, 5), st.integers(-3, 3), max_size=3),
        "allowed_token_ids": st.lists(st.integers(0, 5), min_size=1, max_size=5),
        "bad_words": st.lists(st.sampled_from(["a", "ab", "bcd", "cc", "f"]), max_size=3),
        "min_tokens": st.integers(0, 5),
        "temperature": st.sampled_from([0.0, 0.5, 1.0]),
        "top_k": st.integers(0, 4),
        "top_p": st.sampled_from([0.5, 1.0]),
    },
)
TOKENS = st.lists(st.integers(0, 5), max_size=6)
LOGITS = st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=VOCAB, max_size=VOCAB)


@settings(max_examples=300)
@given(OPTIONS, TOKENS, TOKENS, TOKENS, LOGITS)
def test_the_law_is_what_the_documentation_says(
    options: dict[str, Any],
    prompt: list[int],
    reply: list[int],
    drafted: list[int],
    logits: list[float],
) -> None:
    params = SamplingParams(**options)
    bad = [encode(text) for word in params.bad_words for text in (word, f" {word}")]
    changed = ruled_logits(logits, params, prompt, [*reply, *drafted], bad, STOPS)
    rules = rules_of(params, len(prompt), STOPS)
    logits_V = torch.tensor(logits, dtype=torch.float64)
    if max(changed) == -math.inf:
        with pytest.raises(NoTokenError, match="leave no token after"):
            rules.law(logits_V, [*prompt, *reply], drafted)
        return
    law = rules.law(logits_V, [*prompt, *reply], drafted)
    expected = reference_probs(changed, params)
    assert law.probs_V.tolist() == pytest.approx(expected, abs=1e-12)
    permitted = [rules.permits(t, [*prompt, *reply], drafted) for t in range(VOCAB)]
    assert permitted == [logit > -math.inf for logit in changed]
    assert logits_V.tolist() == logits, "the model's own numbers are not written over"


@given(TOKENS, TOKENS, TOKENS)
def test_a_guess_counts_like_a_token(prompt: list[int], reply: list[int], more: list[int]) -> None:
    """Bit by bit: else a text would depend on what was drafted."""
    params = SamplingParams(
        temperature=1.0,
        repetition_penalty=1.3,
        frequency_penalty=0.3,
        presence_penalty=0.2,
        logit_bias={1: 0.1},
        bad_words=["ab"],
    )
    logits_V = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3))
    drafted = rules_of(params, len(prompt)).law(logits_V, [*prompt, *reply], more)
    committed = rules_of(params, len(prompt)).law(logits_V, [*prompt, *reply, *more])
    assert torch.equal(drafted.logits_V, committed.logits_V)


def test_counts_follow_a_text_that_grows() -> None:
    params = SamplingParams(temperature=1.0, repetition_penalty=1.5, frequency_penalty=0.5)
    rules, text = rules_of(params, 2), [0, 1]
    logits_V = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3))
    for token in (1, 3, 3, 5, 0, 1):
        text.append(token)
        fresh = rules_of(params, 2).law(logits_V, text, (2, 2))
        assert torch.equal(rules.law(logits_V, text, (2, 2)).logits_V, fresh.logits_V)
    shorter = rules_of(params, 2).law(logits_V, text[:3])
    assert torch.equal(rules.law(logits_V, text[:3]).logits_V, shorter.logits_V)


class Watched(list[int]):
    """A text that notes how much of it is copied."""

    num_copied = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.num_copied += len(found) if isinstance(index, slice) else 0
        return found

    def __iter__(self) -> Any:
        raise AssertionError("the whole text is gone through")


class Anything:
    """A matcher that allows every token."""

    def mask(self) -> np.ndarray[Any, Any]:
        return np.ones(VOCAB, dtype=bool)

    def permits(self, token: int) -> bool:
        return True

    def consume(self, token: int) -> bool:
        return True

    def copy(self) -> Anything:
        return self

    def forced(self) -> list[int]:
        return []

    def is_complete(self) -> bool:
        return False


def test_a_position_costs_no_copy_of_the_reply() -> None:
    params = SamplingParams(bad_words=["ab", "cde"], min_tokens=3, grammar=Grammar("regex", ".*"))
    rules = rules_of(params, 2, STOPS, new_matcher=lambda grammar: Anything())
    text = Watched([0, 1] + [2, 3] * 1000)
    logits_V = torch.zeros(VOCAB)
    rules.law(logits_V, text)
    text.num_copied = 0
    for token in (1, 2, 3, 0):
        text.append(token)
        rules.law(logits_V, text, (2, 2))
        assert rules.permits(1, text, (3,))
        rules.forced(text)
        assert not rules.is_complete(text)
    assert text.num_copied < 50


def test_a_request_without_rules_is_spared_them() -> None:
    for params in (SamplingParams(), SamplingParams(temperature=1.0, top_p=0.5, min_tokens=3)):
        assert rules_of(params) is params


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"logit_bias": {6: 1.0}}, "logit_bias names token 6; the vocabulary has 6"),
        ({"allowed_token_ids": [1, 9]}, "allowed_token_ids names token 9"),
        ({"stop_token_ids": [6]}, "stop_token_ids names token 6"),
    ],
)
def test_what_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        rules_of(SamplingParams(**options))
