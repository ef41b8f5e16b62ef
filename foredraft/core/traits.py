"""Properties of a drafter that are known before it has drafted anything."""

from __future__ import annotations

from dataclasses import dataclass

OWN = "own"
"""Name of a drafter that is not in the registry."""


@dataclass(frozen=True)
class DrafterTraits:
    """Declared properties of a drafter. The loader sets the first three.

    Attributes:
        name: its name in controllers and records.
        most_nodes: largest budget of one step if a controller chooses the budget.
        joins_late: whether it can take over a running request. It is then given the whole text so
            far as if it were the prompt.
        promise: acceptance probability of its first token at temperatures 0 and 1, measured when it
            was made. The controller takes it as its prior; None: nothing is known.
        round_share: time of one of its forwards, in plain steps of the target, where each token of
            a draft takes a forward; None: its time does not grow with what it drafts.
        skips_gaps: whether it goes on where its cache layers lack entries of a text's beginning
            that the target has (`StoredLayers.next_start`). Else it does not follow such a text.
        spare: how many extra nodes it may append beyond its budget. It is meant for guesses that
            cost no drafting time; the drafter adds one only if it pays at the row's price.
        learns: whether it uses `observe`. If False, `observe` is never called.
        reads: whether it reads texts with a model of its own, piece by piece, before it drafts for
            them: see `foredraft.drafters.base.ReadingDrafter`. Its state of a text is lost when it
            leaves the text.
        is_guess: whether ``promise`` is a guess, such as by a model's size.
        stops: whether it ends a draft early where it doubts that more of it would pay.
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
    stops: bool = False
