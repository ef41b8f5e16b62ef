"""Models of transformers as targets: the same tokens, fed in any way, give the same logits."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from foredraft.core.errors import CapabilityError, ConfigError, ModelLoadError
from foredraft.core.tree import ROOT, TokenTree
from foredraft.models.base import Capabilities, ScoreRow
from foredraft.models.hf.target import HFTarget
from tests.models.checkpoints import (
    NATIVE_CONFIGS,
    VOCAB_SIZE,
    read,
    save_checkpoint,
    text,
    tiny_model,
)

TREE = TokenTree((7, 8, 9, 8, 10, 11, 8), (ROOT, ROOT, 0, 0, 1, 2, 4))
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
WINDOW = 8
"""Shorter than the texts here: whatever treats a window as full attention shows."""

CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": NATIVE_CONFIGS["llama"],
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=64, n_layer=3, n_head=4, n_positions=256
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SIZES),
    "phi": lambda: transformers.PhiConfig(**SIZES),
    "gemma2": lambda: transformers.Gemma2Config(
        **SIZES,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=WINDOW,
        final_logit_softcapping=4.0,  # small enough to be felt
    ),
    "mistral-window": lambda: transformers.MistralConfig(
        **SIZES, num_key_value_heads=2, sliding_window=WINDOW
    ),
    "qwen2-window": lambda: transformers.Qwen2Config(
        **SIZES,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=1,
    ),
}


@pytest.fixture(scope="module", params=CONFIGS)
def target(request: pytest.FixtureRequest) -> HFTarget:
    return HFTarget(tiny_model(CONFIGS[request.param]()))


@pytest.fixture(scope="module")
def llama() -> HFTarget:
    return HFTarget(tiny_model(CONFIGS["llama"]()))


def reference(target: HFTarget, tokens: list[int]) -> Tensor:
    """Logits [T, V] after each token, read in one go without a cache."""
    with torch.inference_mode():
        logits: Tensor = target.model(torch.tensor([tokens]), use_cache=False).logits
    return logits[0]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max().item() < 1e-4


def test_a_chain_equals_the_model_read_in_one_go(target: HFTarget) -> None:
    tokens = text(30)
    slot = read(target, tokens[:20])
    [scores] = target.score([ScoreRow(slot, tokens[20:], TokenTree.chain((5, 6)))])
    assert_close(scores.logits_NV, reference(target, [*tokens, 5, 6])[-3:])


def test_a_tree_equals_each_of_its_paths_read_alone(target: HFTarget) -> None:
    assert target.capabilities.tree_attention
    tokens = text(30)
    slot = read(target, tokens[:28])
    [scores] = target.score([ScoreRow(slot, tokens[28:], TREE)])
    for node, path in enumerate([(), *TREE.paths]):
        expected = reference(target, [*tokens, *(TREE.tokens[i] for i in path)])
        assert_close(scores.logits_NV[node], expected[-1])


def test_after_keep_only_the_accepted_path_remains(target: HFTarget) -> None:
    tokens = text(30)
    slot = read(target, tokens[:28])
    target.score([ScoreRow(slot, tokens[28:], TREE)])
    target.cache.keep(slot, 2, (1, 4, 6))
    assert target.cache.length(slot) == 33
    [scores] = target.score([ScoreRow(slot, [42])])
    assert_close(scores.logits_NV, reference(target, [*tokens, 8, 10, 8, 42])[-1:])


def test_truncate_fork_and_rejected_drafts_leave_nothing_behind(target: HFTarget) -> None:
    tokens = text(30)
    slot = read(target, tokens)
    copy = target.cache.fork(slot)
    target.score([ScoreRow(slot, [1], TokenTree.chain((2, 3)))])
    target.cache.keep(slot, 1, ())
    target.cache.truncate(copy, 12)
    rows = [ScoreRow(slot, [4]), ScoreRow(copy, [5])]
    first, second = target.score(rows)
    assert_close(first.logits_NV, reference(target, [*tokens, 1, 4])[-1:])
    assert_close(second.logits_NV, reference(target, [*tokens[:12], 5])[-1:])


def test_a_failed_forward_leaves_the_slot_as_it_was(
    llama: HFTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = text(10)
    slot = read(llama, tokens)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of memory")

    last = llama.model.model.layers[-1]
    monkeypatch.setattr(last, "forward", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        llama.score([ScoreRow(slot, [3, 4])])
    monkeypatch.undo()
    assert llama.cache.length(slot) == 10
    [scores] = llama.score([ScoreRow(slot, [5])])
    assert_close(scores.logits_NV, reference(llama, [*tokens, 5])[-1:])


def test_taps_are_the_outputs_of_the_layers(target: HFTarget) -> None:
    """That of the last layer is what the final norm is given, where that is known."""
    tokens, last = text(12), 2
    with torch.inference_mode():
        states = target.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    slot, there = target.cache.allocate(), target.capabilities.taps
    [scores] = target.score([ScoreRow(slot, tokens)], taps=there)
    for layer in (0, 1):
        assert_close(scores.taps[layer], states[layer + 1][0])
    assert (last in there) == (target.capabilities.parts is not None)
    if last in there:
        assert_close(target.parts.norm(scores.taps[last]), states[-1][0])
        [only] = target.score([ScoreRow(slot, tokens)], taps=(last,))
        assert torch.equal(only.taps[last], scores.taps[last])
    with pytest.raises(ConfigError, match=f"layer 3 cannot be tapped.* 0 to {there.stop - 1}"):
        target.score([ScoreRow(slot, tokens)], taps=(3,))


def test_parts_make_the_logits(target: HFTarget) -> None:
    """Gemma caps its logits and Phi's head has a bias: theirs are not had from the parts alone."""
    config = target.model.config.model_type
    assert (target.capabilities.parts is not None) == (config not in ("gemma2", "phi"))
    if not target.capabilities.parts:
        with pytest.raises(CapabilityError, match="no drafter can stand on them"):
            _ = target.parts
        return
    parts, ids_T = target.parts, torch.tensor([3, 5, 8, 250])
    [scores] = target.score([ScoreRow(target.cache.allocate(), text(9), TREE)], taps=(2,))
    normed_TE = parts.norm(scores.taps[2][8:])
    assert_close(parts.logits(normed_TE), scores.logits_NV)
    assert_close(parts.logits(normed_TE)[:, ids_T], normed_TE @ parts.head_rows(ids_T).T)
    assert (parts.hidden_size, parts.dtype) == (64, torch.float32)
    assert_close(parts.embed(ids_T), target.model.get_input_embeddings().weight[ids_T])


def test_a_chunk_without_logits_says_nothing(target: HFTarget) -> None:
    tokens, slot = text(30), target.cache.allocate()
    [scores] = target.score([ScoreRow(slot, tokens[:20], wants_logits=False)], taps=(1,))
    assert (scores.logits_NV.shape, len(scores.taps[1])) == ((0, VOCAB_SIZE), 20)
    target.cache.keep(slot, 20, ())
    [scores] = target.score([ScoreRow(slot, tokens[20:])])
    assert_close(scores.logits_NV, reference(target, tokens)[-1:])


def test_bfloat16_models_score_trees() -> None:
    target = HFTarget(tiny_model(CONFIGS["llama"]()).to(torch.bfloat16))
    assert target.capabilities == Capabilities(
        tree_attention=True, taps=range(3), parts=target.parts, cache_layers=target
    )
    [scores] = target.score([ScoreRow(target.cache.allocate(), [1, 2], TREE)])
    assert scores.logits_NV.dtype == torch.float32


def test_models_without_explicit_positions_score_chains_only() -> None:
    config = transformers.BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=64, n_layer=2, n_head=4)
    target = HFTarget(tiny_model(config))
    assert not target.capabilities.tree_attention
    tokens = text(20)
    slot = read(target, tokens[:9])
    [scores] = target.score([ScoreRow(slot, tokens[9:], TokenTree.chain((5, 6)))])
    assert_close(scores.logits_NV, reference(target, [*tokens, 5, 6])[-3:])


@pytest.mark.parametrize(
    ("family", "ignored"), [("llama", "attention_mask"), ("gpt2", "position_ids")]
)
def test_a_model_that_ignores_what_a_tree_needs_is_found_out(family: str, ignored: str) -> None:
    model = tiny_model(CONFIGS[family]())
    forward = model.forward

    @functools.wraps(forward)
    def deaf(**kwargs: Any) -> Any:
        return forward(**{**kwargs, ignored: None})

    model.forward = deaf  # type: ignore[method-assign]
    assert not HFTarget(model).capabilities.tree_attention


def test_encoder_decoder_models_are_refused() -> None:
    config = transformers.T5Config(vocab_size=VOCAB_SIZE, d_model=32, d_ff=32, num_layers=1)
    model = transformers.T5ForConditionalGeneration(config).eval()
    with pytest.raises(CapabilityError, match="not a causal language model"):
        HFTarget(model)


def test_a_model_in_training_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"call model\.eval\(\)"):
        HFTarget(tiny_model(CONFIGS["gpt2"]()).train())


def test_context_is_limited_by_the_model_and_by_the_caller() -> None:
    model = tiny_model(CONFIGS["gpt2"]())
    assert HFTarget(model, trees=False).max_context == 256
    assert HFTarget(model, 100, trees=False).max_context == 100
    target = HFTarget(model, 8, trees=False)
    slot = read(target, text(8))
    for use in (
        lambda: target.score([ScoreRow(slot, [1])]),
        lambda: target.cache.reserve(slot, 1),
    ):
        with pytest.raises(ValueError, match="9 cache entries wanted; a slot holds 8"):
            use()


# Loading


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path, CONFIGS["gpt2"]())
    return tmp_path


def change_weights(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def test_a_loaded_checkpoint_equals_the_model_it_was_saved_from(checkpoint: Path) -> None:
    target = HFTarget.load(checkpoint, torch.float32, "cpu", 64)
    saved = HFTarget(tiny_model(CONFIGS["gpt2"]()), trees=False)
    assert target.max_context == 64
    assert_close(reference(target, text(10)), reference(saved, text(10)))


def test_missing_weights_are_never_made_up(checkpoint: Path) -> None:
    change_weights(checkpoint, lambda weights: weights.pop("transformer.h.1.mlp.c_fc.weight"))
    with pytest.raises(ModelLoadError, match=r"h\.1\.mlp\.c_fc\.weight missing"):
        HFTarget.load(checkpoint)


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_layer": 2**31 - 1}, "num_hidden_layers is 2147483647, and the weight files hold"),
        ({"vocab_size": 10**9}, "vocab_size is 1000000000, .* whose longest side is"),
        ({"n_head": "x"}, "cannot be run by transformers: Strict"),
        ({"text_config": 3}, "cannot be run by transformers: AttributeError"),
        ({"embd_pdrop": float("nan")}, "cannot be run by transformers: RuntimeError"),
        ({"n_inner": 10**6}, r"describes 38\d,[\d,]* weights, and the files hold"),
        ({"model_type": ["gpt2"]}, "cannot be run by transformers"),
    ],
)
def test_a_config_that_cannot_be_is_refused(
    checkpoint: Path, changes: dict[str, Any], message: str
) -> None:
    change_config(checkpoint, **changes)
    with pytest.raises(ModelLoadError, match=message) as refused:
        HFTarget.load(checkpoint)
    assert len(str(refused.value)) < 700


def test_weights_that_mean_nothing_without_scales_are_refused(checkpoint: Path) -> None:
    name = "transformer.h.1.mlp.c_fc.weight"
    change_weights(checkpoint, lambda weights: weights.update({name: weights[name].to(torch.int8)}))
    with pytest.raises(ModelLoadError, match=rf"{name} is stored as I8"):
        HFTarget.load(checkpoint)


def test_tensors_that_are_left_out_are_named(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change_weights(checkpoint, lambda weights: weights.update({"visual.weight": torch.ones(3)}))
    HFTarget.load(checkpoint)
    assert "are left out: visual.weight" in caplog.text


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(checkpoint: Path, value: float) -> None:
    name = "transformer.h.0.attn.c_attn.weight"
    change_weights(checkpoint, lambda weights: weights[name][3, 5].fill_(value))
    with pytest.raises(ModelLoadError, match=rf"NaN or infinite weights in {name}"):
        HFTarget.load(checkpoint)
