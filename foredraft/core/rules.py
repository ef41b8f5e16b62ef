"""What a request asks of the distribution at one position, given the text before it.

One object owns it: verification asks it for the law at each node it reaches, and a drafter's
distribution goes through it before anything is drawn or chosen. So a rule that looks at the text
(a penalty, a ban, a grammar) sees on every path of a tree what plain decoding would see there.

Shape legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from foredraft.core.params import SamplingParams
from foredraft.core.sampling import Law, law_of


class Rules(Protocol):
    """From logits to a law. A function of its arguments: it is asked about guesses, too."""

    @property
    def takes_best(self) -> bool:
        """Whether the law is always all on the largest logit, so that nothing else is needed."""
        ...

    def law(self, logits_V: Tensor, text: Sequence[int], drafted: Sequence[int] = ()) -> Law:
        """The law of the next token.

        Args:
            logits_V: a model's logits there, target's or drafter's.
            text: all committed tokens. Do not change it.
            drafted: the guesses between them and the position.

        Raises:
            ForedraftError: there is none; this ends the request if plain decoding gets there, too.
        """
        ...


@dataclass(frozen=True)
class SamplingRules:
    """Temperature and filters; they look at no text."""

    params: SamplingParams

    @property
    def takes_best(self) -> bool:
        return self.params.temperature == 0.0

    def law(self, logits_V: Tensor, text: Sequence[int], drafted: Sequence[int] = ()) -> Law:
        return law_of(logits_V, self.params)
