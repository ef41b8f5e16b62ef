"""Which drafters are loaded, and what controls them: a part of the composition root."""

from __future__ import annotations

from dataclasses import replace

from foredraft.control.adaptive import AdaptiveBudget, Experience
from foredraft.control.base import OWN, DrafterTraits
from foredraft.control.fixed import FixedBudget
from foredraft.core.cost import CostModel
from foredraft.drafters import build_drafter, drafter_spec
from foredraft.drafters.base import Drafter
from foredraft.drafters.spec import DrafterContext
from foredraft.engine.guard import LoadedDrafter
from foredraft.engine.policy import Policy
from foredraft.options import LoadOptions

_BESIDE = "suffix"
"""Loaded beside whatever "auto" means: it needs nothing, and takes next to no time."""


def policy_for(
    name: str,
    options: LoadOptions,
    context: DrafterContext,
    cost: CostModel | None,
    experience: Experience,
    own: Drafter | None = None,
) -> Policy:
    """The drafters that options name, and their controller.

    It allows a fixed number of nodes where one was asked for, else what pays.

    Args:
        name: of the drafter that ``options`` mean.
        context: what drafters are built from.
        cost: of the target's forward.
        experience: of others on the same models.
        own: taken instead of the drafter that is named.
    """
    fixed = options.num_draft_tokens
    if own is None and name == "none":
        return Policy(FixedBudget(0, cost, drafter=None))
    if own is not None:
        traits = DrafterTraits(OWN, joins_late=not own.taps and not own.layers)
        loaded = [LoadedDrafter(own, context.target, traits)]
    elif fixed is None and options.drafter == "auto" and name != _BESIDE:
        loaded = [_loaded(name, context), _loaded(_BESIDE, replace(context, options={}))]
    else:
        loaded = [_loaded(name, context)]
    if fixed is not None:
        return Policy(FixedBudget(fixed, cost, loaded[0].name), loaded)
    return Policy(AdaptiveBudget([each.traits for each in loaded], cost, experience), loaded)


def _loaded(name: str, context: DrafterContext) -> LoadedDrafter:
    drafter, spec = build_drafter(name, context), drafter_spec(name)
    # One that needs something of forwards that it was not there for cannot join a text late.
    joins_late = not drafter.taps and not drafter.layers and spec.draft_model == "none"
    promise = getattr(drafter, "promise", None)
    traits = DrafterTraits(name, spec.num_draft_tokens, joins_late, promise)
    return LoadedDrafter(drafter, context.target, traits)
