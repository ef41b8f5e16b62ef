"""Rows of a head behind the tokenizer's last id: models have them, and no text does."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer
from transformers import GPT2Config, MambaConfig

from foredraft import LLM, SamplingParams
from foredraft.core.choices import DrawKey
from foredraft.core.errors import ConfigError
from foredraft.core.tree import TokenTree
from foredraft.models.base import ScoreRow
from foredraft.models.hf.encoder_decoder import EncoderDecoderTarget
from foredraft.models.hf.target import HFTarget
from foredraft.models.native.draft_model import NativeDraftModel, for_drafts
from foredraft.models.native.model import EagerDecoder, finished_logits
from foredraft.models.native.target import NativeTarget
from foredraft.models.native.weights import rounded
from foredraft.models.text.tokenizer import Tokenizer
from foredraft.options import LoadOptions
from tests.conformance.harness import fused_decoder
from tests.models.checkpoints import (
    NATIVE_CONFIGS,
    VOCAB_SIZE,
    save_checkpoint,
    save_tokenizer,
    tiny_model,
)
from tests.models.encoder_decoders import tiny

MORE = 212
"""As many again, nearly: a flat law would draw them all the time."""
FLAT = SamplingParams(temperature=100.0, seed=3, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("padded")
    config = NATIVE_CONFIGS["llama"]()
    config.vocab_size = VOCAB_SIZE + MORE
    save_checkpoint(directory, config)
    return directory


LOADS = {
    "as it comes": {"dtype": "float32", "drafter": "ngram"},
    "eager": {"dtype": "float32", "kernels": "off"},
    "int8, a copy drafts": {"weights": "int8", "drafter": "self-draft"},
    "a draft model": {"draft_model": "itself", "num_draft_tokens": 3},
    "transformers": {"backend": "hf", "dtype": "float32"},
}


@pytest.mark.parametrize("name", LOADS)
def test_no_token_is_drawn_that_has_no_text(
    padded: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = dict(LOADS[name])
    if options.pop("kernels", None):
        monkeypatch.setenv("FOREDRAFT_KERNELS", "off")
    if "draft_model" in options:
        options["draft_model"] = str(padded)
    llm = LLM.load(str(padded), device="cpu", calibrate=False, **options)
    others = (
        replace(FLAT, seed=None),
        replace(FLAT, coupling="drawn"),
        replace(FLAT, top_p=0.999, logprobs=5),
        replace(FLAT, logit_bias={3: 1.0}, presence_penalty=0.5),
    )
    for params in (FLAT, *others):
        (result,) = llm.generate("The ferry", params)
        assert len(result.token_ids) == 60
        assert max(result.token_ids) < VOCAB_SIZE
        assert len({*result.token_ids}) > 30, "the law is flat"


def test_an_id_without_text_is_refused_where_one_is_named(padded: Path) -> None:
    llm = LLM.load(str(padded), device="cpu", calibrate=False, drafter="none")
    for params in ({"logit_bias": {VOCAB_SIZE: 100.0}}, {"allowed_token_ids": [VOCAB_SIZE]}):
        with pytest.raises(ConfigError, match=f"the vocabulary has {VOCAB_SIZE}"):
            llm.generate("The ferry", SamplingParams(**params))
    (result,) = llm.generate([[VOCAB_SIZE + 3, 5]], replace(FLAT, max_tokens=2))  # may be read
    assert len(result.token_ids) == 2


def test_added_tokens_count_and_more_tokens_than_rows_do_no_harm(
    padded: Path, tmp_path: Path
) -> None:
    """Phi's tokens lie behind a hole, and Gemma 3 has one more than its head has rows."""
    save_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    fast = FastTokenizer.from_file(str(path))
    fast.add_tokens([AddedToken(f"<extra {i}>") for i in range(30)])
    fast.save(str(path))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.num_ids(VOCAB_SIZE + MORE) == VOCAB_SIZE + 30
    assert tokenizer.num_ids(VOCAB_SIZE + 8) == VOCAB_SIZE + 8
    for file in padded.iterdir():
        if not (tmp_path / file.name).exists():
            shutil.copy(file, tmp_path)
    llm = LLM.load(str(tmp_path), device="cpu", calibrate=False, drafter="none")
    many = replace(FLAT, max_tokens=300)
    largest = max(llm.generate("The ferry", many)[0].token_ids)
    assert VOCAB_SIZE <= largest < VOCAB_SIZE + 30


def test_all_other_logits_keep_their_bits(padded: Path) -> None:
    """Of every decoder, and of a head in two steps, whose estimates are closed as well."""
    text, size = [*range(40, 60)], VOCAB_SIZE + 3
    for new_decoder in (EagerDecoder, fused_decoder()):
        whole, some = (
            NativeTarget.load(padded, new_decoder=new_decoder, num_ids=num_ids)
            for num_ids in (None, lambda num_rows: num_rows - MORE + 3)
        )
        found = []
        for each in (whole, some):
            row = ScoreRow(each.cache.allocate(), text[:1], TokenTree.chain(text[1:]))
            found.append(each.score([row]).logits_NV)
        assert torch.equal(found[0][:, :size], found[1][:, :size])
        assert found[0].isfinite().all()
        assert found[1].shape == found[0].shape
        assert found[1][:, size:].isneginf().all()
    model = NativeDraftModel(some.config, for_drafts(rounded(some.weights, 4)), fused_decoder())
    for seed in range(30):
        row = ScoreRow(model.cache.allocate(), text[:1], draw=DrawKey(seed, 1, 0.001))  # flat
        scores = model.score([row])
        assert scores.drawn is not None
        assert scores.drawn[0] is not None
        assert scores.drawn[0].drawn < size
        assert scores.logits_NV[:, size:].isneginf().all()
        model.cache.free(row.slot)


@pytest.mark.parametrize("kind", ["gpt2", "mamba", "t5"])
def test_a_model_of_transformers_is_tried_with_all_its_rows(kind: str, tmp_path: Path) -> None:
    """Trees, states and an encoder-decoder's steps are compared as differences of logits."""
    load = EncoderDecoderTarget.load if kind == "t5" else HFTarget.load
    sizes: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2}
    made = {"gpt2": GPT2Config(n_head=4, **sizes), "mamba": MambaConfig(**sizes)}
    model = tiny() if kind == "t5" else tiny_model(made[kind])
    model.save_pretrained(tmp_path)
    whole, some = load(tmp_path), load(tmp_path, num_ids=lambda num_rows: num_rows - 3)
    assert some.capabilities.tree_attention == whole.capabilities.tree_attention == (kind == "gpt2")
    found = [each.score([ScoreRow(each.cache.allocate(), [0])]).logits_NV for each in (whole, some)]
    assert torch.equal(found[0][:, :-3], found[1][:, :-3])
    assert found[1][:, -3:].isneginf().all()


def test_capped_logits_are_closed_behind_the_cap(padded: Path) -> None:
    config = replace(NativeTarget.load(padded).config, logits_cap=3.0, num_ids=4)
    logits_NV = finished_logits(torch.full((2, 6), 50.0), config)
    assert logits_NV[:, :4].eq(3.0).all()
    assert logits_NV[:, 4:].isneginf().all()


def test_a_target_of_ones_own_draws_none_but_what_is_allowed(padded: Path) -> None:
    """Its rows are not known to be no tokens: it was not loaded beside its tokenizer."""
    target = NativeTarget.load(padded, torch.float32)
    llm = LLM(target, Tokenizer(padded), LoadOptions(drafter="none"))
    (result,) = llm.generate("The ferry", replace(FLAT, allowed_token_ids=(5, 6)))
    assert {*result.token_ids} == {5, 6}


def test_a_token_that_ends_replies_is_drawn_though_its_text_is_not_known(padded: Path) -> None:
    tokenizer = Tokenizer(padded)
    tokenizer.eos_token_ids = (VOCAB_SIZE + 9,)
    assert tokenizer.num_ids(VOCAB_SIZE + MORE) == VOCAB_SIZE + 10
    assert tokenizer.num_ids(VOCAB_SIZE + 2) == VOCAB_SIZE + 2
