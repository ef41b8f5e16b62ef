"""Models loaded from a name, and their logits in one forward or in many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.core.tree import TokenTree
from foredraft.load import ModelPlan, load_target, plan_models
from foredraft.models.base import ScoreRow
from foredraft.models.native.target import NativeTarget
from foredraft.options import LoadOptions


def plan_of(model: Path, **options: Any) -> ModelPlan:
    return plan_models(LoadOptions(model=str(model), drafter="none", **options))[0]


def target_of(plan: ModelPlan, threads: int | None = None) -> NativeTarget:
    target = load_target(plan, threads)
    assert isinstance(target, NativeTarget)
    return target


def logits_at_once(target: NativeTarget, tokens: list[int]) -> Tensor:
    """Of each token of a text, in one forward."""
    slot = target.cache.allocate()
    [scores] = target.score([ScoreRow(slot, tokens[:1], TokenTree.chain(tokens[1:]))])
    return scores.logits_NV


def logits_one_by_one(target: NativeTarget, tokens: list[int]) -> Tensor:
    """Of each token of a text, in a forward each."""
    slot, alone = target.cache.allocate(), list[Tensor]()
    for token in tokens:
        [scores] = target.score([ScoreRow(slot, [token])])
        target.cache.keep(slot, 1, [])
        alone.append(scores.logits_NV)
    return torch.cat(alone)
