"""The engine end to end, on tables: what comes out, when it stops, and that nothing leaks."""

from __future__ import annotations

import pytest

from foredraft.core.errors import ConfigError, PromptError
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import NO_PROPOSAL, Proposal
from foredraft.core.record import StepRecord
from foredraft.core.tree import ROOT, TokenTree
from foredraft.drafters.base import Drafter, DraftRow
from foredraft.drafters.none import NoDrafter
from foredraft.drafters.text.ngram import NgramDrafter
from foredraft.models.table import TableModel
from tests.engine.helpers import (
    ScriptedDrafter,
    counting_drafter,
    counting_model,
    drain,
    generate,
    new_engine,
)

PROMPTS = [[1], [2, 3, 4, 5, 6, 7, 8], [9, 9], [0, 1, 2]]


@pytest.fixture(params=["none", "always right", "wrong at times", "ngram"])
def drafter(request: pytest.FixtureRequest) -> Drafter:
    made: dict[str, Drafter] = {
        "none": NoDrafter(),
        "always right": counting_drafter(),
        "wrong at times": counting_drafter(wrong_every=3),
        "ngram": NgramDrafter(min_ngram_size=1),
    }
    return made[request.param]


@pytest.mark.parametrize(
    ("options", "reason", "token_ids", "text"),
    [
        ({"max_tokens": 3}, "length", (2, 3, 4), "cde"),
        ({"stop_token_ids": [4]}, "stop", (2, 3, 4), "cd"),
        ({"stop": "ef"}, "stop", (2, 3, 4, 5), "cd"),
        ({"stop": ["hi", "gh"]}, "stop", (2, 3, 4, 5, 6, 7), "cdef"),
        ({"stop": "ja"}, "stop", (2, 3, 4, 5, 6, 7, 8, 9, 0), "cdefghi"),
        ({"stop": "zz", "max_tokens": 2}, "length", (2, 3), "cd"),
        ({"stop": "de", "max_tokens": 2}, "length", (2, 3), "cd"),
        ({"stop": "e", "max_tokens": 3}, "stop", (2, 3, 4), "cd"),
        ({}, "stop", (2, 3, 4, 5, 6, 7, 8), "cdefgh"),
        ({"ignore_eos": True, "max_tokens": 8}, "length", (2, 3, 4, 5, 6, 7, 8, 9), "cdefghij"),
        ({"stop_token_ids": [4], "include_stop": True}, "stop", (2, 3, 4), "cde"),
        ({"stop": "de", "include_stop": True}, "stop", (2, 3, 4), "cde"),
        ({"stop": "de", "min_tokens": 4, "max_tokens": 5}, "length", (2, 3, 4, 5, 6), "cdefg"),
        ({"stop": "de", "min_tokens": 2}, "stop", (2, 3, 4), "c"),
    ],
)
def test_what_ends_a_request_cuts_text_ids_and_counts_alike(
    drafter: Drafter, options: dict[str, object], reason: str, token_ids: tuple[int, ...], text: str
) -> None:
    ignores_eos = "stop" in options or "stop_token_ids" in options
    params = SamplingParams.of(**{"ignore_eos": ignores_eos, **options})
    engine = new_engine(counting_model(), drafter, eos_token_ids=[8])
    (result,) = generate(engine, [[1]], params)
    assert (result.finish_reason, result.token_ids, result.text) == (reason, token_ids, text)
    assert result.stats.committed == len(token_ids)
    assert (result.stop_string is not None) == ("stop" in options and reason == "stop")


def test_a_right_guess_saves_steps_and_a_wrong_one_costs_none() -> None:
    params = SamplingParams(max_tokens=20)
    right = generate(new_engine(counting_model(), counting_drafter()), [[1]], params)[0]
    assert (right.stats.steps, right.stats.accepted, right.stats.rejected) == (4, 16, 0)
    wrong = generate(new_engine(counting_model(), counting_drafter(1)), [[1]], params)[0]
    assert (wrong.stats.steps, wrong.stats.accepted) == (20, 0)


def test_pieces_tell_drafted_text_from_the_targets_own() -> None:
    engine = new_engine(counting_model(), counting_drafter(wrong_every=3), num_draft_tokens=2)
    engine.submit([1], SamplingParams(max_tokens=4))
    pieces = [piece for event in engine.run() for piece in event.pieces]
    # Position 3 is drafted wrong, and the last token of a request is never drafted.
    assert [(piece.text, piece.drafted) for piece in pieces] == [
        ("c", True),
        ("d", True),
        ("e", False),
        ("f", False),
    ]


def test_the_seed_is_drawn_when_none_is_given_and_repeats_the_text() -> None:
    target = TableModel.random(10, seed=4)
    first = generate(new_engine(target), [[1]], SamplingParams(temperature=1.0, max_tokens=40))[0]
    again = SamplingParams(temperature=1.0, max_tokens=40, seed=first.seed)
    assert generate(new_engine(target), [[1]], again)[0].token_ids == first.token_ids
    other = generate(new_engine(target), [[1]], SamplingParams(temperature=1.0, max_tokens=40))[0]
    assert other.seed != first.seed


def test_later_requests_wait_for_room_in_the_order_they_came() -> None:
    target = counting_model()
    engine = new_engine(target, max_batch_size=2)
    request_ids = [engine.submit([i], SamplingParams(max_tokens=i + 1)) for i in range(5)]
    ended = []
    while engine.has_work:
        events = engine.step()
        assert len(events) <= 2
        assert len(target.cache.slots) <= 2
        ended += [event.request_id for event in events if event.result is not None]
    assert ended == request_ids


def test_cancelled_requests_keep_their_tokens_and_free_their_slot() -> None:
    target = counting_model()
    engine = new_engine(target, max_batch_size=2)
    running, staying, waiting = (engine.submit([i], SamplingParams(max_tokens=9)) for i in range(3))
    for _ in range(3):
        engine.step()
    cancelled = engine.cancel(running)
    assert cancelled is not None
    assert (cancelled.finish_reason, cancelled.token_ids) == ("cancelled", (1, 2, 3))
    never_began = engine.cancel(waiting)
    assert never_began is not None
    assert (never_began.finish_reason, never_began.token_ids) == ("cancelled", ())
    rest = drain(engine)
    assert list(rest) == [staying]
    assert rest[staying].token_ids == (2, 3, 4, 5, 6, 7, 8, 9, 0)
    assert engine.cancel(running) is None
    assert not engine.has_work
    assert target.cache.slots == []


def test_the_context_is_filled_to_the_last_token_and_no_further() -> None:
    for drafter in (None, counting_drafter(), counting_drafter(wrong_every=3)):
        target = counting_model()
        target.max_context = 12
        (result,) = generate(new_engine(target, drafter), [[1, 2, 3]], SamplingParams())
        assert (result.finish_reason, len(result.token_ids)) == ("length", 9)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        (list(range(10)), "the prompt is too long: 10 tokens > 9 maximum"),
        ([1, 10], "prompt token 10 is not an id below 10"),
        ([-1], "prompt token -1"),
        ([True], "prompt token True"),
        ([1.0], "prompt token 1.0"),
    ],
)
def test_a_bad_prompt_is_refused(prompt: list[int], message: str) -> None:
    target = counting_model()
    target.max_context = 10
    engine = new_engine(target)
    with pytest.raises(PromptError, match=message):
        engine.submit(prompt, SamplingParams())
    assert not engine.has_work


def test_stop_strings_need_a_tokenizer() -> None:
    engine = new_engine(counting_model(), new_decoder=None)
    with pytest.raises(ConfigError, match="stop strings need a tokenizer"):
        engine.submit([1], SamplingParams(stop="a"))
    assert generate(engine, [[1]], SamplingParams(max_tokens=2))[0].text == ""


@pytest.mark.parametrize("size", [0, -1, 1.5, True, None])
def test_the_batch_size_must_be_a_positive_whole_number(size: object) -> None:
    with pytest.raises(ConfigError, match="max_batch_size"):
        new_engine(counting_model(), max_batch_size=size)


def test_the_trace_sees_every_step() -> None:
    steps: list[StepRecord] = []
    engine = new_engine(counting_model(), counting_drafter(wrong_every=3), trace=steps.append)
    (result,) = generate(engine, [[1]], SamplingParams(max_tokens=10))
    rows = [step.rows[0] for step in steps]
    assert sum(len(row.proposal.tree) for row in rows) == result.stats.drafted
    assert sum(row.num_accepted for row in rows) == result.stats.accepted
    assert tuple(token for row in rows for token in row.committed) == result.token_ids
    assert len(steps) == result.stats.steps
    assert rows[-1].finish_reason == "length"
    assert all(step.is_decoding and step.times.total_ms > 0.0 for step in steps)


def test_a_long_prompt_is_read_in_chunks_and_others_decode_meanwhile() -> None:
    steps: list[StepRecord] = []
    engine = new_engine(counting_model(), counting_drafter(), max_step_tokens=4, trace=steps.append)
    short = engine.submit([3], SamplingParams(max_tokens=30))
    engine.step()
    long = engine.submit([i % 10 for i in range(11)], SamplingParams(max_tokens=5))
    events = [event for event in engine.run() if event.request_id == long]
    assert [event.num_prompt_read for event in events[:4]] == [3, 6, 9, 11]
    assert [len(event.token_ids) for event in events[:3]] == [0, 0, 0]
    assert tuple(t for event in events for t in event.token_ids) == (1, 2, 3, 4, 5)
    chunked = [step for step in steps if any(row.num_read > 1 for row in step.rows)]
    assert len(chunked) == 4
    for step in chunked:
        (decoding,) = [row for row in step.rows if row.request_id == short]
        assert decoding.committed


def test_a_branching_draft_follows_the_path_that_the_target_takes() -> None:
    def two_branches(row: DraftRow) -> Proposal:
        if row.budget < 4:
            return NO_PROPOSAL
        wrong, right = (row.tokens[-1] + 5) % 10, (row.tokens[-1] + 1) % 10
        tokens = (wrong, right, (right + 5) % 10, (right + 1) % 10)
        return Proposal.chosen(TokenTree(tokens, (ROOT, ROOT, 1, 1)))

    engine = new_engine(counting_model(), ScriptedDrafter(two_branches))
    (result,) = generate(engine, [[1]], SamplingParams(max_tokens=30))
    assert result.token_ids == tuple(i % 10 for i in range(2, 32))
    num_drafting_steps = 9  # three tokens each; the last three tokens leave no room for four nodes
    assert result.stats.accepted == 2 * num_drafting_steps
    assert result.stats.drafted == 4 * num_drafting_steps
    assert result.stats.steps == num_drafting_steps + 3


@pytest.mark.parametrize("max_step_tokens", [1, 2, 3, 512])
@pytest.mark.parametrize("drafter", [NoDrafter(), counting_drafter(3)])
def test_every_token_of_a_prompt_is_counted(drafter: Drafter, max_step_tokens: int) -> None:
    engine = new_engine(counting_model(), drafter, max_step_tokens=max_step_tokens)
    prompts = [[1], [2, 3], [9, 8, 7, 6, 5, 4, 3]]
    generate(engine, prompts, SamplingParams(max_tokens=6))
    assert engine.stats().prompt_tokens == sum(map(len, prompts))
