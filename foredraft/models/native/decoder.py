"""The seam between a native target and the backends that run its forwards.

Shape legend: T tokens of the forward, N wanted logits, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from foredraft.cache.store import Entries
from foredraft.models.native.config import DecoderConfig
from foredraft.models.native.plan import ForwardPlan
from foredraft.models.native.weights import DecoderWeights


class Decoder(Protocol):
    """Something that runs a forward plan: the eager reference or a faster equal."""

    @property
    def name(self) -> str: ...

    @property
    def partial(self) -> bool:
        """Whether it heeds `ForwardPlan.layers`; False costs early exit its shared cache."""
        ...

    @property
    def reads_unseen(self) -> bool:
        """Whether it reads entries that no token sees, with weight 0: they must be finite."""
        ...

    @property
    def reads_packed(self) -> bool:
        """Whether packed weights save it time: then it also runs heads and copies in few bits."""
        ...

    @property
    def draws(self) -> bool:
        """Whether it fills in `ForwardPlan.draws`."""
        ...

    def forward(
        self, plan: ForwardPlan, cache: Entries, taps: Sequence[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]: ...

    def logits(self, normed_TE: Tensor) -> Tensor:
        """The head alone: float32 logits [T, V] of normed states."""
        ...


DecoderFactory = Callable[[DecoderConfig, DecoderWeights], Decoder]
