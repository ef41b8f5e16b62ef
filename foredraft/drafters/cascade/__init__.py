"""Drafters in stages, the cheap ones first.

Vertical: a draft model drafts, and cheaper drafters draft for it; it reads several of their tokens
in one forward and keeps what it would have said itself (staged speculative decoding, arXiv
2308.04623; the vertical cascade of arXiv 2312.11462). The draft is the draft model's own, from
fewer forwards. Horizontal: a step belongs to the first stage that offers something, and a stage
with a limit hands over to those after it (the horizontal cascade of arXiv 2312.11462).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from foredraft.core.errors import ConfigError, unknown
from foredraft.drafters import build_drafter, drafter_spec
from foredraft.drafters.base import Drafter, DrafterContext, DrafterSpec
from foredraft.drafters.cascade.horizontal import HorizontalCascade
from foredraft.drafters.cascade.stages import Stage
from foredraft.drafters.cascade.vertical import VerticalCascade

_MODES = ("vertical", "horizontal")


def _parse_stages(text: Any) -> list[tuple[str, int | None]]:
    """Names and limits from text such as ``"draft_model:2,ngram"``."""
    found: list[tuple[str, int | None]] = []
    for part in str(text).replace(" ", "").split(","):
        name, colon, limit = part.partition(":")
        name = name.replace("-", "_")
        drafter_spec(name)  # says which name is nearest when it is unknown
        if name == "cascade" or name in (known for known, _ in found):
            raise ConfigError(f"stages is {text!r}; {name!r} cannot be a stage (again)")
        if colon and (not limit.isdecimal() or int(limit) < 1):
            raise ConfigError(f"stages is {text!r}; the limit in {part!r} must be 1 or more")
        found.append((name, int(limit) if colon else None))
    if len(found) < 2:
        raise ConfigError(f"stages is {text!r}; a cascade has two or more, such as ngram,suffix")
    return found


def _build(context: DrafterContext) -> Drafter:
    has_model = context.draft_model is not None
    default = "ngram,draft_model" if has_model else "suffix,token_recycling"
    parts = _parse_stages(context.options.get("stages", default))
    last_is_model = parts[-1][0] == "draft_model"
    mode = str(context.options.get("mode", _MODES[not last_is_model]))
    if mode not in _MODES:
        raise unknown("mode of a cascade", mode, _MODES)
    nested = replace(context, options={})
    stages = [Stage(name, build_drafter(name, nested), limit) for name, limit in parts]
    if has_model and "draft_model" not in (name for name, _ in parts):
        raise ConfigError("a draft model was given, and 'draft_model' is not among the stages")
    if mode == "horizontal":
        return HorizontalCascade(stages)
    if not last_is_model or parts[-1][1] is not None:
        raise ConfigError(
            "the last stage of a vertical cascade is 'draft_model' without a limit (the number of "
            f"draft tokens is its limit), not {parts[-1][0]!r}; or use mode 'horizontal'"
        )
    assert context.draft_model is not None  # the stage was built with it
    return VerticalCascade(stages[:-1], stages[-1], context.draft_model)


DRAFTER = DrafterSpec(
    build=_build,
    summary="cheap drafters for a draft model, or drafters that take turns",
    options={
        "stages": "drafters, cheapest first; NAME:N hands over after N tokens",
        "mode": "vertical: they draft for the last one; horizontal: the first that has something",
    },
    num_draft_tokens=8,
    draft_model="optional",
)
