"""The drafters that "auto" means: one that is chosen for the target, and those beside it."""

from __future__ import annotations

from collections.abc import Callable

from foredraft.core.cost import Prices, chain_speedup
from foredraft.core.traits import DrafterTraits
from foredraft.drafters import drafter_spec

FOR_PREDICTIONS = "prediction"
"""Drafts for requests that bring a prediction, where the drafter in use does not read it."""
BESIDE = ("self_draft", "suffix")
"""Loaded beside the chosen one, where they can draft and pay: they join any text at any place."""
OWN = "mtp"
"""Drafts with layers that a model brings, also on a CPU: they were trained with it."""
_CHOSEN = ("blend", "table", "suffix")
_LEAST_SPEEDUP = 1.05
"""That a drafter which takes a forward a token has to promise to be loaded unasked."""


def chosen_drafter(
    has_draft_model: bool, has_encoder: bool, may_be_head: bool, comes_with: Callable[[str], bool]
) -> str:
    """The drafter that "auto" chooses for a target.

    On a CPU it is never a head unless one is asked for: where copies in few bits do not pay, a
    forward is cheap, and a run of a head takes a quarter of it.

    Args:
        has_encoder: whether the target is an encoder-decoder: many of its texts repeat the source.
        may_be_head: whether a head may draft.
        comes_with: whether a trained folder of a kind comes with the package for the target; of
            `OWN` whether the model brings layers.
    """
    if has_draft_model:
        return "draft_model"
    if has_encoder:
        return FOR_PREDICTIONS  # of the source
    if comes_with(OWN):
        return OWN
    names = _CHOSEN if may_be_head else _CHOSEN[1:]
    kinds = {name: drafter_spec(name).trained for name in names}
    return next(name for name, kind in kinds.items() if kind is None or comes_with(kind))


def pays_unasked(traits: DrafterTraits, prices: Prices) -> bool:
    """Whether a drafter's promise is worth loading it beside the chosen one.

    Args:
        prices: of the target's forwards.
    """
    if traits.round_share is None or traits.promise is None:  # it takes no forward a token
        return True
    expected = chain_speedup(sum(traits.promise) / 2, traits.round_share, prices)
    return expected >= _LEAST_SPEEDUP
