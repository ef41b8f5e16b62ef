"""Comparing a model with its float32 self."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from benchmarks.quality import WINDOW, measure_quality, windows
from benchmarks.texts import BUILT_IN, read_text
from foredraft.core.errors import ConfigError
from foredraft.core.tree import TokenTree
from foredraft.models.base import ScoreRow
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


def test_windows_cover_the_text() -> None:
    tokens = list(range(2 * WINDOW + 1))
    assert windows(tokens) == [tokens[:WINDOW], tokens[WINDOW : 2 * WINDOW]]
    assert windows(tokens, limit=WINDOW + 2)[1] == tokens[WINDOW : WINDOW + 2]
    assert windows([5]) == []


def test_texts(tmp_path: Path) -> None:
    assert read_text(None) == BUILT_IN
    path = tmp_path / "text.txt"
    path.write_text("Grüße aus dem Süden", encoding="utf-8")
    assert read_text(str(path)) == "Grüße aus dem Süden"
    path.write_text("  \n")
    with pytest.raises(ConfigError, match="holds no text"):
        read_text(str(path))
    with pytest.raises(ConfigError, match="cannot read the text"):
        read_text(str(tmp_path / "missing.txt"))
