"""Log probabilities as chat and completions report them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foredraft.core.logprobs import TokenLogprobs
from foredraft.models.text.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"
_MAX_UNFINISHED = 3
"""A character has four bytes at most: more tokens without an end are none."""
_LOWEST = -9999.0
"""JSON has no infinity; this is what OpenAI sends for what cannot occur."""


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """``choices[].logprobs`` of chat."""
    return {
        "content": [
            {
                **_token(tokenizer, entry.token, entry.logprob),
                "top_logprobs": [_token(tokenizer, *each) for each in entry.top],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def _token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    text = token_text(tokenizer, token)
    known = None if _UNFINISHED in text else list(text.encode("utf-8", "replace"))
    return {"token": text, "logprob": _finite(logprob), "bytes": known}


class CompletionLogprobs:
    """``choices[].logprobs`` of completions, whose offsets go on from chunk to chunk."""

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self._tokenizer, self._num_top = tokenizer, num_top
        self._offset = 0
        self._unfinished: list[int] = []  # tokens of a character whose end is still to come

    def format(
        self, tokens: Sequence[int], entries: Sequence[TokenLogprobs | None]
    ) -> dict[str, Any]:
        """Of these tokens; an entry is None where nothing foretold the token."""
        return {
            "tokens": [token_text(self._tokenizer, token) for token in tokens],
            "token_logprobs": [None if e is None else _finite(e.logprob) for e in entries],
            "top_logprobs": [self._top(entry) for entry in entries] if self._num_top else None,
            "text_offset": [self._begin(token) for token in tokens],
        }

    def _begin(self, token: int) -> int:
        """Where the token's text begins; tokens of one character begin where it does."""
        begin = self._offset
        self._unfinished.append(token)
        text = self._tokenizer.decode(self._unfinished, skip_special_tokens=False)
        if not text.endswith(_UNFINISHED) or len(self._unfinished) > _MAX_UNFINISHED:
            self._offset += len(text)
            self._unfinished = []
        return begin

    def _top(self, entry: TokenLogprobs | None) -> dict[str, float] | None:
        if entry is None:
            return None
        top = {token_text(self._tokenizer, token): _finite(value) for token, value in entry.top}
        return {token_text(self._tokenizer, entry.token): _finite(entry.logprob)} | top


def token_text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.decode([token], skip_special_tokens=False)


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
