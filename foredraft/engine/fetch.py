"""Bring the results of a forward that verification needs to the host, in two transfers at most.

A GPU runs asynchronously; each number that Python reads waits for it. So the
likeliest tokens of all greedy rows come in one piece, and the logits of all rows that sample in
another, however many rows and nodes there are.

Shape legend: N positions whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foredraft.core.draws import DrawKey, Wanted, draw_rows
from foredraft.core.rules import Rules
from foredraft.models.base import RowScores, Scores


def fetch(
    scores: Scores, rules: Sequence[Rules], keys: Sequence[DrawKey | None]
) -> list[RowScores]:
    """Each row's scores as its rules need them, without taps.

    On CPU everything is on the host already. The next token of all rows with simple rules is drawn
    in one call; other distributions are computed only where verification reaches them.

    Args:
        keys: the draw key of each row's next token; None if the row's whole distribution is needed.
    """
    logits_NV = scores.logits_NV
    rows = [RowScores(logits_NV[span.start : span.stop]) for span in scores.heads]
    if is_on_host(logits_NV):
        return _drawn_ahead(rows, scores, keys) if any(keys) else rows
    greedy = [i for i, rule in enumerate(rules) if rule.takes_best and scores.heads[i]]
    others = [i for i in range(len(rows)) if i not in greedy and scores.heads[i]]
    if greedy:
        largest_N, best_N = _joined(logits_NV, scores, greedy).max(dim=1)
        found = torch.stack((best_N.double(), largest_N.double()), 1).tolist()  # one transfer
        pairs = iter([(int(token), logit) for token, logit in found])
        for i in greedy:
            rows[i] = replace(rows[i], best=[next(pairs) for _ in scores.heads[i]])
    if others:
        here_NV = _joined(logits_NV, scores, others).cpu()  # one transfer
        sizes = [len(scores.heads[i]) for i in others]
        for i, part_NV in zip(others, torch.split(here_NV, sizes), strict=True):
            rows[i] = RowScores(part_NV)
    return rows


def _drawn_ahead(
    rows: list[RowScores], scores: Scores, keys: Sequence[DrawKey | None]
) -> list[RowScores]:
    wanted = [
        (i, key)
        for i, (key, span) in enumerate(zip(keys, scores.heads, strict=True))
        if key is not None and span
    ]
    if scores.draws is None:
        places = [Wanted(scores.heads[i].start, *key) for i, key in wanted]
        first = [[draw] for draw in draw_rows(scores.logits_NV, places)]
    else:
        spans = [scores.heads[i] for i, _ in wanted]
        first = [[*scores.draws[span.start : span.stop]] for span in spans]
    for (i, _), draws in zip(wanted, first, strict=True):
        rows[i] = replace(rows[i], draws=draws)
    return rows


def is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _joined(logits_NV: Tensor, scores: Scores, rows: Sequence[int]) -> Tensor:
    if len(rows) == len(scores.heads):
        return logits_NV
    return torch.cat([logits_NV[scores.heads[i].start : scores.heads[i].stop] for i in rows])
