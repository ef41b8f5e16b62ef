"""Early exit: the target's own first layers, its final norm and its head draft a chain.

LayerSkip, M. Elhoushi et al., arXiv 2404.16710. They are a draft model that shares the target's
weights, with a cache of its own.
"""

from __future__ import annotations

from foredraft.core.checks import checked_int
from foredraft.drafters.base import Drafter
from foredraft.drafters.model.draft_model import chain_drafter
from foredraft.drafters.spec import DrafterContext, DrafterSpec
from foredraft.models.base import offered


def _build(context: DrafterContext) -> Drafter:
    target = offered(context.target.capabilities.first_layers)
    given = context.options.get("exit_layer", max(1, target.num_layers // 4))
    exit_layer = checked_int("exit_layer", given, 1, target.num_layers - 1)
    return chain_drafter(context, target.first_layers(exit_layer))


DRAFTER = DrafterSpec(
    build=_build,
    summary="the target's own first layers draft a chain",
    options={
        "exit_layer": "how many of the first layers draft (a quarter of them)",
        "guesses": "copies of earlier text guess for the first layers (true)",
        "table": "directory of a table that guesses too (the one that comes with the model)",
    },
    num_draft_tokens=4,
    needs=("first_layers",),
)
