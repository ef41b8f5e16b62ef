"""Bring the results of a forward that verification needs to the host, in two transfers at most.

A GPU runs asynchronously; each number that Python reads waits for it. So the likeliest tokens of
all greedy rows come in one piece, and the logits of all rows that sample in another, however many
rows and nodes there are.

Shape legend: N positions whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.core.draws import Draw, DrawKey, draw_rows
from foredraft.engine.turn import Turn
from foredraft.models.base import Scores


def fetch(scores: Scores, batch: Sequence[Turn]) -> list[Scores]:
    """Each row's scores as verification needs them, without taps.

    On CPU everything is on the host already. The next token of all rows whose distribution is
    merely scaled logits is drawn in one call; other distributions are computed only where
    verification reaches them.
    """
    if is_on_host(scores.logits_NV):
        return _drawn_ahead(scores, [turn.draw_key for turn in batch])
    logits_NV, rows = scores.logits_NV, [*map(Scores.of_row, _split(scores.logits_NV, scores))]
    present = [i for i, span in enumerate(scores.heads) if span]
    others = [i for i in present if batch[i].wants_logits]
    greedy = [i for i in present if not batch[i].wants_logits]
    if greedy:
        largest_N, best_N = _joined(logits_NV, scores, greedy).max(dim=1)
        found = torch.stack((best_N.double(), largest_N.double()), 1).tolist()  # one transfer
        draws = iter([_likeliest(int(token), logit) for token, logit in found])
        for i in greedy:
            own = [next(draws) for _ in scores.heads[i]]
            rows[i] = Scores(rows[i].logits_NV, rows[i].heads, draws=own)
    if others:
        here_NV = _joined(logits_NV, scores, others).cpu()  # one transfer
        sizes = [len(scores.heads[i]) for i in others]
        for i, part_NV in zip(others, torch.split(here_NV, sizes), strict=True):
            rows[i] = Scores.of_row(part_NV)
    return rows


def _drawn_ahead(scores: Scores, keys: Sequence[DrawKey | None]) -> list[Scores]:
    """On the host: with the draws of the forward, or else one draw after each row's pending tokens.

    Draws of a row may end early; those of a row without a key are not used.
    """
    rows, draws = [*zip(scores.heads, keys, strict=True)], scores.draws
    own: list[Sequence[Draw | None]]
    if draws is None:
        wanted = [(span.start, key) for span, key in rows if key is not None and span]
        found = iter(draw_rows(scores.logits_NV, wanted) if wanted else ())
        own = [[next(found)] if key is not None and span else [] for span, key in rows]
    else:
        own = [[] if key is None else draws[span.start : span.stop] for span, key in rows]
    parts = zip(_split(scores.logits_NV, scores), own, strict=True)
    return [Scores(part_NV, (range(len(part_NV)),), draws=mine) for part_NV, mine in parts]


def is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _likeliest(token: int, logit: float) -> Draw | None:
    return Draw(token, token) if math.isfinite(logit) else None


def _split(logits_NV: Tensor, scores: Scores) -> list[Tensor]:
    return [logits_NV[span.start : span.stop] for span in scores.heads]


def _joined(logits_NV: Tensor, scores: Scores, rows: Sequence[int]) -> Tensor:
    if len(rows) == len(scores.heads):
        return logits_NV
    return torch.cat([logits_NV[scores.heads[i].start : scores.heads[i].stop] for i in rows])
