"""What verification decided for one row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from foredraft.core.verify.evidence import Evidence


@dataclass(frozen=True)
class Verdict:
    """The accepted path and the token after it.

    Attributes:
        path: accepted node indices, outermost first; empty when none was accepted.
        next_token: drawn from the target, or from the residual after a rejection; None where the
            target has no law at the end of the path.
        kind: "correction" where the draft offered something else, "bonus" where it had ended,
            "failed" where there is no next token. Plain decoding would have failed there, too.
        error: why it failed.
        evidence: what it was decided on, where a trace asked for it.
    """

    path: tuple[int, ...]
    next_token: int | None
    kind: Literal["bonus", "correction", "failed"]
    error: Exception | None = None
    evidence: Evidence | None = field(default=None, repr=False, compare=False)

    @classmethod
    def failed(cls, path: tuple[int, ...], error: Exception) -> Verdict:
        return cls(path, None, "failed", error)

    @property
    def num_accepted(self) -> int:
        return len(self.path)
