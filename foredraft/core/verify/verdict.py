"""What verification decided for one row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Verdict:
    """The accepted path and the token after it.

    Attributes:
        path: accepted node indices, outermost first; empty when none was accepted.
        next_token: drawn from the target, or from the residual after a rejection.
        kind: "correction" where the draft offered something else, "bonus" where it had ended.
    """

    path: tuple[int, ...]
    next_token: int
    kind: Literal["bonus", "correction"]

    @property
    def num_accepted(self) -> int:
        return len(self.path)
