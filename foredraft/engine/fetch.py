"""Bring the results of a forward that verification needs to the host, in two transfers at most.

A GPU runs asynchronously; each number that Python reads waits for it. So the tokens that rows draw
from temperature and filters alone are drawn there and come in one piece, and the logits of all
other rows in another, however many rows and nodes there are. Without Triton, greedy rows alone are
spared their logits.

Shape legend: N positions whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foredraft.core.choices import DrawKey
from foredraft.core.sampling import Law, draw_rows
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
    others = [i for i, span in enumerate(scores.heads) if span]
    draw, needs_noise = scores.draw, any(batch[i].wants_logits for i in others)
    keys = {i: batch[i].draw_keys for i in others} if draw and needs_noise else {}
    if draw and (here := [i for i in others if keys.get(i)]):
        all_keys = [key for i in here for key in keys[i] or ()]
        _take(rows, here, draw(_joined(logits_NV, scores, here), all_keys))
        others = [i for i in others if not keys[i]]
    if greedy := [i for i in others if not batch[i].wants_logits]:
        here_NV = _joined(logits_NV, scores, greedy)
        largest_N, best_N = here_NV.max(dim=1)
        found = torch.stack((best_N.double(), largest_N.double()), 1).tolist()  # one transfer
        _take(rows, greedy, [_greedy(*each) for each in zip(here_NV.unbind(), found, strict=True)])
        others = [i for i in others if batch[i].wants_logits]
    if others:
        here_NV = _joined(logits_NV, scores, others).cpu()  # one transfer
        sizes = [len(scores.heads[i]) for i in others]
        for i, part_NV in zip(others, torch.split(here_NV, sizes), strict=True):
            rows[i] = Scores.of_row(part_NV)
    return rows


def _take(rows: list[Scores], indices: Sequence[int], drawn: Sequence[Law | None]) -> None:
    """Hand their draws to some of the rows."""
    found = iter(drawn)
    for i in indices:
        rows[i] = replace(rows[i], drawn=[next(found) for _ in rows[i].heads[0]])


def _drawn_ahead(scores: Scores, keys: Sequence[DrawKey | None]) -> list[Scores]:
    """On the host: with the draws of the forward, or else one draw after each row's pending tokens.

    Draws of a row may end early; those of a row without a key are not used.
    """
    rows, drawn = [*zip(scores.heads, keys, strict=True)], scores.drawn
    own: list[Sequence[Law | None]]
    if drawn is None:
        wanted = [(span.start, key) for span, key in rows if key is not None and span]
        found = iter(draw_rows(scores.logits_NV, wanted) if wanted else ())
        own = [[next(found)] if key is not None and span else [] for span, key in rows]
    else:
        own = [[] if key is None else drawn[span.start : span.stop] for span, key in rows]
    parts = zip(_split(scores.logits_NV, scores), own, strict=True)
    return [Scores(part_NV, (range(len(part_NV)),), drawn=mine) for part_NV, mine in parts]


def is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _greedy(logits_V: Tensor, found: Sequence[float]) -> Law | None:
    token, logit = int(found[0]), found[1]
    return Law(logits_V, None, token, drawn=token) if math.isfinite(logit) else None


def _split(logits_NV: Tensor, scores: Scores) -> list[Tensor]:
    return [logits_NV[span.start : span.stop] for span in scores.heads]


def _joined(logits_NV: Tensor, scores: Scores, rows: Sequence[int]) -> Tensor:
    if len(rows) == len(scores.heads):
        return logits_NV
    return torch.cat([logits_NV[scores.heads[i].start : scores.heads[i].stop] for i in rows])
