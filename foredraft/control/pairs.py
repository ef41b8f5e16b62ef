"""Expected acceptance of a draft model before this pair of models has run here."""

from __future__ import annotations

from dataclasses import replace

from foredraft.core.traits import DrafterTraits

_ACCEPTANCE = ((0.1, (0.62, 0.57)), (0.25, (0.7, 0.65)), (0.5, (0.75, 0.71)), (1.0, (0.8, 0.77)))
"""By the draft model's bytes over the target's, up to so much: the chance that the target takes a
token behind accepted ones, at temperatures 0 and 1. Of models of one family on chats; on code it is
higher."""
_USUAL_SHARE = 0.3


def expected_of_pair(
    drafter: DrafterTraits, size_share: float | None, by_token: bool
) -> DrafterTraits:
    """A drafter that has a draft model, with guesses by size where it says nothing.

    Args:
        size_share: bytes that a forward of the draft model reads, over the target's; None: not
            known.
        by_token: whether each token of a draft takes a forward of the draft model.
    """
    share = _USUAL_SHARE if size_share is None else size_share
    chances = next((each for most, each in _ACCEPTANCE if share <= most), _ACCEPTANCE[-1][1])
    round_share = share if by_token and drafter.round_share is None else drafter.round_share
    is_guess = drafter.promise is None or drafter.is_guess
    return replace(
        drafter,
        promise=drafter.promise or chances,
        round_share=round_share,
        is_guess=is_guess,
    )
