"""A reply's text, split as it comes into thoughts, content and tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from foredraft.engine.events import Event

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"

_HEAD = re.compile(
    r'[\s,\[}]*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*',
    re.DOTALL,
)


@dataclass(frozen=True)
class Part:
    """A stretch of a reply.

    Attributes:
        kind: of what it is; "call" begins a tool call and "arguments" continues it.
        text: the text; of a call the function's name.
        index: which tool call.
    """

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    index: int = 0


class ReplyParser:
    """Splits text at the marks that models are trained to write (Qwen's and Hermes' form).

    What may turn out to be the beginning of a mark waits until that is clear. A tool call that is
    none in the end comes out as the content that it is.

    Args:
        reasoning: whether a reply may begin with thoughts.
        tools: whether it may call tools.
        in_thoughts: the prompt has already opened the thoughts.
        only_first: calls behind the first one are left out.
    """

    def __init__(
        self, reasoning: bool, tools: bool, in_thoughts: bool = False, only_first: bool = False
    ) -> None:
        self._tools, self._only_first = tools, only_first
        self._reasoning = reasoning
        self._state: Literal["start", "thoughts", "content", "call"] = (
            "thoughts" if in_thoughts else "start" if reasoning else "content"
        )
        self._waiting = ""
        self._skips = in_thoughts  # newlines behind a mark
        self._calls = _Calls()

    @property
    def num_calls(self) -> int:
        return self._calls.count

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain now."""
        if not (self._tools or self._reasoning):
            return [Part("content", text)] if text else []
        self._waiting += text
        return self._told(self._certain())

    def close(self) -> list[Part]:
        """What still waited."""
        left, self._waiting = self._waiting, ""
        if self._state == "call":
            parts = [*self._calls.feed(left), *self._calls.end(f"{CALL}", "")]
        else:
            kind: Literal["content", "reasoning"]
            kind = "reasoning" if self._state == "thoughts" else "content"
            parts = [Part(kind, left)] if left else []
        self._state = "content"
        return self._told(iter(parts))

    def take(self, event: Event) -> list[Part]:
        """The parts that are certain with a step's text; with a reply's last event, all."""
        text = "".join(piece.text for piece in event.pieces)
        parts = self.feed(text) if text else []
        return parts if event.result is None else [*parts, *self.close()]

    def _told(self, parts: Iterator[Part]) -> list[Part]:
        return [part for part in _joined(parts) if not (self._only_first and part.index)]

    def _certain(self) -> Iterator[Part]:
        while self._waiting:
            before = (self._state, self._waiting)
            yield from getattr(self, f"_in_{self._state}")()
            if (self._state, self._waiting) == before:
                return

    def _in_start(self) -> Iterator[Part]:
        text = self._waiting.lstrip()
        if text.startswith(THINK):
            self._waiting, self._state, self._skips = text[len(THINK) :], "thoughts", True
        elif text and not THINK.startswith(text):
            self._state = "content"
        yield from ()

    def _in_thoughts(self) -> Iterator[Part]:
        self._skip_newlines()
        inside, found = self._until(END_THINK)
        if inside:
            yield Part("reasoning", inside)
        if found:
            self._state, self._skips = "content", True

    def _in_content(self) -> Iterator[Part]:
        self._skip_newlines()
        if not self._tools:
            inside, self._waiting = self._waiting, ""
            yield Part("content", inside)
            return
        inside, found = self._until(CALL)
        text = inside.rstrip()  # space before a call is no content; it waits
        if text:
            yield Part("content", text)
        if not found:
            self._waiting = inside[len(text) :] + self._waiting
        if found:
            self._state = "call"

    def _in_call(self) -> Iterator[Part]:
        inside, found = self._until(END_CALL)
        yield from self._calls.feed(inside)
        if found:
            yield from self._calls.end(CALL, END_CALL)
            self._state = "content"

    def _skip_newlines(self) -> None:
        """Those behind a mark."""
        if self._skips:
            self._waiting = self._waiting.lstrip("\n")
            self._skips = not self._waiting

    def _until(self, mark: str) -> tuple[str, bool]:
        """Take the text before a mark, and the mark; as much as is certain if there is none."""
        at = self._waiting.find(mark)
        if at >= 0:
            inside, self._waiting = self._waiting[:at], self._waiting[at + len(mark) :]
            return inside, True
        held = next(
            (
                n
                for n in range(min(len(mark) - 1, len(self._waiting)), 0, -1)
                if mark.startswith(self._waiting[-n:])
            ),
            0,
        )
        end = len(self._waiting) - held
        inside, self._waiting = self._waiting[:end], self._waiting[end:]
        return inside, False


class _Calls:
    """The JSON between the marks of a tool call: one call, or a list of them."""

    def __init__(self) -> None:
        self.count = 0
        self._text = ""
        self._num_before = 0  # calls when the marks opened
        self._value: _Value | None = None

    def feed(self, text: str) -> Iterator[Part]:
        self._text += text
        while True:
            if self._value is None:
                head = _HEAD.match(self._text)
                if head is None or head.end() == len(self._text):
                    return
                self._text, self._value = self._text[head.end() :], _Value()
                yield Part("call", json.loads(head[1]), self.count)
                self.count += 1
            inside, self._text = self._value.take(self._text)
            if inside:
                yield Part("arguments", inside, self.count - 1)
            if not self._value.is_over:
                return
            self._value = None

    def end(self, opened: str, closed: str) -> Iterator[Part]:
        """The closing mark: whatever is left over must be read another way."""
        left, self._text, self._value = self._text, "", None
        was_empty, self._num_before = self.count == self._num_before, self.count
        if not was_empty:
            return
        calls = _loose_calls(left)
        for name, arguments in calls:
            yield Part("call", name, self.count)
            yield Part("arguments", arguments, self.count)
            self.count += 1
        self._num_before = self.count
        if not calls and left.strip():
            yield Part("content", f"{opened}{left}{closed}")


class _Value:
    """A JSON object that is passed on as it comes, to where it ends."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._escaped = 0, False, False
        self._string = ""
        self._is_text = False
        self._begun = self.is_over = False

    def take(self, text: str) -> tuple[str, str]:
        """The part of ``text`` that belongs to the value, and the rest."""
        for at, char in enumerate(text):
            if not self._begun:
                self._begun, self._is_text = True, char == '"'
            elif self._depth == 0 and not self._in_string and char in ",}]":
                return self._cut(text, at)  # a bare number or word
            self._follow(char)
            if self._depth == 0 and not self._in_string and char in '}]"':
                return self._cut(text, at + 1)
        return self._cut(text, len(text), over=False)

    def _follow(self, char: str) -> None:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1

    def _cut(self, text: str, at: int, over: bool = True) -> tuple[str, str]:
        self.is_over = over
        inside = text[:at]
        if not self._is_text:
            return inside, text[at:]
        self._string += inside  # arguments as a JSON string: what is in it is passed on whole
        if not over:
            return "", text[at:]
        try:
            return str(json.loads(self._string)), text[at:]
        except ValueError:
            return self._string, text[at:]


def _loose_calls(text: str) -> list[tuple[str, str]]:
    """Calls whose fields come in another order."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls: list[tuple[str, str]] = []
    for each in value if isinstance(value, list) else [value]:
        if not isinstance(each, dict) or not isinstance(each.get("name"), str):
            return []
        arguments: Any = each.get("arguments", each.get("parameters", {}))
        as_text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        calls.append((each["name"], as_text))
    return calls


def _joined(parts: Iterator[Part]) -> list[Part]:
    """Neighbours of one kind as one."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        same = last is not None and (last.kind, last.index) == (part.kind, part.index)
        if last is not None and same and part.kind != "call":
            joined[-1] = Part(part.kind, last.text + part.text, part.index)
        else:
            joined.append(part)
    return joined
