"""The llama.cpp peer, against a stand-in: llama-cpp-python takes too long to compile."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import llama_cpp
from benchmarks.beside_peers import table_of
from benchmarks.compare import Trial
from benchmarks.contenders import Contender, ContenderRun
from benchmarks.forwards import Size, time_steps
from benchmarks.gguf import QUANTISATIONS, bits_per_weight, write_gguf
from benchmarks.gguf_models import save_tiny
from benchmarks.llama_cpp import LlamaCppContender, LlamaCppStepper
from benchmarks.peer_process import PeerContender, PeerStepper
from benchmarks.prompts import time_reading
from benchmarks.timing import PeerFailed
from foredraft.bench.prompts import BenchPrompt
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.models.native.source_blocks import FILE as SOURCE_BLOCKS
from tests.models.checkpoints import NATIVE_CONFIGS, save_checkpoint, save_tokenizer


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


@pytest.mark.parametrize("quantisation", QUANTISATIONS)
def test_a_file_is_written_and_smaller_formats_are_smaller(
    tmp_path: Path, quantisation: str
) -> None:
    save_tiny(tmp_path / "model", "llama")
    num_weights = (tmp_path / "model" / "model.safetensors").stat().st_size / 4
    path = tmp_path / "model.gguf"
    save_file({"blocks": torch.zeros(1)}, tmp_path / "model" / SOURCE_BLOCKS)  # is no weight
    write_gguf(tmp_path / "model", path, quantisation)
    assert path.read_bytes()[:4] == b"GGUF"
    weights = num_weights * bits_per_weight(quantisation) / 8
    assert weights - 2_000 < path.stat().st_size < weights + 64_000


def test_a_conversation_becomes_the_same_tokens(tmp_path: Path) -> None:
    """Marks of turns are single tokens for a peer only if the file says that they control."""
    import gguf

    save_checkpoint(tmp_path / "model", NATIVE_CONFIGS["llama-tied"]())
    save_tokenizer(tmp_path / "model", "{{ messages }}")
    write_gguf(tmp_path / "model", tmp_path / "out.gguf", "bf16")
    written = gguf.GGUFReader(tmp_path / "out.gguf")

    def field(name: str) -> Any:
        return written.get_field(name).contents()  # type: ignore[union-attr]

    tokens, kinds = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    controls = {t for t, kind in zip(tokens, kinds, strict=True) if kind == gguf.TokenType.CONTROL}
    assert {"<|im_start|>", "<|im_end|>"} <= controls
    assert "a" not in controls
    assert field("tokenizer.chat_template") == "{{ messages }}"


CRASHED = "crashed (signal 11)"


class Fragile:
    """Counts on from a prompt; reads at address 0 where there is more than one token to read.

    Args:
        problem: what happens as it is made.
    """

    name = "fragile"

    def __init__(self, problem: str = "") -> None:
        print("a library that prints")  # noqa: T201
        if problem == "crash":
            ctypes.string_at(0)
        if problem:
            raise ConfigError(problem) if problem == "mistake" else RuntimeError(problem)

    def run(self, prompt_ids: Sequence[int], params: SamplingParams) -> ContenderRun:
        started = time.perf_counter()
        self.step(Size(1, len(prompt_ids)))
        found = tuple(prompt_ids[-1] + i for i in range(1, params.max_tokens + 1))
        return ContenderRun(found, 0.5, 1.0 + time.perf_counter() - started, 1)

    def step(self, size: Size) -> dict[str, float]:
        if size.tokens > 1:
            ctypes.string_at(0)
        return {"total": float(os.getpid())}


class Sound:
    """The same in this process, which reads any number."""

    name = "sound"

    def run(self, prompt_ids: Sequence[int], params: SamplingParams) -> ContenderRun:
        return ContenderRun((prompt_ids[-1] + 1,), 0.5, 1.0, 1)


@pytest.mark.slow  # each process imports torch
def test_a_peer_answers_from_its_own_process() -> None:
    run = PeerContender(Fragile, "x").run([7], SamplingParams(max_tokens=3))
    assert run.token_ids == (8, 9, 10)
    assert run.first_s == 0.5
    stepper = PeerStepper(Fragile, "x")
    assert not stepper.fits(Size(2, 1))
    assert stepper.step(Size(1, 1))["total"] != os.getpid()


@pytest.mark.slow  # each process imports torch
def test_a_crash_is_said_and_the_next_question_starts_it_anew() -> None:
    peer = PeerStepper(Fragile, "x")
    with pytest.raises(PeerFailed) as reason:
        peer.step(Size(1, 2))
    assert str(reason.value) == peer.failure == CRASHED
    assert peer.step(Size(1, 1))["total"] > 0


@pytest.mark.slow  # each process imports torch
def test_a_crash_costs_its_figure_alone() -> None:
    sizes = [Size(1, 2), Size(1, 1)]
    figures = time_steps([PeerStepper(Fragile, "fragile")], sizes, 2, lambda: None)
    assert [figure.failure for figure in figures] == [CRASHED, None]
    assert len(figures[1].samples) == 2
    assert figures[0].as_dict() == {"name": "fragile", "rows": 1, "tokens": 2, "failure": CRASHED}

    contenders: list[Contender] = [Sound(), PeerContender(Fragile, "fragile")]
    read = time_reading(contenders, [3], 10, 1, 0, lambda: None)
    assert [figure.failure for figure in read] == [None, CRASHED]
    assert read[0].median_ms() == 500.0


def test_each_engine_is_held_against_its_own_plain_text() -> None:
    runs = {
        "foredraft": ([5, 6], 2.0), "foredraft auto": ([5, 6], 1.5),
        "x": ([5, 7], 3.0), "x draft model": ([5, 8], 2.0), "y draft model": ([1, 2], 2.0),
    }  # fmt: skip
    prompt = BenchPrompt("1", "chat", "text")
    trials = [
        Trial(prompt, name, 0.0, ContenderRun(tuple(ids), 1.0, total_s, 1), name == "foredraft")
        for name, (ids, total_s) in runs.items()
    ]
    rows = {row["contender"]: row for row in table_of(trials)}
    assert [row["num_different"] for row in rows.values()] == [0, 0, 0, 1, 0]
    assert rows["foredraft auto"]["speedup"] == rows["foredraft auto"]["over_ours"] == 2.0
    assert (rows["x draft model"]["speedup"], rows["x draft model"]["over_ours"]) == (2.0, 1.0)
