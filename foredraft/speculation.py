"""Which drafters are loaded, and what controls them: a part of the composition root."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

from foredraft.auto import BESIDE, pays_unasked
from foredraft.cache.base import NO_MEMORY
from foredraft.control.adaptive import AdaptiveBudget
from foredraft.control.experience import Experience
from foredraft.control.fixed import FixedBudget
from foredraft.control.pairs import expected_of_pair
from foredraft.core.cost import USUAL_PRICES, CostModel, Prices
from foredraft.core.errors import ModelLoadError
from foredraft.drafters import build_drafter, check_parts, drafter_spec
from foredraft.drafters.base import Drafter
from foredraft.drafters.spec import DrafterContext
from foredraft.engine.guard import LoadedDrafter
from foredraft.engine.policy import Policy
from foredraft.options import LoadOptions

_log = logging.getLogger("foredraft")
USUAL_CONTEXT, _MOST_NODES = 256, 16
"""Tokens before a step, and nodes of it, where what drafts cost is asked beforehand."""


def build_policy(
    name: str,
    options: LoadOptions,
    context: DrafterContext,
    cost: CostModel | None,
    experience: Experience,
    own: Drafter | None = None,
) -> Policy:
    """The drafters that options name, and their controller.

    It allows a fixed number of nodes where one was asked for or nothing was measured, else what
    pays.

    Args:
        name: of the drafter that ``options`` mean.
        context: what drafters are built from.
        cost: of the target's forward; None: it was not measured.
        experience: of others on the same models.
        own: taken instead of the drafter that is named.
    """
    fixed = options.num_draft_tokens
    if own is None and name == "none":
        return Policy(FixedBudget(0, cost, drafter=None))
    if own is not None:
        check_parts(own, "the drafter given is")
        joins_late = not own.taps and not own.layers
        loaded = [LoadedDrafter(own, context.target, joins_late=joins_late)]
    elif options.drafter == "auto" and fixed != 0:
        loaded = _loaded_for_auto(
            name, context, cost.prices([USUAL_CONTEXT], _MOST_NODES) if cost else USUAL_PRICES
        )
    else:
        loaded = [_loaded(name, context)]
    if fixed is None and cost is not None:
        return Policy(AdaptiveBudget([each.traits for each in loaded], cost, experience), loaded)
    # One drafts for all requests that name none: the first that is known to pay.
    loaded.sort(key=lambda each: each.traits.promise is None)
    first = loaded[0].traits
    num_draft_tokens = first.most_nodes if fixed is None else fixed
    return Policy(FixedBudget(num_draft_tokens, cost, first.name), loaded)


def _loaded_for_auto(name: str, context: DrafterContext, prices: Prices) -> list[LoadedDrafter]:
    """The drafters of "auto": the one of this name, and those that join any text anywhere."""
    beside = _beside(name, replace(context, options={}))
    paying = [each for each in beside if pays_unasked(each.traits, prices)]
    return [_loaded(name, context), *paying]


def _beside(name: str, context: DrafterContext) -> Iterator[LoadedDrafter]:
    """Drafters that can be loaded beside the one of this name, if there is memory for them."""
    copies = drafter_spec(name).copies
    for other in BESIDE:
        spec = drafter_spec(other)
        if other == name or (copies and spec.copies) or spec.missing_capabilities(context.target):
            continue
        try:
            yield _loaded(other, context)
        except (*NO_MEMORY, ModelLoadError) as error:
            _log.info("no %s: %s", other, error)


def _loaded(name: str, context: DrafterContext) -> LoadedDrafter:
    drafter, spec = build_drafter(name, context), drafter_spec(name)
    # One that needs something of forwards that it was not there for cannot join a text late.
    knows_text = spec.draft_model == "none" or drafter.traits.reads
    joins_late = knows_text and not drafter.taps and not drafter.layers
    loaded = LoadedDrafter(drafter, context.target, name, spec.num_draft_tokens, joins_late)
    if context.draft_model is not None and spec.draft_model != "none":
        loaded.traits = expected_of_pair(loaded.traits, context.size_share)
    return loaded
