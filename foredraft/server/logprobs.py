"""Log probabilities as the APIs write them, and where in a reply's text each token begins."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from foredraft.core.logprobs import TokenLogprobs
from foredraft.models.text.tokenizer import Tokenizer
from foredraft.server.wire import FEW, Made

_LOWEST = -9999.0
"""OpenAI's value for tokens of probability 0, because JSON has no infinity."""


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """``choices[].logprobs`` of chat; the content of a long reply is made as it is read."""

    def written(entry: TokenLogprobs) -> dict[str, Any]:
        top = [_token(tokenizer, *each) for each in entry.top]
        return {**_token(tokenizer, entry.token, entry.logprob), "top_logprobs": top}

    return {"content": _listed(written, entries), "refusal": None}


def _listed(written: Callable[[Any], Any], entries: Sequence[Any]) -> list[Any] | Made:
    # 8,000 tokens with 20 alternatives are 340,000 objects, among which garbage is looked for.
    return Made(written, entries) if len(entries) > FEW else [*map(written, entries)]


def _token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes(token)),
    }


class CompletionLogprobs:
    """``choices[].logprobs`` of completions, whose offsets go on from chunk to chunk.

    Args:
        prompt: the tokens that the reply continues.
        num_top: how many of the likeliest tokens were asked for.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], num_top: int) -> None:
        self._tokenizer, self._num_top = tokenizer, num_top
        self._offsets = _Offsets(tokenizer, prompt)

    def format(
        self, tokens: Sequence[int], entries: Sequence[TokenLogprobs | None], num_prompt: int = 0
    ) -> dict[str, Any]:
        """The fields of the next tokens.

        Args:
            entries: of each token; None for the first of a prompt, which has no text before it.
            num_prompt: how many of the tokens are the prompt, all of it, before the reply.
        """
        offsets = self._offsets.of_prompt(tokens[:num_prompt]) if num_prompt else []
        return {
            "tokens": [self._tokenizer.token_text(token) for token in tokens],
            "token_logprobs": [None if e is None else _finite(e.logprob) for e in entries],
            "top_logprobs": _listed(self._top, entries) if self._num_top else None,
            "text_offset": [*offsets, *self._offsets.of_reply(tokens[num_prompt:])],
        }

    def _top(self, entry: TokenLogprobs | None) -> dict[str, float] | None:
        """The token itself first. If tokens share a text the likeliest one counts."""
        if entry is None:
            return None
        top: dict[str, float] = {}
        for token, logprob in ((entry.token, entry.logprob), *entry.top):
            top.setdefault(self._tokenizer.token_text(token), _finite(logprob))
        return top


class ReplyLogprobs:
    """Log probabilities of a reply's tokens, by where in its text they begin.

    A stretch of text gets those of its own tokens, independent of the steps.

    Args:
        prompt: the tokens that the reply continues.
        skip_special_tokens: whether special tokens are no text of the reply.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool = True
    ) -> None:
        self._offsets = _Offsets(tokenizer, prompt, skip_special_tokens)
        self._waiting: deque[tuple[int, TokenLogprobs]] = deque()

    def add(self, entries: Sequence[TokenLogprobs]) -> None:
        """Add those of the next tokens."""
        offsets = self._offsets.of_reply([entry.token for entry in entries])
        self._waiting.extend(zip(offsets, entries, strict=True))

    def take(self, begin: int, end: int | None = None) -> list[TokenLogprobs]:
        """Entries of tokens that begin in this stretch of text; entries of earlier tokens are
        dropped.

        Args:
            begin: characters before the stretch.
            end: characters up to its end; None: all the rest.
        """
        taken: list[TokenLogprobs] = []
        while self._waiting and (end is None or self._waiting[0][0] < end):
            offset, entry = self._waiting.popleft()
            if offset >= begin:
                taken.append(entry)
        return taken


class _Offsets:
    """Offsets: the number of characters before each token in the client's text.

    Tokens of one character begin where it does.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._decode = tokenizer.new_decoder(prompt, skip_special_tokens)
        self._num_characters = 0

    def of_prompt(self, tokens: Sequence[int]) -> list[int]:
        """Offsets of a prompt's tokens, where special tokens are text."""
        decode = self._tokenizer.new_decoder(skip_special_tokens=False)
        offsets = self._of(decode(token) for token in tokens)
        self._num_characters = len(self._tokenizer.decode(tokens, skip_special_tokens=False))
        return offsets

    def of_reply(self, tokens: Sequence[int]) -> list[int]:
        """Offsets of a reply's next tokens."""
        return self._of(map(self._decode, tokens))

    def _of(self, texts: Iterable[str | None]) -> list[int]:
        offsets: list[int] = []
        for text in texts:
            offsets.append(self._num_characters)
            self._num_characters += len(text or "")
        return offsets


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
