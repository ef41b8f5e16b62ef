"""Saving heads, with a test of their computation that travels with them.

The digest of the weights tells a damaged file; the self test tells a version that computes
something else with them. Training checks it before it goes on with a head, and this repository's
tests do for the heads that come with the package.

Shape legend: D depths, L tokens, S some of the output rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor

from foredraft.core.errors import ModelLoadError
from foredraft.drafters.heads.base import HeadModule
from foredraft.drafters.trained import (
    SELF_TEST,
    HeadInfo,
    TargetIdentity,
    load_head,
    write_folder,
)
from foredraft.models.files.safety import check_safetensors
from foredraft.train.heads.base import TextBatch, training_of

_COMPARED_ROWS = 64
_TOLERANCE = 0.02
"""Tolerance of the self test, in logits: it covers another order of float32 sums only."""
M = TypeVar("M", bound=HeadModule)


def save_head(directory: Path, module: HeadModule, info: Mapping[str, Any], test: TextBatch,
              depth: int, card: str) -> None:  # fmt: skip
    """Write a head's directory; an earlier one is replaced when all is written.

    Weights are stored in bfloat16, and the self test is made with those.

    Args:
        info: ``target`` (`TargetIdentity`), ``provenance`` and ``measured`` of `HeadInfo`.
        test: a short text, one row, for the self test.
        depth: draft tokens of the self test.
        card: the text of README.md.

    Raises:
        TrainingError: it cannot be written, such as on a full disk.
    """
    stored = {name: _stored(tensor) for name, tensor in module.state_dict().items()}
    rounded = type(module).from_config(module.shape, module.config)
    rounded.load_state_dict(stored)
    whole_info = HeadInfo(module.kind, module.config, module.shape, **info)
    write_folder(directory, whole_info, stored, card, _self_test(rounded, _rounded(test), depth))


def _stored(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.bfloat16 if tensor.is_floating_point() else tensor.dtype)


def _rounded(batch: TextBatch) -> TextBatch:
    """The batch as it will be read back."""
    return TextBatch(
        batch.tokens_BL.cpu(),
        batch.lengths_B.cpu(),
        batch.embeddings_BLE.cpu().bfloat16().float(),
        {layer: x_BLE.cpu().bfloat16().float() for layer, x_BLE in batch.taps.items()},
    )


@torch.no_grad()
def _self_test(module: HeadModule, batch: TextBatch, depth: int) -> dict[str, Tensor]:
    tensors = {
        "tokens": batch.tokens_BL[0],
        "embeddings": batch.embeddings_BLE[0].to(torch.bfloat16),
        "logits": _test_logits(module.eval(), batch, depth),
    }
    return tensors | {f"tap.{n}": x[0].to(torch.bfloat16) for n, x in batch.taps.items()}


def _test_logits(module: HeadModule, batch: TextBatch, depth: int) -> Tensor:
    """Float32 [D, L, S]: every depth, some of the output rows; entries beyond the text zero."""
    found = []
    for prediction in training_of(module).predictions(batch, depth):
        num_rows = len(prediction.output_RK)
        rows = torch.arange(0, num_rows, max(1, num_rows // _COMPARED_ROWS))
        logits_LS = (prediction.states_BLK[0] @ prediction.output_RK[rows].T).float()
        inside = torch.arange(len(logits_LS)) < len(logits_LS) - prediction.shift
        found.append(logits_LS * inside[:, None])
    return torch.stack(found)


def load_tested(directory: Path, kind: type[M], target: TargetIdentity) -> M:
    """A trained head that computes what it did when it was saved.

    Raises:
        ConfigError, ModelLoadError: see `load_head`; or it computes something else.
    """
    head = load_head(directory, kind, target)
    check_self_test(directory / SELF_TEST, head)
    return head


def check_self_test(path: Path, head: HeadModule) -> None:
    """Compare what a head computes with what it computed when it was saved.

    Raises:
        ModelLoadError: they differ, or the file is no such test.
    """
    check_safetensors(path)
    stored = load_file(path)
    try:
        batch = TextBatch(
            stored["tokens"][None],
            torch.tensor([len(stored["tokens"])]),
            stored["embeddings"][None].float(),
            {layer: stored[f"tap.{layer}"][None].float() for layer in head.taps},
        )
        expected_DLS = stored["logits"]
        with torch.no_grad():
            actual_DLS = _test_logits(head, batch, len(expected_DLS))
        error = float((actual_DLS - expected_DLS).abs().max())
    except (KeyError, IndexError, RuntimeError, ValueError) as problem:
        raise ModelLoadError(f"{path} is no test of this head: copy it again") from problem
    scale = 1.0 + float(expected_DLS.abs().max())
    if not error <= _TOLERANCE * scale:
        raise ModelLoadError(
            f"{path}: the head computes other logits than when it was saved (by up to "
            f"{error:.3g}); it is damaged, or this version of foredraft computes it differently. "
            "Train it again"
        )
