"""The plain distribution: each token of a text is scored again after its prefix, without drafts.

So every token of a served text is a separate trial, also after the point where texts diverged, and
wrong cache entries have no effect here.

Shape legend: N tokens of a reply, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from foredraft.audit.report import Finding
from foredraft.core.noise import gumbel_argmax, gumbel_noise
from foredraft.core.params import SamplingParams
from foredraft.core.rules import Rules
from foredraft.core.sampling import Law
from foredraft.core.tree import TokenTree
from foredraft.models.base import ScoreRow, Target, read

_AT_ONCE = 64
"""Tokens of a forward: the logits after all of them are in memory at once."""
_CUT = 3
"""Tokens or characters that a prompt loses at each turn."""
Prompt = TypeVar("Prompt", str, tuple[int, ...])
_MOST_TOLERANCE = 1.0
"""Nats: no near-tie is wider."""


@dataclass(frozen=True)
class Scored:
    """A token of a reply with the law that it was to be drawn from."""

    index: int
    token: int
    law: Law
    logits_V: Tensor


class PlainTarget:
    """A target that scores texts without drafts; its engine must not step meanwhile.

    Prefilled prompts are kept until `close`, because several replies share a prompt.
    """

    def __init__(self, target: Target) -> None:
        self._target, self._slots = target, dict[tuple[int, ...], int]()

    def close(self) -> None:
        """Give all memory back."""
        for slot in self._slots.values():
            self._target.cache.free(slot)
        self._slots.clear()

    def logits(self, prompt: Sequence[int], reply: Sequence[int]) -> Iterator[Tensor]:
        """The logits [V] that each token of the reply was to be drawn from."""
        target, read_by_then = self._target, [prompt[-1], *reply[:-1]]
        slot = self._behind(prompt)
        try:
            for start in range(0, len(reply), _AT_ONCE):
                first, *rest = read_by_then[start : start + _AT_ONCE]
                target.cache.reserve(slot, 1 + len(rest))
                scores = target.score([ScoreRow(slot, (first,), TokenTree.chain(rest))])
                target.cache.keep(slot, 1, range(len(rest)))
                yield from scores[0].logits_NV.cpu()
        finally:
            target.cache.free(slot)

    def noise(self, prompt: Sequence[int], reply: Sequence[int]) -> Iterator[float]:
        """For each token the range of differences between logits computed alone and in blocks.

        No margin between two likely tokens moves by more. 0 if bits do not depend on the tokens
        that are scored together.
        """
        target, slot = self._target, self._behind(prompt)
        try:
            last = prompt[-1]
            for token, logits_V in zip(reply, self.logits(prompt, reply), strict=True):
                target.cache.reserve(slot, 1)
                alone_V = target.score([ScoreRow(slot, (last,))])[0].logits_NV[0].cpu()
                target.cache.keep(slot, 1, ())
                likely = logits_V.topk(min(20, len(logits_V))).indices
                apart_M = (alone_V - logits_V)[likely]
                apart_M = apart_M[torch.isfinite(apart_M)]
                yield float(apart_M.max() - apart_M.min())
                last = token
        finally:
            target.cache.free(slot)

    def scored(self, rules: Rules, prompt: Sequence[int], reply: Sequence[int]) -> Iterator[Scored]:
        """Each token of a reply with its plain law.

        Raises:
            ForedraftError: the rules leave no token where one was served.
        """
        text = list(prompt)
        for index, logits_V in enumerate(self.logits(prompt, reply)):
            yield Scored(index, reply[index], rules.law(logits_V, text), logits_V)
            text.append(reply[index])

    def _behind(self, prompt: Sequence[int]) -> int:
        """A slot of its own with all of a prompt but its last token."""
        cache, key = self._target.cache, tuple(prompt)
        if key not in self._slots:
            self._slots[key] = cache.allocate()
            read(self._target, self._slots[key], prompt[:-1])
        return cache.fork(self._slots[key])


@dataclass(frozen=True)
class Difference:
    """A token that differs from plain decoding's.

    Attributes:
        text: number of the reply.
        position: in the reply, from 0.
        served: the token that came.
        due: the one that plain decoding draws there.
        margin: difference of perturbed scores in nats; infinite if the served token was ruled out.
        prompt_sha256: of the prompt's ids.
    """

    text: int
    position: int
    served: int
    due: int
    margin: float
    prompt_sha256: str = ""


@dataclass
class Margins:
    """Tokens against what plain decoding draws at their places.

    Attributes:
        tolerance: the largest margin of a near-tie.
        tokens: looked at; each context counts once, as a greedy reply to one prompt never changes.
        near_ties: of these within the tolerance.
        structural: of these beyond it.
        examples: the first of them, near-ties or not.
    """

    tolerance: float
    tokens: int = 0
    near_ties: int = 0
    structural: int = 0
    examples: list[Difference] = field(default_factory=list)
    _contexts: set[int] = field(default_factory=set)

    def add(self, difference: Difference | None, context: int) -> None:
        """Add a token.

        Args:
            difference: None: it is the one that was due.
            context: a hash of the text before it, and of the seed where it is drawn.
        """
        if context in self._contexts:
            return
        self._contexts.add(context)
        self.tokens += 1
        if difference is None:
            return
        is_tie = self.count(difference.margin)
        if len(self.examples) < 10 or (not is_tie and self.structural <= 3):
            self.examples.append(difference)

    def count(self, margin: float) -> bool:
        """Count a token that differs; returns whether it is a near-tie."""
        is_tie = margin <= self.tolerance
        self.near_ties += is_tie
        self.structural += not is_tie
        return is_tie

    @property
    def reach(self) -> str:
        """How far apart tokens are that differ, for reports."""
        if self.tolerance > _MOST_TOLERANCE:
            return f"within its noise of {self.tolerance:.1f} nats, which hides real differences"
        return "at near-ties"

    @property
    def figures(self) -> dict[str, float]:
        return {
            "tokens": self.tokens,
            "near_ties": self.near_ties,
            "structural": self.structural,
            "tolerance_nats": self.tolerance,
        }

    @property
    def finding(self) -> Finding:
        """Where nothing is structural. Tokens that differ by more than a nat are no near-ties, and
        noise that reaches so far hides them."""
        if self.near_ties and self.tolerance > _MOST_TOLERANCE:
            return Finding.INCONCLUSIVE
        return Finding.NEAR_TIES if self.near_ties else Finding.SAME_BITS


def difference_of(
    each: Scored, params: SamplingParams, seed: int, num_prompt: int
) -> tuple[int, float] | None:
    """The token that plain decoding draws and its margin in nats, where another one was served.

    Requests with the coupling "drawn" draw nothing that plain decoding would draw: there a token
    differs where it was not possible at all, and the margin is how far it is from being so.
    """
    law, served, position = each.law, each.token, num_prompt + each.index
    if params.coupling == "drawn" and law.scale is not None:
        kept_V = law.logits_V > -math.inf
        if kept_V[served]:
            return None
        margin = float(each.logits_V[kept_V].min() - each.logits_V[served]) * law.scale
        return (law.token, margin) if margin else None
    due = law.token
    if law.scale is not None:
        due = gumbel_argmax(law.logits_V, seed, position, law.scale)
    if due == served:
        return None
    margin = float(law.logits_V[due] - law.logits_V[served]) * (law.scale or 1.0)
    if law.scale is not None and not math.isinf(margin):
        noise = gumbel_noise([due, served], seed, position)
        margin += noise[0] - noise[1]
    return due, margin


def shortened(prompt: Prompt, turn: int) -> Prompt:
    """A prompt without its end, so that another text follows at each turn; half of it stays.

    Its beginning does, too: servers then go on from entries that they have kept.
    """
    return prompt[: len(prompt) - min(_CUT * turn, len(prompt) // 2)]
