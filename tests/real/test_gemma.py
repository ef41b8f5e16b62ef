"""Gemma 3 270M: the text of llama.cpp, and drafts between two vocabularies."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.against_llama_cpp import compare
from foredraft import LLM, SamplingParams
from foredraft.models.files.packaged import SMOLLM2
from foredraft.models.files.store import resolve_model
from foredraft.models.text.tokenizer import Tokenizer
from tests.real.conftest import TEXTS, gguf_of

NAME = "gemma-3-270m"
PROMPTS = (
    "The ferry crosses the river twice a day. In the morning it carries",
    "def add(first, second):\n    return first",
    "Seven is a prime number, and eight is",
)


@pytest.fixture(scope="module")
def file() -> Path:
    return gguf_of(NAME)


def test_texts_become_the_tokens_of_llama_cpp(file: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    theirs = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
    ours = Tokenizer(resolve_model(file))
    for text in (*TEXTS, "<start_of_turn>user\nHi<end_of_turn>\n", *PROMPTS):
        expected = theirs.tokenize(text.encode(), add_bos=True, special=True)
        assert ours.encode(text) == expected
        assert ours.decode(expected[1:], skip_special_tokens=False) == text


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_is_that_of_llama_cpp(file: Path, prompt: str) -> None:
    pytest.importorskip("llama_cpp")
    found = compare(file, Tokenizer(resolve_model(file)).encode(prompt), 48, file.name)
    assert found.is_equal, found.line
    assert found.difference < 0.1


@pytest.mark.parametrize(
    "names", [(NAME, SMOLLM2.name), (SMOLLM2.name, NAME)], ids=["target", "draft"]
)
def test_drafts_of_another_vocabulary_change_no_text(names: tuple[str, str]) -> None:
    """Gemma drafts for SmolLM2, and SmolLM2 for Gemma."""
    target, draft = names
    params = [SamplingParams(max_tokens=32, temperature=heat, seed=3) for heat in (0.0, 0.7)]
    plain = LLM.load(target, drafter="none")
    drafted = LLM.load(target, drafter="cross_tokenizer", draft_model=draft)
    num_accepted = 0
    for one in params:
        results = drafted.generate(list(PROMPTS), one)
        expected = plain.generate(list(PROMPTS), one)
        assert [r.token_ids for r in results] == [r.token_ids for r in expected]
        num_accepted += sum(result.stats.accepted for result in results)
    assert num_accepted > 0
