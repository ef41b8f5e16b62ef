"""Models of the tests' engines: a model of tables, and deaths at a named step."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foredraft.core.errors import EngineStoppedError
from foredraft.core.record import StepRecord
from foredraft.llm import LLM
from foredraft.models.table import TableModel
from foredraft.models.text.tokenizer import Tokenizer
from foredraft.options import LoadOptions
from tests.models.checkpoints import VOCAB_SIZE

MAX_BATCH_SIZE = 4


class SlowTable(TableModel):
    """A model that leaves time for something to happen."""

    seconds = 0.0
    has_failed = False

    def score(self, *args: Any) -> Any:
        if self.has_failed:
            raise EngineStoppedError("this test's target has failed")
        time.sleep(self.seconds)
        return super().score(*args)


@dataclass
class Death:
    """Kills its own process after the step in which a reply has its ``after``-th event.

    Attributes:
        path: a file that holds ``after``. The engine that removes it dies, so there is one death a
            file. If "stops" follows, the engine's thread fails and nothing kills its process; if
            "freezes" does, the process stands still.
        target: of the engine.
    """

    path: Path
    target: SlowTable
    _steps: dict[int, int] = field(default_factory=dict)

    def __call__(self, record: StepRecord) -> None:
        for row in record.rows:
            if row.committed:
                self._steps[row.request_id] = self._steps.get(row.request_id, 0) + 1
        try:
            after, _, how = self.path.read_text().partition(" ")
        except OSError:
            return
        if max(self._steps.get(row.request_id, 0) for row in record.rows) > int(after):
            try:
                self.path.unlink()
            except FileNotFoundError:
                return
            if how == "freezes":
                os.kill(os.getpid(), signal.SIGSTOP)
                return
            if how != "stops":
                os.kill(os.getpid(), signal.SIGKILL)
            self.target.has_failed = True


def load(directory: Path, death: Path | None = None, seconds: float = 0.0) -> LLM:
    """A model whose tokenizer is in ``directory``."""
    target = SlowTable.random(VOCAB_SIZE, seed=5, order=1, sharpness=4.0)
    target.seconds = seconds
    asked = LoadOptions(drafter="suffix", max_batch_size=MAX_BATCH_SIZE)
    return LLM(target, Tokenizer(directory), asked, trace=Death(death, target) if death else None)
