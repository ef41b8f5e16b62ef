"""Drafters: each guesses the tokens that come next.

A drafter is one file, whose name is the drafter's name: in ``text`` where it copies from texts, in
``model`` where it runs a model, in ``heads`` where it was trained for its target. `base` is the
interface of drafters, `spec` the registry's entry of one, `registry` finds it, other packages'
drafters included. See docs/extend/add-a-drafter.md.
"""

from foredraft.drafters.registry import (
    build_drafter,
    check_draft_model,
    check_options,
    check_parts,
    drafter_key,
    drafter_names,
    drafter_spec,
    ready_drafters,
    usable_specs,
)

__all__ = [
    "build_drafter",
    "check_draft_model",
    "check_options",
    "check_parts",
    "drafter_key",
    "drafter_names",
    "drafter_spec",
    "ready_drafters",
    "usable_specs",
]
