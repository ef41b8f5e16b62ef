"""Each native family: transformers' text, the same text with drafts on, and its row in the docs."""

from __future__ import annotations

import functools
import json
import math
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    Gemma4TextConfig,
    NemotronHConfig,
    PreTrainedConfig,
)
from transformers.utils import logging as hf_logging

from foredraft.control import fixed
from foredraft.control.fixed import FixedBudget
from foredraft.core.errors import CapabilityError, ConfigError, ModelLoadError
from foredraft.core.params import SamplingParams
from foredraft.drafters import build_drafter
from foredraft.drafters.none import NoDrafter
from foredraft.drafters.spec import DrafterContext
from foredraft.engine.engine import Engine
from foredraft.llm import LLM
from foredraft.load import plan_models
from foredraft.models import families
from foredraft.models.base import ScoreRow, Target
from foredraft.models.families import FAMILIES, GGUF_NORMS, Family
from foredraft.models.files.schema import DecoderFields
from foredraft.models.native.config import read_config, why_not_native
from foredraft.models.native.cpu import FusedDecoder
from foredraft.models.native.model import EagerDecoder
from foredraft.models.native.target import NativeTarget
from foredraft.models.native.weights import (
    DecoderWeights,
    as_tensor,
    load_weights,
    weight_bytes,
)
from foredraft.options import LoadOptions
from foredraft.train.heads.base import start_head
from foredraft.train.target import TrainingTarget
from tests.conformance.harness import Kind as ModelKind
from tests.conformance.harness import check_budget, check_forgets, plain, run, set_up
from tests.engine.helpers import engine_of
from tests.engine.test_hybrids import RandomTrees, plain_text
from tests.models import encoder_decoders
from tests.models.checkpoints import (
    NATIVE_CONFIGS,
    VOCAB_SIZE,
    WINDOW,
    need_kernel,
    save_checkpoint,
)

ROWS: Mapping[str, tuple[str, str]] = {
    "llama": ("Llama 2 and 3, SmolLM, SmolLM2", "llama-yarn-rope"),
    "mistral": ("Mistral", "mistral-window"),
    "qwen2": ("Qwen2, Qwen2.5", "qwen2-window"),
    "qwen3": ("Qwen3", "qwen3"),
    "smollm3": ("SmolLM3", "smollm3"),
    "olmo2": ("OLMo 2", "olmo2"),
    "granite": ("Granite 3", "granite"),
    "phi3": ("Phi-3, Phi-4", "phi3"),
    "gemma": ("Gemma", "gemma"),
    "gemma2": ("Gemma 2", "gemma2"),
    "gemma3_text": ("Gemma 3 (text)", "gemma3"),
    "gemma4_text": ("Gemma 4 (text)", "gemma4"),
    "gemma4_unified_text": ("Gemma 4 12B (text)", "gemma4-unified"),
    "mixtral": ("Mixtral", "mixtral"),
    "qwen3_moe": ("Qwen3 mixtures", "qwen3-moe"),
    "olmoe": ("OLMoE", "olmoe"),
    "lfm2": ("LFM2, LFM2.5", "lfm2"),
    "qwen3_5_text": ("Qwen3.5 (text)", "qwen3.5"),
    "qwen3_5_moe_text": ("Qwen3.5 mixtures (text)", "qwen3.5-moe"),
    "qwen3_next": ("Qwen3-Next", "qwen3-next"),
    "lfm2_moe": ("LFM2 mixtures", "lfm2-moe"),
    "glm4_moe": ("GLM-4.5", "glm4-moe"),
    "gpt_oss": ("gpt-oss", "gpt-oss"),
    "granitemoehybrid": ("Granite 4", "granite-hybrid-moe"),
    "falcon_h1": ("Falcon-H1", "falcon-h1"),
    "nemotron_h": ("Nemotron-H, Nemotron 3 Nano", "nemotron-h-moe"),
    "mamba2": ("Mamba-2", "mamba2"),
    "glm4": ("GLM-4", "glm4"),
    "ernie4_5": ("Ernie 4.5", "ernie4.5"),
    "hunyuan_v1_dense": ("Hunyuan", "hunyuan"),
    "seed_oss": ("Seed-OSS", "seed-oss"),
    "ministral": ("Ministral", "ministral"),
    "exaone4": ("EXAONE 4", "exaone4"),
    "olmo3": ("OLMo 3", "olmo3"),
    "cohere2": ("Cohere 2 (Command R7B, Command A)", "cohere2"),
    "stablelm": ("StableLM", "stablelm"),
    "starcoder2": ("StarCoder2", "starcoder2"),
    "arcee": ("Arcee", "arcee"),
    "apertus": ("Apertus", "apertus"),
    "mimo": ("MiMo", "qwen2"),
    "deepseek_v2": ("DeepSeek-V2", "deepseek-v2"),
    "deepseek_v3": ("DeepSeek-V3, R1", "deepseek-v3"),
    "kimi_k2": ("Kimi K2", "deepseek-v3"),
    "glm4_moe_lite": ("GLM-4.7-Flash", "glm4-moe-lite"),
    "youtu": ("Youtu-LLM", "youtu"),
}
"""By ``model_type``: what people call it, and the tiny model that stands for it here."""

NOT_THEIRS = {"mimo", "kimi_k2"}
"""Families of models with code of their own, which transformers has under another name."""

SHAPES: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "gemma4-moe": NATIVE_CONFIGS["gemma4-moe"],
    "nemotron-h": NATIVE_CONFIGS["nemotron-h"],
    "gemma4-readers": lambda: Gemma4TextConfig(
        **NATIVE_CONFIGS["gemma4"]().to_dict()
        | {
            "num_hidden_layers": 5,
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
            "num_kv_shared_layers": 3,
            "per_layer_config": {i: {"head_dim": 24} for i in (1, 3, 4)},
        }
    ),
}
"""Others of a family: experts beside what all tokens read, layers of both sorts that read entries
of another, and feed-forward parts alone."""

FORMATS: Mapping[str, tuple[torch.dtype, int | None]] = {
    "float32": (torch.float32, None),
    "bf16": (torch.bfloat16, None),
    "int8": (torch.bfloat16, 8),
    "int4": (torch.bfloat16, 4),
}
DRAFTERS = ("suffix", "draft_model", "early_exit", "self_draft", "hidden_head")
"""One of each sort: from the text, by another model, by the target's own layers, by a copy of them
in few bits, and by a trained head."""

TABLE = Path(__file__).parents[2] / "docs/reference/families.md"
PROMPTS = ([3, 1, 4, 1, 5], [7, 8, 9, 7, 8, 9, 7, 8, 9, 7, 8], [5, 5, 3])


# DeepSeek-V3 under another name.
_SAME = {"kimi_k2": pytest.param("kimi_k2", marks=pytest.mark.slow)}


@pytest.fixture(scope="module", params=[_SAME.get(name, name) for name in ROWS])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", autouse=True)
def _kernel() -> Iterator[None]:
    hf_logging.set_verbosity_error()
    need_kernel()
    yield
    directory.cache_clear()
    weights.cache_clear()


@functools.cache
def scratch() -> Any:
    import tempfile

    return tempfile.TemporaryDirectory(prefix="foredraft-families-")


@functools.cache
def directory(family: str) -> Path:
    path = Path(scratch().name) / family
    new_config = SHAPES[family] if family in SHAPES else NATIVE_CONFIGS[ROWS[family][1]]
    save_checkpoint(path, new_config())
    if family in NOT_THEIRS:
        shutil.copytree(path, path.with_name(f"{family}-theirs"))
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"model_type": family}))
    return path


def theirs(family: str) -> Path:
    """The same model as transformers knows it."""
    path = directory(family)
    return path.with_name(f"{family}-theirs") if family in NOT_THEIRS else path


@functools.cache
def weights(family: str, format_name: str) -> DecoderWeights:
    """Shared by targets: nothing may write to them."""
    dtype, bits = FORMATS[format_name]
    return load_weights(directory(family), read_config(directory(family)), dtype, bits=bits)


def new_target(family: str, format_name: str = "bf16") -> NativeTarget:
    return NativeTarget(
        read_config(directory(family)), weights(family, format_name), FusedDecoder, max_context=512
    )


def near_target(family: str) -> NativeTarget:
    """A draft model that often agrees: the head is a little off."""
    own = weights(family, "bf16")
    head = as_tensor(own.head_VE, torch.float32)
    noise = torch.randn(head.shape, generator=torch.Generator().manual_seed(7))
    near = replace(own, head_VE=(head + 0.01 * noise).bfloat16())
    return NativeTarget(read_config(directory(family)), near, FusedDecoder, max_context=512)


def kind_of(family: str) -> ModelKind:
    from foredraft.models.text.tokenizer import Tokenizer

    return ModelKind(
        family,
        lambda: new_target(family),
        lambda: near_target(family),
        lambda: Tokenizer(directory(family)),
    )


def drafter_on(name: str, family: str, target: Target) -> Any:
    """The drafter, a trained one with an untrained head of this family."""
    if name != "hidden_head":
        return set_up(name, kind_of(family), target).drafter
    context = DrafterContext(target, None, {"head": head_of(family), "round_cost": 0.0})
    return build_drafter(name, context)


@functools.cache
def head_of(family: str) -> Path:
    from foredraft.drafters.registry import head_class
    from foredraft.train.heads.base import TextBatch
    from foredraft.train.heads.saving import save_head

    source = TrainingTarget(new_target(family, "float32"), family, "its weights")
    torch.manual_seed(9)
    module = start_head(head_class("hidden_head"), source, range(0, VOCAB_SIZE, 2), {})
    tokens = torch.arange(6)
    (states,) = source.read([tokens.numpy()], module.taps)
    taps = {layer: states.layers[layer][None] for layer in module.taps}
    text = TextBatch(tokens[None], torch.tensor([6]), source.parts.embed(tokens)[None], taps)
    info = {"target": source.identity, "provenance": {}, "measured": {}}
    path = Path(scratch().name) / f"{family}-head"
    save_head(path, module, info, text, 2, "A head that nobody trained.")
    return path


@pytest.mark.parametrize("name", FAMILIES)
def test_entries_are_of_their_types_and_name_fields_that_exist(name: str) -> None:
    """A checker of Python's types does not see the table."""
    family = FAMILIES[name]
    TypeAdapter(Family).validate_python(asdict(family))
    said = family.reads | family.defaults.keys() | family.fixed.keys()
    if family.gguf:
        said |= family.gguf.keys.keys() | family.gguf.implied.keys()
        assert family.gguf.norms.keys() <= GGUF_NORMS.keys() | {"final_norm"}
    known = {"hybrid_override_pattern", "alpha"}  # which are read before the others
    for field, about in DecoderFields.model_fields.items():
        known |= {field, *getattr(about.validation_alias, "choices", [about.validation_alias])}
    assert said <= known


@pytest.mark.parametrize(
    ("mistyped", "said"),
    [("head_norm = 'each'", "head_norm"), ("like = ['_hed_norms']", "_hed_norms"), ("", "")],
)
def test_a_mistyped_entry_is_named(
    mistyped: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(families, "TEXT", f"[tiny]\n{mistyped}")
    if not said:
        assert families._families() == {"tiny": Family("tiny")}
        return
    with pytest.raises(ValueError, match=rf"\[tiny\].*{said}"):
        families._families()


def test_each_family_is_here() -> None:
    assert list(ROWS) == list(FAMILIES)


def test_greedy_text_is_that_of_transformers(family: str) -> None:
    reference = AutoModelForCausalLM.from_pretrained(theirs(family), dtype=torch.float32)
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    texts = plain(new_target(family, "float32"), PROMPTS, params)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        with torch.inference_mode():
            found = reference.generate(
                torch.tensor([prompt]),
                max_new_tokens=48,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=2,
            )
        assert text == tuple(found[0, len(prompt) :].tolist())


COLD = pytest.param(0.0, marks=pytest.mark.slow)
"""At temperature 0 the row of the table is run; what follows differs in formats and drafters."""


def one_a_family(choices: Iterable[str]) -> list[Any]:
    """Each family with one of them, in turns ("turn"); with each in the slow suite."""
    return ["turn", *(pytest.param(each, marks=pytest.mark.slow) for each in choices)]


def in_turn(name: str, choices: Iterable[str], family: str) -> str:
    others = [*choices]
    return others[[*ROWS].index(family) % len(others)] if name == "turn" else name


@pytest.mark.parametrize("format_name", one_a_family(FORMATS))
@pytest.mark.parametrize("temperature", [COLD, 1.0])
def test_drafts_change_no_text(family: str, format_name: str, temperature: float) -> None:
    format_name = in_turn(format_name, FORMATS, family)
    target = new_target(family, format_name)
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=40, ignore_eos=True)
    expected = plain(target, PROMPTS, params)
    drafter = set_up("suffix", kind_of(family), target).drafter
    for size in (1, 4):
        results = run(target, drafter, PROMPTS, params, size, 3)
        assert [result.token_ids for result in results] == expected
    assert sum(result.stats.drafted for result in results) > 0


def works(drafter: str, family: str) -> bool:
    """Early exit has no states of its own, and heads begin as a layer that attends."""
    config = read_config(directory(family))
    if drafter == "hidden_head":
        return config.num_attending_layers > 0
    return drafter != "early_exit" or config.recurrent is None


@pytest.mark.parametrize("temperature", [COLD, 1.0])
@pytest.mark.parametrize("name", one_a_family(DRAFTERS))
def test_each_sort_of_drafter_works(family: str, name: str, temperature: float) -> None:
    name = in_turn(name, DRAFTERS, family)
    target = new_target(family)
    if not works(name, family):
        with pytest.raises(CapabilityError):
            drafter_on(name, family, target)
        return
    params = SamplingParams(temperature=temperature, seed=17, max_tokens=24, ignore_eos=True)
    expected = plain(target, PROMPTS, params)
    with pytest.MonkeyPatch.context() as patch:  # else hardly a draft of an untrained head pays
        patch.setattr(fixed, "USUAL_PRICES", (1.0, 1.0))
        results = run(target, drafter_on(name, family, target), PROMPTS, params, 3, 3)
    assert [result.token_ids for result in results] == expected
    assert sum(result.stats.drafted for result in results) > 0


def test_it_keeps_the_promises_of_the_seam(family: str) -> None:
    """The checks of tests/conformance, with the drafter that is nearest to the model."""
    params = SamplingParams(temperature=1.0, seed=17, max_tokens=16)
    setup = set_up("self_draft", kind_of(family))
    check_budget(setup.drafter, setup.target, PROMPTS, params)
    check_forgets(set_up("self_draft", kind_of(family)), PROMPTS, params, 3)


def test_a_cached_beginning_gives_the_same_text(family: str) -> None:
    prompt = [(7 * i) % 90 + 3 for i in range(150)]
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=20, ignore_eos=True)
    alone = LLM(new_target(family), None, LoadOptions(drafter="none")).generate(prompt, params)[0]
    llm = LLM(new_target(family), None, LoadOptions(drafter="suffix"))
    llm.generate([*prompt[:140], 9], params)
    again = llm.generate(prompt, params)[0]
    assert again.num_cached_tokens > 0
    assert again.token_ids == alone.token_ids


def test_a_copy_is_tuned_or_that_is_refused(family: str) -> None:
    target, texts = new_target(family), [[(7 * i) % 90 + 3 for i in range(60)]]
    if target.config.experts or target.config.latent:
        with pytest.raises(ConfigError, match="is not tuned yet"):
            target.tune_copy(texts, lambda _: None)
        return
    done = list[str]()
    assert target.tune_copy(texts, done.append).bits == 4
    assert len(done) == target.num_layers


# ----------------------------------------------------------------------------------------- table

_FEW_TOKENS = {True: 400, False: 300}
"""That the small cache has room for: the longest text and a part of another; with states more."""
_TEXTS = [[*((7 * i) % 90 + 3 for i in range(130)), *range(5 + k, 9 + k)] for k in range(4)]


def written(family: str, temperature: float, size: int, memory: int | None = None) -> Engine:
    """An engine that has written a reply to each text with trees of drafts, as plain decoding does.

    Args:
        size: most requests at once.
        memory: of the cache; None: enough.
    """
    config, own = read_config(directory(family)), weights(family, "float32")
    alone = NativeTarget(config, own, FusedDecoder, max_context=512)
    plain_engine = engine_of(alone, NoDrafter(), FixedBudget(0), max_batch_size=1)
    expected, found = dict[int, list[int]](), dict[int, list[int]]()
    drafter = RandomTrees(random.Random("table"), expected)
    target = NativeTarget(config, own, FusedDecoder, max_context=512, cache_memory=memory)
    engine = engine_of(target, drafter, FixedBudget(12), max_batch_size=size)
    engine._headroom = 0
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=60, ignore_eos=True)
    for prompt in _TEXTS:
        (row,) = engine.prepare(prompt, params)
        found[row.request_id] = [*prompt]
        expected[row.request_id] = [*prompt, *plain_text(plain_engine, prompt, params)]
        engine.add([row], lambda event: found[event.request_id].extend(event.token_ids))
    while engine.has_work:
        engine.step()
    assert found == expected
    assert drafter.num_accepted > 20
    return engine


def test_the_row_of_the_table(family: str) -> None:
    """Native; logits of transformers; and the text of plain decoding with trees of drafts at both
    temperatures, alone, in a batch of four, behind cached beginnings, and preempted."""
    raw = json.loads((directory(family) / "config.json").read_text())
    assert why_not_native(raw, directory(family)) is None
    target = new_target(family, "float32")
    logits_V = target.score([ScoreRow(target.cache.allocate(), _TEXTS[0])])[0].logits_NV[0]
    reference = AutoModelForCausalLM.from_pretrained(theirs(family), dtype=torch.float32)
    with torch.inference_mode():
        expected_V = reference(torch.tensor([_TEXTS[0]])).logits[0, -1]
    assert torch.allclose(logits_V, expected_V, atol=1e-4)
    for temperature in (0.0, 1.0):
        engine = written(family, temperature, 1)
        assert engine.stats().prefix_cached_tokens > 300
        written(family, temperature, 4)
    few = _FEW_TOKENS[target.config.recurrent is not None] * target.cache.memory._token_bytes
    assert written(family, 1.0, 4, few).stats().preemptions > 0


@pytest.mark.parametrize("name", SHAPES)
def test_other_shapes_of_a_family(name: str) -> None:
    test_greedy_text_is_that_of_transformers(name)
    for format_name in FORMATS:
        test_drafts_change_no_text(name, format_name, 1.0)
    for drafter in ("early_exit", "self_draft"):
        test_each_sort_of_drafter_works(name, drafter, 1.0)
    test_a_copy_is_tuned_or_that_is_refused(name)
    test_the_row_of_the_table(name)


# --------------------------------------------------------------------------------------- configs

HARMLESS = {
    *("initializer_range", "use_cache", "attention_dropout", "resid_pdrop", "embd_pdrop"),
    *("pad_token_id", "bos_token_id", "pretraining_tp", "output_router_logits"),
    *("router_aux_loss_coef", "router_jitter_noise", "rms_norm_eps", "transformers_version"),
    *("num_nextn_predict_layers", "mamba_chunk_size", "eod_token_id", "residual_dropout"),
    *("hidden_dropout", "embedding_dropout", "num_logits_to_keep"),
    *("chunk_size", "mamba_ssm_cache_dtype", "use_mamba_kernels", "rescale_prenorm_residual"),
    *(
        "embedding_initializer_range",
        "qk_head_dim",
        "num_mtp_layers",
        "residual_in_fp32",
        "time_step_max",
        "time_step_floor",
        "time_step_rank",
    ),
    *("architectures", "dtype", "torch_dtype", "return_dict", "chunk_size_feed_forward"),
}
"""Fields that change no logits."""
READ = {
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
    *("rms_norm_eps", "hidden_act", "rope_parameters", "tie_word_embeddings", "eos_token_id"),
}
IGNORED = {
    "gemma3_text": {"attn_logit_softcapping"},
    "nemotron_h": {
        *("attention_bias", "sliding_window", "expand", "n_shared_experts"),
        *("moe_shared_expert_overlap", "mtp_layers_block_type"),
    },
    "mamba2": {"time_step_min"},
}
"""Fields that transformers has for a family, and does nothing with."""


def test_every_field_that_transformers_knows_is_known(family: str) -> None:
    """Every field that changes the model's computation is read, or refused by name."""
    if family in NOT_THEIRS:
        pytest.skip("transformers does not have it")
    described = FAMILIES[family]
    known = HARMLESS | READ | described.heeds | set(described.neutral) | set(described.fixed)
    known |= IGNORED.get(family, set())
    known |= {"num_local_experts"} if "num_experts" in known else set()
    fields = CONFIG_MAPPING[family]().to_dict().keys() - PreTrainedConfig().to_dict().keys()
    assert {name.removeprefix("_") for name in fields} - known == set()


_NUMBERS = {0, 2, 3, 5, 16, 100, -1, 10**9, 2**63, 10**30, 0.25, 0.5, 30.0, 1e300, math.inf}
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0.0, 1.0, math.nan, *sorted(_NUMBERS), "\ud800"),
    *("silu", "gelu", "gelu_pytorch_tanh", "relu", "", "linear", [], [1, 0, 1], [0], {}),
    ["full_attention", "sliding_attention", "full_attention"],
    ["full_attention", "chunked_attention", "full_attention"],
    *({"rope_type": kind, "factor": 2.0, "rope_theta": 500.0} for kind in ("linear", "dynamic")),
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    {"type": "mrope", "mrope_section": [2, 2, 4]},
    {"rope_type": "linear"},
    {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    {"quant_method": "gptq", "bits": 4},
)
FIELDS = (
    *("hidden_act", "hidden_activation", "rope_parameters", "rope_scaling", "rope_theta"),
    *("partial_rotary_factor", "original_max_position_embeddings", "attention_bias", "mlp_bias"),
    *("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
    *("no_rope_layers", "no_rope_layer_interval", "attention_multiplier", "logits_scaling"),
    *("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
    *("num_experts_per_tok", "norm_topk_prob", "clip_qkv", "decoder_sparse_step"),
    *("mlp_only_layers", "use_bidirectional_attention", "quantization_config", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings"),
    *("embedding_multiplier", "residual_multiplier", "rope_local_base_freq"),
)


def check_mutations(family: str, count: int, path: Path, part: int = 0) -> None:
    """Each gives a model with transformers' logits, or a reason that can be read.

    Args:
        part: each has other configs.
    """
    generator = random.Random(f"{family} {part}")
    good = json.loads((directory(family) / "config.json").read_text())
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (path / name).symlink_to(directory(family) / name)
    # Where these say so, transformers makes anew what it has read: matrices of Mamba-2, and the
    # embedding of a token of Youtu.
    remade = ("rescale_prenorm_residual", "pad_token_id")
    names = [*FIELDS, *(name for name in good if name not in remade)]
    num_models, reasons = 0, list[str]()
    for _ in range(count):
        config = dict(good)
        for _ in range(generator.choice((1, 1, 2))):
            config[generator.choice(names)] = generator.choice(VALUES)
        (path / "config.json").write_text(json.dumps(config))
        try:
            if why_not_native(config, path / "config.json"):
                continue
            plan, _ = plan_models(LoadOptions(model=str(path), device="cpu", dtype="float32"))
            assert plan.backend == "native"
            target = NativeTarget.load(path, torch.float32, new_decoder=FusedDecoder)
        except ModelLoadError as refused:
            reasons.append(str(refused))
            continue
        changes = {name: value for name, value in config.items() if good.get(name, ...) != value}
        if "head_dim" in changes and "kv_lora_rank" in good:
            continue  # has no meaning there, and one of 2 turns all of transformers' pairs alike
        num_models += check_logits(path, target, changes)
    assert num_models > 0 or family in NOT_THEIRS
    assert all(0 < len(reason) < 1000 for reason in reasons)


def check_logits(path: Path, target: NativeTarget, config: dict[str, Any]) -> bool:
    """Whether transformers loads the model; then it must say the same."""
    tokens = [(11 * i + 5) % (VOCAB_SIZE - 8) for i in range(min(24, target.max_context))]
    scores = target.score([ScoreRow(target.cache.allocate(), tokens)])
    try:
        reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        with torch.inference_mode():
            expected = reference(torch.tensor([tokens]), use_cache=False).logits[0, -1]
    except Exception:
        return False
    assert torch.allclose(scores.logits_NV[0], expected, atol=2e-3, rtol=1e-3), config
    return True


def changed(family: str, changes: Mapping[str, Any], path: Path) -> Path:
    """The family's tiny model under a config with other values."""
    shutil.copytree(directory(family), path, dirs_exist_ok=True)
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_mistral_with_kinds_of_layers_is_ministral(tmp_path: Path) -> None:
    """Such a config was read as if it did not say them."""
    config = {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    path = changed("mistral", config, tmp_path)
    target = NativeTarget.load(path, torch.float32, new_decoder=FusedDecoder)
    assert [kind.window for kind in target.config.kinds] == [None, WINDOW, None]
    assert check_logits(path, target, config)


def test_heads_of_gemma_4_are_read_as_they_are_published(tmp_path: Path) -> None:
    """transformers 5 writes sizes layer by layer, and the hub has them by name."""
    named = {"per_layer_config": None, "global_head_dim": 24, "num_global_key_value_heads": 2}
    path = changed("gemma4_unified_text", named, tmp_path)
    assert read_config(path) == read_config(directory("gemma4_unified_text"))


def test_tables_that_tell_layers_are_in_memory_once_and_not_read() -> None:
    target = NativeTarget.load(directory("gemma4_text"), torch.float32, new_decoder=FusedDecoder)
    table_VW = target.weights.inputs_VW
    assert isinstance(table_VW, torch.Tensor)
    assert target.low_bit_copy(4).weights.inputs_VW is table_VW
    in_memory, read = weight_bytes(target.config, 4, None)
    assert in_memory == target.weights.num_bytes
    assert read < in_memory - table_VW.nbytes


def test_experts_may_lie_in_one_tensor(tmp_path: Path) -> None:
    """As transformers 5 holds them, and as some checkpoints are published."""
    path = changed("qwen3_5_moe_text", {}, tmp_path)
    stored = load_file(path / "model.safetensors")
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    held = {name: t for name, t in reference.state_dict().items() if ".experts." in name}
    kept = {name: tensor for name, tensor in stored.items() if ".experts." not in name}
    assert len(held) == 2 * 3
    save_file(kept | held, path / "model.safetensors", {"format": "pt"})
    target = NativeTarget.load(path, torch.float32, new_decoder=FusedDecoder)
    expected = new_target("qwen3_5_moe_text", "float32")
    logits = [
        each.score([ScoreRow(each.cache.allocate(), _TEXTS[0])])[0].logits_NV
        for each in (target, expected)
    ]
    assert torch.equal(*logits)


def test_a_window_counts_in_a_context_that_scaling_extends(tmp_path: Path) -> None:
    """It was left out where it is not shorter than ``max_position_embeddings``."""
    changes = {"max_position_embeddings": WINDOW}
    path = changed("gpt_oss", changes, tmp_path)
    target = NativeTarget.load(path, torch.float32, new_decoder=FusedDecoder)
    assert target.max_context > WINDOW
    assert [kind.window for kind in target.config.kinds] == [WINDOW, None, WINDOW]
    assert check_logits(path, target, changes)


@pytest.mark.parametrize("name", ["cohere2", "starcoder2", "lfm2", "mamba2"])
def test_a_familys_own_name_of_epsilon_counts(name: str, tmp_path: Path) -> None:
    expected = read_config(directory(name)).rms_norm_eps
    path = changed(name, {"rms_norm_eps": 0.25}, tmp_path)
    assert read_config(path).rms_norm_eps == expected


def test_layers_of_nemotron_are_read_as_they_are_published(tmp_path: Path) -> None:
    """transformers 5 lists them, and the hub has a letter of each."""
    named = {"layers_block_type": None, "hybrid_override_pattern": "ME*", "num_hidden_layers": 3}
    for more in ({"layer_types": None}, {"hybrid_override_pattern": [*"ME*"]}, {}):
        path = changed("nemotron_h", named | more, tmp_path)
        assert read_config(path) == read_config(directory("nemotron_h"))
    assert check_logits(path, NativeTarget.load(path, new_decoder=FusedDecoder), named)


@pytest.mark.parametrize("decoder", [FusedDecoder, EagerDecoder])
@pytest.mark.parametrize("kinds", [["mlp", "full_attention"], ["mlp", "mlp"]])
def test_nemotron_without_states(kinds: list[str], decoder: Any, tmp_path: Path) -> None:
    usual = NATIVE_CONFIGS["nemotron-h"]().to_dict()
    own = {"layers_block_type": kinds, "num_hidden_layers": 2}
    save_checkpoint(tmp_path, NemotronHConfig(**usual | own))
    llm = LLM(NativeTarget.load(tmp_path, new_decoder=decoder), None, LoadOptions(drafter="suffix"))
    results = llm.generate([[5, 6, 5, 6, 5]], SamplingParams(max_tokens=8, ignore_eos=True))
    assert len(results[0].token_ids) == 8
    assert llm.target.weights.bits == 8 * llm.target.weights.dtype.itemsize


_ALL_FULL = {"layer_types": ["full_attention"] * 3, "per_layer_config": None}
_MOE = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
_LETTERS = {"layers_block_type": None, "hybrid_override_pattern": "MEX"}
_OUT_OF_ORDER = {"mlp_layer_types": ["sparse", "dense", "sparse"]}
_RECURRENT = ("falcon_h1", "granitemoehybrid", "qwen3_next", "qwen3_5_text")


@pytest.mark.parametrize(
    ("family", "changes", "problem"),
    [
        ("granite", {"attention_multiplier": 0.0}, "attention_multiplier"),
        *(
            ("gemma4_text", changes, problem)
            for changes, problem in (
                ({"per_layer_config": {"0": {"head_dim": 24}}}, "differ between layers of one"),
                ({"num_kv_shared_layers": 2}, "leave a layer without entries"),
                ({"num_kv_shared_layers": 9}, "leave a layer without entries"),
                ({"vocab_size_per_layer_input": VOCAB_SIZE - 1}, "lacks some tokens"),
                (_ALL_FULL, "with a window"),
                ({"per_layer_config": None, "global_head_dim": 25}, "heads of 25 numbers"),
                ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
                (_MOE, "feed-forward parts of two sizes"),
            )
        ),
        *((name, {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act") for name in _RECURRENT),
        *((name, {"mamba_n_heads": 10**9}, "mamba_n_heads") for name in _RECURRENT[:2]),
        *((name, {"mamba_d_head": ""}, "mamba_d_head") for name in _RECURRENT[:2]),
        ("nemotron_h", {"layers_block_type": ["mlp", "moe", "full_attention"]}, "beside others"),
        ("nemotron_h", _LETTERS, "layers of type 'X'"),
        ("nemotron_h", {"num_hidden_layers": 2}, "lists 3 layers, and there are 2"),
        ("nemotron_h", {"moe_latent_size": 16}, "moe_latent_size"),
        ("nemotron_h", {"time_step_min": 0.5}, "time_step_min"),
        ("nemotron_h", {"use_bias": True}, "use_bias"),
        ("deepseek_v3", {"q_lora_rank": None}, "attention_bias without a q_lora_rank"),
        ("deepseek_v3", {"n_group": 3}, "experts in 3 groups"),
        ("deepseek_v3", {"topk_group": 1, "num_experts_per_tok": 3}, "3 of 8 experts in 4 groups"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("glm4_moe_lite", _OUT_OF_ORDER, "mlp_layer_types"),
    ],
)
def test_what_is_not_known_of_a_family_is_refused(
    family: str, changes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=problem):
        read_config(changed(family, changes, tmp_path))


def test_one_group_of_experts_is_none(tmp_path: Path) -> None:
    experts = read_config(changed("deepseek_v3", {"n_group": 1, "topk_group": 4}, tmp_path)).experts
    assert experts is not None
    assert (experts.groups, experts.chosen_groups) == (1, 1)


def test_entries_of_latent_attention_are_in_memory_once(tmp_path: Path) -> None:
    changes = {"topk_method": "greedy"}  # groups are then not heeded
    path = changed("deepseek_v2", changes, tmp_path)
    target = NativeTarget.load(path, torch.float32, new_decoder=FusedDecoder)
    assert check_logits(path, target, changes)
    store, sizes = target.cache.store, target.config.latent
    assert sizes is not None
    assert store.keys is store.values
    assert store.shape.bytes_per_token(torch.float32) == 4 * 3 * (sizes.rank + 16)


def test_a_head_of_a_model_that_attends_nowhere_is_refused() -> None:
    source = TrainingTarget(new_target("mamba2", "float32"), "mamba2", "its weights")
    with pytest.raises(CapabilityError, match="mamba2 has none"):
        source.layer(-1)


@pytest.mark.parametrize(
    ("family", "forged", "problem"),
    [
        ("lfm2_moe", {"num_experts": 10**9}, r"experts\.5\.w1\.weight is missing"),
        (
            *("falcon_h1", {"mamba_n_heads": 10**8, "mamba_d_ssm": 16 * 10**8}),
            r"in_proj\.weight has shape",
        ),
    ],
)
def test_forged_numbers_take_no_memory(
    family: str, forged: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    """Names and orders of all rows were made before the file was asked for them."""
    with pytest.raises(ModelLoadError, match=problem):
        NativeTarget.load(changed(family, forged, tmp_path), new_decoder=FusedDecoder)


def test_a_mutated_config_is_right_or_refused(family: str, tmp_path: Path) -> None:
    check_mutations(family, 20, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(1, 6))
def test_five_hundred_mutated_configs_are_right_or_refused(
    family: str, part: int, tmp_path: Path
) -> None:
    check_mutations(family, 100, tmp_path, part)


# ------------------------------------------------------------------------------------------- docs


def table() -> str:
    """The rows of docs/reference/families.md: what the tests above prove."""
    lines = ["| models | `model_type` | GGUF |", "|---|---|---|"]
    for model_type, (people, _) in ROWS.items():
        gguf = FAMILIES[model_type].gguf
        file = f"`{gguf.architecture}`" if gguf else "no"
        lines.append(f"| {people} | `{model_type}` | {file} |")
    kinds = ", ".join(f"`{name}`" for name in encoder_decoders.CONFIGS)
    people = "[T5, BART, Marian](../start/encoder-decoder.md), through transformers"
    lines.append(f"| {people} | {kinds} | no |")
    lines.append("| others, through transformers | any | no |")
    return "\n".join(lines)


def test_the_table_in_the_docs_says_what_is_proven_here() -> None:
    assert table() in TABLE.read_text()
