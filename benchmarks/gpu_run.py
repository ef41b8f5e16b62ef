"""What each part of `benchmarks.gpu` is given."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Results = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A part's run.

    Attributes:
        asked: the options of the command.
        device: that is measured.
        found: the part's results, which it fills in.
        deadline: seconds of `time.monotonic` after which no other size is begun.
        save: writes the results of all parts so far.
    """

    asked: argparse.Namespace
    device: torch.device
    found: Results
    deadline: float
    save: Callable[[], None]

    @property
    def is_over(self) -> bool:
        """Whether no other size may be begun."""
        return time.monotonic() > self.deadline
