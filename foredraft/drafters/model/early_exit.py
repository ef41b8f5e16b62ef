"""Early exit: the target's own first layers, its final norm and its head draft a chain.

LayerSkip, M. Elhoushi et al., arXiv 2404.16710. They are a draft model that shares the target's
weights, with a cache of its own.
"""

from __future__ import annotations

from typing import Any

from foredraft.core.errors import ConfigError
from foredraft.drafters.base import Drafter
from foredraft.drafters.model.draft_model import chain_drafter
from foredraft.drafters.spec import DrafterContext, DrafterSpec
from foredraft.models.base import offered


def _exit_layer(given: Any, num_layers: int) -> int:
    """A checked number of layers; a quarter of them where None is given."""
    if given is None:
        return max(1, num_layers // 4)
    if type(given) is not int or not 1 <= given < num_layers:
        raise ConfigError(
            f"exit_layer is {given!r}; the target has {num_layers} layers, so it must be a "
            f"whole number from 1 to {num_layers - 1}"
        )
    return given


def _build(context: DrafterContext) -> Drafter:
    target = offered(context.target.capabilities.first_layers)
    exit_layer = _exit_layer(context.options.get("exit_layer"), target.num_layers)
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
