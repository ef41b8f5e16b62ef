"""The target's own layers draft: what they draft, what it costs, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from foredraft.control.fixed import FixedBudget
from foredraft.core.errors import CapabilityError, ConfigError
from foredraft.core.params import SamplingParams
from foredraft.drafters import build_drafter
from foredraft.drafters.base import Drafter, DraftRow
from foredraft.drafters.model.draft_model import DraftModelDrafter
from foredraft.drafters.spec import DrafterContext
from foredraft.models.base import ScoreRow
from foredraft.models.native.model import EagerDecoder
from foredraft.models.native.target import NativeTarget
from foredraft.models.table import TableModel
from tests.conformance.harness import checkpoint, plain
from tests.engine.helpers import drain, engine_of, finish
from tests.models.checkpoints import some_layers
from tests.models.test_shallow import Spy, calls

PROMPTS = ([3, 1, 4, 1, 5], [2], [7, 8, 9, 7, 8, 9, 7])


@pytest.fixture
def target() -> NativeTarget:
    return NativeTarget.load(
        checkpoint(0.0), new_decoder=lambda config, weights: Spy(EagerDecoder(config, weights))
    )


def early_exit(target: NativeTarget, **options: Any) -> Drafter:
    return build_drafter("early_exit", DrafterContext(target, options=options))


def row_of(target: NativeTarget, tokens: list[int], budget: int) -> DraftRow:
    """A row whose last token is pending."""
    slot = target.cache.allocate()
    target.score([ScoreRow(slot, tokens[:-1])])
    target.cache.keep(slot, len(tokens) - 1, ())
    return DraftRow.of(0, tuple(tokens), SamplingParams(), budget, seed=1, slot=slot)


@pytest.mark.parametrize("exit_layer", [1, 2])
def test_it_drafts_what_its_layers_alone_would_say(target: NativeTarget, exit_layer: int) -> None:
    row = row_of(target, [3, 1, 4, 1, 5], 6)
    alone = DraftModelDrafter(some_layers(target, range(exit_layer)))
    alone.begin(DraftRow.of(0, row.tokens))
    (expected,) = alone.propose([row])
    (actual,) = early_exit(target, exit_layer=exit_layer).propose([row])
    assert actual.tree == expected.tree
    assert len(actual.tree) == 6


def test_verification_goes_on_where_the_draft_stopped(target: NativeTarget) -> None:
    """Per step: a token for each draft forward, the last draft token, then the other layers."""
    drafter = early_exit(target, exit_layer=2)
    engine = engine_of(target, drafter, FixedBudget(3))
    engine.submit([3, 1, 4, 1, 5], SamplingParams(max_tokens=32, ignore_eos=True))
    engine.step()
    calls(target)
    engine.step()
    assert calls(target) == [(range(2), 1)] * 4 + [(range(2, 3), 4)]


def test_what_was_computed_travels_with_the_proposal(target: NativeTarget) -> None:
    """And stays nowhere else: the next draft starts anew."""
    drafter = early_exit(target, exit_layer=2)
    row = row_of(target, [3, 1, 4, 1, 5], 3)
    for _ in range(2):
        calls(target)
        (proposal,) = drafter.propose([row])
        assert calls(target) == [(range(2), 1)] * 3
    tree, computed = proposal.tree, proposal.computed
    (scores,) = target.score([ScoreRow(row.slot, row.tokens[-1:], tree, computed=computed)])
    assert calls(target) == [(range(2), 1), (range(2, 3), 4)]
    (expected,) = target.score([ScoreRow(row.slot, row.tokens[-1:], tree)])
    assert (scores.logits_NV - expected.logits_NV).abs().max() < 1e-4


def test_the_prompt_passes_the_first_layers_once(target: NativeTarget) -> None:
    engine = engine_of(target, early_exit(target, exit_layer=2), FixedBudget(2))
    engine.submit([3, 1, 4, 1, 5], SamplingParams(max_tokens=32))
    engine.step()
    assert calls(target) == [(range(2), 5), (range(2), 1), (range(2), 1), (range(2, 3), 7)]


def test_a_long_prompt_is_read_before_anything_is_drafted(target: NativeTarget) -> None:
    slot = target.cache.allocate()
    row = DraftRow.of(0, (5,) * 300, SamplingParams(), 4, slot=slot)
    (proposal,) = early_exit(target).propose([row])
    assert len(proposal.tree) == 0
    assert calls(target) == []


def test_confidence_ends_the_draft(target: NativeTarget) -> None:
    tokens = [3, 1, 4, 1, 5]
    lengths = [
        len(early_exit(target, min_confidence=at).propose([row_of(target, tokens, 8)])[0].tree)
        for at in (0.0, 0.05, 1.0)
    ]
    assert lengths == sorted(lengths, reverse=True)
    assert (lengths[0], lengths[-1]) == (8, 0)


def test_a_step_that_fails_leaves_nothing_for_the_next_request(target: NativeTarget) -> None:
    """The same slot and prompt, but the draft of the failed step must not count."""
    params = SamplingParams(max_tokens=8)
    (expected,) = plain(target, PROMPTS[:1], params)
    engine = engine_of(target, early_exit(target, exit_layer=2), FixedBudget(3))
    engine.submit(PROMPTS[0], params)
    engine.step()
    spy = target.decoder
    assert isinstance(spy, Spy)
    spy.fails = True
    (failed,) = engine.step()
    spy.fails = False
    assert failed.result is not None
    assert failed.result.finish_reason == "error"
    request_id = engine.submit(PROMPTS[0], params)
    assert finish(engine)[request_id].token_ids == expected


def test_a_cancelled_request_leaves_nothing_for_its_slot(target: NativeTarget) -> None:
    params = SamplingParams(max_tokens=8)
    expected = plain(target, PROMPTS, params)
    engine = engine_of(target, early_exit(target, exit_layer=2), FixedBudget(3))
    first, second = engine.submit(PROMPTS[0], params), engine.submit(PROMPTS[1], params)
    engine.step()
    engine.cancel(first)
    again = engine.submit(PROMPTS[2], params)
    results = drain(engine)
    assert results[second].token_ids == expected[1]
    assert results[again].token_ids == expected[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exit_layer": 0}, "from 1 to 2"),
        ({"exit_layer": 3}, "from 1 to 2"),
        ({"exit_layer": True}, "from 1 to 2"),
        ({"min_confidence": 1.5}, "between 0 and 1"),
        ({"min_confidence": "high"}, "must be a number"),
        ({"exit_layers": 1}, "did you mean 'exit_layer'"),
    ],
)
def test_options_that_cannot_be_used_are_refused(
    target: NativeTarget, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        early_exit(target, **options)


def test_a_target_without_layers_is_refused() -> None:
    with pytest.raises(CapabilityError, match="first_layers"):
        build_drafter("early_exit", DrafterContext(TableModel.random(4, seed=1)))
