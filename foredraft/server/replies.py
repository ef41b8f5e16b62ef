"""A reply's text, split as it comes into reasoning, content and tool calls.

This module holds the forms that models are trained to write (Qwen's and Hermes'): thoughts between
`THINK` and `END_THINK`, and tool calls as JSON between `CALL` and `END_CALL`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic_core import from_json, to_json

from foredraft.core.grammar import Grammar
from foredraft.engine.request import Event

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"

_HEAD = re.compile(
    r'[\s,\[}]*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*',
    re.DOTALL,
)
"""How a call usually begins: the function's name, then the arguments."""
_FOREIGN_ESCAPE = re.compile(r'\\(?!["\\/bfnrtu])')
_NO_JSON = re.compile(r"-?(NaN|Infinity)")
_PUNCTUATION = '{}[],:"'


@dataclass(frozen=True)
class Part:
    """A stretch of a reply.

    Attributes:
        kind: what it is; "call" begins a tool call and "arguments" continues it.
        text: the text; for "call" the function's name.
        index: the number of the tool call, from 0.
        at: for content and reasoning, how many characters of the reply come before it.
    """

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    index: int = 0
    at: int = 0

    @property
    def end(self) -> int:
        """For content and reasoning, how many characters of the reply come up to its end."""
        return self.at + len(self.text)


class ReplyParser:
    """Splits a reply at its marks. The parts do not depend on how the text was cut into steps.

    Text that may be the beginning of a mark waits until that is decided. Text between the marks of
    a tool call that is not a call becomes content, marks included.

    Args:
        reasoning: whether a reply may begin with thoughts.
        tools: whether it may call tools.
        in_thoughts: whether the prompt has already opened the thoughts.
        only_first: whether calls behind the first one are left out.
    """

    def __init__(
        self, reasoning: bool, tools: bool, in_thoughts: bool = False, only_first: bool = False
    ) -> None:
        self._tools, self._only_first = tools, only_first
        self._reasoning = reasoning
        self._state: Literal["start", "thoughts", "content", "call"] = (
            "thoughts" if in_thoughts else "start" if reasoning else "content"
        )
        self._waiting, self._num_read = "", 0
        self._skips_newlines = in_thoughts  # those behind a mark
        self._calls = _Calls()

    @property
    def num_calls(self) -> int:
        return self._calls.count

    def feed(self, text: str) -> list[Part]:
        """The parts that are final after this text."""
        self._waiting += text
        return self._selected(self._certain())

    def close(self) -> list[Part]:
        """The rest, at the end of the reply."""
        if self._state == "call":
            parts = [*self._calls.feed(self._take(len(self._waiting))), *self._calls.end(False)]
        else:
            kind: Literal["content", "reasoning"]
            kind = "reasoning" if self._state == "thoughts" else "content"
            parts = [self._part(kind, len(self._waiting))]
        self._state = "content"
        return self._selected(iter(parts))

    def take(self, event: Event) -> list[Part]:
        """The parts that are final after a step's text; after a reply's last event, all."""
        text = "".join(piece.text for piece in event.pieces)
        parts = self.feed(text) if text else []
        return parts if event.result is None else [*parts, *self.close()]

    def _selected(self, parts: Iterator[Part]) -> list[Part]:
        return _joined(
            part for part in parts if part.text and not (self._only_first and part.index)
        )

    def _certain(self) -> Iterator[Part]:
        read = {
            "start": self._in_start,
            "thoughts": self._in_thoughts,
            "content": self._in_content,
            "call": self._in_call,
        }
        while self._waiting:
            before = (self._state, self._num_read)
            yield from read[self._state]()
            if (self._state, self._num_read) == before:
                return

    def _in_start(self) -> Iterator[Part]:
        text = self._waiting.lstrip()
        if text.startswith(THINK):
            self._take(len(self._waiting) - len(text) + len(THINK))
            self._state, self._skips_newlines = "thoughts", True
        elif text and not THINK.startswith(text):
            self._state = "content"
        yield from ()

    def _in_thoughts(self) -> Iterator[Part]:
        self._skip_newlines()
        size, is_whole = self._find(END_THINK)
        yield self._part("reasoning", size)
        if is_whole:
            self._take(len(END_THINK))
            self._state, self._skips_newlines = "content", True

    def _in_content(self) -> Iterator[Part]:
        self._skip_newlines()
        if not self._tools:
            yield self._part("content", len(self._waiting))
            return
        size, is_whole = self._find(CALL)
        yield self._part("content", len(self._waiting[:size].rstrip()))
        if is_whole:  # white space before a call is no content
            at, size = self._num_read, self._waiting.index(CALL) + len(CALL)
            self._calls.begin(at, self._take(size))
            self._state = "call"

    def _in_call(self) -> Iterator[Part]:
        size, is_whole = self._find(END_CALL)
        yield from self._calls.feed(self._take(size))
        if is_whole:
            self._take(len(END_CALL))
            yield from self._calls.end(True)
            self._state = "content"

    def _skip_newlines(self) -> None:
        if self._skips_newlines:
            self._take(len(self._waiting) - len(self._waiting.lstrip("\n")))
            self._skips_newlines = not self._waiting

    def _part(self, kind: Literal["content", "reasoning"], size: int) -> Part:
        at = self._num_read
        return Part(kind, self._take(size), at=at)

    def _take(self, size: int) -> str:
        """Read this many of the waiting characters."""
        taken, self._waiting = self._waiting[:size], self._waiting[size:]
        self._num_read += size
        return taken

    def _find(self, mark: str) -> tuple[int, bool]:
        """The number of characters before a mark, and whether the mark was found.

        If not, characters at the end that may be its beginning are not counted.
        """
        at = self._waiting.find(mark)
        if at >= 0:
            return at, True
        sizes = range(min(len(mark) - 1, len(self._waiting)), 0, -1)
        held = next((size for size in sizes if mark.startswith(self._waiting[-size:])), 0)
        return len(self._waiting) - held, False


def opens_thoughts(prompt: str) -> bool:
    """Whether a prompt ends with the mark that opens thoughts, so that the reply begins in them."""
    return prompt.rstrip().endswith(THINK)


def after_thoughts(grammar: Grammar) -> Grammar:
    """A reply's grammar after its thoughts, which stay free."""
    return replace(grammar, begins_after=END_THINK)


class _Calls:
    """Reads the JSON between the marks of tool calls: one call, or a list of them.

    Attributes:
        count: how many calls there are by now, between all marks.
    """

    def __init__(self) -> None:
        self.count = 0
        self.begin(0, CALL)

    def begin(self, at: int, opening: str) -> None:
        """The opening mark with white space before it, behind ``at`` characters of the reply."""
        self._at, self._opening, self._num_before = at, opening, self.count
        self._text = ""  # behind the last value
        self._arguments: _Arguments | None = None
        self._is_malformed = False

    def feed(self, text: str) -> Iterator[Part]:
        self._text += text
        while not self._is_malformed:
            if self._arguments is None:
                head = _HEAD.match(self._text)
                if head is None or head.end() == len(self._text):
                    return
                name = _name(head[1])
                if name is None:
                    self._is_malformed = True
                    return
                self._text, self._arguments = self._text[head.end() :], _Arguments()
                yield Part("call", name, self.count)
                self.count += 1
            passed, self._text = self._arguments.feed(self._text)
            yield Part("arguments", passed, self.count - 1)
            if not self._arguments.is_over:
                return
            self._arguments = None

    def end(self, is_closed: bool) -> Iterator[Part]:
        """The closing mark, or the end of the reply without one."""
        if self._arguments is not None:
            yield Part("arguments", self._arguments.close(), self.count - 1)
        if self.count > self._num_before:
            return
        calls = _calls_in(self._text)
        for name, arguments in calls:
            yield Part("call", name, self.count)
            yield Part("arguments", arguments, self.count)
            self.count += 1
        if not calls:
            text = self._opening + self._text + (END_CALL if is_closed else "")
            yield Part("content", text, at=self._at)


class _Arguments:
    """The value of a call's arguments, passed on as it comes, to where it ends.

    JSON has no NaN and no infinity: null stands for them. Arguments that are text (some models
    write JSON in a JSON string) are passed on when the string is whole.

    Attributes:
        is_over: whether the value has ended.
    """

    def __init__(self) -> None:
        self._depth, self._in_string, self._escaped = 0, False, False
        self._word = ""  # a number or a name that may go on
        self._string: str | None = None  # what there is of arguments that are text
        self._has_begun = self.is_over = False

    def feed(self, text: str) -> tuple[str, str]:
        """The text to pass on, and the text behind the value."""
        if text and not self._has_begun:
            self._has_begun, self._string = True, "" if text[0] == '"' else None
        passed = [""]
        for at, char in enumerate(text):
            if self._in_string:
                self._in_string = char != '"' or self._escaped
                self._escaped = char == "\\" and not self._escaped
                closes = not self._in_string
            elif char in _PUNCTUATION or char.isspace():
                passed.append(self._end_word())
                if char in ",}]" and not self._depth:
                    return self._passed(passed, ends=True), text[at:]
                self._depth += (char in "{[") - (char in "}]")
                self._in_string, closes = char == '"', char in "}]"
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


def _calls_in(text: str) -> list[tuple[str, str]]:
    """Names and arguments of calls whose fields come in another order; none if any is malformed."""
    try:
        value = from_json(text)
    except ValueError:
        return []
    calls: list[tuple[str, str]] = []
    for each in value if isinstance(value, list) else [value]:
        if not isinstance(each, dict) or not isinstance(each.get("name"), str):
            return []
        arguments: Any = each.get("arguments", each.get("parameters", {}))
        if not isinstance(arguments, str):
            arguments = to_json(arguments, inf_nan_mode="null").decode()
        calls.append((each["name"], arguments))
    return calls


def _joined(parts: Iterator[Part]) -> list[Part]:
    """Neighbours that continue each other become one part."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last is not None and _continues(last, part):
            joined[-1] = replace(last, text=last.text + part.text)
        else:
            joined.append(part)
    return joined


def _continues(last: Part, part: Part) -> bool:
    if last.kind != part.kind or part.kind == "call":
        return False
    return last.index == part.index if part.kind == "arguments" else last.end == part.at
