"""Speculative decoding on one page: the algorithm, its drafters and its rules, and nothing else.

A *target* p writes text. A cheap *drafter* guesses γ tokens x̃₁ … x̃_γ. The target scores all of
them in one forward, which gives p₁ … p_{γ+1}: p_i is its distribution of token i behind the guesses
before it. A *rule* then keeps a prefix of the guesses and adds one token of the target's own. The
text has the distribution that the target alone gives it, whatever the drafter guesses.

Read from top to bottom:

    plain           the target alone, a token a forward
    speculate       the loop: draft, score, verify               Leviathan et al., arXiv 2211.17192
    ngram_drafter   copies from the text                         Saxena 2023 (prompt lookup)
    greedy_drafter  the likeliest tokens of a small model q
    drawn_drafter   tokens drawn from q                          Leviathan et al., algorithm 1
    target_only     keep guesses while the target draws them
    token_rule      keep x̃ with probability min(1, p(x̃)/q(x̃))    Leviathan et al., algorithm 1
    block_rule      decide about whole prefixes                  Sun et al., arXiv 2403.10444
    Noise           the random numbers, each fixed by its key    Salmon et al., SC 2011

The engine (`foredraft.engine.step`) runs this loop for many requests at once, with trees, caches
and kernels. With the same seed its text is the text of this page; a test compares them.

    >>> from foredraft.models.table import TableModel
    >>> p, q = (TableModel.random(vocab_size=9, seed=s).probs for s in (1, 2))
    >>> text = speculate(p, [3, 1, 4], 8, drawn_drafter(q, gamma=3), block_rule, seed=7)
    >>> len(text)
    11
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Text = list[int]
Probs = npt.NDArray[np.float64]
Model = Callable[[tuple[int, ...]], Sequence[float]]
"""From a text to the distribution of its next token, [V], as `TableModel.probs` gives it."""
Drafter = Callable[[Text, "Noise"], tuple[Text, list[Probs]]]
"""From the text to γ guesses x̃, and the distributions q₁ … q_γ that they were drawn from; the list
is empty where the guesses are a function of the text and were not drawn."""
Rule = Callable[[Text, list[Probs], list[Probs], "Noise"], Text]
"""From x̃, q and p to the tokens that are committed: a prefix of x̃, and one token more."""


# ---- the loop ------------------------------------------------------------------------------------


def plain(p: Model, prompt: Text, num_tokens: int, seed: int) -> Text:
    """The text as the target writes it alone: a forward for each token."""
    x = [*prompt]
    for _ in range(num_tokens):
        x.append(Noise(seed, len(x)).draw_target(_next(p, x), depth=0))
    return x


def speculate(
    p: Model, prompt: Text, num_tokens: int, draft: Drafter, verify: Rule, seed: int
) -> Text:
    """The same distribution in fewer forwards: each step commits 1 to γ + 1 tokens."""
    x = [*prompt]
    while len(x) < len(prompt) + num_tokens:
        noise = Noise(seed, len(x))
        guesses, qs = draft(x, noise)
        # ONE forward of the target scores all prefixes: this is where the time is saved.
        ps = [_next(p, x + guesses[:i]) for i in range(len(guesses) + 1)]
        x += verify(guesses, qs, ps, noise)
    return x[: len(prompt) + num_tokens]


def _next(model: Model, x: Text) -> Probs:
    probs: Probs = np.asarray(model(tuple(x)), dtype=np.float64)
    normalised: Probs = probs / probs.sum()
    return normalised


# ---- drafters ------------------------------------------------------------------------------------


def ngram_drafter(gamma: int, largest: int = 4, smallest: int = 2) -> Drafter:
    """Guesses what followed the last tokens when they came before (prompt lookup)."""

    def draft(x: Text, noise: Noise) -> tuple[Text, list[Probs]]:
        for size in range(largest, smallest - 1, -1):
            for start in range(len(x) - size - 1, -1, -1):  # the latest match first
                if x[start : start + size] == x[-size:]:
                    copied = x[start + size :]
                    return [copied[i % len(copied)] for i in range(gamma)], []
        return [], []

    return draft


def greedy_drafter(q: Model, gamma: int) -> Drafter:
    """Guesses the likeliest tokens of a small model, one after the other."""

    def draft(x: Text, noise: Noise) -> tuple[Text, list[Probs]]:
        guesses: Text = []
        for _ in range(gamma):
            guesses.append(int(_next(q, x + guesses).argmax()))
        return guesses, []

    return draft


def drawn_drafter(q: Model, gamma: int) -> Drafter:
    """Draws γ tokens from a small model, and hands over what they were drawn from."""

    def draft(x: Text, noise: Noise) -> tuple[Text, list[Probs]]:
        guesses: Text = []
        qs: list[Probs] = []
        for i in range(gamma):
            qs.append(_next(q, x + guesses))
            guesses.append(noise.draw_draft(qs[i], i))
        return guesses, qs

    return draft


# ---- rules ---------------------------------------------------------------------------------------


def target_only(guesses: Text, qs: list[Probs], ps: list[Probs], noise: Noise) -> Text:
    """Draw as plain decoding would, and go on while the token drawn happens to be the guess.

    For guesses that are a function of the text. Each token is drawn from p with the noise of its
    position, so that the text is the plain one, token by token.
    """
    committed: Text = []
    for i, p in enumerate(ps):
        committed.append(noise.draw_target(p, depth=i))
        if i == len(guesses) or committed[i] != guesses[i]:
            break
    return committed


def token_rule(guesses: Text, qs: list[Probs], ps: list[Probs], noise: Noise) -> Text:
    """Keep each guess with probability min(1, p/q); at the first refusal draw from (p - q)₊."""
    for i, (guess, q) in enumerate(zip(guesses, qs, strict=True)):
        if not noise.accept(min(1.0, ps[i][guess] / q[guess]), i + 1):
            return [*guesses[:i], noise.draw_residual(_residual(ps[i], q))]
    return [*guesses, noise.draw_residual(ps[-1])]  # all were kept: a bonus token


def block_rule(guesses: Text, qs: list[Probs], ps: list[Probs], noise: Noise) -> Text:
    """Keep the longest prefix that passes a test of its own: no fewer tokens than the token rule.

    w_i = min(1, w_{i-1} p_i(x̃_i) / q_i(x̃_i)) is how much of the prefix the target would have
    written. Prefix i passes with S_i / (S_i + 1 - w_i), where S_i = Σ (w_i p_{i+1} - q_{i+1})₊; the
    whole draft passes with w_γ. The next token is drawn from (w_i p_{i+1} - q_{i+1})₊.
    """
    gamma, w = len(guesses), [1.0]
    for guess, p, q in zip(guesses, ps, qs, strict=False):
        w.append(min(1.0, w[-1] * p[guess] / q[guess]))
    if noise.accept(w[gamma], gamma):
        return [*guesses, noise.draw_residual(ps[gamma])]
    for i in range(gamma - 1, 0, -1):
        s = float(np.maximum(w[i] * ps[i] - qs[i], 0.0).sum())
        if noise.accept(s / (s + 1.0 - w[i]) if s + 1.0 > w[i] else 1.0, i):
            return [*guesses[:i], noise.draw_residual(_residual(w[i] * ps[i], qs[i]))]
    return [noise.draw_residual(_residual(ps[0], qs[0]))]


def _residual(p: Probs, q: Probs) -> Probs:
    """(p - q)₊: what the drafter leaves uncovered. Equal distributions leave nothing; then p."""
    rest = np.maximum(p - q, 0.0)
    return rest if rest.sum() > 0.0 else p


# ---- random numbers ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Noise:
    """The random numbers of one step. Each is a function of (seed, position, purpose, index), so no
    number depends on how many were asked for before it: neither batches nor rejections shift them.

    Args:
        seed: of the request.
        position: number of tokens before the step.
    """

    seed: int
    position: int

    def draw_target(self, p: Probs, depth: int) -> int:
        """argmax(log p + g) with Gumbel noise g of the token's position: a draw from p."""
        with np.errstate(divide="ignore"):
            scores = np.log(p)
        possible = np.flatnonzero(p)
        scores[possible] += [self._gumbel(self.position + depth, int(v)) for v in possible]
        return int(scores.argmax())

    def draw_draft(self, q: Probs, index: int) -> int:
        return _inverted(q, self._uniform(3, index))

    def accept(self, probability: float, index: int) -> bool:
        return self._uniform(1, index) < probability

    def draw_residual(self, weights: Probs) -> int:
        return _inverted(weights, self._uniform(2, 0))

    def _uniform(self, purpose: int, index: int) -> float:
        high, low, _, _ = _philox(self.seed, self.position, purpose, index)
        return ((high << 21) | (low >> 11)) * 2.0**-53

    def _gumbel(self, position: int, v: int) -> float:
        """-log(-log u) with 52 random bits: 8 of a block that 16 tokens share, 44 of its own."""
        shared = _philox(self.seed, position, 0, 16 * (v >> 8) + (v >> 2 & 15))
        high, low, _, _ = _philox(self.seed, position, 0, (1 << 31) + v)
        bits = (shared[v >> 6 & 3] >> 8 * (v & 3) & 255) << 44 | high << 12 | low >> 20
        return -math.log(-math.log(1.0 - (2 * bits + 1) * 2.0**-53))


def _inverted(weights: Probs, u: float) -> int:
    """The token at u of the cumulative weights, u in [0, 1)."""
    cumulative: Any = weights.cumsum()
    return int(np.searchsorted(cumulative, cumulative[-1] * u, side="right"))


def _philox(seed: int, position: int, purpose: int, index: int) -> tuple[int, int, int, int]:
    """Philox 4x32-10: four words of 32 bits, a hash of the four arguments."""
    mask = 0xFFFFFFFF
    a, b, c, d = position & mask, position >> 32, purpose, index
    key0, key1 = seed & mask, seed >> 32
    for _ in range(10):
        m, n = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = n >> 32 ^ b ^ key0, n & mask, m >> 32 ^ d ^ key1, m & mask
        key0, key1 = key0 + 0x9E3779B9 & mask, key1 + 0xBB67AE85 & mask
    return a, b, c, d
