"""Tokens as text: one by one for drafts, in their order for what is committed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from foredraft.engine.text import NewDecoder, TokenDecoder

_MAX_DECODERS = 4096
"""More than the requests that are ever under way at once."""


class Decoding(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    @property
    def new_decoder(self) -> NewDecoder: ...


class TokenTexts:
    """Texts of tokens; empty ones without a tokenizer.

    Args:
        tokenizer: the target's.
    """

    def __init__(self, tokenizer: Decoding | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}
        self._decoders: OrderedDict[int, TokenDecoder] = OrderedDict()  # the last used behind

    def of(self, token: int) -> str:
        """What a token says by itself; bytes of an unfinished character show as such."""
        if self._tokenizer is None:
            return ""
        if token not in self._known:
            # Behind itself: decoders drop the space before the first token of a text.
            once = self._tokenizer.decode([token], skip_special_tokens=False)
            twice = self._tokenizer.decode([token, token], skip_special_tokens=False)
            self._known[token] = twice[len(once) :] or once
        return self._known[token]

    def push(self, request_id: int, token: int) -> str:
        """The whole characters that a request's next token completes."""
        if self._tokenizer is None:
            return ""
        # Behind itself, as in `of`: a reply's first token follows its prompt.
        decode = self._decoders.pop(request_id, None) or self._tokenizer.new_decoder([token])
        self._decoders[request_id] = decode
        if len(self._decoders) > _MAX_DECODERS:  # no record says that a request was cancelled
            self._decoders.popitem(last=False)
        return decode(token) or ""

    def end(self, request_id: int) -> None:
        """The request is over."""
        self._decoders.pop(request_id, None)
