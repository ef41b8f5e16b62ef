"""Text that the target writes: which prompts, kept how, and resumed after a kill."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foredraft.core.errors import ConfigError
from foredraft.drafters.heads.store import TargetIdentity
from foredraft.train.texts import read_texts, shard_paths, write_shard
from foredraft.train.writing import (
    Prompt,
    Reply,
    Request,
    WritePlan,
    Writer,
    check_origin,
    common_prefix,
)
from tests.train.helpers import Watch, some_texts

WHO = TargetIdentity("tiny", "abc", "words")


class Echo:
    """Replies with the prompt backwards; as a user it says a few letters."""

    user_prefix = (1, 2)

    def __init__(self, die_after: int | None = None) -> None:
        self.asked: list[Request] = []
        self._die_after = die_after

    def __call__(self, requests: Sequence[Request]) -> Generator[Reply, None, None]:
        for request in reversed(requests):
            self.asked.append(request)
            if self._die_after is not None and len(self.asked) > self._die_after:
                raise KeyboardInterrupt
            ids = request.prompt_ids
            if ids == self.user_prefix:
                ids = tuple(65 + int(digit) for digit in f"{request.seed % 10**9:09d}")
            yield Reply(request.number, tuple(reversed(ids)), True)

    def encode(self, text: str) -> list[int]:
        return [*self.user_prefix, *map(ord, text), 3]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


def writer(directory: Path, echo: Echo, prompts: int = 0, **plan: Any) -> Writer:
    given = [Prompt(f"file-{n}", "word " * (1 + n % 5) + str(n)) for n in range(prompts)]
    return Writer(directory, echo, echo, WHO, given, WritePlan(**{"tokens": 2000} | plan))


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
    sources = {text.source.split("-")[0] for text in texts}
    assert "self" in sources
    assert len(sources) > 5


def test_given_prompts_are_answered_once_a_pass(tmp_path: Path) -> None:
    plan = {"made_up": False, "passes": 2, "tokens": 10**6}
    writer(tmp_path / "texts", Echo(), prompts=30, **plan).run(Watch(), lambda: False)
    sources = [text.source for text in read_texts(tmp_path / "texts")]
    assert len(sources) == 60
    assert len(set(sources[:30])) == 30


def test_both_take_turns(tmp_path: Path) -> None:
    writer(tmp_path / "texts", Echo(), prompts=9).run(Watch(), lambda: False)
    sources = [text.source[:4] == "file" for text in read_texts(tmp_path / "texts")]
    assert sources[:4] == [True, False, True, False]


def test_a_kill_repeats_nothing_that_was_kept(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        writer(tmp_path / "cut", Echo(die_after=100), tokens=20_000).run(Watch(), lambda: False)
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


def test_there_must_be_something_to_answer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no prompts"):
        writer(tmp_path, Echo(), made_up=False)


def test_what_all_begin_with() -> None:
    assert common_prefix([[1, 2, 3, 4], [1, 2, 5], [1, 2, 3]]) == (1, 2)
    assert json.loads("[]") == list(common_prefix([]))
