"""Tokens as text: one by one for drafts, in their order for what is committed."""

from __future__ import annotations

from collections import OrderedDict

from foredraft.engine.text import TokenDecoder
from foredraft.models.text.tokenizer import Tokenizer

_MAX_DECODERS = 4096
"""More than the requests that ever run at once."""


class TokenTexts:
    """Texts of tokens; empty ones without a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._decoders: OrderedDict[int, TokenDecoder] = OrderedDict()  # the last used behind

    def of(self, token: int) -> str:
        """The text of a token; bytes of an unfinished character are shown as bytes."""
        return self._tokenizer.token_text(token) if self._tokenizer else ""

    def push(self, request_id: int, token: int) -> str:
        """The whole characters that a request's next token completes."""
        if self._tokenizer is None:
            return ""
        # Behind itself: decoders drop the space before the first token of a text.
        decode = self._decoders.pop(request_id, None) or self._tokenizer.new_decoder([token])
        self._decoders[request_id] = decode
        if len(self._decoders) > _MAX_DECODERS:  # no record says that a request was cancelled
            self._decoders.popitem(last=False)
        return decode(token) or ""

    def end(self, request_id: int) -> None:
        self._decoders.pop(request_id, None)
