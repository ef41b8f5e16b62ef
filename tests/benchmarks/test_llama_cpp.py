"""The llama.cpp peer, against a stand-in: llama-cpp-python takes too long to compile."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest

from benchmarks import llama_cpp, random_files
from benchmarks.forwards import Size
from benchmarks.llama_cpp import LlamaCppContender, LlamaCppStepper, open_llama
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams


class StandIn:
    """Counts up from the last prompt token, and notes what it is asked for."""

    def __init__(self) -> None:
        self.n_tokens = 0
        self.evaluated: list[tuple[int, int]] = []

    def reset(self) -> None:
        self.n_tokens = 0

    def generate(self, tokens: Sequence[int], **options: Any) -> Iterator[int]:
        assert options["temp"] == 0.0
        token = tokens[-1]
        while True:
            token += 1
            yield token

    def eval(self, tokens: Sequence[int]) -> None:
        self.evaluated.append((self.n_tokens, len(tokens)))
        self.n_tokens += len(tokens)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    llama = StandIn()
    monkeypatch.setattr(llama_cpp, "open_llama", lambda *_, **__: llama)
    return llama


def test_generation_ends_at_a_stop_token_or_at_the_limit(stand_in: StandIn) -> None:
    contender = LlamaCppContender("model", 64, 2, stop_ids=[9])
    assert contender.run([3, 5], SamplingParams(max_tokens=8)).token_ids == (6, 7, 8, 9)
    run = contender.run([3, 5], SamplingParams(max_tokens=2))
    assert run.token_ids == (6, 7)
    assert 0.0 < run.first_s <= run.total_s


def test_each_step_starts_from_the_same_context(stand_in: StandIn) -> None:
    stepper = LlamaCppStepper("model", "bf16", 32, 4, 2)
    for tokens in (4, 1):
        stepper.step(Size(1, tokens))
    assert stand_in.evaluated == [(0, 32), (32, 4), (32, 1)]
    assert not stepper.fits(Size(2, 1))


def test_a_shape_is_written_as_a_file_with_made_up_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("llama_cpp")
    monkeypatch.setattr(package, "Llama", lambda path, **_: path, raising=False)
    monkeypatch.setitem(sys.modules, "llama_cpp", package)
    monkeypatch.setattr(llama_cpp, "package_version", lambda _: "0")
    monkeypatch.setattr(random_files, "write_random", lambda _, *what: what)
    assert open_llama("llama-1b", "q4_0", 64, 2) == str(("llama-1b", "q4_0"))


def test_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp, "package_version", lambda _: None)
    with pytest.raises(ConfigError, match="pip install llama-cpp-python"):
        open_llama("model", "bf16", 64, 2)
