"""MTP weights of other families' checkpoints: read where they fit, refused where they do not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from foredraft.core.errors import ConfigError, ModelLoadError
from foredraft.drafters import build_drafter
from foredraft.drafters.heads.mtp import LAYOUTS, MtpModule, MtpRunner, read_native
from foredraft.drafters.heads.steps import StepDrafter
from foredraft.drafters.spec import DrafterContext
from tests.drafters.heads import TinySource, random_text, shaken, text_batch, tiny_target

TARGET = tiny_target()
Change = Callable[[dict[str, Tensor]], object]


def layer_names(weights: dict[str, Tensor], at: str) -> dict[str, Tensor]:
    """A head's decoder layer as checkpoints name it."""
    shape = TARGET.config
    query, key = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * 16
    q, k, v = weights["layer.qkv.weight"].split((query, key, key))
    gate, up = weights["layer.gate_up.weight"].chunk(2)
    return {
        f"{at}input_layernorm.weight": weights["layer.attention_norm.weight"],
        f"{at}post_attention_layernorm.weight": weights["layer.mlp_norm.weight"],
        f"{at}self_attn.q_proj.weight": q,
        f"{at}self_attn.k_proj.weight": k,
        f"{at}self_attn.v_proj.weight": v,
        f"{at}self_attn.o_proj.weight": weights["layer.output.weight"],
        f"{at}mlp.gate_proj.weight": gate,
        f"{at}mlp.up_proj.weight": up,
        f"{at}mlp.down_proj.weight": weights["layer.down.weight"],
    }


PREFIXES = {"DeepSeek-V3": "model.layers.{}.", "Qwen3-Next": "mtp."}
"""Of a head's names; of other families `_OTHERS`."""
_OTHERS = "model.mtp_layers.{}."
SEVERAL = [layout.family for layout in LAYOUTS if layout.family != "Qwen3-Next"]
"""Families whose names count the heads."""


def stored(family: str, module: MtpModule) -> dict[str, Tensor]:
    """The module's weights as a checkpoint of that family would hold them."""
    first = TARGET.config.num_hidden_layers if family == "DeepSeek-V3" else 0
    found = {"model.layers.0.input_layernorm.weight": torch.zeros(3)}
    for number, head in enumerate(module.heads):
        prefix = PREFIXES.get(family, _OTHERS).format(first + number)
        found |= stored_head(family, prefix, {n: w.clone() for n, w in head.state_dict().items()})
    return {name: tensor.contiguous() for name, tensor in found.items()}


def stored_head(family: str, prefix: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    layout = next(layout for layout in LAYOUTS if layout.family == family)
    if layout.hidden_first:
        first, second = weights["join.weight"].chunk(2, 1)
        weights["join.weight"] = torch.cat((second, first), 1)
    found = {
        prefix + layout.embedding_norm: weights["embedding_norm.weight"],
        prefix + layout.hidden_norm: weights["hidden_norm.weight"],
        prefix + layout.join: weights["join.weight"],
        prefix + layout.norm: weights["norm.weight"],
        **layer_names(weights, prefix + layout.layer),
        **{prefix + name: torch.zeros(2) for name in layout.unused},
    }
    if layout.less_one:
        found |= {name: tensor - 1.0 for name, tensor in found.items() if tensor.ndim == 1}
    return found


def write(directory: Path, tensors: dict[str, Tensor], **config: object) -> Path:
    source = TinySource(TARGET)
    (directory / "config.json").write_text(json.dumps(asdict(source.shape) | config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def new_module(family: str, heads: int = 1) -> MtpModule:
    torch.manual_seed(2)
    returns = next(layout.returns for layout in LAYOUTS if layout.family == family)
    source = TinySource(TARGET)
    module = MtpModule.start(source, None, {"returns": returns, "heads": heads})
    shaken(module)
    with torch.no_grad():  # these are the target's own, and not in the checkpoint's layer
        module.target_norm.weight.copy_(source.final_norm())
        module.output.copy_(source.head())
    return module.eval()


@pytest.mark.parametrize(
    ("family", "heads"),
    [*((layout.family, 1) for layout in LAYOUTS), *((family, 3) for family in SEVERAL)],
)
def test_each_layout_is_read(family: str, heads: int, tmp_path: Path) -> None:
    module = new_module(family, heads)
    directory = write(tmp_path, stored(family, module), num_nextn_predict_layers=heads)
    read = read_native(directory, TARGET)
    assert len(read.heads) == heads
    batch = text_batch(TARGET, [random_text(12)], module.taps)
    for mine, theirs in zip(module.predictions(batch, 3), read.predictions(batch, 3), strict=True):
        torch.testing.assert_close(mine.logits_BLR, theirs.logits_BLR, rtol=1e-3, atol=1e-3)
    drafter = build_drafter("mtp", DrafterContext(TARGET, options={"head": str(tmp_path)}))
    assert isinstance(drafter, StepDrafter)
    assert isinstance(drafter._runner, MtpRunner)
    assert len(drafter.layers) == heads


def test_a_head_in_the_middle_that_is_missing_is_noticed(tmp_path: Path) -> None:
    tensors = stored("DeepSeek-V3", new_module("DeepSeek-V3", 3))
    some = {n: w for n, w in tensors.items() if not n.startswith("model.layers.4.")}
    with pytest.raises(ModelLoadError, match=r"says num_nextn_predict_layers=3.* holds 2 \(model"):
        read_native(write(tmp_path, some, num_nextn_predict_layers=3), TARGET)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda w: w.update({"mtp.layers.0.mlp.experts.0.up_proj.weight": torch.zeros(2)}),
         ConfigError, "not as a llama layer.*experts"),
        (lambda w: w.update({"mtp.layers.0.self_attn.q_norm.weight": torch.zeros(16)}),
         ConfigError, "q_norm"),
        (lambda w: w.pop("mtp.layers.0.mlp.up_proj.weight"), ConfigError, "lacks.*up_proj"),
        (lambda w: w.update({"mtp.fc.weight": torch.zeros(64, 64)}), ModelLoadError, "shape"),
        (lambda w: w.pop("mtp.fc.weight"), ConfigError, "holds no MTP layer.*foredraft train"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(
    change: Change, error: type[Exception], says: str, tmp_path: Path
) -> None:
    tensors = stored("Qwen3-Next", new_module("Qwen3-Next"))
    change(tensors)
    with pytest.raises(error, match=says):
        read_native(write(tmp_path, tensors), TARGET)
