"""Text that the target writes: which prompts, kept how, and resumed after a kill."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foredraft.core.errors import ConfigError
from foredraft.core.record import SpeculationStats
from foredraft.drafters.trained import TargetIdentity
from foredraft.engine.request import GenerationResult
from foredraft.train.options import WriteOptions
from foredraft.train.texts import read_texts, shard_paths, write_shard
from foredraft.train.writing import (
    PromptEncoder,
    Requests,
    SourcePrompt,
    Writer,
    check_origin,
)
from tests.train.helpers import Watch, some_texts

WHO = TargetIdentity("tiny", "abc", "words")


Replies = Generator[tuple[int, GenerationResult], None, None]


def result_of(ids: tuple[int, ...]) -> GenerationResult:
    return GenerationResult(0, "", ids, "stop", SpeculationStats(), 0, 0)


class Echo(PromptEncoder):
    """Replies with the prompt backwards; as a user it says a few letters."""

    plain = False
    user_prefix: tuple[int, ...] = (1, 2)

    def __init__(self, die_after: int | None = None) -> None:
        self.asked: list[tuple[int, ...]] = []
        self._die_after = die_after

    def __call__(self, requests: Requests) -> Replies:
        for number, (prompt_ids, params) in reversed(requests.items()):
            self.asked.append(prompt_ids)
            if self._die_after is not None and len(self.asked) > self._die_after:
                raise KeyboardInterrupt
            ids = prompt_ids
            if ids == self.user_prefix:
                assert params.seed is not None
                ids = tuple(65 + int(digit) for digit in f"{params.seed % 10**9:09d}")
            yield number, result_of(tuple(reversed(ids)))

    def encode(self, text: str) -> list[int]:
        return [*self.user_prefix, *map(ord, text), 3]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


def writer(
    directory: Path, echo: Echo, prompts: int = 0, max_context: int = 4096, **options: Any
) -> Writer:
    given = [SourcePrompt(f"file-{n}", "word " * (1 + n % 5) + str(n)) for n in range(prompts)]
    write_options = WriteOptions(**{"tokens": 2000} | options)
    return Writer(directory, echo, echo, WHO, max_context, given, write_options)


def test_shards_keep_texts_as_they_were(tmp_path: Path) -> None:
    texts = some_texts(10)
    write_shard(tmp_path, texts[:6])
    write_shard(tmp_path, texts[6:])
    found = read_texts(tmp_path)
    assert len(shard_paths(tmp_path)) == 2
    for before, after in zip(texts, found, strict=True):
        assert np.array_equal(before.tokens, after.tokens)
        for name in ("num_prompt", "temperature", "finished", "source", "number"):
            assert getattr(before, name) == getattr(after, name)


@pytest.mark.parametrize("damage", ["torn", "lengths", "none"])
def test_damaged_shards_are_named(tmp_path: Path, damage: str) -> None:
    if damage != "none":
        path = write_shard(tmp_path, some_texts(4))
        if damage == "torn":
            path.write_bytes(path.read_bytes()[:300])
        else:
            with np.load(path) as arrays:
                changed = dict(arrays) | {"prompt_lengths": np.array([1, 2, 3, 4])}
            np.savez(path, **changed)
    with pytest.raises(ConfigError, match="holds no texts" if damage == "none" else "part-0000"):
        read_texts(tmp_path)


def test_prompts_of_its_own_are_unlike_each_other(tmp_path: Path) -> None:
    written = writer(tmp_path / "texts", Echo()).run(Watch(), lambda: False)
    texts = read_texts(tmp_path / "texts")
    assert written >= 2000
    assert len({tuple(text.prompt_ids) for text in texts}) == len(texts)
    assert {round(text.temperature, 3) for text in texts} == {0.0, 0.7, 1.0}
    assert {text.source.split("-")[0] for text in texts} == {"self"}


def test_given_prompts_are_answered_once_a_pass(tmp_path: Path) -> None:
    plan = {"passes": 2, "tokens": 10**6}
    writer(tmp_path / "texts", Echo(), prompts=30, **plan).run(Watch(), lambda: False)
    sources = [text.source for text in read_texts(tmp_path / "texts")]
    assert len(sources) == 60
    assert len(set(sources[:30])) == 30


def test_a_kill_repeats_nothing_that_was_kept(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        writer(tmp_path / "cut", Echo(die_after=170), tokens=20_000).run(Watch(), lambda: False)
    kept = len(read_texts(tmp_path / "cut"))
    assert 0 < kept <= 64
    writer(tmp_path / "cut", Echo(), tokens=20_000).run(Watch(), lambda: False)
    writer(tmp_path / "whole", Echo(), tokens=20_000).run(Watch(), lambda: False)
    cut, whole = read_texts(tmp_path / "cut"), read_texts(tmp_path / "whole")
    assert [t.number for t in cut] == [t.number for t in whole]
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(cut, whole, strict=True))


def test_a_stop_keeps_what_was_over(tmp_path: Path) -> None:
    echo = Echo()
    writer(tmp_path / "texts", echo).run(Watch(), lambda: len(echo.asked) >= 70)
    first = read_texts(tmp_path / "texts")
    assert 0 < len(first) < 64
    writer(tmp_path / "texts", Echo()).run(Watch(), lambda: False)
    numbers = [text.number for text in read_texts(tmp_path / "texts")]
    assert len(numbers) == len(set(numbers))


def test_text_of_another_target_is_refused(tmp_path: Path) -> None:
    writer(tmp_path / "texts", Echo(), tokens=50).run(Watch(), lambda: False)
    check_origin(tmp_path / "texts", WHO)
    with pytest.raises(ConfigError, match=r"text of 'tiny' .* the target is 'big'"):
        check_origin(tmp_path / "texts", TargetIdentity("big", "def"))


def test_prompts_fit_a_short_context(tmp_path: Path) -> None:
    """At a context of 512 a reply of up to 256 tokens still fits; here a letter is a token."""
    echo = Echo()
    made = writer(tmp_path / "texts", echo, max_context=512, tokens=20_000)
    made.run(Watch(), lambda: False)
    assert made.prompt_limit == 256
    assert made.tokens >= 20_000
    assert max(map(len, echo.asked)) <= 256


def test_prompts_that_are_too_long_are_counted_and_said(tmp_path: Path) -> None:
    options = WriteOptions(tokens=1000, passes=1)
    prompts = [SourcePrompt(f"p{n}", "w" * (400 if n % 2 else 20)) for n in range(10)]
    made = Writer(tmp_path / "a", Echo(), Echo(), WHO, 512, prompts, options)
    made.run(Watch(), lambda: False)
    assert made.num_skipped == 5
    assert len(read_texts(tmp_path / "a")) == 5
    made = Writer(tmp_path / "b", Echo(), Echo(), WHO, 512, prompts[1::2], options)
    with pytest.raises(ConfigError, match="5 prompts are longer than 256 tokens"):
        made.run(Watch(), lambda: False)


class PlainEcho(Echo):
    """A base model: no chat template, and no end of a text."""

    plain = True

    def __call__(self, requests: Requests) -> Replies:
        for number, reply in super().__call__(requests):
            yield number, replace(reply, finish_reason="length")

    def encode(self, text: str) -> list[int]:
        return [*self.user_prefix, *map(ord, text)]


def test_base_models_continue_texts(tmp_path: Path) -> None:
    echo = PlainEcho()
    writer(tmp_path / "texts", echo).run(Watch(), lambda: False)
    assert len(read_texts(tmp_path / "texts")) > 1
    echo.user_prefix = ()
    with pytest.raises(ConfigError, match="can make none up"):
        writer(tmp_path / "none", echo).run(Watch(), lambda: False)
    writer(tmp_path / "given", echo, prompts=9, passes=1).run(Watch(), lambda: False)
    assert len(read_texts(tmp_path / "given")) == 9


def test_prompts_that_do_not_end_serve_where_none_does(tmp_path: Path) -> None:
    echo = PlainEcho()
    echo.plain = False
    writer(tmp_path / "texts", echo).run(Watch(), lambda: False)
    assert len(read_texts(tmp_path / "texts")) > 1
