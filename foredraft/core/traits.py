"""What is known of a drafter before it has drafted anything."""

from __future__ import annotations

from dataclasses import dataclass

OWN = "own"
"""What a drafter is called that has no name in the registry."""


@dataclass(frozen=True)
class DrafterTraits:
    """What a drafter says of itself. Whoever loads it adds the first three.

    Attributes:
        name: what controllers and records call it.
        most_nodes: that it is asked for at once, where a controller chooses.
        joins_late: whether it can begin in the middle of a text, which it then takes for a prompt.
        promise: the chances that its first token is right, at temperatures 0 and 1, as measured
            when it was made: what a controller begins with; None: nothing is known.
        round_share: time of one of its forwards, in plain steps of the target, where each token of
            a draft takes a forward; None: its time does not grow with what it drafts.
        skips_gaps: whether it goes on where its cache layers lack entries of a text's beginning
            that the target has (see `CacheLayers.next_start`). Else it does not follow such a text.
        spare: nodes that it may add to those that it is asked for: they take it no time, and it
            weighs them by their price.
        learns: whether it makes anything of what it observes; else it is not told.
        reads: whether it reads texts with a model of its own, piece by piece, before it drafts for
            them: see `foredraft.drafters.base.ReadingDrafter`. What it has read is lost when it
            leaves a text.
        is_guess: whether ``promise`` and ``round_share`` are guesses, such as by a model's size.
        continues: whether it can go on from a draft as well as from the text: see
            `foredraft.drafters.base.ContinuingDrafter`.
    """

    name: str = OWN
    most_nodes: int = 16
    joins_late: bool = False
    promise: tuple[float, float] | None = None
    round_share: float | None = None
    skips_gaps: bool = False
    spare: int = 0
    learns: bool = True
    reads: bool = False
    continues: bool = False
    is_guess: bool = False
