"""Reading ``config.json``: every family, both spellings of rotary parameters, clear refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from foredraft.core.errors import ModelLoadError
from foredraft.load import plan_models
from foredraft.models.native.config import read_config, why_not_native
from foredraft.models.native.weights import count_weights
from foredraft.options import LoadOptions
from tests.models.checkpoints import (
    NATIVE_CONFIGS,
    made,
    saved_buffers,
    tiny_model,
)

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}

_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def read(directory: Path, raw: dict[str, Any]) -> Any:
    (directory / "config.json").write_text(json.dumps(raw))
    return read_config(directory)


@pytest.mark.parametrize("name", NATIVE_CONFIGS)
def test_every_family_as_transformers_writes_it(name: str, tmp_path: Path) -> None:
    theirs = NATIVE_CONFIGS[name]()
    theirs.save_pretrained(tmp_path)
    ours = read_config(tmp_path)
    assert why_not_native(json.loads((tmp_path / "config.json").read_text()), tmp_path) is None
    for field in (
        "model_type",
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "tie_word_embeddings",
    ):
        said = theirs.to_dict()
        expected = said[field] if field in said else getattr(theirs, field, 1)
        if field == "num_key_value_heads" and ours.latent:
            expected = 1  # an entry is of all heads
        assert getattr(ours, field) == expected, field
    names = ("rms_norm_eps", "norm_eps", "layer_norm_eps", "norm_epsilon", "layer_norm_epsilon")
    assert ours.rms_norm_eps == next(getattr(theirs, n) for n in names if hasattr(theirs, n))
    # As trained, before it is stretched; the rotary embedding of gpt-oss is.
    longest = {"phi3": 1024, "gpt-oss": 131072, "mamba2": 2**20}.get(name, 2048)
    assert ours.max_position_embeddings == longest
    assert ours.eos_token_ids == (2,)
    model = tiny_model(theirs)
    ends = ("_bias", "act_fn.beta", "act_fn.eps", "layer_scalar")
    learned = [*model.parameters(), *saved_buffers(model, *ends)]
    assert count_weights(ours).all == sum(weight.numel() for weight in learned)


def test_dynamic_scaling_goes_by_the_longest_text_that_is_allowed(tmp_path: Path) -> None:
    NATIVE_CONFIGS["llama-dynamic-rope"]().save_pretrained(tmp_path)
    theirs = AutoConfig.from_pretrained(tmp_path)
    for asked, context in ((None, 2048), (1000, 2048), (5000, 5000), (100_000, 4 * 2048)):
        ours = read_config(tmp_path, asked)
        expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](theirs, seq_len=context)
        assert ours.max_position_embeddings == context
        assert torch.allclose(ours.ropes[0].inverse_frequencies(), expected, rtol=1e-5)


def test_older_spellings_of_rotary_parameters(tmp_path: Path) -> None:
    plain = read(tmp_path, {**LLAMA, "rope_theta": 500000.0})
    assert (plain.ropes[0].theta, plain.ropes[0].kind) == (500000.0, "default")
    plain_speeds = read(tmp_path, LLAMA).ropes[0].inverse_frequencies()
    older = read(tmp_path, {**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}})
    newer = read(
        tmp_path,
        {**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    )
    assert torch.equal(older.ropes[0].inverse_frequencies(), newer.ropes[0].inverse_frequencies())
    assert torch.equal(older.ropes[0].inverse_frequencies() * 4, plain_speeds)


def test_defaults_that_a_config_may_leave_out(tmp_path: Path) -> None:
    llama = dict(LLAMA)
    del llama["num_key_value_heads"]
    config = read(tmp_path, llama)
    assert (config.num_key_value_heads, config.head_dim) == (4, 16)
    assert not config.tie_word_embeddings
    assert config.eos_token_ids == ()
    assert read(tmp_path, {**LLAMA, "model_type": "qwen3"}).head_dim == 128
    for said, ids in (([1, 2], (1, 2)), (-1, ())):
        assert read(tmp_path, {**LLAMA, "eos_token_id": said}).eos_token_ids == ids
    gemma = {**LLAMA, "model_type": "gemma"}  # whose gelu is the tanh form
    assert read(tmp_path, gemma | {"hidden_act": "gelu"}).activation == "gelu_tanh"
    assert read(tmp_path, gemma).activation == "gelu_tanh"


MISTRAL, QWEN2 = {**LLAMA, "model_type": "mistral"}, {**LLAMA, "model_type": "qwen2"}
SLIDING = {"sliding_window": 100, "use_sliding_window": True}


PHI3 = {**LLAMA, "model_type": "phi3"}
GEMMA2, GEMMA3 = {**LLAMA, "model_type": "gemma2"}, {**LLAMA, "model_type": "gemma3_text"}
SMOLLM3 = {**LLAMA, "model_type": "smollm3"}
FULL, LOCAL = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("raw", "windows"),
    [
        (LLAMA, (None,) * 3),
        ({**LLAMA, "sliding_window": 100}, (None,) * 3),
        ({**MISTRAL, "sliding_window": 512}, (None,) * 3),
        ({**MISTRAL, "sliding_window": None}, (None,) * 3),
        ({**MISTRAL, "max_position_embeddings": 8192}, (4096,) * 3),
        ({**QWEN2, "sliding_window": 100}, (None,) * 3),
        ({**QWEN2, **SLIDING, "max_window_layers": 0}, (100,) * 3),
        ({**QWEN2, **SLIDING, "max_window_layers": 28}, (None,) * 3),
        ({**QWEN2, **SLIDING, "max_window_layers": 2}, (None, None, 100)),
        ({**QWEN2, **SLIDING, "layer_types": [LOCAL, FULL, FULL]}, (100, None, None)),
        ({**MISTRAL, "sliding_window": 100}, (100, 100, 100)),
        # As transformers has it: such a config is a Ministral.
        ({**MISTRAL, "sliding_window": 100, "layer_types": [FULL] * 3}, (None, None, None)),
        ({**GEMMA2, "sliding_window": 100}, (100, None, 100)),
        ({**GEMMA3, "sliding_window": 100}, (100, 100, 100)),
        ({**GEMMA3, "sliding_window": 100, "sliding_window_pattern": 3}, (100, 100, None)),
        ({**SMOLLM3, **SLIDING, "no_rope_layers": [1, 0, 1]}, (None, 100, None)),
        ({**SMOLLM3, **SLIDING, "no_rope_layer_interval": 3}, (None, None, 100)),
    ],
)
def test_which_layers_see_a_window(
    raw: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    config = read(tmp_path, raw)
    assert tuple(config.kind(index).window for index in range(3)) == windows
    assert config.max_context == raw["max_position_embeddings"], "a window does not cut it"


def test_layers_without_rotary_embedding_and_with_their_own(tmp_path: Path) -> None:
    smollm3 = read(tmp_path, {**SMOLLM3, "no_rope_layer_interval": 2})
    assert [smollm3.kind(index).rope for index in range(3)] == [0, None, 0]
    assert smollm3.ropes[0].theta == 2e6
    older = {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "sliding_window_pattern": 2}
    scaling = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    gemma3 = read(tmp_path, {**GEMMA3, **older, **scaling})
    assert [(rope.theta, rope.kind) for rope in gemma3.ropes] == [(5e5, "linear"), (2e4, "default")]
    assert [gemma3.kind(index).rope for index in range(3)] == [1, 0, 1]


LONG = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}


def test_longrope_is_for_short_texts_unless_somebody_asks_for_more(tmp_path: Path) -> None:
    raw = {**PHI3, "rope_scaling": LONG, "original_max_position_embeddings": 128}
    short = read(tmp_path, raw)
    assert (short.max_context, short.ropes[0].is_long) == (128, False)
    assert read_config(tmp_path, max_context=128) == short
    long = read_config(tmp_path, max_context=129)
    assert (long.max_context, long.ropes[0].is_long) == (512, True)
    slower = long.ropes[0].inverse_frequencies() * 4
    assert torch.allclose(slower, short.ropes[0].inverse_frequencies())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not one of llama, mistral, qwen2, qwen3,"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "weights quantised as ''"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, "rotary scaling 'ntk'"),
        ({"rope_scaling": {**LONG, "type": "longrope"}, "head_dim": 8}, "short_factor has 8 num"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not"),
        ({**PHI3, "partial_rotary_factor": 0.2}, "rotary embedding of 3 numbers"),
        ({"rope_parameters": {FULL: {"rope_type": "default"}}}, "by layer type"),
        ({**GEMMA3, "rope_parameters": {"factor": 8.0}}, "not those of a layer type"),
        ({**GEMMA3, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({**GEMMA2, "layer_types": [FULL]}, "layer_types lists 1 layers, and there are 3"),
        ({**GEMMA2, "layer_types": [FULL, FULL, "chunked_attention"]}, "'chunked_attention'"),
        ({**QWEN2, "layer_types": [FULL, FULL, LOCAL]}, "without a window"),
        ({**SMOLLM3, "no_rope_layers": [1]}, "no_rope_layers lists 1 layers"),
        ({"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2.0}}, "no finite numb"),
    ],
)
def test_what_the_decoder_lacks_is_refused(
    change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    raw = {**LLAMA, **change}
    assert re.search(reason, why_not_native(raw, tmp_path) or "")
    with pytest.raises(ModelLoadError, match=reason) as refused:
        read(tmp_path, raw)
    assert "backend 'hf'" in str(refused.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads is 0; it should be greater than or"),
        ({"num_attention_heads": -4}, "num_attention_heads is -4"),
        ({"num_attention_heads": 4.0}, "num_attention_heads is 4.0; it should be a valid integer"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"num_attention_heads": "4"}, "num_attention_heads is '4'"),
        ({"num_attention_heads": None}, "num_attention_heads is None"),
        ({"num_attention_heads": [4]}, r"num_attention_heads is \[4\]"),
        ({"num_attention_heads": 100}, "make heads of 0; rotary embedding needs an even size"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of .* 3"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"head_dim": 7}, "heads of 7"),
        ({"vocab_size": 10**30}, "vocab_size is 10+; it should be less than"),
        ({"max_position_embeddings": 2**31}, "max_position_embeddings is 2147483648"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rms_norm_eps": ...}, "does not give 'rms_norm_eps'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_theta": float("nan")}, "rope_theta is nan; it should be a finite number"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
        ({"rope_scaling": 3}, "rope_scaling is 3"),
        ({"rope_scaling": {"type": 3}}, r"rope_scaling\.\w*type is 3"),
        ({"rope_scaling": {"type": "linear"}}, "rotary scaling 'linear' needs factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, r"rope_scaling\.factor is 0"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "needs low_freq_factor, high_freq"),
        ({"rope_parameters": {**_LLAMA3, "low_freq_factor": 4.0}}, "4.0 must be below .* 4.0"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'; it must be a token id, or a list"),
        ({"eos_token_id": [1, None]}, r"eos_token_id\.1 is None"),
        ({"eos_token_id": -2}, r"eos_token_id\.0 is -2"),
        ({"eos_token_id": {}, "hidden_act": 1, "vocab_size": "", "head_dim": ""}, "and 1 more"),
        ({"hidden_size": "x" * 10_000}, "hidden_size is 'x{1,40}\\.\\.\\.x{1,40}'"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    raw = {name: value for name, value in {**LLAMA, **change}.items() if value != ...}
    with pytest.raises(ModelLoadError, match=message) as refused:
        read(tmp_path, raw)
    assert str(tmp_path / "config.json") in str(refused.value)
    with pytest.raises(ModelLoadError, match=message):
        why_not_native(raw, tmp_path)


@pytest.mark.parametrize("content", [None, "{", "[1, 2]", " " * (65 << 20)])
def test_a_config_that_cannot_be_read(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        read_config(tmp_path)


def test_a_plan_says_how_longer_texts_are_asked_for() -> None:
    plan, _ = plan_models(LoadOptions(model=str(made("phi3")), device="cpu"))
    assert plan.max_context == 1024
    assert any("max_context=2048 asks for more" in note for note in plan.notes)
    plan, _ = plan_models(LoadOptions(model=str(made("phi3")), device="cpu", max_context=2048))
    assert plan.max_context == 2048
    assert not any("asks for more" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"type": "yarn", "factor": 4.0}, 512),
        ({"type": "linear", "factor": 2.0, "original_max_position_embeddings": 128}, 256),
        ({"type": "linear", "factor": 2.0}, 128),  # the context is the extended one already
        ({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}, 128),
    ],
)
def test_scaling_extends_the_context_as_model_cards_say(
    tmp_path: Path, scaling: dict[str, Any], context: int
) -> None:
    raw = {**LLAMA, "max_position_embeddings": 128, "rope_theta": 1e4, "rope_scaling": scaling}
    assert read(tmp_path, raw).max_context == context
