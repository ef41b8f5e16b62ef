"""A cascade: a cheap drafter drafts for a draft model, which drafts for the target.

Spector and Re, arXiv 2308.04623; Chen et al., arXiv 2312.11462. The draft is the one that the draft
model would write alone, in fewer forwards of it: see `foredraft.drafters.model.staged`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from foredraft.core.errors import ConfigError
from foredraft.drafters import build_drafter, drafter_key
from foredraft.drafters.base import ContinuingDrafter, Drafter
from foredraft.drafters.model.draft_model import chain_drafter, draft_model_of
from foredraft.drafters.spec import DrafterContext, DrafterSpec


def _build(context: DrafterContext) -> Drafter:
    name = drafter_key(str(context.options.get("guesser", "ngram")))
    context = replace(context, options={})
    guesser = build_drafter(name, context)
    if not guesser.traits.continues or guesser.taps or guesser.layers:
        raise ConfigError(
            f"guesser is {name!r}, which cannot go on from a draft; choose one that copies text, "
            "such as ngram or suffix"
        )
    return chain_drafter(context, draft_model_of(context), cast(ContinuingDrafter, guesser))


DRAFTER = DrafterSpec(
    build=_build,
    summary="a cheap drafter drafts for a draft model, which drafts for the target",
    options={"guesser": "drafter that drafts for the draft model (ngram)"},
    num_draft_tokens=8,
    draft_model="required",
)
