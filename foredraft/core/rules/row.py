"""All rules of one request together, in the order that `SamplingParams` states (vLLM's).

Bans may come last here all the same: they commute with what only moves logits.

Shape legend: V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foredraft.core.errors import NoTokenError
from foredraft.core.params import SamplingParams
from foredraft.core.rules.bans import Array, Ban
from foredraft.core.rules.grammar import GrammarRule
from foredraft.core.rules.penalties import Bias, Penalties
from foredraft.core.sampling import Law, law_of


@dataclass(eq=False)
class RowRules:
    """`Rules` that look at the text. Made for one request, and used by one thread at a time.

    Attributes:
        num_prompt: tokens of the prompt.
    """

    params: SamplingParams
    num_prompt: int
    bias: Bias | None = None
    penalties: Penalties | None = None
    token_bans: Sequence[Ban] = ()
    grammar: GrammarRule | None = None

    filters_only = False
    scale = None

    @property
    def bans(self) -> bool:
        return bool(self.token_bans) or self.grammar is not None

    def law(self, logits_V: Tensor, text: Sequence[int], drafted: Sequence[int] = ()) -> Law:
        given_V: Array = logits_V.detach().cpu().numpy()
        changed_V = given_V.copy()
        if self.bias:
            self.bias.apply(changed_V)
        if self.penalties:
            self.penalties.apply(changed_V, text, drafted)
        self._ban(changed_V, text, drafted)
        if changed_V.max() == -math.inf and given_V.max() > -math.inf:
            raise NoTokenError(
                f"the request's rules leave no token after {self._num_reply(text, drafted)} tokens "
                f"of the reply ({', '.join(self._names())})",
                code="no_token_left",
            )
        return law_of(torch.from_numpy(changed_V), self.params)

    def permits(self, token: int, text: Sequence[int], drafted: Sequence[int] = ()) -> bool:
        num_reply, ending = self._num_reply(text, drafted), self._ending(text, drafted)
        return all(ban.permits(token, num_reply, ending) for ban in self.token_bans) and (
            self.grammar is None or self.grammar.permits(token, text, drafted)
        )

    def forced(self, text: Sequence[int]) -> Sequence[int]:
        return self.grammar.forced(text) if self.grammar else ()

    def is_complete(self, text: Sequence[int]) -> bool:
        if self.grammar is None or len(text) - self.num_prompt < self.params.min_tokens:
            return False
        return self.grammar.is_complete(text)

    def _ban(self, logits_V: Array, text: Sequence[int], drafted: Sequence[int]) -> None:
        num_reply, ending = self._num_reply(text, drafted), self._ending(text, drafted)
        for ban in self.token_bans:
            ban.apply(logits_V, num_reply, ending)
        if self.grammar is not None:
            mask_V = self.grammar.mask(text, drafted)
            if mask_V is None:
                raise NoTokenError("no text by the request's grammar leads here")
            np.copyto(logits_V, -math.inf, where=~mask_V)

    def _ending(self, text: Sequence[int], drafted: Sequence[int]) -> Sequence[int]:
        """The reply's last tokens, guesses included: as many as bans look at, or some more."""
        most = max((ban.num_ending for ban in self.token_bans), default=0)
        first = max(self.num_prompt, len(text) - most)
        return (*text[first:], *drafted)

    def _num_reply(self, text: Sequence[int], drafted: Sequence[int]) -> int:
        return len(text) - self.num_prompt + len(drafted)

    def _names(self) -> list[str]:
        given = {
            "grammar": self.grammar,
            "allowed_token_ids": self.params.allowed_token_ids,
            "bad_words": self.params.bad_words,
            "min_tokens": self.params.min_tokens,
            "thinking": self.params.thinking,
        }
        return [name for name, value in given.items() if value]
