"""A reply's text, split as it comes into blocks: thoughts, texts and tool calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from foredraft.engine.request import Event
from foredraft.server.formats.base import Format, Tool
from foredraft.server.formats.reading import Incoming, Part

BlockKind = Literal["text", "reasoning", "call"]
_KINDS: dict[str, BlockKind] = {"content": "text", "reasoning": "reasoning"}


@dataclass
class Block:
    """One block.

    Attributes:
        number: from 0.
        name: of the function that a call is for.
        call: the number of the call, from 0.
        text: of the block so far; of a call its arguments.
    """

    kind: BlockKind
    number: int
    name: str = ""
    call: int = 0
    text: str = ""


class Change(NamedTuple):
    """A block opens, grows, or closes.

    Attributes:
        text: that it grows by.
        at: of texts and thoughts, characters of the reply before it.
    """

    kind: Literal["open", "delta", "close"]
    block: Block
    text: str = ""
    at: int = 0

    @property
    def end(self) -> int:
        """Of texts and thoughts, characters of the reply up to the end of ``text``."""
        return self.at + len(self.text)


class ReplyParser:
    """Splits a reply at its marks. The blocks do not depend on how the text was cut into steps.

    Text that may be the beginning of a mark waits until that is decided. Text between the marks of
    a tool call that is not a call becomes content, marks included.

    Args:
        form: the model's form of thoughts and calls.
        tools: that the reply may call.
        thinks: whether it may begin with thoughts.
        in_thoughts: whether the prompt has already opened the thoughts.
        only_first: whether calls behind the first one are left out.

    Attributes:
        blocks: so far.
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
        self.blocks: list[Block] = []
        self._is_open = False

    def take(self, event: Event) -> list[Change]:
        """The changes of a step; after a reply's last event all are known."""
        text = "".join(piece.text for piece in event.pieces)
        return self.feed(text, is_over=event.result is not None)

    def feed(self, text: str, is_over: bool = False) -> list[Change]:
        """The changes that are final after this text; those that continue each other are one."""
        self._text.whole += text
        self._text.is_over = is_over
        changes: list[Change] = []
        for change in self._read():
            last = changes[-1] if changes else change
            goes_on = last is not change and last.kind == change.kind == "delta"
            if goes_on and (change.block.kind == "call" or last.end == change.at):
                changes[-1] = last._replace(text=last.text + change.text)
            else:
                changes.append(change)
        return changes

    def _read(self) -> Iterator[Change]:
        for part in self._reading:
            if part is None:
                return
            self.num_calls += part.kind == "call"
            is_of_call = part.kind in ("call", "arguments")
            if part.text and not (is_of_call and self._only_first and self.num_calls > 1):
                yield from self._added(part)
        yield from self._closed()

    def _added(self, part: Part) -> Iterator[Change]:
        kind = _KINDS.get(part.kind, "call")
        call = self.num_calls - 1 if kind == "call" else 0
        block = self.blocks[-1] if self._is_open else None
        if block is None or part.kind == "call" or (block.kind, block.call) != (kind, call):
            yield from self._closed()
            name = part.text if part.kind == "call" else ""
            block = Block(kind, len(self.blocks), name, call)
            self.blocks.append(block)
            self._is_open = True
            yield Change("open", block)
        if part.kind != "call":
            block.text += part.text
            yield Change("delta", block, part.text, part.at)

    def _closed(self) -> Iterator[Change]:
        if self._is_open:
            self._is_open = False
            yield Change("close", self.blocks[-1])
