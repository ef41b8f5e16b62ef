"""Trained heads on disk: weights, and a test that each head runs of itself.

The self test is a short text with the states that the target made of it, and some of the logits
that the head makes of those. See `head_folder` for the rest.

Shape legend: L tokens of the test's text, E hidden size, D depths, S output rows that are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor

from foredraft.core.errors import ModelLoadError
from foredraft.drafters.common.head import HeadModule, TextBatch
from foredraft.drafters.common.head_folder import (
    META,
    SELF_TEST,
    WEIGHTS,
    HeadInfo,
    Learnt,
    TargetIdentity,
    check_kind,
    check_target,
    check_weights,
    read_info,
    write_folder,
)
from foredraft.models.files.safety import FLOATS, check_safetensors

_COMPARED_ROWS = 64
_TOLERANCE = 0.02
"""Of the self test, in logits: float32 sums in another order, and nothing else."""
M = TypeVar("M", bound=HeadModule)


# ------------------------------------------------------------------------------------ saving


def save_head(directory: Path, module: HeadModule, info: Mapping[str, Any], test: TextBatch,
              depth: int, card: str) -> None:  # fmt: skip
    """Write a head's directory; what was there before is replaced when all is written.

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
    rounded.load_state_dict({name: _loaded(t, torch.float32) for name, t in stored.items()})
    tested = _self_test(rounded, _on_cpu(test), depth)
    learnt = Learnt(module.kind, module.config, module.shape, stored, tested, card)
    write_folder(directory, learnt, info)


def _stored(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.bfloat16 if tensor.is_floating_point() else tensor.dtype)


def _loaded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _on_cpu(batch: TextBatch) -> TextBatch:
    return TextBatch(
        batch.tokens_BL.cpu(),
        batch.lengths_B.cpu(),
        batch.embeddings_BLE.cpu().float(),
        {layer: x_BLE.cpu().float() for layer, x_BLE in batch.taps.items()},
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
    # The batch as it will be read back.
    rounded = TextBatch(
        batch.tokens_BL,
        batch.lengths_B,
        batch.embeddings_BLE.bfloat16().float(),
        {layer: x.bfloat16().float() for layer, x in batch.taps.items()},
    )
    found = []
    for prediction in module.predictions(rounded, depth):
        num_rows = len(prediction.output_RK)
        rows = torch.arange(0, num_rows, max(1, num_rows // _COMPARED_ROWS))
        logits_LS = (prediction.states_BLK[0] @ prediction.output_RK[rows].T).float()
        inside = torch.arange(len(logits_LS)) < len(logits_LS) - prediction.shift
        found.append(logits_LS * inside[:, None])
    return torch.stack(found)


# ----------------------------------------------------------------------------------- loading


def load_head(
    directory: Path,
    module: type[M],
    target: TargetIdentity,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> M:
    """A trained head, checked: kind, target, shapes, weights, and what it computes.

    Args:
        module: the class of the kind.
        target: what it is to draft for; see `identify`.
        dtype: of the weights.
        device: where they go.

    Raises:
        ConfigError: no head is there, it is of another kind, or of another target.
        ModelLoadError: it is damaged, or does not compute what it did when it was saved.
    """
    info = read_info(directory)
    check_kind(info, module.kind, directory)
    check_target(info, target, directory)
    head = read_head(directory, module, info).to(device=device, dtype=dtype)
    head.promise = info.promise
    return head


def read_head(directory: Path, module: type[M], info: HeadInfo) -> M:
    """The module in float32 on the CPU, its weights and what it computes checked.

    Raises:
        ModelLoadError: it is damaged, or does not compute what it did when it was saved.
    """
    path = directory / WEIGHTS
    stored = check_weights(directory, info)
    try:
        head = module.from_config(info.shape, info.config)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ModelLoadError(f"{directory / META} cannot be used: {error!r:.200}") from error
    _check_shapes(path, head, stored)
    weights = load_file(path)
    for name, tensor in weights.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ModelLoadError(f"{path}: {name} holds NaN or infinity; train the head again")
    head.load_state_dict({name: _loaded(t, torch.float32) for name, t in weights.items()})
    head.eval()
    _run_self_test(directory / SELF_TEST, head)
    return head


def _check_shapes(path: Path, head: HeadModule, stored: Mapping[str, Any]) -> None:
    expected = head.state_dict()
    for name in expected.keys() ^ stored.keys():
        where = "lacks" if name in expected else "holds"
        raise ModelLoadError(f"{path} {where} {name!r}, unlike a head of kind {head.kind!r}")
    for name, tensor in expected.items():
        entry = stored[name]
        if list(tensor.shape) != entry["shape"]:
            raise ModelLoadError(
                f"{path}: {name} has shape {entry['shape']} and should have {list(tensor.shape)}"
            )
        if tensor.is_floating_point() != (entry["dtype"] in FLOATS):
            raise ModelLoadError(f"{path}: {name} is of type {entry['dtype']}")


def _run_self_test(path: Path, head: HeadModule) -> None:
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
        raise ModelLoadError(f"{path} cannot be run: {problem!r:.200}") from problem
    scale = 1.0 + float(expected_DLS.abs().max())
    if not error <= _TOLERANCE * scale:
        raise ModelLoadError(
            f"{path}: the head computes other logits than when it was saved (by up to "
            f"{error:.3g}); it is damaged, or this version of foredraft computes it differently. "
            "Train it again"
        )
