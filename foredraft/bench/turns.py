"""Figures that are taken in turns, so that a slow moment of the machine hits all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

_S = TypeVar("_S")


class PeerFailed(Exception):  # noqa: N818 - a result, not a mistake
    """A peer gave no answer. The message says why, in a few words for a table."""


@dataclass(kw_only=True)
class Figure(Generic[_S]):
    """What was measured of one contender at one point.

    Attributes:
        failure: why there is no figure; None: there is.
    """

    samples: list[_S] = field(default_factory=list)
    failure: str | None = None


_F = TypeVar("_F", bound=Figure)  # type: ignore[type-arg]


def take_turns(
    figures: Sequence[_F],
    rounds: int,
    sample: Callable[[_F], object],
    advance: Callable[[], None],
) -> None:
    """Sample each figure once a round. The first round, which warms up, is not kept.

    A figure whose contender fails is sampled no more.
    """
    for number in range(rounds + 1):
        for figure in figures:
            if figure.failure is not None:
                continue
            try:
                found = sample(figure)
            except PeerFailed as reason:
                figure.failure = str(reason)
                continue
            if number:
                figure.samples.append(found)
        advance()
