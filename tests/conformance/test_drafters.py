"""Every registered drafter, on every kind of model, keeps the promises of the drafter seam."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterable, Iterator

import pytest
from _pytest.mark import ParameterSet

from foredraft.control.fixed import FixedBudget
from foredraft.core.params import SamplingParams
from foredraft.drafters import drafter_names
from foredraft.drafters.base import BaseDrafter
from tests.conformance.harness import (
    KINDS,
    VARIANTS,
    WITH_HEADS,
    Kind,
    NeverRight,
    check_budget,
    check_forgets,
    check_rejections_leave_nothing,
    is_empty,
    plain,
    run,
    set_up,
    simplest_kind,
    spec_of,
)
from tests.engine.helpers import drain, engine_of

PROMPTS = ([3, 1, 4, 1, 5], [2], [0, 1, 2, 0, 1, 2, 0, 1], [5, 5, 3])
"""Ragged, some of them repetitive; ids fit every kind's vocabulary."""
MAX_TOKENS = 16
OFTEN = ("table", "native-fused-bf16")
"""Drafters that run by default over a whole grid: exact numbers, and the most used ones."""
UNTRAINED = {"toy_head", *WITH_HEADS}
"""Right by chance only: untrained heads. So are drafters that need one given."""


@functools.cache
def kind_of(name: str) -> Kind:
    return KINDS[name]()


@functools.cache
def plain_text(kind: str, params: SamplingParams) -> list[tuple[int, ...]]:
    return plain(kind_of(kind).new_target(), PROMPTS, params)


def is_slow(kind: str, temperature: float, coupling: str = "seeded") -> bool:
    """At temperature 0 drafts are chosen, just as they are at 1 when the coupling is "seeded".

    How drafts are chosen and drawn does not depend on the kind of model. The eager decoder differs
    from the fused one in its numbers alone: the plain run's text is what it is compared with.
    """
    is_other = temperature == 0.0 or coupling == "drawn"
    return temperature == 0.7 or kind == "native-eager" or (is_other and kind not in OFTEN)


def with_marks(kind: str, *case: object, slow: bool = False) -> ParameterSet:
    """A case of a test; a cache of int8 differs in nothing that a drafter sees."""
    marks = pytest.mark.slow if slow or kind == "native-fused-int8-cache" else ()
    return pytest.param(kind, *case, marks=marks)


KINDS_AND_SAMPLINGS = [
    with_marks(*case, slow=is_slow(*case) or case[1:] == (0.0, "drawn"))
    for case in itertools.product(KINDS, (0.0, 1.0), ("seeded", "drawn"))
]
KINDS_AND_COUPLINGS = [
    with_marks(kind, coupling, slow=is_slow(kind, 1.0, coupling))
    for kind, coupling in itertools.product(KINDS, ("seeded", "drawn"))
]
KINDS_AND_TEMPERATURES = [
    with_marks(*case, slow=is_slow(*case)) for case in itertools.product(KINDS, (0.0, 0.7, 1.0))
]
TEXTS = [
    with_marks(*case, slow=is_slow(*case) and case != ("native-eager", 1.0))
    for case in itertools.product(KINDS, (0.0, 0.7, 1.0))
]
REPEATS = [
    with_marks(*case, slow=is_slow(*case) or case[0] not in OFTEN)
    for case in itertools.product(KINDS, (0.0, 0.7, 1.0))
]


@pytest.fixture(params=[with_marks(kind) for kind in KINDS])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[*drafter_names(), *WITH_HEADS, *VARIANTS])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def no_faults(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The engine survives a faulty drafter; a conforming one is not faulty."""
    yield
    records = caplog.get_records("call")
    assert [r.getMessage() for r in records if r.levelno >= logging.WARNING] == []


def sampling(temperature: float, **options: object) -> SamplingParams:
    return SamplingParams.of(temperature=temperature, seed=17, max_tokens=MAX_TOKENS, **options)


def check_text(name: str, kind: str, temperature: float, lengths: Iterable[int]) -> None:
    params = sampling(temperature)
    expected = plain_text(kind, params)
    setup = set_up(name, kind_of(kind))
    for num_draft_tokens in lengths:
        if num_draft_tokens % 2:
            alone = run(setup.target, setup.drafter, PROMPTS[2:3], params, num_draft_tokens)
            assert alone[0].token_ids == expected[2]
        together = run(setup.target, setup.drafter, PROMPTS, params, num_draft_tokens, 3)
        assert [r.token_ids for r in together] == expected


@pytest.mark.parametrize(("kind", "temperature"), TEXTS)
def test_text_is_the_plain_runs(name: str, kind: str, temperature: float) -> None:
    """Token for token, whatever the number of draft tokens, alone and in a ragged batch."""
    lengths = {"table": range(9), "native-fused-bf16": (0, 1, 2, 8)}
    check_text(name, kind, temperature, lengths.get(kind, (2, 5)))


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_is_the_plain_runs_for_every_length(name: str, kind: str, temperature: float) -> None:
    check_text(name, kind, temperature, range(9))


def test_it_drafts(name: str) -> None:
    """A drafter that never drafts would pass everything else here."""
    if spec_of(name).num_draft_tokens == 0:
        pytest.skip("drafts nothing by its own account")
    setup = set_up(name, kind_of(simplest_kind(name)))
    results = run(setup.target, setup.drafter, PROMPTS, sampling(0.0), 4)
    assert sum(r.stats.drafted for r in results) > 0
    if name not in UNTRAINED and spec_of(name).trained is None:
        assert sum(r.stats.accepted for r in results) > 0


def test_what_it_says_of_itself_is_true(name: str) -> None:
    drafter = set_up(name, kind_of(simplest_kind(name))).drafter
    assert drafter.traits.learns == (type(drafter).observe is not BaseDrafter.observe)
    assert drafter.traits.continues == hasattr(drafter, "propose_after")


@pytest.mark.parametrize(("kind", "coupling"), KINDS_AND_COUPLINGS)
def test_it_keeps_to_its_budget(name: str, kind: str, coupling: str) -> None:
    setup = set_up(name, kind_of(kind))
    check_budget(setup.drafter, setup.target, PROMPTS, sampling(1.0, coupling=coupling))


@pytest.mark.parametrize(("kind", "coupling"), KINDS_AND_COUPLINGS)
def test_it_forgets_what_is_over(name: str, kind: str, coupling: str) -> None:
    check_forgets(set_up(name, kind_of(kind)), PROMPTS, sampling(1.0, coupling=coupling), 3)


@pytest.mark.parametrize(("kind", "temperature", "coupling"), KINDS_AND_SAMPLINGS)
def test_a_rejected_branch_leaves_nothing(
    name: str, kind: str, temperature: float, coupling: str
) -> None:
    if name == "lookahead":
        pytest.skip("learns from guesses by its own account")
    model_kind = kind_of(kind)
    target = model_kind.new_target()
    result = check_rejections_leave_nothing(
        lambda: set_up(name, model_kind, target).drafter,
        target,
        PROMPTS[2],
        sampling(temperature, coupling=coupling),
        num_draft_tokens=3,
    )
    if kind == "table" and temperature and spec_of(name).num_draft_tokens:
        assert result.stats.rejected > 0


@pytest.mark.parametrize(("kind", "temperature"), KINDS_AND_TEMPERATURES)
def test_it_survives_being_wrong_all_the_time(name: str, kind: str, temperature: float) -> None:
    params = sampling(temperature)
    prompt, expected = PROMPTS[2], plain_text(kind, params)[2]
    setup = set_up(name, kind_of(kind))
    wrong = NeverRight(setup.drafter, [*prompt, *expected], setup.target.vocab_size)
    (result,) = run(setup.target, wrong, [prompt], params, 4)
    assert result.token_ids == expected
    assert result.stats.accepted == 0
    assert result.stats.steps == len(expected)


@pytest.mark.parametrize(("kind", "coupling"), KINDS_AND_COUPLINGS)
def test_a_cancelled_request_can_be_started_again(name: str, kind: str, coupling: str) -> None:
    params = sampling(1.0, coupling=coupling)
    setup = set_up(name, kind_of(kind))
    engine = engine_of(setup.target, setup.drafter, FixedBudget(3))
    request_id, other = engine.submit(PROMPTS[0], params), engine.submit(PROMPTS[3], params)
    for _ in range(3):
        engine.step()
    cancelled = engine.cancel(request_id)
    again = engine.submit(PROMPTS[0], params)
    results = drain(engine)
    assert cancelled is not None
    assert len(cancelled.token_ids) >= 3
    assert results[again].token_ids[: len(cancelled.token_ids)] == cancelled.token_ids
    assert results[again].finish_reason == results[other].finish_reason == "length"
    if coupling == "seeded":
        assert results[again].token_ids == plain_text(kind, params)[0]
        assert results[other].token_ids == plain_text(kind, params)[3]
    assert is_empty(setup.target.cache)


@pytest.mark.parametrize(("kind", "temperature"), REPEATS)
def test_drawn_drafts_are_fixed_by_the_seed(name: str, kind: str, temperature: float) -> None:
    """Another text than the plain run's, but one that the seed repeats."""
    params = sampling(temperature, coupling="drawn")

    def texts() -> list[tuple[int, ...]]:
        setup = set_up(name, kind_of(kind))
        results = run(setup.target, setup.drafter, PROMPTS, params, 3, max_batch_size=3)
        return [result.token_ids for result in results]

    assert texts() == (texts() if temperature else plain_text(kind, sampling(0.0)))
