"""Tuning early exit: steps replayed from agreements, and exits judged on a model."""

from __future__ import annotations

import pytest

from foredraft.bench.exits import (
    Passage,
    committed_per_step,
    describe,
    first_layer_exits,
    layered,
    likeliest,
    measure_exits,
    split_passages,
)
from foredraft.core.errors import CapabilityError
from foredraft.core.params import SamplingParams
from foredraft.drafters import build_drafter
from foredraft.drafters.spec import DrafterContext
from foredraft.models.base import ScoreRow
from foredraft.models.native.target import NativeTarget
from foredraft.models.table import TableModel
from tests.conformance.harness import checkpoint, is_empty, plain, run

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def target() -> NativeTarget:
    return NativeTarget.load(checkpoint(0.0))


@pytest.fixture(scope="module")
def passage(target: NativeTarget) -> Passage:
    (reply,) = plain(target, [PROMPT], SamplingParams(max_tokens=90, ignore_eos=True))
    return Passage([*PROMPT, *reply], len(PROMPT))


def quiet(text: str) -> None:
    pass


def test_the_target_agrees_with_its_own_greedy_reply(
    target: NativeTarget, passage: Passage
) -> None:
    """Across the pieces that a passage is read in."""
    assert likeliest(target, passage) == list(passage.tokens[passage.first :])
    assert is_empty(target.cache)


@pytest.mark.parametrize(
    ("matches", "num_draft_tokens", "expected"),
    [
        ([[True] * 6], 2, 3.0),
        ([[False] * 6], 4, 1.0),
        ([[True, False, True, False]], 3, 2.0),
        ([[True, True, True, False]], 1, 2.0),
        ([[True, True], [False]], 1, 1.5),
    ],
)
def test_steps_are_replayed(
    matches: list[list[bool]], num_draft_tokens: int, expected: float
) -> None:
    assert committed_per_step(matches, num_draft_tokens) == expected


@pytest.mark.parametrize("num_draft_tokens", [1, 3])
@pytest.mark.parametrize("options", [{"exit_layer": 1}, {"exit_layer": 2}])
def test_the_replay_is_what_decoding_does(
    target: NativeTarget, passage: Passage, options: dict[str, object], num_draft_tokens: int
) -> None:
    figure = measure_exits(target, [passage], [options], (num_draft_tokens,), 1, quiet)[0]
    drafter = build_drafter("early_exit", DrafterContext(target, options=options))
    params = SamplingParams(max_tokens=passage.num_predicted, ignore_eos=True)
    (result,) = run(target, drafter, [PROMPT], params, num_draft_tokens)
    expected = result.stats.committed_per_step
    # The last step of a run stops at max_tokens, that of a replay does not.
    assert abs(figure.committed_per_step - expected) <= num_draft_tokens / result.stats.steps


def test_figures_are_of_the_best_number_of_draft_tokens(
    target: NativeTarget, passage: Passage
) -> None:
    figures = measure_exits(target, [passage], first_layer_exits(3), (1, 2, 4), 2, quiet)
    assert [dict(f.options) for f in figures] == [{"exit_layer": 1}, {"exit_layer": 2}]
    for figure in figures:
        assert 0.0 <= figure.agreement <= 1.0
        assert figure.num_draft_tokens in (1, 2, 4)
        assert 1.0 <= figure.committed_per_step <= figure.num_draft_tokens + 1
        assert min(figure.draft_ms, figure.verify_ms, figure.speedup) > 0.0
    assert is_empty(target.cache)


def test_exits_are_spread_over_the_layers() -> None:
    layers = [options["exit_layer"] for options in first_layer_exits(32)]
    assert layers == [3, 6, 9, 12, 15, 18, 21, 24]
    assert first_layer_exits(2) == [{"exit_layer": 1}]
    assert describe(first_layer_exits(2)[0]) == "first layer"


def test_long_texts_are_split() -> None:
    passages = [*split_passages(range(1040), 512)]
    assert [len(p.tokens) for p in passages] == [512, 512]
    assert {p.num_predicted for p in passages} == {504}


def test_a_target_without_layers_is_refused() -> None:
    with pytest.raises(CapabilityError, match="layer_views"):
        layered(TableModel.random(4, seed=1))


def test_reading_a_passage_frees_its_slot_on_failure(target: NativeTarget) -> None:
    with pytest.raises(IndexError):
        likeliest(target, Passage([1, 10**6, 2], 1))
    slot = target.cache.allocate()
    assert slot == 0
    target.score([ScoreRow(slot, [1])])
    target.cache.free(slot)
