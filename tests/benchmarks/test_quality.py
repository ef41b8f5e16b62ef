"""Comparing a model with its float32 self."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.corrector import write_prompts
from benchmarks.noisy_model import add_noise
from benchmarks.quality import measure_quality, windows
from benchmarks.random_model import Shape, random_config, random_weights
from benchmarks.same_text import ALONE, COMPANY, MODEL, Parted, TextLog, Texts, write_all
from benchmarks.texts import BUILT_IN
from foredraft.bench.prompts import load_prompts
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.core.tree import TokenTree
from foredraft.models.base import ScoreRow
from foredraft.models.native.target import NativeTarget
from foredraft.models.table import TableModel

VOCAB = 11
TEXTS = [[i * i % VOCAB for i in range(150)], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [7, 7]]


def log_probs(model: TableModel, tokens: list[int]) -> torch.Tensor:
    """After each token, in one forward."""
    slot = model.cache.allocate()
    [scores] = model.score([ScoreRow(slot, tokens[:1], TokenTree.chain(tokens[1:]))])
    model.cache.free(slot)
    return scores.logits_NV.double().log_softmax(-1)


def test_a_model_equals_itself() -> None:
    model = TableModel.random(VOCAB, seed=1, order=2)
    found = measure_quality(model, model, TEXTS)
    assert found.num_tokens == sum(len(tokens) - 1 for tokens in TEXTS)
    assert (found.mean_kl, found.p99_kl, found.top1_agreement) == (0.0, 0.0, 1.0)
    assert found.perplexity == found.reference_perplexity
    assert model.cache.slots == []


def test_figures_equal_their_definitions() -> None:
    reference = TableModel.random(VOCAB, seed=1, order=2)
    candidate = TableModel.random(VOCAB, seed=2, order=2)
    calls: list[int] = []
    found = measure_quality(reference, candidate, TEXTS, lambda: calls.append(1))
    assert len(calls) == len(TEXTS)
    p = torch.cat([log_probs(reference, tokens)[:-1] for tokens in TEXTS])
    q = torch.cat([log_probs(candidate, tokens)[:-1] for tokens in TEXTS])
    kl = (p.exp() * (p - q)).sum(-1)
    assert found.mean_kl == pytest.approx(kl.mean().item())
    assert found.p99_kl == pytest.approx(kl.quantile(0.99).item())
    agrees = (p.argmax(-1) == q.argmax(-1)).double().mean().item()
    assert found.top1_agreement == pytest.approx(agrees)
    following = torch.tensor([token for tokens in TEXTS for token in tokens[1:]])
    for x, perplexity in ((p, found.reference_perplexity), (q, found.perplexity)):
        mean = x.gather(1, following[:, None]).mean().item()
        assert perplexity == pytest.approx(math.exp(-mean))


@pytest.mark.real_model
def test_int8_weights_are_close_to_float32() -> None:
    from foredraft.llm import LLM

    reference = LLM.load(dtype="float32", drafter="none")
    candidate = LLM.load(weights="int8", drafter="none")
    assert candidate.tokenizer is not None
    texts = windows(candidate.tokenizer.encode(BUILT_IN), limit=200)
    found = measure_quality(reference.target, candidate.target, texts)
    assert found.mean_kl < 0.003
    assert found.top1_agreement > 0.93
    assert abs(found.perplexity / found.reference_perplexity - 1) < 0.02


def test_texts_have_some_faults_and_are_otherwise_as_they_were(tmp_path: Path) -> None:
    texts = write_prompts(tmp_path / "prompts.jsonl", 6)
    for wrong, right in texts.items():
        kept = set(wrong.split()) & set(right.split())
        assert len(set(right.split()) - kept) in range(1, 16)
        assert len(kept) > 0.6 * len(set(right.split()))
    found = load_prompts(str(tmp_path / "prompts.jsonl"))
    assert [prompt.text for prompt in found] == list(texts)


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> NativeTarget:
    tiny = Shape(64, 128, 2, 4, 2, 16, 1000, True)
    monkeypatch.setattr("benchmarks.random_model.shapes", lambda: {"tiny": tiny})
    config = random_config("tiny")
    return NativeTarget(config, random_weights(config, torch.float32, "cpu"))


def test_every_matrix_moves_by_the_share_of_its_spread(target: NativeTarget) -> None:
    before = [matrix.clone() for matrix in target.weights.matrices()]
    add_noise(target, 0.1)
    changes = []
    for old, new in zip(before, target.weights.matrices(), strict=True):
        changes.append((new - old).flatten()[:1000])
        assert float((new - old).std() / old.std()) == pytest.approx(0.1, rel=0.1)
    assert len({tuple(change.tolist()) for change in changes}) == len(changes)


PROMPTS = {name: [number] for number, name in enumerate("abcde")}


class Counting:
    """Writes three tokens; with company, those of the prompt 3 end otherwise."""

    name, ways = "engine", (ALONE, MODEL, COMPANY)

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def write(self, way: str, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Texts:
        self.asked.append((way, len(prompts)))
        return [[ids[0], 7, 8 + (way == COMPANY and ids[0] == 3)] for ids in prompts]


def test_it_counts_texts_that_differ_and_where(tmp_path: Path) -> None:
    engine = Counting()
    found = write_all(engine, PROMPTS, SamplingParams(), 2, TextLog(tmp_path / "log", {}))
    assert found == [
        Parted("engine", MODEL, 0.0, 5, 0, None, 15),
        Parted("engine", COMPANY, 0.0, 5, 1, 2, 15),
    ]
    assert engine.asked.count((COMPANY, 2)) == 2, "company comes in groups"
    assert engine.asked.count((ALONE, 1)) == 5


def test_a_run_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    write_all(Counting(), PROMPTS, SamplingParams(), 2, TextLog(tmp_path / "log", {"of": 1}))
    lines = (tmp_path / "log").read_text().splitlines()
    (tmp_path / "log").write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:9])  # killed
    engine = Counting()
    log = TextLog(tmp_path / "log", {"of": 1})
    assert len(write_all(engine, PROMPTS, SamplingParams(), 2, log)) == 2
    assert engine.asked == [(COMPANY, 1)]
    with pytest.raises(ConfigError, match="another comparison"):
        TextLog(tmp_path / "log", {"of": 2})
