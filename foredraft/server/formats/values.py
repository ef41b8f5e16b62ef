"""Values that are not JSON, in a call that is whole: as in Python, or with marks around texts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from pydantic_core import from_json

_WORD = re.compile(r"[^,}\])]*")
_QUOTED = re.compile(r"""(["'])((?:[^\\]|\\.)*?)\1(?=\s*[,:}\])])""", re.DOTALL)
"""A text in quotes. Quotes that nothing could follow are part of it: models forget escapes."""
_ODD = re.compile(r'\\.|"', re.DOTALL)
_NAMES = {"True": True, "False": False, "None": None}

T = TypeVar("T")


class Values:
    """Reads values from a text. Each method raises `ValueError` where there is none.

    Args:
        mark: stands around texts, which are as they stand; "": only quotes do.
    """

    def __init__(self, text: str, mark: str = "") -> None:
        self._text, self._mark, self._at = text, mark, 0
        self._unpaired = set[str]()  # quotes that end no text from here on

    def whole(self, read: Callable[[Values], T]) -> T | None:
        """The value if it is all of the text; None: it is not, or there is none."""
        try:
            value = read(self)
        except (ValueError, RecursionError):
            return None
        return value if self.takes("") and self._at == len(self._text) else None

    def call(self, begins: str, names: str, ends: str) -> tuple[str, dict[str, Any]]:
        """A call: its name up to a mark, then named arguments."""
        (name,) = self._up_to(begins).split()
        return name, dict(self.items(ends, partial(self._pair, names)))

    def items(self, end: str, read: Callable[[], T]) -> Iterator[T]:
        """Values separated by commas, each read by ``read``, up to the mark ``end``."""
        while not self.takes(end):
            yield read()
            if not self.takes(",") and not self._text.startswith(end, self._at):
                raise ValueError("a list or an object does not end")

    def takes(self, mark: str) -> bool:
        """Whether a mark is next, behind white space, which is passed over."""
        while self._text[self._at : self._at + 1].isspace():
            self._at += 1
        is_there = self._text.startswith(mark, self._at)
        self._at += len(mark) * is_there
        return is_there

    def _read(self) -> Any:
        if self.takes("{"):
            return dict(self.items("}", partial(self._pair, ":")))
        if self.takes("["):
            return list(self.items("]", self._read))
        if (quoted := self._quoted()) is not None:
            return quoted
        word = _WORD.match(self._text, self._at)
        assert word is not None
        self._at = word.end()
        return value_of(word[0])

    def _pair(self, names: str) -> tuple[str, Any]:
        key, before = self._quoted(), self._up_to(names).strip()
        if "," in before or (key is None) != bool(before):
            raise ValueError("no name")
        return before if key is None else key, self._read()

    def _quoted(self) -> str | None:
        if self.takes(self._mark) and self._mark:
            return self._up_to(self._mark)
        quote = self._text[self._at : self._at + 1]
        found = None if quote in self._unpaired else _QUOTED.match(self._text, self._at)
        if found is None:
            self._unpaired.add(quote)  # each search would go to the end of the text
            return None
        self._at = found.end()
        text = str(json.loads(f'"{_ODD.sub(_as_json, found[2])}"', strict=False))
        text.encode()  # half a surrogate pair is no text
        return text

    def _up_to(self, mark: str) -> str:
        end = self._text.index(mark, self._at)
        value, self._at = self._text[self._at : end], end + len(mark)
        return value


def value_of(text: str) -> Any:
    """A value of JSON, or a name of Python's; anything else is the text itself."""
    text = text.strip()
    try:
        return _NAMES[text] if text in _NAMES else from_json(text, allow_inf_nan=False)
    except ValueError:
        return text


def _as_json(found: re.Match[str]) -> str:
    """A quote or an escape as JSON has it. Unknown escapes are text, as in Python."""
    text = found[0]
    if text == "\\'":
        return "'"
    return text if text[1:] and text[1] in '"\\/bfnrtu' else f"\\{text}"
