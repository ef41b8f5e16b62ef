"""Text from committed tokens, a whole character at a time, cut at the first stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

TokenDecoder = Callable[[int], str | None]
"""Takes a reply's next token; returns the whole characters that it completes, or None."""
NewDecoder = Callable[..., TokenDecoder]
"""Makes the decoder of one reply, given the tokens of its prompt. Special tokens are text with
``skip_special_tokens=False``."""


@dataclass(frozen=True)
class Piece:
    """A stretch of text, drafted or not.

    Attributes:
        text: whole characters; pieces one after the other are the text.
        drafted: whether the drafter had guessed the token that completed it.
    """

    text: str
    drafted: bool


class TextAssembler:
    """Builds a request's text.

    Text that may be the beginning of a stop string is held back until that is decided, so `take`
    never revokes text. Bytes of an unfinished character at the very end are not part of the text
    (their tokens are part of the token ids).

    Args:
        decode: the request's own decoder; None when there is no tokenizer, and no text then.
        stop: strings that end the text.
        min_tokens: stop strings that are complete within this many tokens do not count.
        include_stop: whether the text includes the stop string or stop token.

    Attributes:
        text: so far.
        found_stop: the stop string that ended the text; None: none did.
    """

    def __init__(
        self,
        decode: TokenDecoder | None,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        self._decode, self._stop = decode, stop
        self._min_tokens, self._include_stop = min_tokens, include_stop
        self._num_tokens = 0
        self._longest_stop = max((len(s) for s in stop), default=0)
        self._pieces: list[Piece] = []
        self._stopped = False
        self._num_seen = self._held = 0  # characters at the last look, and those held back then
        self.text = ""
        self.found_stop: str | None = None

    def push(self, token: int, drafted: bool) -> bool:
        """Add a committed token; True when it completes a stop string."""
        delta = self._decode(token) if self._decode else None
        self._num_tokens += 1
        if not delta:
            return False
        before = len(self.text)
        self.text += delta
        self._pieces.append(Piece(delta, drafted))
        found = self._found_from(before) if self._num_tokens > self._min_tokens else None
        if found is None:
            return False
        begin, end = found
        self.found_stop = self.text[begin:end]
        self._cut(end if self._include_stop else begin)
        return True

    def push_stop(self, token: int, drafted: bool) -> None:
        """Add the stop id that ends the text: its own text counts if stops are included."""
        delta = self._decode(token) if self._decode and self._include_stop else None
        if delta:
            self.text += delta
            self._pieces.append(Piece(delta, drafted))

    def take(self, final: bool = False) -> list[Piece]:
        """New pieces that are final by now; all that is left if ``final``."""
        held = 0 if final or self._stopped else self._num_held()
        kept: list[Piece] = []
        while held and self._pieces:
            piece = self._pieces.pop()
            back = min(held, len(piece.text))
            kept.insert(0, Piece(piece.text[len(piece.text) - back :], piece.drafted))
            if back < len(piece.text):
                self._pieces.append(Piece(piece.text[: len(piece.text) - back], piece.drafted))
            held -= back
        taken, self._pieces = self._pieces, kept
        return taken

    def _found_from(self, before: int) -> tuple[int, int] | None:
        """Start and end of the first stop string that ends behind ``before`` characters."""
        found = [
            (at, at + len(stop))
            for stop in self._stop
            if (at := self.text.find(stop, max(0, before - len(stop) + 1))) >= 0
        ]
        return min(found, default=None)

    def _cut(self, length: int) -> None:
        surplus = len(self.text) - length
        self.text, self._stopped = self.text[:length], True
        while surplus:
            piece = self._pieces.pop()
            if len(piece.text) > surplus:
                self._pieces.append(Piece(piece.text[:-surplus], piece.drafted))
            surplus -= min(surplus, len(piece.text))

    def _num_held(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        # Without the new characters it was such an end already, so few lengths have to be tried,
        # however long the stop strings are.
        most = self._held + len(self.text) - self._num_seen
        lengths = range(min(self._longest_stop - 1, most), 0, -1)
        self._num_seen = len(self.text)
        self._held = next((n for n in lengths if self._begins_a_stop(self.text[-n:])), 0)
        return self._held

    def _begins_a_stop(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stop)
