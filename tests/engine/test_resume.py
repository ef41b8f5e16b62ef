"""A reply that is cut off goes on in another engine as if it had not been."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from foredraft import LLM, AsyncLLM, Grammar, SamplingParams
from foredraft.core.errors import ConfigError, ForedraftError, PromptError
from foredraft.engine.request import Event, ReplySoFar
from foredraft.models.table import TableModel
from foredraft.models.text.tokenizer import Tokenizer
from foredraft.options import LoadOptions
from tests.engine.helpers import counting_model, limited, new_engine
from tests.models.checkpoints import VOCAB_SIZE, save_tokenizer

LONG = SamplingParams(temperature=1.0, seed=7, max_tokens=40)
ASKED = {
    "greedy": replace(LONG, temperature=0.0, seed=None, repetition_penalty=1.3),
    "seeded": LONG,
    "drawn": replace(LONG, coupling="drawn", speculation="off"),
    "penalties": replace(LONG, presence_penalty=0.7, frequency_penalty=0.9),
    "grammar": replace(LONG, grammar=Grammar.regex("[a-f ]{20,60}!?"), max_tokens=60),
    "min_tokens": replace(LONG, min_tokens=30, temperature=0.5),
    "bad words": replace(LONG, bad_words=["e", "the"]),
    "logprobs": replace(LONG, logprobs=2, prompt_logprobs=1),
    "stop": replace(LONG, stop=["zzzz", "e  "], seed=5),
    "stop included": replace(LONG, stop=["the"], include_stop=True, min_tokens=4),
}


@pytest.fixture(scope="module")
def new_llm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], LLM]:
    """Makes engines over one model, as on several machines."""
    directory = tmp_path_factory.mktemp("resume") / "tiny"
    save_tokenizer(directory)
    tokenizer = Tokenizer(directory)

    def new(drafter: str = "suffix") -> LLM:
        target = TableModel.random(VOCAB_SIZE, seed=5, order=1, sharpness=4.0)
        return LLM(target, tokenizer, LoadOptions(drafter=drafter, max_batch_size=4))

    return new


@pytest.fixture(scope="module")
def llms(new_llm: Callable[[], LLM]) -> tuple[LLM, LLM]:
    return new_llm(), new_llm("ngram")


def text(events: list[Event]) -> str:
    return "".join(piece.text for event in events for piece in event.pieces)


def tokens(events: list[Event]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def check_cut(whole: list[Event], k: int, rest: list[Event]) -> None:
    """Events of a reply, and those that another engine gave behind the first k of them."""
    mended, last, end = whole[:k] + rest, whole[-1].result, rest[-1].result
    assert last is not None
    assert end is not None
    assert tokens(mended) == tokens(whole) == list(end.token_ids)
    assert text(mended) == text(whole) == end.text == last.text
    assert [p for e in mended for p in e.logprobs] == list(last.logprobs or ())
    assert sum(event.prompt_logprobs is not None for event in mended) == (
        last.prompt_logprobs is not None
    )
    for name in ("finish_reason", "logprobs", "prompt_logprobs", "stop_string", "index"):
        assert getattr(end, name) == getattr(last, name), name
    assert end.num_prompt_tokens == last.num_prompt_tokens
    assert end.num_cached_tokens <= end.num_prompt_tokens
    stats = end.stats
    assert stats.committed == len(end.token_ids)
    assert stats.drafted == stats.accepted + stats.rejected + stats.discarded
    assert sum(event.num_accepted for event in mended) == stats.accepted
    steps = [event for event in mended if event.token_ids]
    assert stats.steps == len(steps)
    drafts = [count for event in steps for _, count in event.drafts]
    assert sum(stats.drafters.values()) == stats.drafted == sum(drafts)
    assert sum(stats.plain_steps.values()) == sum(not event.drafts for event in steps)
    assert bool(stats.plain_steps) == (stats.plain_reason is not None)


@pytest.mark.parametrize("name", ASKED)
def test_a_reply_goes_on_elsewhere(llms: tuple[LLM, LLM], name: str) -> None:
    first, second = llms
    params, prompt = ASKED[name], "<|im_start|>The ferry and the sea"
    whole = list(first.stream(prompt, params))
    assert len(whole) > 3
    for k in sorted({1, 2, 3, len(whole) // 2, len(whole) - 1}):
        rest = list(second.stream(prompt, params, so_far=ReplySoFar.of(whole[:k])))
        check_cut(whole, k, rest)
        assert tokens(rest)


async def test_each_of_several_replies_resumes_alone(llms: tuple[LLM, LLM]) -> None:
    params, prompt = replace(LONG, n=3, logprobs=0), "the sea"
    async with AsyncLLM(llms[0]) as one, AsyncLLM(llms[1]) as other:
        async with await one.open(prompt, params) as stream:
            events = [event async for event in stream]
        for index, own in enumerate(params.each()):
            whole = [event for event in events if event.index == index]
            k = 2 + index
            so_far = ReplySoFar.of(whole[:k])
            async with await other.open(prompt, own, so_far=so_far) as rest:
                check_cut(whole, k, [event async for event in rest])


def test_a_cut_inside_a_character_and_a_stop_string(new_llm: Callable[[], LLM]) -> None:
    """Text that was held back at the cut comes afterwards, and once."""
    llm = new_llm("none")
    bytes_of = llm.encode("é and ü, é")
    params = SamplingParams(
        allowed_token_ids=sorted({*bytes_of}), temperature=1.0, seed=3, max_tokens=30,
        stop=["ééééé", "ü ü ü"],
    )  # fmt: skip
    whole = list(llm.stream([5], params))
    for k in range(1, len(whole)):
        check_cut(whole, k, list(llm.stream([5], params, so_far=ReplySoFar.of(whole[:k]))))


def refusals() -> Iterator[tuple[SamplingParams, ReplySoFar, type[ForedraftError], str]]:
    begun = ReplySoFar((5, 6))
    yield replace(LONG, seed=None), begun, ConfigError, "seed"
    yield replace(LONG, n=2), begun, ConfigError, "each reply goes on alone"
    yield replace(LONG, max_tokens=2), begun, ConfigError, "over after 2 of its 2 tokens"
    yield replace(LONG, stop_token_ids=[5]), begun, ConfigError, "over after 1 of its 2 tokens"
    yield replace(LONG, logprobs=1), begun, ConfigError, "0 log probabilities"
    yield LONG, ReplySoFar((5, VOCAB_SIZE)), PromptError, "not an id"
    yield replace(LONG, grammar=Grammar.regex("[0-9]")), begun, ForedraftError, "grammar"


@pytest.mark.parametrize("case", list(refusals()), ids=lambda case: case[3])
def test_what_cannot_go_on_is_refused(llms: tuple[LLM, LLM], case: Any) -> None:
    params, so_far, kind, said = case
    with pytest.raises(kind, match=said):
        list(llms[0].stream([5, 6], params, so_far=so_far))
    assert not llms[0].engine.has_work


def test_a_resumed_reply_may_make_way_once_more() -> None:
    """It is a request like any other: without memory it waits, and goes on."""
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=100) for i in range(3)]
    free = new_engine(counting_model())
    wanted = []
    for own in params:
        free.submit([1, 2], own)
        wanted.append(list(free.run()))
    tight = new_engine(limited(counting_model(), 160))
    for own, whole in zip(params, wanted, strict=True):
        tight.submit([1, 2], own, so_far=ReplySoFar.of(whole[:6]))
    rest = list(tight.run())
    assert tight.stats().preemptions > 0
    for number, whole in enumerate(wanted):
        check_cut(whole, 6, [event for event in rest if event.request_id == number])
