"""The likeliest tokens of a head's logits: one compiled pass, or torch where it is not to be had.

Shape legend: N nodes, R output rows, K candidates of a node.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from ctypes import c_double, c_int64

import numpy as np
import torch
from torch import Tensor

from foredraft.core.choices import Choice, DrawnChoices, choices_of
from foredraft.core.draws import Array
from foredraft.core.named import NamedLaws, NamedTokens
from foredraft.core.params import SamplingParams
from foredraft.drafters.base import DraftRow
from foredraft.kernels.build import KernelUnavailable, load_library
from foredraft.kernels.interface import declared
from foredraft.models.base import ScoredTokens

LEAST_CHANCE = 4e-3
"""Less likely tokens are ignored: only once in a thousand times does the noise make one ten times
as likely, so that it might be worth a node."""


class Candidates:
    """Finds them among the tokens that a head can name."""

    def __init__(self, ids_R: Tensor) -> None:
        self._ids_R = ids_R.long().cpu().contiguous()

    def likeliest(self, logits_NR: Tensor, count: int, scale: float) -> list[list[Choice]]:
        """At most ``count`` tokens of each node, likeliest first, with their probabilities.

        Args:
            logits_NR: float32.
            scale: 1 / temperature.
        """
        count = min(count, len(self._ids_R))
        library = _library() if logits_NR.device.type == "cpu" else None
        if library is None or logits_NR.dtype != torch.float32:
            return self._by_torch(logits_NR, count, scale)
        logits_NR = logits_NR.contiguous()
        num_nodes, num_rows = logits_NR.shape
        tokens = (c_int64 * (num_nodes * count))()
        chances = (c_double * (num_nodes * count))()
        found = (c_int64 * num_nodes)()
        library.foredraft_candidates(
            *(logits_NR.data_ptr(), num_nodes, num_rows, count, scale, LEAST_CHANCE),
            *(self._ids_R.data_ptr(), tokens, chances, found),
        )
        starts = range(0, num_nodes * count, count)
        return [
            [*map(Choice, tokens[start : start + n], chances[start : start + n])]
            for start, n in zip(starts, found, strict=True)
        ]

    def _by_torch(self, logits_NR: Tensor, count: int, scale: float) -> list[list[Choice]]:
        top = logits_NR.topk(count)
        log_total_N1 = (logits_NR * scale).logsumexp(1, keepdim=True)
        chances_NK = (top.values * scale - log_total_N1).exp().tolist()
        tokens_NK = self._ids_R[top.indices.cpu()].tolist()
        return [
            [Choice(*pair) for pair in zip(tokens, chances, strict=True) if pair[1] >= LEAST_CHANCE]
            for tokens, chances in zip(tokens_NK, chances_NK, strict=True)
        ]


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        return declared(load_library("heads"), "heads")
    except KernelUnavailable:
        return None


_CANDIDATES = 64
"""Candidates of each node among which the noise chooses; tokens beyond are rarely drawn."""

_COPIED_WEIGHT = 0.35

HEAD_TRUST = 0.7
"""A head's scores say less than a draft model's (`foredraft.core.choices.TRUST`). Fitted to the log
loss of its choices at temperatures 0.7 and 1."""


class OutputRows:
    """The token of each output row of a head.

    Args:
        ids_R: the tokens, ascending; None: all.
        vocab_size: V.

    Attributes:
        ids_R: the tokens, all of them named.
    """

    def __init__(self, ids_R: Tensor | None, vocab_size: int) -> None:
        self.ids_R = torch.arange(vocab_size) if ids_R is None else ids_R.cpu()
        self._candidates = Candidates(self.ids_R)
        self._tokens = NamedTokens(self.ids_R.numpy(), vocab_size)

    def spread(self, logits_R: Tensor) -> Tensor:
        """Logits [V]: tokens without a row cannot occur."""
        if self._tokens.are_all:
            return logits_R
        if logits_R.is_cpu and logits_R.dtype == torch.float32:
            # torch would wake other threads for it, which takes longer than the work.
            return torch.from_numpy(self._tokens.spread(logits_R.numpy()))
        logits_V = logits_R.new_full((self._tokens.vocab_size,), -math.inf)
        logits_V[self.ids_R.to(logits_R.device)] = logits_R
        return logits_V

    def choices(
        self,
        row: DraftRow,
        logits_NR: Tensor,
        drafted: Sequence[Sequence[int]],
        count: int,
        copied: Sequence[Sequence[Choice]] = (),
    ) -> list[list[Choice]]:
        """The tokens that the target will likeliest take at each node, likeliest first.

        For seeded requests. Where the rules are temperature and filters alone, only the likeliest
        tokens are looked at, which costs far less than a law over the vocabulary.

        Args:
            logits_NR: the head's own.
            drafted: for each node the guesses from the committed text to it, itself included.
            copied: for each node candidates of another source; see `blended`.
        """
        params = row.params
        if not row.rules.filters_only:
            return [
                row.choose(self.spread(logits_R), guesses, count)
                for logits_R, guesses in zip(logits_NR, drafted, strict=True)
            ]
        is_greedy = params.temperature == 0.0
        scale = 1.0 if is_greedy else 1.0 / max(params.temperature, 1e-3)
        assert not isinstance(row.choices, DrawnChoices)
        if not is_greedy and not params.has_filters:
            laws = self._laws(logits_NR, scale, copied)
            return row.choices.best_each(laws, [*map(len, drafted)], count, HEAD_TRUST)
        wanted = count if is_greedy else _CANDIDATES
        likeliest = self._candidates.likeliest(logits_NR, wanted, scale)
        found = []
        for node, (candidates, guesses) in enumerate(zip(likeliest, drafted, strict=True)):
            if copied and copied[node]:
                candidates = blended(candidates, copied[node])
            if not is_greedy:
                candidates = _filtered(candidates, params)
            found.append(row.choices.among(candidates, len(guesses), count, HEAD_TRUST))
        return found

    def _laws(
        self, logits_NR: Tensor, scale: float, copied: Sequence[Sequence[Choice]]
    ) -> NamedLaws:
        """Laws over all tokens, since noise may choose any; copied ones as in `blended`."""
        values_NR = np.ascontiguousarray(logits_NR.detach().float().cpu().numpy())
        others: list[list[tuple[int, float]]] = [[] for _ in values_NR]
        if any(copied):
            values_NR = values_NR.copy()
            for node, choices in enumerate(copied):
                if choices:
                    others[node] = self._mix_in(values_NR[node], scale, choices)
        return NamedLaws(self._tokens, values_NR, scale, others)

    def _mix_in(
        self, values_R: Array, scale: float, copied: Sequence[Choice]
    ) -> list[tuple[int, float]]:
        """Mix the copied tokens into the head's logits.

        Returns:
            Copied tokens that have no row, with their logits.
        """
        # With z the log of the head's total, p = exp(scale * logit - z).
        z = _log_total(values_R, scale)
        others = []
        for token, chance in copied:
            row = self._tokens.row(token)
            own = 0.0 if row is None else math.exp(float(values_R[row]) * scale - z)
            odds = own + _COPIED_WEIGHT / (1.0 - _COPIED_WEIGHT) * chance
            logit = (math.log(max(odds, 1e-12)) + z) / scale
            if row is None:
                others.append((token, logit))
            else:
                values_R[row] = logit
        return others


def scored_choices(
    row: DraftRow, level: ScoredTokens, count: int, copied: Sequence[Choice] = ()
) -> list[Choice]:
    """The tokens that the target will likeliest take, of sums that a device has made.

    Args:
        copied: candidates of another source, which join where there is no noise.
    """
    assert not isinstance(row.choices, DrawnChoices)
    if row.choices.has_noise:
        return choices_of(level.scored, count, HEAD_TRUST)
    found = [Choice(token, math.exp(logit - level.total)) for token, logit in level.scored[:count]]
    found = [choice for choice in found if choice.chance >= LEAST_CHANCE]
    return blended(found, copied)[:count] if copied else found


def _log_total(values_R: Array, scale: float) -> float:
    most = values_R.max()
    total = np.exp((values_R - most) * np.float32(scale)).sum()
    return float(most) * scale + math.log(float(total))


def blended(learned: Sequence[Choice], copied: Sequence[Choice]) -> list[Choice]:
    """Two opinions about one token as one, likeliest first: their weighted mean.

    The weight is the one that named most tokens right in held-out replies of a small chat model
    (0.79 of greedy ones, where the head alone named 0.72 and the copy alone 0.68).
    """
    chances = {choice.token: (1.0 - _COPIED_WEIGHT) * choice.chance for choice in learned}
    for choice in copied:
        chances[choice.token] = chances.get(choice.token, 0.0) + _COPIED_WEIGHT * choice.chance
    return [Choice(*pair) for pair in sorted(chances.items(), key=lambda pair: -pair[1])]


def _filtered(candidates: list[Choice], params: SamplingParams) -> list[Choice]:
    """Candidates (in falling order) that pass top-k, top-p and min-p, renormalised."""
    if not params.has_filters:
        return candidates
    if params.top_k > 0:
        candidates = candidates[: params.top_k]
    kept, mass = [], 0.0
    for candidate in candidates:
        if mass >= params.top_p or candidate.chance < params.min_p * candidates[0].chance:
            break
        kept.append(candidate)
        mass += candidate.chance
    return [Choice(token, chance / mass) for token, chance in kept]
