"""The text of a reply while it comes, and the parts that are read from it.

A form of replies is read by generators. They yield the parts that are certain, and None where the
text so far decides nothing: then they go on with more text, or with the end of the reply.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic_core import from_json, to_json

_HEAD = re.compile(
    r'(?:\s*,\s*"[^"\\]*"\s*:\s*(?:"[^"\\]*"|[\w.+-]+))*[\s,;\[}]*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*',
    re.DOTALL,
)
"""How a call in JSON usually begins: the function's name, then the arguments. Before it may come
what is left of the call before, such as its id."""
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_FOREIGN_ESCAPE = re.compile(r'\\(?!["\\/bfnrtu])')
_NO_JSON = re.compile(r"-?(NaN|Infinity)")
_PUNCTUATION = '{}[],:"'

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """A stretch of a reply.

    Attributes:
        kind: type of the part; "call" begins a tool call and "arguments" continues it.
        text: the text; for "call" the function's name.
        at: for content and reasoning, number of characters of the reply before it.
    """

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    at: int = 0


Reads = Generator[Part | None, None, T]
"""Reads the next stretch of a reply, and returns what it has found out."""


class Incoming:
    """A reply so far.

    Attributes:
        whole: its text.
        at: characters that have been read.
        is_over: whether no more text comes.
    """

    def __init__(self) -> None:
        self.whole, self.at, self.is_over = "", 0, False

    @property
    def rest(self) -> str:
        """The characters that have come and have not been read."""
        return self.whole[self.at :]

    def more(self) -> Reads[bool]:
        """Wait for more text; False: the reply is over."""
        size = len(self.whole)
        while len(self.whole) == size and not self.is_over:
            yield None
        return len(self.whole) > size

    def part(self, kind: Literal["content", "reasoning"], size: int) -> Part:
        """Read so many characters as a part."""
        at, self.at = self.at, self.at + size
        return Part(kind, self.whole[at : self.at], at=at)

    def skip(self, characters: str | None = None) -> Reads[None]:
        """Pass over white space, or over these characters."""
        while True:
            self.at = len(self.whole) - len(self.rest.lstrip(characters))
            if self.rest or not (yield from self.more()):
                return

    def takes(self, mark: str) -> Reads[bool]:
        """Whether the text goes on with a mark, which is read then."""
        while len(self.rest) < len(mark) and mark.startswith(self.rest):
            if not (yield from self.more()):
                return False
        if not self.rest.startswith(mark):
            return False
        self.at += len(mark)
        return True

    def up_to(self, *marks: str) -> Reads[tuple[str, str] | None]:
        """Read up to and with the first of some marks: the text before it, and the mark.

        None: the reply ends without one, and nothing is read.
        """
        while (found := _first(self.rest, marks)) is None:
            if not (yield from self.more()):
                return None
        at, mark = found
        before = self.rest[:at]
        self.at += at + len(mark)
        return before, mark

    def parts_up_to(
        self, kind: Literal["content", "reasoning"], marks: tuple[str, ...]
    ) -> Reads[str]:
        """Parts up to the first of some marks, which is not read; "" at the end of the reply.

        In content, white space before a mark is not read either.
        """
        while True:
            found = _first(self.rest, marks)
            size = found[0] if found else len(self.rest) - held(self.rest, marks)
            kept = self.rest[:size]
            yield self.part(kind, len(kept.rstrip() if marks and kind == "content" else kept))
            if found:
                return found[1]
            if not (yield from self.more()):
                yield self.part(kind, len(self.rest))
                return ""


def _first(text: str, marks: tuple[str, ...]) -> tuple[int, str] | None:
    """The first of the marks in a text, the longest of several at one place."""
    found = [(at, -len(mark), mark) for mark in marks if (at := text.find(mark)) >= 0]
    return (min(found)[0], min(found)[2]) if found else None


def held(text: str, marks: tuple[str, ...]) -> int:
    """Characters at the end of a text that may be the beginning of a mark."""
    longest = max(map(len, marks), default=1)
    sizes = range(min(longest - 1, len(text)), 0, -1)
    return next((n for n in sizes if any(mark.startswith(text[-n:]) for mark in marks)), 0)


# ------------------------------------------------------------------------------------------- JSON


def json_calls(text: Incoming, end: str = "") -> Reads[bool]:
    """Calls as JSON, one or a list of them, up to a mark, which is read.

    Args:
        end: the mark; "": the end of the reply. In a string of JSON it is text.

    Returns:
        Whether there was a call.
    """
    found, is_malformed = False, False
    while True:
        head = None if is_malformed else _HEAD.match(text.whole, text.at)
        if head is not None and head.end() < len(text.whole):
            if (name := _name(head[1])) is not None:
                text.at, found = head.end(), True
                yield Part("call", name)
                yield from json_value(text, end)
                continue
            is_malformed = True
        at = _outside_strings(text.rest, end)
        if at is not None or not (yield from text.more()):
            break
    inner = text.rest[:at]
    text.at += len(inner) + (0 if at is None else len(end))
    calls = [] if found or is_malformed else _calls_in(inner)
    for name, arguments in calls:
        yield from call_parts(name, arguments)
    return found or bool(calls)


def call_parts(name: str, arguments: Any) -> tuple[Part, Part]:
    """A call that is read in one piece. Arguments that are text are JSON, as some models write."""
    text = arguments if isinstance(arguments, str) else as_json(arguments)
    return Part("call", name), Part("arguments", text)


def as_json(value: Any) -> str:
    """A value as JSON, which has no NaN and no infinity: null stands for them."""
    return to_json(value, inf_nan_mode="null").decode()


def json_value(text: Incoming, end: str = "") -> Reads[None]:
    """The value of a call's arguments, to where it ends, or to a mark that cuts it.

    Args:
        end: the mark, which is not read; in a string of JSON it is text. "": there is none.
    """
    value = _Arguments()
    while not value.is_over:
        found = _first(text.rest, (end,)) if end else None
        size = found[0] if found else len(text.rest) - held(text.rest, (end,))
        if found and not size and value.in_string:
            size = len(end)
        elif found and not size:
            break
        passed, behind = value.feed(text.rest[:size])
        text.at += size - len(behind)
        yield Part("arguments", passed)
        if not (size or value.is_over or (yield from text.more())):
            passed, _ = value.feed(text.rest)
            text.at = len(text.whole)
            yield Part("arguments", passed)
            break
    if not value.is_over:
        yield Part("arguments", value.close())


def _outside_strings(text: str, mark: str) -> int | None:
    """Where a mark is that is in no string of JSON; None: nowhere yet."""
    if not mark:
        return None
    at = 0
    while (found := text.find(mark, at)) >= 0:
        quote = text.find('"', at)
        if quote < 0 or found < quote:
            return found
        string = _STRING.match(text, quote)
        if string is None:
            return None
        at = string.end()
    return None


class _Arguments:
    """The value of a call's arguments, passed on as it comes, to where it ends.

    JSON has no NaN and no infinity: null stands for them. Arguments that are text (some models
    write JSON in a JSON string) are passed on when the string is whole.

    Attributes:
        is_over: whether the value has ended.
        in_string: whether the text so far ends within a string.
    """

    def __init__(self) -> None:
        self._depth, self.in_string, self._escaped = 0, False, False
        self._word = ""  # a number or a name that may go on
        self._string: str | None = None  # what there is of arguments that are text
        self._has_begun = self.is_over = False

    def feed(self, text: str) -> tuple[str, str]:
        """The text to pass on, and the text behind the value."""
        if text and not self._has_begun:
            self._has_begun, self._string = True, "" if text[0] == '"' else None
        passed = [""]
        for at, char in enumerate(text):
            if self.in_string:
                self.in_string = char != '"' or self._escaped
                self._escaped = char == "\\" and not self._escaped
                closes = not self.in_string
            elif char in _PUNCTUATION or char.isspace():
                passed.append(self._end_word())
                if char in ",}]" and not self._depth:
                    return self._passed(passed, ends=True), text[at:]
                self._depth += (char in "{[") - (char in "}]")
                self.in_string, closes = char == '"', char in "}]"
            else:
                self._word += char
                continue
            passed.append(char)
            if closes and not self._depth:
                return self._passed(passed, ends=True), text[at + 1 :]
        return self._passed(passed), ""

    def close(self) -> str:
        """The rest of a value that was cut."""
        if self._string is None:
            return self._end_word()
        try:
            return str(from_json(self._string, allow_partial="trailing-strings"))
        except ValueError:
            return self._string

    def _end_word(self) -> str:
        word, self._word = self._word, ""
        return "null" if _NO_JSON.fullmatch(word) else word

    def _passed(self, passed: list[str], ends: bool = False) -> str:
        self.is_over = ends
        if self._string is None:
            return "".join(passed)
        self._string += "".join(passed)
        return self.close() if ends else ""


def _name(quoted: str) -> str | None:
    """A function's name from its JSON string; None where it is none.

    Small models escape underscores as Markdown does. Escapes that JSON does not have are dropped.
    """
    for text in (quoted, _FOREIGN_ESCAPE.sub("", quoted)):
        try:
            return str(from_json(text))
        except ValueError:
            continue
    return None


def _calls_in(text: str) -> list[tuple[str, Any]]:
    """Names and arguments of calls whose fields come in another order; none if any is malformed."""
    try:
        value = from_json(text)
    except ValueError:
        return []
    calls: list[tuple[str, Any]] = []
    for each in value if isinstance(value, list) else [value]:
        if not isinstance(each, dict) or not isinstance(each.get("name"), str):
            return []
        calls.append((each["name"], each.get("arguments", each.get("parameters", {}))))
    return calls
