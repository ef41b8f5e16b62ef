"""From names to models: in one direction, each step once, mistakes before anything costs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import foredraft.load
from benchmarks.random_model import random_config
from foredraft import LLM, SamplingParams
from foredraft.core.errors import ConfigError, ModelLoadError, VocabularyMismatchError
from foredraft.kernels.build import LIBRARIES
from foredraft.load import load_models, native_decoder, plan_models, plan_native
from foredraft.models.native import cuda
from foredraft.models.text.tokenizer import Tokenizer
from foredraft.options import LoadOptions
from foredraft.system.devices import resolve_device
from foredraft.system.machine import give_memory_back
from tests.models.checkpoints import (
    NATIVE_CONFIGS,
    VOCAB_SIZE,
    save_checkpoint,
    save_tokenizer,
    tiny_model,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save_checkpoint(directory, NATIVE_CONFIGS["llama"]())
    return directory


def asked(checkpoint: Path, **options: object) -> LoadOptions:
    return LoadOptions.of(**{"model": str(checkpoint), "device": "cpu", **options})


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise AssertionError("went on to the weights")

    monkeypatch.setattr(foredraft.load, "load_target", load)


def test_target_and_draft_model_are_loaded_as_planned(checkpoint: Path) -> None:
    options = asked(checkpoint, draft_model=str(checkpoint), max_context=64)
    plans = plan_models(options)
    target, draft = load_models(options)
    assert draft is not None
    assert (target.plan.decoder, draft.plan.decoder) == tuple(p.decoder for p in plans if p)
    assert target.plan.directory == checkpoint
    assert target.target is not draft.target
    assert target.target.max_context == 64


def misshapen(directory: Path) -> None:
    save_checkpoint(directory, NATIVE_CONFIGS["llama"]())
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 4}))


def of_other_tokens(directory: Path) -> None:
    save_checkpoint(directory, NATIVE_CONFIGS["llama"]())
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(content))


SPOILT: dict[str, Callable[[Path], object]] = {
    "empty": lambda directory: None,
    "misshapen": misshapen,
}


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("nowhere/to/be/found", ConfigError, "no such directory"),
        ("smollm2-135m-instrukt", ConfigError, "did you mean 'smollm2-135m-instruct'"),
        ("SmolLM2-135M", ConfigError, "did you mean 'smollm2-135m-instruct'"),
        ("empty", ModelLoadError, r"has no config\.json"),
        ("misshapen", ModelLoadError, "hold 3 layers"),
    ],
)
@pytest.mark.parametrize("which", ["model", "draft_model"])
def test_a_mistake_about_a_model_costs_no_weights(
    checkpoint: Path, tmp_path: Path, which: str, name: str, kind: type[Exception], message: str
) -> None:
    if name in SPOILT:
        SPOILT[name](tmp_path)
        name = str(tmp_path)
    with pytest.raises(kind, match=message):
        load_models(asked(checkpoint, **{which: name}))


@pytest.mark.usefixtures("no_weights")
def test_a_draft_model_of_another_vocabulary_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    of_other_tokens(tmp_path)
    with pytest.raises(VocabularyMismatchError) as caught:
        load_models(asked(checkpoint, draft_model=str(tmp_path)))
    for directory in (checkpoint, tmp_path):
        tokenizer = Tokenizer(directory)
        for said in (tokenizer.fingerprint, directory, tokenizer.vocab_size):
            assert str(said) in str(caught.value)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("with_draft", [False, True])
def test_a_cache_that_the_machine_cannot_hold_is_refused(
    checkpoint: Path, with_draft: bool
) -> None:
    draft = {"draft_model": str(checkpoint)} if with_draft else {}
    with pytest.raises(ConfigError, match="GB for caches"):
        load_models(asked(checkpoint, cache_memory="9000GB", **draft))


def save(directory: Path, config: Any, kind: Any = None) -> Path:
    model = tiny_model(config) if kind is None else kind(config)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return directory


@pytest.mark.parametrize(
    "config",
    [
        transformers.BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=64, n_layer=2, n_head=4),
        transformers.MptConfig(vocab_size=VOCAB_SIZE, d_model=64, n_layers=2, n_heads=4),
    ],
    ids=["bloom", "mpt"],
)
def test_configurations_with_names_of_their_own(config: Any, tmp_path: Path) -> None:
    llm = LLM.load(save(tmp_path, config), drafter="suffix", calibrate=False)
    expected = LLM.load(tmp_path, drafter="none").generate([[5, 6, 7] * 9])[0]
    assert llm.generate([[5, 6, 7] * 9])[0].token_ids == expected.token_ids


def test_a_sliding_window_cuts_no_prompt(tmp_path: Path) -> None:
    config = transformers.MistralConfig(
        **{**NATIVE_CONFIGS["mistral"]().to_dict(), "sliding_window": 16}
    )
    save(tmp_path, config)
    llm = LLM.load(tmp_path, drafter="none")
    assert llm.plan is not None
    assert llm.plan.backend == "native"
    assert llm.target.max_context == config.max_position_embeddings
    assert len(llm.generate([[5] * 200], SamplingParams(max_tokens=3))[0].token_ids) == 3


def test_nothing_is_compiled_once_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(foredraft.load, "load_library", made.append)
    assert foredraft.load._kernel_problem() is None
    assert made == [*LIBRARIES]


def test_an_int8_cache_is_planned_loaded_and_given_to_drafts(checkpoint: Path) -> None:
    plain, _ = plan_models(asked(checkpoint, dtype="bfloat16"))
    options = asked(checkpoint, dtype="bfloat16", cache_dtype="int8", draft_model=str(checkpoint))
    plan, draft_plan = plan_models(options)
    assert draft_plan is not None
    if plan.decoder != "fused":
        pytest.skip("no fused kernel")
    assert plan.cache_dtype == draft_plan.cache_dtype == "int8"
    assert "int8 cache" in plan.number_format
    head = plan.checkpoint.config["head_dim"] if plan.checkpoint else 0
    assert plan.cache_bytes_per_token / plain.cache_bytes_per_token == (head + 4) / (2 * head)
    llm = LLM.load(**{**vars(options), "calibrate": False})
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)
    [drafted] = llm.generate([[5, 6, 7, 8]], params)
    [alone] = LLM.load(
        **{**vars(options), "calibrate": False, "draft_model": None, "drafter": "none"}
    ).generate([[5, 6, 7, 8]], params)
    assert drafted.stats.accepted > 0
    assert drafted.token_ids == alone.token_ids


def test_an_int8_cache_is_refused_where_nothing_reads_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"cache_dtype 'int8'.*runs through transformers"):
        plan_models(asked(checkpoint, cache_dtype="int8", backend="hf"))
    monkeypatch.setenv("FOREDRAFT_KERNELS", "off")
    with pytest.raises(ConfigError, match=r"cache_dtype 'int8' is there on CPU with the fused"):
        plan_models(asked(checkpoint, cache_dtype="int8"))
    with pytest.raises(ConfigError, match="unknown cache_dtype 'int4'"):
        asked(checkpoint, cache_dtype="int4")


def test_activations_of_8_bits_are_planned_for_weights_in_4(checkpoint: Path) -> None:
    plan, _ = plan_models(asked(checkpoint, weights="int4", activations="int8"))
    if plan.decoder != "fused":
        pytest.skip("no fused kernel")
    assert plan.activation_bits == 8
    assert "int4 weights, int8 activations" in plan.number_format
    for weights in ("auto", "int8"):
        with pytest.raises(ConfigError, match=r"activations 'int8' are for weights in 4 bits"):
            plan_models(asked(checkpoint, weights=weights, activations="int8"))
    with pytest.raises(ConfigError, match=r"activations 'int8'.*runs through transformers"):
        plan_models(asked(checkpoint, activations="int8", backend="hf"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's figures")
def test_memory_that_was_freed_goes_back_to_the_system() -> None:
    def resident() -> int:
        status = Path("/proc/self/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) << 10

    pieces = [bytes(50_000) for _ in range(2_000)]
    keeps_the_end = bytes(50_000)
    del pieces
    before = resident()
    give_memory_back()
    assert before - resident() > 50_000_000
    assert not any(keeps_the_end)


# --------------------------------------------------------------------- which decoder a machine gets


CONFIG = random_config("smollm2-135m")


@pytest.mark.parametrize(
    ("device", "capability", "decoder"),
    [
        ("cuda", (8, 0), "graphed"),
        ("cuda:1", (9, 0), "graphed"),
        ("auto", (12, 0), "graphed"),
        ("cuda", (7, 5), "eager"),
    ],
)
def test_a_gpu_has_the_decoder_that_it_can_run(
    device: str,
    capability: tuple[int, int],
    decoder: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(cuda, "has_triton", lambda device: device.type == "cuda")
    plan = plan_native("model", None, CONFIG, LoadOptions(), resolve_device(device))
    assert (plan.decoder, plan.dtype, plan.is_exact) == (decoder, "bfloat16", False)
    assert any("compute capability 8.0" in note for note in plan.notes) == (decoder == "eager")
    plan = plan_native("model", None, CONFIG, LoadOptions(exact=True), resolve_device(device))
    assert (plan.decoder, plan.is_exact) == ("fixed-shape", True)
    made = native_decoder(plan.decoder)
    # By the GPU's own kernels, where it has them.
    assert made is cuda.exact_decoder


def test_layers_that_gpus_kernels_do_not_know_are_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "has_kernels", lambda _: True)
    for name, decoder in (("smollm2-135m", "graphed"), ("qwen3.5-0.8b", "eager")):
        plan = plan_native("model", None, random_config(name), LoadOptions(), "cuda")
        assert plan.decoder == decoder
    assert any(note.endswith("slower: recurrent layers") for note in plan.notes)


@pytest.mark.parametrize(("exact", "decoder"), [(False, "eager"), (True, "fixed-shape")])
def test_a_cpu_without_the_kernel_runs_eagerly(
    exact: bool, decoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foredraft.load._kernel_problem", lambda: "no compiler")
    plan = plan_native("model", None, CONFIG, LoadOptions(exact=exact), "cpu")
    assert plan.decoder == decoder


def test_a_missing_gpu_is_an_error() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match="sees no CUDA device"):
        resolve_device("cuda")
