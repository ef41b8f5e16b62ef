"""Expected acceptance of a draft model before this pair of models has run here."""

from __future__ import annotations

from dataclasses import replace

from foredraft.core.traits import DrafterTraits

_ACCEPTANCE = ((0.1, (0.62, 0.57)), (0.25, (0.7, 0.65)), (0.5, (0.75, 0.71)), (1.0, (0.8, 0.77)))
"""By the draft model's bytes over the target's, up to so much: the chance that the target takes a
token behind accepted ones, at temperatures 0 and 1. Of models of one family on chats; on code it is
higher."""
_USUAL_SHARE = 0.3


def expected_of_pair(drafter: DrafterTraits, size_share: float | None) -> DrafterTraits:
    """A drafter that has a draft model, with a promise by size where it makes none.

    Args:
        size_share: bytes that a forward of the draft model reads, over the target's; None: not
            known.
    """
    if drafter.promise is not None:
        return drafter
    share = _USUAL_SHARE if size_share is None else size_share
    chances = next((each for most, each in _ACCEPTANCE if share <= most), _ACCEPTANCE[-1][1])
    return replace(drafter, promise=chances, is_guess=True)
