"""The head that comes with the package is found by its target, and taken where nothing is asked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foredraft.drafters.registry import head_class
from foredraft.drafters.trained import (
    SELF_TEST,
    SHIPPED,
    identify,
    read_head,
    read_info,
    shipped_head,
    shipped_head_of_files,
)
from foredraft.load import plan_model, resolve_drafter
from foredraft.models.files.safety import Checkpoint
from foredraft.models.files.store import resolve_model
from foredraft.models.native.target import NativeTarget
from foredraft.models.table import TableModel
from foredraft.options import DEFAULT_MODEL, LoadOptions
from foredraft.train.heads.saving import check_self_test
from tests.drafters.heads import tiny_target


@pytest.mark.real_model
def test_the_built_in_model_has_one() -> None:
    target = NativeTarget.load(resolve_model(DEFAULT_MODEL))
    found = shipped_head("hidden_head", target)
    assert found is not None
    assert read_info(found).target.fingerprint == identify(target).fingerprint
    assert resolve_drafter(LoadOptions(), False, target) == "table"
    asked = LoadOptions(drafter_options={"max_depth": 3})
    assert resolve_drafter(asked, False, target) == "blend"


@pytest.mark.real_model
def test_the_files_of_a_target_tell_as_much() -> None:
    plan = plan_model("model", Checkpoint(resolve_model(DEFAULT_MODEL)), LoadOptions(), "cpu")
    assert plan.checkpoint is not None
    found = shipped_head_of_files("hidden_head", plan.checkpoint)
    assert found == shipped_head("hidden_head", NativeTarget.load(resolve_model(DEFAULT_MODEL)))
    assert resolve_drafter(LoadOptions(), False, plan) == "table"
    assert resolve_drafter(LoadOptions(), False, replace(plan, device="cuda")) == "blend"
    assert resolve_drafter(LoadOptions(), False, replace(plan, backend="hf")) == "suffix"


def test_other_targets_have_none() -> None:
    for target in (tiny_target(), TableModel.random(6, seed=0)):
        assert shipped_head("hidden_head", target) is None
        assert resolve_drafter(LoadOptions(), False, target) == "suffix"


def test_they_compute_what_they_did_when_they_were_saved() -> None:
    infos = {path.parent: read_info(path.parent) for path in SHIPPED.glob("*/*/head.json")}
    heads = {head: info for head, info in infos.items() if info.kind != "table"}
    assert heads
    for head, info in heads.items():
        check_self_test(head / SELF_TEST, read_head(head, head_class(info.kind), info))


def test_together_they_are_small() -> None:
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*") if path.is_file()) < 40e6
