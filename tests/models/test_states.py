"""Models of transformers with states: Mamba, its hybrids and others, with drafts and without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from foredraft.core.errors import CapabilityError
from foredraft.core.params import SamplingParams
from foredraft.core.tree import TokenTree
from foredraft.llm import LLM
from foredraft.models.base import ScoreRow
from foredraft.models.hf.states import HFStateCache
from foredraft.models.hf.target import HFTarget
from foredraft.options import LoadOptions
from tests.models.checkpoints import VOCAB_SIZE, save_tokenizer, text, tiny_model

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MAMBA: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 2}
CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "mamba": lambda: transformers.MambaConfig(**MAMBA),
    "mamba2": lambda: transformers.Mamba2Config(
        **MAMBA, num_heads=8, head_dim=16, n_groups=1, state_size=16, chunk_size=8
    ),
    "jamba": lambda: transformers.JambaConfig(
        **SIZES, attn_layer_period=2, attn_layer_offset=1, num_experts=2
    ),
    "nemotron_h": lambda: transformers.NemotronHConfig(
        **{**SIZES, "num_hidden_layers": None},
        layers_block_type=["mamba", "moe", "attention", "mamba"],
        head_dim=16,
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=1,
        ssm_state_size=16,
        chunk_size=8,
        n_routed_experts=4,
        moe_intermediate_size=64,
        moe_shared_expert_intermediate_size=64,
    ),
    "bamba": lambda: transformers.BambaConfig(
        **SIZES,
        attn_layer_indices=[1],
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_chunk_size=8,
    ),
    "zamba2": lambda: transformers.Zamba2Config(
        **SIZES,
        layers_block_type=["mamba", "hybrid", "mamba", "mamba"],
        mamba_ngroups=1,
        mamba_d_state=16,
        n_mamba_heads=8,
        mamba_headdim=16,
        chunk_size=8,
        num_mem_blocks=1,
    ),
    "olmo_hybrid": lambda: transformers.OlmoHybridConfig(**SIZES, pad_token_id=0, eos_token_id=1),
}
ONE_BY_ONE = {"mamba", "jamba"}
"""Kinds whose forwards of several tokens begin from nothing, in this version of transformers."""


@pytest.fixture(scope="module", params=CONFIGS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def target(family: str) -> HFTarget:
    return HFTarget(tiny_model(CONFIGS[family]()))


def test_texts_are_those_of_transformers_with_drafts_and_without(
    target: HFTarget, family: str
) -> None:
    assert isinstance(target.cache, HFStateCache)
    assert target.cache.reads_on == (family not in ONE_BY_ONE)
    prompts = [text(20) * 2, text(33)]
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=40, temperature=temperature, seed=3)
        plain = LLM(target, None, LoadOptions(drafter="none")).generate(prompts, params)
        options = LoadOptions(drafter="suffix", num_draft_tokens=4)
        drafted = LLM(target, None, options).generate(prompts, params)
        assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
        assert sum(r.stats.drafted for r in drafted)
        if not temperature:
            ids = torch.tensor([prompts[0]])
            theirs = target.model.generate(
                ids, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            assert theirs[0, 40:].tolist() == [*plain[0].token_ids]


def test_drafts_that_are_rejected_leave_nothing_behind(target: HFTarget) -> None:
    """Also not many of them, nor a forward that no `keep` followed, a cut, or a copy."""
    tokens, cache = text(60), target.cache
    slot = cache.allocate()
    target.score([ScoreRow(slot, tokens[:20])])
    cache.keep(slot, 20, ())
    for place in range(20, 48, 2):
        wrong = TokenTree.chain((tokens[place + 1], 1 + tokens[place + 2] % 50, 7))
        target.score([ScoreRow(slot, tokens[place : place + 1], wrong)])
        cache.keep(slot, 1, (0,))
    target.score([ScoreRow(slot, [9, 8])])
    copy = cache.fork(slot)
    cache.truncate(copy, 30)
    target.score([ScoreRow(copy, tokens[30:48])])
    cache.keep(copy, 18, ())
    with torch.inference_mode():
        expected = target.model(torch.tensor([tokens]), use_cache=False).logits[0, 48:]
    for each in (slot, copy):
        found = target.score([ScoreRow(each, tokens[48:50], TokenTree.chain(tokens[50:]))])[0]
        assert (found.logits_NV - expected[1:]).abs().max() < 1e-4
        cache.keep(each, 2, range(10))
        assert cache.length(each) == 60
        cache.free(each)
    cache.check()


def test_a_text_that_goes_on_takes_the_state_of_the_one_before(target: HFTarget) -> None:
    llm = LLM(target, None, LoadOptions(drafter="none"))
    params = SamplingParams(max_tokens=8, temperature=0)
    first = llm.generate([text(40)], params)[0]
    again = llm.generate([[*text(40), *first.token_ids, 5]], params)[0]
    assert again.num_cached_tokens >= 47
    fresh = LLM(target, None, LoadOptions(drafter="none", prefix_caching=False))
    expected = fresh.generate([[*text(40), *first.token_ids, 5]], params)[0]
    assert again.token_ids == expected.token_ids


@pytest.mark.parametrize("family", ["mamba2", "nemotron_h"], indirect=True)
def test_checkpoints_load(family: str, tmp_path: Path) -> None:
    tiny_model(CONFIGS[family]()).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    llm = LLM.load(tmp_path, drafter="suffix", calibrate=False)
    expected = LLM.load(tmp_path, drafter="none").generate([[5, 6, 7] * 9])[0]
    assert llm.generate([[5, 6, 7] * 9])[0].token_ids == expected.token_ids


def test_a_state_outside_the_cache_is_refused() -> None:
    config = transformers.RecurrentGemmaConfig(
        **{**SIZES, "num_key_value_heads": 1}, block_types=["recurrent", "attention"], lru_width=64
    )
    with pytest.raises(CapabilityError, match="does not go on from the state in its cache"):
        HFTarget(tiny_model(config))
    with pytest.raises(CapabilityError, match="a form of its own"):
        HFTarget(tiny_model(transformers.RwkvConfig(vocab_size=VOCAB_SIZE, hidden_size=64)))
