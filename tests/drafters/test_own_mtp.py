"""Layers that a model brings to predict further tokens: what they compute, and that they draft.

The layer's reference is transformers' model of one such layer; the join around it is as vLLM and
transformers have it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig

from benchmarks.gguf import write_gguf
from benchmarks.gguf_models import save_tiny
from foredraft.core.errors import CapabilityError
from foredraft.core.params import SamplingParams
from foredraft.drafters.heads.mtp import OwnMtp
from foredraft.llm import LLM
from foredraft.load import load_target, plan_models, resolve_drafter
from foredraft.models.base import HeadRow, ScoreRow
from foredraft.models.files.safety import Checkpoint
from foredraft.models.native.config import read_config
from foredraft.models.native.cpu import FusedDecoder
from foredraft.models.native.model import EagerDecoder
from foredraft.models.native.target import NativeTarget
from foredraft.models.native.weights import why_not_as_stored
from foredraft.options import LoadOptions
from tests.models.checkpoints import NATIVE_CONFIGS, need_kernel, save_checkpoint

NAMES: Mapping[str, tuple[str, str, str, str, str]] = {
    "qwen3.5": ("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    "qwen3.5-moe": ("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    "qwen3-next": ("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    "glm4-moe": ("model.layers.3.", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "deepseek-v3": ("model.layers.3.", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "glm4-moe-lite": ("model.layers.3.", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "mimo": (
        *("model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj"),
        "final_layernorm",
    ),
}
"""As published: what names begin with, and norms of token and state, projection and last norm."""
TOKENS = [(7 * i) % 90 + 3 for i in range(12)]
PROMPTS = ([3, 1, 4], [7, 8, 9, 7, 8, 9, 7, 8], [5, 5, 3], [(7 * i) % 90 + 3 for i in range(100)])


class Made:
    """A checkpoint with such a layer.

    Attributes:
        main: transformers' model.
        layer: its model of the layer alone.
        extra: tensors around the layer: norms, without what the family adds to them, and join.
    """

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        new = NATIVE_CONFIGS["qwen2" if name == "mimo" else name]
        self.main = save_checkpoint(path, new())
        self.layer = save_checkpoint(path / "layer", _of_one_layer(new()), seed=5)
        generator, hidden = torch.Generator().manual_seed(3), new().hidden_size
        self.offset = 1.0 if name.startswith("qwen3") else 0.0

        def norm() -> Tensor:
            return 1 - self.offset + 0.1 * torch.randn(hidden, generator=generator)

        join = 0.15 * torch.randn(hidden, 2 * hidden, generator=generator)
        self.token_norm, self.state_norm, self.join = norm(), norm(), join
        with torch.no_grad():  # a head that is sure of something drafts it
            last = self.layer.model.norm.weight
            last.copy_(8 * (last + self.offset) - self.offset)
        self.layer.save_pretrained(path / "layer")
        self._save()

    def _save(self) -> None:
        prefix, token_norm, state_norm, join, last_norm = NAMES[self.name]
        before = "mtp.layers.0." if prefix == "mtp." else prefix
        stored = load_file(self.path / "model.safetensors")
        for name, tensor in load_file(self.path / "layer/model.safetensors").items():
            if name.startswith("model.layers.0."):
                stored[before + name.removeprefix("model.layers.0.")] = tensor
            elif name == "model.norm.weight":
                stored[f"{prefix}{last_norm}.weight"] = tensor
        stored[f"{prefix}{token_norm}.weight"] = self.token_norm
        stored[f"{prefix}{state_norm}.weight"] = self.state_norm
        stored[f"{prefix}{join}.weight"] = self.join
        save_file(stored, self.path / "model.safetensors", {"format": "pt"})
        if self.name == "mimo":
            config = json.loads((self.path / "config.json").read_text())
            (self.path / "config.json").write_text(json.dumps(config | {"model_type": "mimo"}))

    def joined(self, following: Sequence[int], states_TE: Tensor) -> Tensor:
        eps = self.main.config.rms_norm_eps
        embedded_TE = self.main.get_input_embeddings()(torch.tensor(following))

        def normed(x_TE: Tensor, weight: Tensor) -> Tensor:
            x_TE = x_TE * torch.rsqrt(x_TE.square().mean(-1, keepdim=True) + eps)
            return x_TE * (weight + self.offset)

        token, state = normed(embedded_TE, self.token_norm), normed(states_TE, self.state_norm)
        both = (state, token) if self.name == "mimo" else (token, state)
        return torch.cat(both, -1) @ self.join.T

    @torch.inference_mode()
    def drafted(self, tokens: Sequence[int], count: int) -> list[Tensor]:
        """Logits [V] of the next tokens but one of a text, guessed one behind the other."""
        states_TE = self.main.model(torch.tensor([tokens])).last_hidden_state[0]
        following = [*tokens[1:], int(self.main.lm_head(states_TE[-1]).argmax())]
        inputs_TE, found = self.joined(following, states_TE), list[Tensor]()
        for _ in range(count):
            outputs = self.layer.model(inputs_embeds=inputs_TE[None]).last_hidden_state[0]
            found.append(self.main.lm_head(outputs[-1]))
            own_TE = self.joined([int(found[-1].argmax())], outputs[-1:])
            inputs_TE = torch.cat((inputs_TE, own_TE))
        return found


def _of_one_layer(config: PretrainedConfig) -> PretrainedConfig:
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"]
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0
    if hasattr(config, "mlp_layer_types"):
        config.mlp_layer_types = ["sparse"]
    return config


OTHERS = pytest.param("glm4-moe-lite", marks=pytest.mark.slow)
"""What others show already, of what takes seconds."""


@pytest.fixture(scope="module", params=NAMES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    need_kernel()
    return Made(request.param, tmp_path_factory.mktemp("mtp"))


def new_target(made: Made, decoder: Callable[..., Any] = FusedDecoder, **more: Any) -> NativeTarget:
    return NativeTarget.load(made.path, torch.float32, new_decoder=decoder, max_context=512, **more)


def drafted(target: NativeTarget) -> list[Tensor]:
    """As `Made.drafted` of `TOKENS`, three times."""
    runner, slot = OwnMtp(target).runner(target), target.cache.allocate()
    scores = target.score([ScoreRow(slot, TOKENS)], (target.num_layers - 1,))
    target.cache.keep(slot, len(TOKENS), ())
    next_token = int(scores[0].logits_NV[0].argmax())
    taps = [scores.taps[target.num_layers - 1]]
    inputs_TE = runner.text_inputs([*TOKENS[1:], next_token], taps)
    start, found = 0, list[Tensor]()
    for _ in range(3):
        states_TE, logits_NV = runner.run([HeadRow(slot, start, len(inputs_TE))], inputs_TE)
        start += len(inputs_TE)
        found.append(logits_NV[-1])
        inputs_TE = runner.own_inputs([int(logits_NV[-1].argmax())], states_TE[-1:])
    return found


@pytest.mark.parametrize("decoder", [EagerDecoder, FusedDecoder])
def test_it_computes_what_its_makers_publish(made: Made, decoder: Callable[..., Any]) -> None:
    found = drafted(new_target(made, decoder))
    # The join is in few bits, or has a table in bfloat16: nearly the same numbers.
    for own_V, expected_V in zip(found, made.drafted(TOKENS, 3), strict=True):
        assert own_V.argmax() == expected_V.argmax()
        assert (own_V - expected_V).abs().max() < 0.1 * expected_V.std()


@pytest.mark.parametrize(
    ("temperature", "bits"),
    [
        (0.0, None),
        (1.0, 4),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [(0.0, 8), (1.0, 8), (1.0, None)]
        ),
    ],
)
@pytest.mark.parametrize(
    "made", [*(name for name in NAMES if name not in OTHERS.values), OTHERS], indirect=True
)
def test_drafts_change_no_text(made: Made, temperature: float, bits: int | None) -> None:
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=40, ignore_eos=True)
    alone = LLM(new_target(made, bits=bits), None, LoadOptions(drafter="none"))
    expected = [result.token_ids for result in alone.generate(list(PROMPTS), params)]
    for branching in (1, 4):
        options = LoadOptions(
            drafter="mtp", num_draft_tokens=4, drafter_options={"branching": branching}
        )
        llm = LLM(new_target(made, bits=bits), None, options)
        for size in (1, 4):  # the second time behind a cached beginning
            batches = [list(PROMPTS[at : at + size]) for at in range(0, 4, size)]
            results = [result for batch in batches for result in llm.generate(batch, params)]
            assert [result.token_ids for result in results] == expected
            assert sum(result.stats.drafted for result in results) > 0


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-moe", "qwen3-next", "glm4-moe"])
def test_gguf_files_bring_it(name: str, kind: str, tmp_path: Path) -> None:
    """The numbers of the file, and of a checkpoint with the same numbers, draft alike."""
    same, path = _with_copied_layer(name, tmp_path), tmp_path / "model.gguf"
    numbers = dict[str, Any]()
    write_gguf(same, path, kind, numbers)
    tensors = {name: torch.from_numpy(values).contiguous() for name, values in numbers.items()}
    save_file(tensors, same / "model.safetensors", {"format": "pt"})
    options = LoadOptions(model=str(path), device="cpu", dtype="float32", activations="int16")
    file, expected = load_target(plan_models(options)[0]), NativeTarget.load(same, torch.float32)
    assert isinstance(file, NativeTarget)
    for own_V, expected_V in zip(drafted(file), drafted(expected), strict=True):
        assert (own_V - expected_V).abs().max() < 0.1 * expected_V.std()
    params, drafts = SamplingParams(temperature=1.0, seed=5, max_tokens=24, ignore_eos=True), 0
    texts = list[list[Sequence[int]]]()
    for drafter in ("none", "mtp"):
        count = None if drafter == "none" else 3
        llm = LLM(file, None, LoadOptions(drafter=drafter, num_draft_tokens=count))
        results = llm.generate(list(PROMPTS), params)
        texts.append([result.token_ids for result in results])
        drafts += sum(result.stats.drafted for result in results)
    assert texts[0] == texts[1]
    assert drafts > 0


def test_a_join_in_floats_costs_a_file_no_formats(tmp_path: Path) -> None:
    same, path = _with_copied_layer("glm4-moe", tmp_path), tmp_path / "model.gguf"
    write_gguf(same, path, "q8_0")
    plan, _ = plan_models(LoadOptions(model=str(path), drafter="none"))
    assert plan.weights == "file"
    assert plan.checkpoint is not None
    tensors = dict(plan.checkpoint.tensors)
    name = "model.layers.3.eh_proj.weight"
    tensors[name] = replace(tensors[name], dtype="F16", gguf=None)
    vars(checkpoint := Checkpoint(plan.directory))["tensors"] = tensors
    assert why_not_as_stored(checkpoint, read_config(plan.directory)) is None


def _with_copied_layer(name: str, tmp_path: Path) -> Path:
    """A checkpoint whose layer of its own is its last layer, named as published."""
    save_tiny(made := tmp_path / "made", name)
    stored = load_file(made / "model.safetensors")
    last = max(int(key.split(".")[2]) for key in stored if key.startswith("model.layers."))
    prefix, token_norm, state_norm, join, last_norm = NAMES[name]
    before = "mtp.layers.0." if prefix == "mtp." else prefix
    for key, tensor in [*stored.items()]:
        if key.startswith(f"model.layers.{last}."):
            stored[before + key.removeprefix(f"model.layers.{last}.")] = tensor.clone()
    for part in (token_norm, state_norm, last_norm):
        stored[f"{prefix}{part}.weight"] = stored["model.norm.weight"].clone()
    hidden = len(stored["model.norm.weight"])
    generator = torch.Generator().manual_seed(3)
    stored[f"{prefix}{join}.weight"] = 0.1 * torch.randn(hidden, 2 * hidden, generator=generator)
    save_file(stored, made / "model.safetensors", {"format": "pt"})
    return made


def test_auto_finds_it(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    options = LoadOptions(model=str(made.path), device="cpu", dtype="float32")
    plan, _ = plan_models(options)
    assert resolve_drafter(options, False, plan) == "mtp"
    with caplog.at_level(logging.WARNING):
        target = new_target(made)
    assert "left out" not in caplog.text
    assert resolve_drafter(options, False, target) == "mtp"


def test_a_model_without_one_says_so(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, NATIVE_CONFIGS["qwen3"]())
    target = NativeTarget.load(tmp_path, torch.float32)
    assert not target.has_own_layers
    with pytest.raises(CapabilityError, match="brings no layers"):
        target.own_layers()
