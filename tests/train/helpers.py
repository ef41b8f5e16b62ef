"""A tiny target, texts of it, and the smallest head that can be trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from foredraft.drafters.heads.base import HeadModule, HeadOption
from foredraft.models.base import ModelShape
from foredraft.models.files.digest import weights_digest
from foredraft.models.files.safety import Checkpoint
from foredraft.models.native.target import NativeTarget
from foredraft.train.heads.base import HeadTraining, Prediction, TextBatch
from foredraft.train.loop import Job, Trainer
from foredraft.train.options import Rates, TrainOptions
from foredraft.train.progress import Status
from foredraft.train.target import TrainingTarget
from foredraft.train.texts import Text

VOCAB = 300


class LinearHead(HeadModule):
    """One matrix for each depth, from the last layer's output and the next token's embedding."""

    kind = "linear"
    training_file = __name__

    OPTIONS: ClassVar = {
        "tap": HeadOption("the layer it reads", lambda shape: shape.num_hidden_layers - 1, least=0)
    }

    def __init__(self, shape: ModelShape, num_rows: int | None, tap: int) -> None:
        super().__init__(shape, (tap,), num_rows=num_rows, tap=tap)
        size = shape.hidden_size
        self.joins = nn.ModuleList(nn.Linear(2 * size, size) for _ in range(3))

    @staticmethod
    def new_output(num_rows: int, hidden_size: int) -> nn.Linear:
        return nn.Linear(hidden_size, num_rows, bias=False)

    @property
    def rows(self) -> Tensor:
        return self.output.weight


class OtherHead(LinearHead):
    kind = "other"


class LinearTraining(HeadTraining[LinearHead]):
    """Starts from random matrices, the same for each head."""

    def take_layers(self, source: TrainingTarget) -> None:
        torch.manual_seed(0)
        for join in self.module.joins:
            cast(nn.Linear, join).reset_parameters()

    def predictions(self, batch: TextBatch, depth: int) -> list[Prediction]:
        module, following = self.module, batch.embeddings_BLE.roll(-1, 1)
        x = torch.cat((batch.taps[module.taps[0]], following), -1)
        return [Prediction(module.joins[k](x), module.output.weight, k + 1) for k in range(depth)]


TRAINING = LinearTraining


class Watch:
    """A monitor that stops, or fails, after some steps."""

    def __init__(self, stop_after: int | None = None, fail_after: int | None = None) -> None:
        self.steps = 0
        self.statuses: list[Status] = []
        self.said: list[str] = []
        self._stop, self._fail = stop_after, fail_after

    def stage(self, text: str) -> None:
        pass

    def advance(self, fraction: float) -> None:
        pass

    def step(self, status: Status) -> None:
        self.steps += 1
        if self.steps == self._fail:
            raise KeyboardInterrupt

    def say(self, text: str) -> None:
        self.said.append(text)

    def evaluated(self, status: Status) -> None:
        self.statuses.append(status)

    def wants_stop(self) -> bool:
        return self._stop is not None and self.steps >= self._stop

    def pause(self) -> None:
        pass


def training_target(
    checkpoint: Path, name: str = "tiny", dtype: torch.dtype = torch.float32
) -> TrainingTarget:
    weights = weights_digest(Checkpoint(checkpoint))
    return TrainingTarget(NativeTarget.load(checkpoint, dtype), name, weights, "words")


def counted_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of texts that each forward of targets reads from now on."""
    counts: list[int] = []
    read = TrainingTarget.read

    def counting(self: TrainingTarget, texts: Any, *more: Any) -> Any:
        counts.append(len(texts))
        return read(self, texts, *more)

    monkeypatch.setattr(TrainingTarget, "read", counting)
    return counts


def some_texts(num: int = 320, seed: int = 0, length: int = 14) -> list[Text]:
    """Sentences that go on by a rule, so that there is something to learn."""
    draw = np.random.default_rng(seed)
    found = []
    for number in range(num):
        first, step = draw.integers(3, VOCAB), draw.integers(1, 4)
        size = int(length + draw.integers(0, length))
        tokens = (first + step * np.arange(size)) % (VOCAB - 3) + 3
        temperature = float(number % 2)
        found.append(Text(tokens.astype(np.int64), 6, temperature, True, f"p{number}", number))
    return found


def options_of(**changes: Any) -> TrainOptions:
    usual: dict[str, Any] = {
        "tokens": 6000,
        "batch_tokens": 512,
        "sequence": 64,
        "depth": 2,
        "first_depth_until": 0.3,
        "output_rows": 100,
        "evaluations": 2,
        "rates": Rates(3e-3, 3e-3, 3e-3),
        "average": 0.9,
        "float32": True,
    }
    return TrainOptions(**usual | changes)


def trainer_of(
    target: TrainingTarget,
    out: Path,
    *,
    texts: Sequence[Text] | None = None,
    options: TrainOptions | None = None,
    watch: Watch | None = None,
    kind_options: Mapping[str, Any] | None = None,
    capture_bytes: float = 1e9,
    kind: type[HeadModule] = LinearHead,
    start_from: Path | None = None,
) -> Trainer:
    job = Job(
        kind,
        out,
        out.parent / "captures",
        capture_bytes,
        kind_options or {},
        start_from,
        {"data": "rules"},
    )
    texts = some_texts() if texts is None else texts
    return Trainer(job, target, texts, options or options_of(), watch or Watch())


def train(target: TrainingTarget, out: Path, **more: Any) -> Status:
    return trainer_of(target, out, **more).run()
