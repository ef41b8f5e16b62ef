"""The target's own first layers draft: what they draft, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.drafters import build_drafter
from foredraft.drafters.base import Drafter, DraftRow
from foredraft.drafters.model.draft_model import DraftModelDrafter
from foredraft.drafters.spec import DrafterContext
from foredraft.models.native.target import NativeTarget
from tests.conformance.harness import checkpoint
from tests.models.checkpoints import some_layers


@pytest.fixture
def target() -> NativeTarget:
    return NativeTarget.load(checkpoint(0.0))


def early_exit(target: NativeTarget, **options: Any) -> Drafter:
    return build_drafter("early_exit", DrafterContext(target, options=options, is_fixed=True))


@pytest.mark.parametrize("exit_layer", [1, 2])
def test_it_drafts_what_its_layers_alone_would_say(target: NativeTarget, exit_layer: int) -> None:
    row = DraftRow.of(0, (3, 1, 4, 1, 5), SamplingParams(), 6, seed=1, slot=0)
    drafts = []
    for drafter in (
        DraftModelDrafter(some_layers(target, range(exit_layer))),
        early_exit(target, exit_layer=exit_layer, guesses=False),
    ):
        drafter.begin(DraftRow.of(0, row.tokens))
        drafts += drafter.propose([row])
    assert drafts[0].tree == drafts[1].tree
    assert len(drafts[0].tree) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exit_layer": 0}, "between 1 and 2"),
        ({"exit_layer": 3}, "between 1 and 2"),
        ({"exit_layer": True}, "whole number"),
        ({"exit_layers": 1}, "did you mean 'exit_layer'"),
    ],
)
def test_options_that_cannot_be_used_are_refused(
    target: NativeTarget, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        early_exit(target, **options)
