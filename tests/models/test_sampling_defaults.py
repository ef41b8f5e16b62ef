"""The model's own sampling defaults: from its files to the requests of every door."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foredraft.core.errors import ModelLoadError
from foredraft.core.params import SamplingParams
from foredraft.llm import LLM
from foredraft.models.table import TableModel
from foredraft.models.text.tokenizer import Tokenizer
from foredraft.options import LoadOptions
from tests.models.checkpoints import VOCAB_SIZE, save_tokenizer
from tests.server.conftest import running

NAMED = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20}
NAMED |= {"repetition_penalty": 1.05}
DEFAULTS = {name: value for name, value in NAMED.items() if name != "do_sample"}


def tokenizer_of(directory: Path, **generation: Any) -> Tokenizer:
    save_tokenizer(directory)
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return Tokenizer(directory)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (NAMED, DEFAULTS),
        ({}, {}),
        ({"do_sample": False, "temperature": 0.6}, {}),
        ({"do_sample": False, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"temperature": 0.6, "top_p": None}, {"temperature": 0.6}),
    ],
)
def test_fields_of_a_generation_config(
    tmp_path: Path, generation: dict[str, Any], expected: dict[str, float]
) -> None:
    assert tokenizer_of(tmp_path, **generation).sampling_defaults == expected


def test_wrong_and_unheeded_fields(tmp_path: Path) -> None:
    found = tokenizer_of(tmp_path, num_beams=1, suppress_tokens=[5], min_length=0, typical_p=0.9)
    assert set(found.not_honoured()) == {"suppress_tokens", "typical_p"}
    with pytest.raises(ModelLoadError, match="top_p"):
        tokenizer_of(tmp_path, top_p=7)


def test_what_was_given_stands() -> None:
    assert SamplingParams().by(DEFAULTS) == SamplingParams(**DEFAULTS)  # type: ignore[arg-type]
    given = SamplingParams(temperature=0, top_k=0).by(DEFAULTS)
    assert (given.temperature, given.top_k, given.top_p) == (0.0, 0, 0.8)
    copied = replace(SamplingParams(max_tokens=5), seed=3)
    assert copied.by(DEFAULTS).temperature == 0.7
    assert SamplingParams().by(None) == SamplingParams()
    assert SamplingParams().temperature == 0.0


def llm(tokenizer: Tokenizer, trace: Any = None, **options: Any) -> LLM:
    tables = TableModel.random(VOCAB_SIZE, seed=5, order=1, sharpness=2.0)
    target = TableModel(VOCAB_SIZE, tables.probs)
    asked = LoadOptions.of(drafter="suffix", **options)
    return LLM(target, tokenizer, asked, trace=trace)


def test_python_and_server_have_the_same(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, **NAMED)
    asked = SamplingParams(max_tokens=12, seed=3)
    ours = llm(tokenizer).generate("a", asked)[0].text
    explicit = replace(asked, **DEFAULTS)
    assert ours == llm(tokenizer, sampling_defaults="none").generate("a", explicit)[0].text
    greedy = llm(tokenizer, sampling_defaults="none").generate("a", asked)[0].text
    assert greedy != ours
    body = {"prompt": "a", "max_tokens": 12, "seed": 3}
    with running(lambda trace: llm(tokenizer, trace)) as server, server.client() as client:
        answer = client.post("/v1/completions", json=body)
        own = client.post("/v1/completions", json=body | {"temperature": 0, "top_k": 5})
    assert answer.json()["choices"][0]["text"] == ours
    assert answer.headers["x-foredraft-sampling-defaults"] == (
        "temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05"
    )
    assert own.headers["x-foredraft-sampling-defaults"] == "top_p=0.8, repetition_penalty=1.05"
