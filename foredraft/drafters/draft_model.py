"""Two-model speculation: a smaller model of the same vocabulary drafts a chain.

Leviathan et al. (arXiv 2211.17192), Chen et al. (arXiv 2302.01318). With coupling "seeded" it
proposes its most likely tokens (chosen); with "drawn" it samples with the request's own
parameters and hands the distribution along.
"""

from __future__ import annotations

from foredraft.core.errors import ConfigError, VocabularyMismatchError
from foredraft.drafters.base import DrafterContext, DrafterSpec
from foredraft.drafters.common.chain import ChainDrafter, ModelPredictor
from foredraft.models.base import Target


class DraftModelDrafter(ChainDrafter):
    """See the module docstring. All rows that still draft share each forward of the draft model.

    Args:
        model: the draft model, with a cache of its own.
    """

    def __init__(self, model: Target) -> None:
        super().__init__(ModelPredictor(model))


def _build(context: DrafterContext) -> DraftModelDrafter:
    model = context.draft_model
    assert model is not None  # the registry has checked needs_draft_model
    if model.vocab_size != context.target.vocab_size:
        raise VocabularyMismatchError(
            f"the draft model has {model.vocab_size} tokens and the target "
            f"{context.target.vocab_size}: they must share one vocabulary; choose a draft model "
            "of the target's family"
        )
    if model is context.target:
        raise ConfigError("the draft model is the target itself: load it a second time")
    return DraftModelDrafter(model)


DRAFTER = DrafterSpec(
    build=_build,
    summary="a smaller model of the same vocabulary drafts a chain",
    num_draft_tokens=4,
    needs_draft_model=True,
)
