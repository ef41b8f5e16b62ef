"""A text as it was at some moment, without a copy of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import overload


class TextView(Sequence[int]):
    """The tokens that a growing list holds now. It does not show what is appended later.

    A request's text only grows, so its first tokens stay what they are. Slices are tuples.

    Args:
        tokens: the text; its first tokens must never change.
    """

    __slots__ = ("_length", "_tokens")

    def __init__(self, tokens: list[int]) -> None:
        self._tokens, self._length = tokens, len(tokens)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            if step == 1:
                return tuple(self._tokens[start:stop])
            return tuple(self._tokens[i] for i in range(start, stop, step))
        position = index + self._length if index < 0 else index
        if not 0 <= position < self._length:
            raise IndexError(f"token {index} of a text of {self._length}")
        return self._tokens[position]

    def __iter__(self) -> Iterator[int]:
        return islice(self._tokens, self._length)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"TextView({[*self]})"
