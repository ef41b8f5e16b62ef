"""A reply's text, split as it comes into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from foredraft.engine.request import Event
from foredraft.server.formats.base import Format, Tool
from foredraft.server.formats.reading import Incoming, Part


class ReplyParser:
    """Splits a reply at its marks. The parts do not depend on how the text was cut into steps.

    Text that may be the beginning of a mark waits until that is decided. Text between the marks of
    a tool call that is not a call becomes content, marks included.

    Args:
        form: the model's form of thoughts and calls.
        tools: that the reply may call.
        thinks: whether it may begin with thoughts.
        in_thoughts: whether the prompt has already opened the thoughts.
        only_first: whether calls behind the first one are left out.

    Attributes:
        num_calls: read so far.
    """

    def __init__(
        self,
        form: Format,
        tools: Sequence[Tool] = (),
        thinks: bool = False,
        in_thoughts: bool = False,
        only_first: bool = False,
    ) -> None:
        self._text, self._only_first, self.num_calls = Incoming(), only_first, 0
        self._reading = form.reply(self._text, tools, thinks, in_thoughts)

    def feed(self, text: str) -> list[Part]:
        """The parts that are final after this text."""
        self._text.whole += text
        return _joined(self._read())

    def close(self) -> list[Part]:
        """The rest, at the end of the reply."""
        self._text.is_over = True
        return _joined(self._read())

    def take(self, event: Event) -> list[Part]:
        """The parts that are final after a step's text; after a reply's last event, all."""
        text = "".join(piece.text for piece in event.pieces)
        parts = self.feed(text) if text else []
        return parts if event.result is None else [*parts, *self.close()]

    def _read(self) -> Iterator[Part]:
        for part in self._reading:
            if part is None:
                return
            if part.kind in ("call", "arguments"):
                self.num_calls += part.kind == "call"
                part = replace(part, index=self.num_calls - 1)
            if part.text and not (self._only_first and part.index):
                yield part


def _joined(parts: Iterator[Part]) -> list[Part]:
    """Neighbours that continue each other become one part."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else Part("call", "")
        if last.kind != part.kind or part.kind == "call":
            joined.append(part)
        elif last.index == part.index if part.kind == "arguments" else last.end == part.at:
            joined[-1] = replace(last, text=last.text + part.text)
        else:
            joined.append(part)
    return joined
