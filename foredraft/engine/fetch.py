"""What verification needs of a forward, brought to the host in two transfers at most.

A GPU works ahead of Python; every number that Python reads makes it wait for the GPU. So the
likeliest tokens of all greedy rows come in one piece, and the logits of all rows that sample in
another, however many rows and nodes there are.

Shape legend: N positions whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.core.draws import Draw, DrawKey, Wanted, draw_rows
from foredraft.core.rules import Rules
from foredraft.core.sampling import Law, check_finite
from foredraft.core.tree import ROOT
from foredraft.models.base import Scores


@dataclass(frozen=True)
class FetchedRow:
    """One row's scores.

    Attributes:
        logits_NV: after the last token read (number 0) and after each node, [V] each; on the host
            unless ``best`` is there.
        best: the likeliest token and its logit at each position, where nothing else is needed.
        draw: the token after the last one read, where it is drawn already.
        scale: of the logits that it was drawn from.
    """

    logits_NV: Sequence[Tensor]
    best: Sequence[tuple[int, float]] | None = None
    draw: Draw | None = None
    scale: float = 0.0

    @property
    def drawn(self) -> int | None:
        """The token after the last one read, where it is drawn already."""
        return self.draw.token if self.draw else None

    def law(self, node: int, rules: Rules, text: Sequence[int], drafted: Sequence[int]) -> Law:
        """The target's law after ``node``.

        Raises:
            NonFiniteScoresError: its logits are not finite.
            ForedraftError: the rules allow no token.
        """
        if node == ROOT and self.draw is not None:
            return Law(self.logits_NV[0], self.scale or None, self.draw.best)
        logits_V = self.logits_NV[node + 1]
        if self.best is None:
            return rules.law(logits_V, text, drafted)
        token, logit = self.best[node + 1]
        check_finite(logit, logits_V.numel())
        return Law(logits_V, None, token)


def fetch(
    scores: Scores, rules: Sequence[Rules], keys: Sequence[DrawKey | None]
) -> list[FetchedRow]:
    """Each row's scores as its rules need them.

    On CPU everything is on the host already. What all rows need, their next token, is drawn for all
    of them in one call where rules are simple; beyond that only what verification reaches is
    looked at.

    Args:
        keys: what the next token of each row is drawn with; None where a look at its law is needed.
    """
    logits_NV = scores.logits_NV
    rows = [FetchedRow(_LogitRows(logits_NV, span)) for span in scores.heads]
    if is_on_host(logits_NV):
        return _drawn_ahead(rows, scores, keys) if any(keys) else rows
    greedy = [i for i, rule in enumerate(rules) if rule.takes_best and scores.heads[i]]
    others = [i for i in range(len(rows)) if i not in greedy and scores.heads[i]]
    if greedy:
        largest_N, best_N = _joined(logits_NV, scores, greedy).max(dim=1)
        found = torch.stack((best_N.double(), largest_N.double()), 1).tolist()  # one transfer
        pairs = iter([(int(token), logit) for token, logit in found])
        for i in greedy:
            rows[i] = FetchedRow(rows[i].logits_NV, [next(pairs) for _ in scores.heads[i]])
    if others:
        here_NV = _joined(logits_NV, scores, others).cpu()  # one transfer
        sizes = [len(scores.heads[i]) for i in others]
        for i, part_NV in zip(others, torch.split(here_NV, sizes), strict=True):
            rows[i] = FetchedRow(part_NV.unbind())
    return rows


def _drawn_ahead(
    rows: list[FetchedRow], scores: Scores, keys: Sequence[DrawKey | None]
) -> list[FetchedRow]:
    wanted = [
        (i, key)
        for i, (key, span) in enumerate(zip(keys, scores.heads, strict=True))
        if key is not None and span
    ]
    draws = scores.draws
    if draws is None:
        places = [Wanted(scores.heads[i].start, *key) for i, key in wanted]
        draws = draw_rows(scores.logits_NV, places)
    for (i, key), draw in zip(wanted, draws, strict=True):
        if draw is not None:  # else it is looked at alone, and found out what is wrong
            rows[i] = FetchedRow(rows[i].logits_NV, None, draw, key.scale)
    return rows


class _LogitRows(Sequence[Tensor]):
    """Some rows of logits. Of most steps few are looked at."""

    def __init__(self, logits_NV: Tensor, span: range) -> None:
        self._logits_NV, self._span = logits_NV, span

    def __len__(self) -> int:
        return len(self._span)

    def __getitem__(self, index: int) -> Tensor:  # type: ignore[override]
        return self._logits_NV[self._span[index]]


def is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _joined(logits_NV: Tensor, scores: Scores, rows: Sequence[int]) -> Tensor:
    if len(rows) == len(scores.heads):
        return logits_NV
    return torch.cat([logits_NV[scores.heads[i].start : scores.heads[i].stop] for i in rows])
