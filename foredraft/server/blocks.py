"""A reply as a sequence of typed blocks, for dialects that open and close them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from foredraft.server.formats.reading import Part

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
