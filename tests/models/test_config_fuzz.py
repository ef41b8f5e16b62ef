"""Whatever ``config.json`` says: a plan and a model that scores, or a reason in plain words."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, PretrainedConfig
from transformers.utils import logging as hf_logging

from foredraft.core.errors import ModelLoadError
from foredraft.load import load_target, plan_models
from foredraft.models.base import ScoreRow
from foredraft.options import LoadOptions
from tests.models.checkpoints import NATIVE_CONFIGS, VOCAB_SIZE, save_checkpoint

MODELS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": NATIVE_CONFIGS["llama-llama3-rope"],
    "mistral": NATIVE_CONFIGS["mistral"],
    "qwen3": NATIVE_CONFIGS["qwen3"],
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=64, n_layer=3, n_head=4, n_positions=256
    ),
}

SCALARS = (
    st.none()
    | st.booleans()
    | st.sampled_from([0, -1, 1, 2, 3, 8, 10**9, 2**31, 2**63, 10**30])
    | st.sampled_from([0.0, 0.5, 1e-300, 1e300, math.nan, math.inf, -math.inf])
    | st.sampled_from(["", "64", "null", "linear", "llama3", "yarn", "float8", "\ud800"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["rope_type", "type", "factor", "rope_theta", "x"]), inner, max_size=3
        )
    ),
    max_leaves=5,
)
Change = Callable[[dict[str, Any], str], None]


def replaced(value: Any) -> Change:
    return lambda config, key: config.update({key: value})


def scaled(factor: float) -> Change:
    def scale(config: dict[str, Any], key: str) -> None:
        if isinstance(config.get(key), int | float):
            config[key] = type(config[key])(config[key] * factor)

    return scale


def dropped(config: dict[str, Any], key: str) -> None:
    config.pop(key, None)


def nested(config: dict[str, Any], key: str) -> None:
    config[key] = {"value": config.get(key)}


CHANGES = st.one_of(
    VALUES.map(replaced),
    st.sampled_from([-1, 0.5, 2, 1000]).map(scaled),
    st.just(dropped),
    st.just(nested),
)


@pytest.fixture(scope="module", params=MODELS)
def good(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    save_checkpoint(directory, MODELS[request.param]())
    (directory / "good.json").write_text((directory / "config.json").read_text())
    hf_logging.set_verbosity_error()
    return directory


@settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    changes=st.lists(st.tuples(st.integers(0, 60), CHANGES), min_size=1, max_size=3),
    backend=st.sampled_from(["auto", "auto", "hf"]),
)
@example(changes=[(0, replaced(0))], backend="auto")
def test_any_config_gives_a_model_or_a_reason(
    good: Path, changes: list[tuple[int, Change]], backend: str
) -> None:
    config = json.loads((good / "good.json").read_text())
    names = sorted(config)
    for index, change in changes:
        change(config, names[index % len(names)])
    (good / "config.json").write_text(json.dumps(config))
    reason = None
    try:
        plan, _ = plan_models(LoadOptions(model=str(good), device="cpu", backend=backend))
        target = load_target(plan)
    except ModelLoadError as refused:
        reason = str(refused)
    if reason is not None:
        assert 0 < len(reason.encode()) < 1000  # it can be printed
        return
    slot = target.cache.allocate()
    if plan.backend == "native":
        target.cache.reserve(slot, 1)
    (scores,) = target.score([ScoreRow(slot, [5])])
    assert scores.logits_NV.shape == (1, VOCAB_SIZE)
    if plan.backend == "native":
        assert torch.isfinite(scores.logits_NV).all()
    target.cache.free(slot)


@pytest.mark.parametrize("key", ["num_attention_heads", "hidden_size", "vocab_size", "rope_theta"])
@pytest.mark.parametrize("value", [0, -1, math.nan, "x", [], {}, 10**30, True])
def test_each_of_the_worst(tmp_path: Path, key: str, value: Any) -> None:
    save_checkpoint(tmp_path, NATIVE_CONFIGS["llama"]())
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("head_dim", None)
    rope = config.pop("rope_parameters", None)
    assert rope is not None
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(ModelLoadError, match=key):
        plan_models(LoadOptions(model=str(tmp_path), device="cpu"))
