"""One request's text between two tokenizers: read in target tokens, kept in draft tokens.

Tokenizers cut text at different places and into different bytes. So what the target committed is
turned into text, character by complete character, and that into draft tokens; near the end the
text is encoded again as it grows, since more text may change how it is cut (look-back). The result
is a function of the committed tokens alone, not of the steps in which they came.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from foredraft.drafters.spec import TextCodec

_UNFINISHED = "\ufffd"
"""Decoders write it for bytes that are not, or not yet, a whole character."""
_MAX_HELD = 3
"""A character has at most four bytes, so at most three are unfinished."""
_MAX_PIECE = 16
"""Tokens after which a character that is still unfinished is taken for bad bytes."""
_LOOK_BACK = 48
"""Characters of text that are encoded again as it goes on, at least; twice as many at most."""
_WINDOWS = (4, 2, 1, 0)
"""Numbers of committed pieces to align a draft with, tried in this order."""


class Specials:
    """Special tokens, such as end-of-text: those that decoding can leave out."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._texts: dict[int, str] = {}

    def text(self, token: int) -> str:
        """The text of a special token; empty for every other token."""
        if token not in self._texts:
            plain = self._codec.decode([token], skip_special_tokens=True)
            named = self._codec.decode([token], skip_special_tokens=False)
            self._texts[token] = named if not plain else ""
        return self._texts[token]

    def token(self, text: str) -> int | None:
        """The special token of that text, if there is one."""
        tokens = self._codec.encode(text, add_special_tokens=False)
        return tokens[0] if len(tokens) == 1 and self.text(tokens[0]) == text else None


@dataclass(frozen=True)
class CodecPair:
    """The target's and the draft model's tokenizer, and which special tokens they share."""

    target: TextCodec
    draft: TextCodec
    target_specials: Specials
    draft_specials: Specials

    @classmethod
    def of(cls, target: TextCodec, draft: TextCodec) -> CodecPair:
        return cls(target, draft, Specials(target), Specials(draft))


@dataclass
class _OpenText:
    """The end of the draft-side text, which is encoded again as it grows.

    Attributes:
        text: since the last point that will not change any more.
        start: the number of draft tokens before it.
    """

    text: str = ""
    start: int = 0


@dataclass
class Transcript:
    """A request's committed text, as characters and as draft tokens.

    Attributes:
        draft_tokens: the text in the draft model's tokens, its start token included. Its end may
            be rewritten when the text goes on.
        held: committed target tokens whose text is not complete yet.
    """

    codecs: CodecPair = field(compare=False)
    draft_tokens: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    num_read: int = 0
    _pieces: list[tuple[tuple[int, ...], str]] = field(default_factory=list)
    _before: tuple[int, ...] = ()
    _said: str = ""
    _open: _OpenText = field(default_factory=_OpenText)

    def begin(self, prompt: Sequence[int]) -> None:
        """Read a prompt: all at once between special tokens."""
        self.draft_tokens = list(self.codecs.draft.encode("", add_special_tokens=True))
        self._open.start = len(self.draft_tokens)
        run: list[int] = []
        for token in prompt:
            if self.codecs.target_specials.text(token):
                self._read_run(run)
                self._read(token)
                run = []
            else:
                run.append(token)
        self._read_run(run)
        self.num_read = len(prompt)

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Read what was committed since the last call.

        Args:
            tokens: all committed tokens.
        """
        for token in tokens[self.num_read :]:
            self._read(token)
        self.num_read = len(tokens)

    # ------------------------------------------------------------------- from target to draft

    def _read_run(self, run: Sequence[int]) -> None:
        """Read many tokens, none of them special; the last few one by one."""
        bulk, rest = list(run[:-_MAX_HELD]), run[-_MAX_HELD:]
        if bulk:
            text = self.codecs.target.decode(bulk, skip_special_tokens=False)
            while text.endswith(_UNFINISHED) and len(bulk) > 1 and len(rest) < 3 * _MAX_HELD:
                rest = [bulk.pop(), *rest]
                text = self.codecs.target.decode(bulk, skip_special_tokens=False)
            self._add(bulk, text)
            # Too long to be looked back over; its end is only there to be decoded behind.
            self._pieces, self._before = [], tuple(bulk[-2:])
        for token in rest:
            self._read(token)

    def _read(self, token: int) -> None:
        special = self.codecs.target_specials.text(token)
        if special:
            self._add_special(token, special)
            return
        self.held.append(token)
        text = self._decoded(self.held)
        if not text.endswith(_UNFINISHED) or len(self.held) > _MAX_PIECE:
            self._add(self.held, text)
            self.held = []
        elif len(self.held) > _MAX_HELD:  # tokens that end in the middle of one character each
            self._say(text[: max(len(text.rstrip(_UNFINISHED)), len(text) - _MAX_HELD)])

    def _decoded(self, tokens: Sequence[int]) -> str:
        """The text of target tokens that follow the last piece.

        Decoders treat the first token of a text differently, so they are decoded behind it.
        """
        decode = self.codecs.target.decode
        start = len(decode(self._before, skip_special_tokens=False)) if self._before else 0
        return decode([*self._before, *tokens], skip_special_tokens=False)[start:]

    def _add(self, tokens: Sequence[int], text: str) -> None:
        """Take up target tokens and their text."""
        self._say(text)
        self._said = ""
        self._before = tuple(tokens)
        self._pieces = [*self._pieces[1 - max(_WINDOWS) :], (self._before, text)]

    def _say(self, text: str) -> None:
        """Let the draft side have as much of the held tokens' text."""
        new, self._said = text[len(self._said) :], text
        if new:
            self._open.text += new
            encoded = self.codecs.draft.encode(self._open.text, add_special_tokens=False)
            self.draft_tokens[self._open.start :] = encoded
            if len(self._open.text) > 2 * _LOOK_BACK:
                self._close(encoded)

    def _close(self, encoded: list[int]) -> None:
        """Fix the tokens of all but the last part of the open text.

        It is cut before a word where cutting changes no token. Where there is no such place for
        long, everything is fixed, and the text goes on as if it were new.
        """
        text, encode = self._open.text, self.codecs.draft.encode
        cut = text.rfind(" ", 1, len(text) - _LOOK_BACK)
        if cut > 0:
            first = encode(text[:cut], add_special_tokens=False)
            # Some tokenizers put a space before every text; then the rest must come without.
            for rest in (text[cut:], text[cut + 1 :]):
                if first + encode(rest, add_special_tokens=False) == encoded:
                    self._open = _OpenText(rest, self._open.start + len(first))
                    return
        if len(text) > 4 * _LOOK_BACK:
            self._open = _OpenText("", len(self.draft_tokens))

    def _add_special(self, token: int, text: str) -> None:
        """A special token is kept if the draft model has it too; it ends the look-back anyway."""
        if self.held:
            held, self.held = self.held, []
            self._add(held, self._decoded(held))
        twin = self.codecs.draft_specials.token(text)
        if twin is not None and self.draft_tokens != [twin]:  # a start token is there already
            self.draft_tokens.append(twin)
        self._open = _OpenText("", len(self.draft_tokens))
        self._pieces, self._before = [], ()

    # ------------------------------------------------------------------- from draft to target

    def continuation(self, draft: Sequence[int]) -> list[int]:
        """Target tokens for draft tokens that go on where the transcript ends.

        Empty where the draft's text cannot follow the committed tokens.
        """
        specials = self.codecs.draft_specials
        end = next((i for i, token in enumerate(draft) if specials.text(token)), len(draft))
        text = self._text_of(draft[:end])
        tokens = self._aligned(text) if text else []
        if end < len(draft) and bool(tokens) == bool(end) and not self.held:
            twin = self.codecs.target_specials.token(specials.text(draft[end]))
            tokens = tokens if twin is None else [*tokens, twin]
        return tokens

    def _text_of(self, draft: Sequence[int]) -> str:
        """The text that draft tokens add, up to the first byte that is no character."""
        before = self.draft_tokens[-_MAX_HELD - 1 :]
        decode = self.codecs.draft.decode
        start = len(decode(before, skip_special_tokens=False))
        added = decode([*before, *draft], skip_special_tokens=False)[start:]
        return added.split(_UNFINISHED)[0]

    def _aligned(self, text: str) -> list[int]:
        """``text`` in target tokens, cut as it would be behind the last committed pieces."""
        for size in _WINDOWS:
            window = self._pieces[len(self._pieces) - min(size, len(self._pieces)) :]
            committed = [*(token for tokens, _ in window for token in tokens), *self.held]
            joined = "".join(piece for _, piece in window) + self._said + text
            tokens = self.codecs.target.encode(joined, add_special_tokens=False)
            # Some tokenizers put a space before every text, which may become a token of its own.
            for first in (0, 1):
                after = first + len(committed)
                if committed and tokens[first:after] == committed:
                    return tokens[after:]
        return self._behind_a_seam(text)

    def _behind_a_seam(self, text: str) -> list[int]:
        """``text`` on its own, where together with what is committed it would be cut elsewhere."""
        tokens = self.codecs.target.encode(text, add_special_tokens=False)
        if self.held:
            return []
        return tokens if self._decoded(tokens) == text else []
