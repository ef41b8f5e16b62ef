"""Drafters: each guesses the tokens that come next.

A drafter is one file, whose name is the drafter's name: in ``text`` where it copies from texts, in
``model`` where it runs a model, in ``heads`` where it was trained for its target. `base` is the
interface of drafters, `spec` the registry's entry of one, `registry` finds it, other packages'
drafters included. See docs/extend/add-a-drafter.md.
"""

from foredraft.drafters.registry import build_drafter as build_drafter
from foredraft.drafters.registry import check_draft_model as check_draft_model
from foredraft.drafters.registry import check_options as check_options
from foredraft.drafters.registry import check_parts as check_parts
from foredraft.drafters.registry import drafter_key as drafter_key
from foredraft.drafters.registry import drafter_names as drafter_names
from foredraft.drafters.registry import drafter_spec as drafter_spec
from foredraft.drafters.registry import ready_drafters as ready_drafters
from foredraft.drafters.registry import usable_specs as usable_specs
