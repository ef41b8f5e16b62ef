"""The loss of a head by token, where products of training are of other types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated
from unittest.mock import patch

import torch
import typer

from foredraft.drafters.heads.base import HeadModule
from foredraft.drafters.registry import head_class
from foredraft.models.files.digest import weights_digest
from foredraft.models.files.progress import SilentProgress
from foredraft.models.files.safety import Checkpoint
from foredraft.models.files.store import resolve_model
from foredraft.models.native.target import NativeTarget
from foredraft.options import DEFAULT_MODEL
from foredraft.system.paths import cache_root
from foredraft.train.batches import TrainBatch
from foredraft.train.folder import Counters
from foredraft.train.learner import Learner, NameableTokens, settled
from foredraft.train.loop import Job, Trainer
from foredraft.train.optimiser import Optimiser
from foredraft.train.options import TrainOptions
from foredraft.train.progress import Status
from foredraft.train.target import TrainingTarget
from foredraft.train.texts import Text, read_texts

_TEXTS = 60
Curve = list[tuple[int, float, float]]
"""Tokens learnt from, the loss of the step that followed, and the overlap at the first depth."""


class _Silent(SilentProgress):
    def step(self, status: Status) -> None:
        pass

    def evaluated(self, status: Status) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def pause(self) -> None:
        pass

    def wants_stop(self) -> bool:
        return False


class _Noting(Learner):
    """Notes a curve."""

    curve: Curve

    def learn(self, batch: TrainBatch, counters: Counters) -> tuple[float, list[float]]:
        tokens = counters.tokens
        loss, overlaps = super().learn(batch, counters)
        self.curve.append((tokens, loss, overlaps[0]))
        return loss, overlaps


class _AsBefore(_Noting):
    """Muon and the target's own logits in bfloat16, all else in float32."""

    def __init__(self, module: HeadModule, target: TrainingTarget, options: TrainOptions) -> None:
        super().__init__(module, target, options)
        self._optimiser = Optimiser(self.module, options.rates, torch.bfloat16)
        self.rows = NameableTokens.of(module, target, torch.bfloat16)


def training_types(
    data: Annotated[Path, typer.Option(help="Folder of texts.")],
    out: Annotated[Path, typer.Option(help="Folder of the heads and of curves.json.")],
    tokens: Annotated[int, typer.Option(help="Learnt from by each.")] = 16_000,
) -> None:
    """Loss by token of eagle for the default model: products as on machines that are slow at
    bfloat16, as these had them before, and in bfloat16."""
    directory = Path(resolve_model(DEFAULT_MODEL))
    digest = weights_digest(Checkpoint(directory), cache_root())
    target = TrainingTarget(NativeTarget.load(directory, torch.bfloat16), DEFAULT_MODEL, digest)
    texts, curves = read_texts(data)[:_TEXTS], dict[str, Curve]()
    for name in ("float32", "as before", "bfloat16"):
        options = TrainOptions(
            tokens=tokens,
            batch_tokens=64,
            sequence=64,
            output_rows=4096,
            evaluations=1,
            held_out_texts=4,
            float32=name != "bfloat16",
        )
        learner = _AsBefore if name == "as before" else _Noting
        curves[name] = _curve(target, texts, options, learner, out / name.replace(" ", "-"))
        (out / "curves.json").write_text(json.dumps(curves) + "\n")


def _curve(
    target: TrainingTarget,
    texts: list[Text],
    options: TrainOptions,
    learner: type[_Noting],
    out: Path,
) -> Curve:
    learner.curve = []
    job = Job(head_class("eagle"), out, out.parent / "captures")
    with patch("foredraft.train.loop.Learner", learner), settled():
        Trainer(job, target, texts, options, _Silent()).run()
    return learner.curve
