"""The only random primitives: accept with a probability, and draw from a distribution.

Verification and drafting see these two verbs and no random numbers, so a test can put a ledger of
every outcome behind them and prove the shipped rules exact. The numbers behind them are keyed by
what they decide (see `core/rng.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from foredraft.core.rng import Purpose, keyed_uniform
from foredraft.core.sampling import draw_token


class DraftChoices(Protocol):
    """What a drafter may draw from. It gives no access to the verify stream."""

    def draw(self, probs_V: Tensor, index: int) -> int:
        """Draw draft token number ``index`` of this step."""
        ...


class VerifyChoices(Protocol):
    """What verification decides with, for one row in one step."""

    def draw_target(self, probs_V: Tensor, depth: int) -> int:
        """Draw the token ``depth`` places after the last committed one.

        Keyed by absolute position alone: plain decoding draws the same number there.
        """
        ...

    def accept(self, probability: float, index: int) -> bool:
        """Decision number ``index`` of this step: True with ``probability``."""
        ...

    def draw_residual(self, probs_V: Tensor) -> int:
        """Draw the next token after the decisions."""
        ...


@dataclass(frozen=True)
class KeyedDraftChoices:
    """Draft draws of one row in one step.

    Keyed by the number of committed tokens and the node: a position that is drafted again after a
    rejection gets fresh numbers. Reusing the old ones would correlate the new draft with the
    rejection that has just been seen, and bias the output.
    """

    seed: int
    num_tokens: int

    def draw(self, probs_V: Tensor, index: int) -> int:
        return draw_token(probs_V, keyed_uniform(self.seed, self.num_tokens, Purpose.DRAFT, index))


@dataclass(frozen=True)
class KeyedVerifyChoices:
    """Verify decisions of one row in one step; ``num_tokens`` tokens are committed before it."""

    seed: int
    num_tokens: int

    def draw_target(self, probs_V: Tensor, depth: int) -> int:
        position = self.num_tokens + depth
        return draw_token(probs_V, keyed_uniform(self.seed, position, Purpose.TARGET))

    def accept(self, probability: float, index: int) -> bool:
        return keyed_uniform(self.seed, self.num_tokens, Purpose.ACCEPT, index) < probability

    def draw_residual(self, probs_V: Tensor) -> int:
        return draw_token(probs_V, keyed_uniform(self.seed, self.num_tokens, Purpose.RESIDUAL))
