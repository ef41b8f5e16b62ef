"""Which drafters are loaded, and what controls them: a part of the composition root."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from foredraft.control.adaptive import AdaptiveBudget, Experience
from foredraft.control.base import Controller
from foredraft.control.fixed import FixedBudget
from foredraft.control.planner import LoadedDrafter
from foredraft.core.cost import CostModel
from foredraft.drafters import build_drafter, drafter_spec
from foredraft.drafters.base import Drafter
from foredraft.drafters.common.ruled import RuledDrafter
from foredraft.drafters.common.switch import Loaded, SwitchDrafter
from foredraft.drafters.spec import DrafterContext
from foredraft.options import LoadOptions

_BESIDE = "suffix"
"""Loaded beside whatever "auto" means: it needs nothing, and takes next to no time."""
_OWN = "own"
_OWN_NODES = 16


def speculation(
    name: str,
    options: LoadOptions,
    context: DrafterContext,
    cost: CostModel | None,
    experience: Experience,
    own: Drafter | None = None,
) -> tuple[Drafter, Controller]:
    """A drafter and its controller: a fixed budget where one was asked for, else an adaptive one.

    Args:
        name: of the drafter that ``options`` mean.
        cost: of the target's forward.
        experience: of others on the same models.
        own: taken instead of the one that is named.
    """
    limit = context.target.max_context
    if options.num_draft_tokens is not None or (own is None and name == "none"):
        drafter = own or build_drafter(name, context)
        return RuledDrafter(drafter), FixedBudget(options.num_draft_tokens or 0, limit, cost)
    loaded = {_OWN: own} if own else _loaded(name, options, context)
    described = [
        LoadedDrafter(n, _most_nodes(n), _joins_late(n, d), getattr(d, "promise", None))
        for n, d in loaded.items()
    ]
    controller = AdaptiveBudget(described, limit, cost, experience)
    members = {d.name: Loaded(RuledDrafter(loaded[d.name]), d.joins_late) for d in described}
    return SwitchDrafter(members, controller.first), controller


def _loaded(name: str, options: LoadOptions, context: DrafterContext) -> dict[str, Drafter]:
    names: Sequence[str] = [name]
    if options.drafter == "auto" and name != _BESIDE:
        names = [name, _BESIDE]
    contexts = [context, replace(context, options={})]
    return {n: build_drafter(n, c) for n, c in zip(names, contexts, strict=False)}


def _most_nodes(name: str) -> int:
    return _OWN_NODES if name == _OWN else drafter_spec(name).num_draft_tokens


def _joins_late(name: str, drafter: Drafter) -> bool:
    """Whether it needs nothing of the forwards that it was not there for."""
    reads_itself = name != _OWN and drafter_spec(name).draft_model != "none"
    return not drafter.taps and not drafter.layers and not reads_itself
