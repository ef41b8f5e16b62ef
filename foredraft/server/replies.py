"""A reply's text, split as it comes into reasoning, content and tool calls, and into blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

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
        place = (last.index, part.index) if part.kind == "arguments" else (last.end, part.at)
        if last.kind == part.kind != "call" and place[0] == place[1]:
            joined[-1] = replace(last, text=last.text + part.text)
        else:
            joined.append(part)
    return joined


# ------------------------------------------------------------------------------------ its blocks

BlockKind = Literal["text", "reasoning", "call"]
Change = Literal["open", "delta", "close"]


@dataclass
class Block:
    """One block.

    Attributes:
        number: from 0.
        name: of the function that a call is for.
        text: of the block so far; of a call its arguments.
        key: which tool call it is.
        id: names the block to clients.
    """

    kind: BlockKind
    number: int
    name: str = ""
    text: str = ""
    key: int = 0
    id: str = ""


BlockChange = tuple[Change, Block, Part | None]
"""How a block changes, and the part that it grows by."""


class BlockBuilder:
    """Builds the blocks of one reply from its parts.

    Args:
        reply_id: what the ids of blocks begin with.
    """

    def __init__(self, reply_id: str) -> None:
        self._reply_id = reply_id
        self.all: list[Block] = []
        self._is_open = False

    def add(self, parts: Sequence[Part]) -> Iterator[BlockChange]:
        """The changes that a part makes: a block opens, grows, or closes."""
        for part in parts:
            kind: BlockKind = "call"
            if part.kind == "content":
                kind = "text"
            elif part.kind == "reasoning":
                kind = "reasoning"
            block = self.all[-1] if self._is_open else None
            if (
                block is None
                or part.kind == "call"
                or (block.kind, block.key) != (kind, part.index)
            ):
                yield from self.close()
                name = part.text if part.kind == "call" else ""
                number = len(self.all)
                block_id = f"{self._reply_id}{number:x}"
                block = Block(kind, number, name, key=part.index, id=block_id)
                self.all.append(block)
                self._is_open = True
                yield "open", block, None
            if part.kind != "call" and part.text:
                block.text += part.text
                yield "delta", block, part

    def close(self) -> Iterator[BlockChange]:
        """The last block is over."""
        if self._is_open:
            self._is_open = False
            yield "close", self.all[-1], None
