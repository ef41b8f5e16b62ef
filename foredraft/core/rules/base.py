"""The seam: from logits and the text before them to a law.

Shape legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from foredraft.core.sampling import Law


class Rules(Protocol):
    """From logits to a law. A function of its arguments: it is asked about guesses, too.

    `SamplingParams` are the rules of requests that ask for temperature and filters alone.
    """

    @property
    def scale(self) -> float | None:
        """Factor on the logits, if the law is nothing but scaled logits; else None.

        0 puts all mass on the largest logit. Tokens of such laws are drawn for all rows in one
        call: see `foredraft.core.sampling.draw_rows`.
        """

    @property
    def filters_only(self) -> bool:
        """Whether the law is temperature and filters, so that likelier tokens stay likelier."""

    @property
    def bans(self) -> bool:
        """Whether there are tokens that `permits` may refuse."""

    def law(self, logits_V: Tensor, text: Sequence[int], drafted: Sequence[int] = ()) -> Law:
        """The law of the next token.

        Args:
            logits_V: a model's logits there, target's or drafter's.
            text: all committed tokens. Do not change it.
            drafted: the guesses between them and the position.

        Raises:
            NoTokenError: no token may come there.
            ForedraftError: there is no law; like the other, it ends the request if plain decoding
                gets there, too.
        """

    def permits(self, token: int, text: Sequence[int], drafted: Sequence[int] = ()) -> bool:
        """Whether a token may come there, whatever its logit; filters are not asked."""

    def forced(self, text: Sequence[int]) -> Sequence[int]:
        """Tokens that are known, or all but known, to follow the text: drafts that cost nothing."""

    def is_complete(self, text: Sequence[int]) -> bool:
        """Whether the reply ends here: nothing but the end can follow, and it may come already.

        A grammar that is complete before ``min_tokens`` leaves no token, which is an error.
        """
