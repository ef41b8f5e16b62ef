"""Acceptance of a head's drafts by the target, measured on held-out text.

Greedy text: a draft token is right if it is the text's. Above temperature 0 target and drafter
choose with the same Gumbel noise, and agree with probability

    sum_x 1 / sum_y max(p_y / p_x, q_y / q_x)        (Daliri, Musco, Suresh, arXiv 2408.07978)

Shape legend: B texts, L tokens, N anchors, R output rows, D depths.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import Tensor

from foredraft.train.batches import TrainBatch
from foredraft.train.heads.base import Prediction

_ROWS_AT_ONCE = 128
_SAMPLED_STRIDE = 8
"""One in this many anchors of a sampled text is measured: each needs its rows sorted."""


def gumbel_acceptance(target_probs_NR: Tensor, draft_probs_NR: Tensor) -> Tensor:
    """The chance [N] that draws from p and q with the same Gumbel noise are equal.

    Rows of p may sum up to less than 1: the rest lies on tokens that q never names.
    """
    p, q = target_probs_NR.double(), draft_probs_NR.double()
    p, q = p / p.sum(-1, keepdim=True).clamp(min=1.0), q / q.sum(-1, keepdim=True)
    other_N1 = (1.0 - p.sum(-1, keepdim=True)).clamp(min=0.0)
    order = (p / q.clamp(min=1e-300)).argsort(-1, descending=True)
    p, q = p.gather(-1, order), q.gather(-1, order)
    # In this order p_y / p_x is the larger for those before x, q_y / q_x for x and those after.
    before = p.cumsum(-1) - p + other_N1
    after = q.flip(-1).cumsum(-1).flip(-1)
    shares = 1.0 / (before / p.clamp(min=1e-300) + after / q.clamp(min=1e-300))
    return torch.where((p > 0) & (q > 0), shares, 0.0).sum(-1)


@dataclass(frozen=True)
class HeldOutAcceptance:
    """Acceptance on held-out text.

    Attributes:
        greedy: by depth, the share of anchors of greedy text where the draft is right, of those
            where all before it were.
        sampled: by depth, the chance at temperature 1 that shared noise makes draft and target
            agree, on text that was sampled (on greedy text where there is no other).
        overlap: by depth, the sum of the smaller probabilities there.
        committed_greedy: tokens a step of a chain of that depth, temperature 0.
        committed_sampled: tokens a step of a chain of that depth, temperature 1.
        covered: share of the target's mass that the head can name.
        num_anchors: of greedy and of sampled text.
    """

    greedy: tuple[float, ...]
    sampled: tuple[float, ...]
    overlap: tuple[float, ...]
    committed_greedy: float
    committed_sampled: float
    covered: float
    num_anchors: tuple[int, int]

    @property
    def score(self) -> float:
        """The score by which checkpoints are chosen: the mean of both temperatures."""
        return (self.committed_greedy + self.committed_sampled) / 2

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"score": self.score}


class AcceptanceCount:
    """Accumulates acceptance over batches.

    Args:
        depth: draft tokens to count.
        has_sampled: whether any of the texts was sampled; if not, greedy ones serve for both.
    """

    def __init__(self, depth: int, has_sampled: bool) -> None:
        self._depth, self._has_sampled = depth, has_sampled
        self._right = torch.zeros(depth, dtype=torch.float64)
        self._tried = torch.zeros(depth, dtype=torch.float64)
        self._sampled: list[Tensor] = []
        self._overlap: list[Tensor] = []
        self._covered: list[Tensor] = []

    def add(
        self,
        predictions: Sequence[Prediction],
        batch: TrainBatch,
        head_RE: Tensor,
        row_of_V: Tensor,
    ) -> None:
        """Count a batch.

        Args:
            head_RE: float32 rows of the target's head for the head's output rows.
            row_of_V: output row of each token; -1: none.
        """
        greedy_B = batch.temperatures_B == 0
        self._add_greedy(predictions, batch, greedy_B, row_of_V)
        sampled_B = ~greedy_B if self._has_sampled else greedy_B
        self._add_sampled(predictions, batch, sampled_B, head_RE)

    def _add_greedy(
        self,
        predictions: Sequence[Prediction],
        batch: TrainBatch,
        texts_B: Tensor,
        row_of_V: Tensor,
    ) -> None:
        places = anchors(batch, texts_B, 1)
        alive_N = torch.ones(len(places), dtype=torch.bool, device=places.device)
        lengths_N = batch.texts.lengths_B[places[:, 0]]
        for k, prediction in enumerate(predictions):
            inside_N = places[:, 1] + k + 2 < lengths_N
            alive_N &= inside_N
            texts, at = places[alive_N, 0], places[alive_N, 1]
            labels = row_of_V[batch.texts.tokens_BL[texts, at + k + 2]]
            logits = _logits(prediction, texts, at)
            best = [piece.argmax(-1) for piece in logits]
            right = torch.cat(best) == labels if best else labels == -2
            self._tried[k] += len(right)
            self._right[k] += int(right.sum())
            alive_N[alive_N.clone()] = right

    def _add_sampled(
        self, predictions: Sequence[Prediction], batch: TrainBatch, texts_B: Tensor, head_RE: Tensor
    ) -> None:
        places = anchors(batch, texts_B, self._depth)
        places = places[places[:, 1] % _SAMPLED_STRIDE == 0]  # whatever batch they are in
        agreed, overlaps = [], []
        texts, at = places[:, 0], places[:, 1]
        for k, prediction in enumerate(predictions):
            rows = batch.teacher.rows_BL[texts, at + k + 2]
            target = _target_probs(batch, rows, head_RE)
            draft = _logits(prediction, texts, at)
            measures = [
                (gumbel_acceptance(p, q), torch.minimum(p, q).sum(-1), p.sum(-1))
                for p, q in zip(target, (x.softmax(-1) for x in draft), strict=True)
            ]
            if not measures:
                return
            agreed.append(torch.cat([each[0] for each in measures]))
            overlaps.append(torch.cat([each[1] for each in measures]))
            self._covered.append(torch.cat([each[2] for each in measures]).cpu())
        self._sampled.append(torch.stack(agreed).cpu())
        self._overlap.append(torch.stack(overlaps).cpu())

    def result(self) -> HeldOutAcceptance:
        depth = self._depth
        empty = torch.zeros(depth, 0)
        sampled_DN = torch.cat(self._sampled, 1) if self._sampled else empty
        overlap_DN = torch.cat(self._overlap, 1) if self._overlap else empty
        greedy = tuple((self._right / self._tried.clamp(min=1)).tolist())
        num = sampled_DN.shape[1]
        return HeldOutAcceptance(
            greedy=greedy,
            sampled=tuple(sampled_DN.mean(1).tolist()) if num else (0.0,) * depth,
            overlap=tuple(overlap_DN.mean(1).tolist()) if num else (0.0,) * depth,
            committed_greedy=tokens_a_step(greedy),
            committed_sampled=1.0 + (sampled_DN.cumprod(0).sum(0).mean().item() if num else 0.0),
            covered=torch.cat(self._covered).mean().item() if num else 0.0,
            num_anchors=(int(self._tried[0]) if depth else 0, num),
        )


def tokens_a_step(shares: Sequence[float]) -> float:
    """Tokens a step of a chain, from the acceptance at each depth."""
    return sum(accumulate(shares, mul, initial=1.0))


def shares_by_depth(rights: Iterable[Sequence[bool]], depth: int) -> list[float]:
    """As `HeldOutAcceptance.greedy`, for a drafter that names one token after any text.

    Args:
        rights: for each text, whether each token of its reply was named right.
    """
    right, tried = [0] * depth, [0] * depth
    for of_text in rights:
        for first in range(1, len(of_text)):  # the first token is the target's own
            for k, is_right in enumerate(of_text[first : first + depth]):
                tried[k] += 1
                right[k] += is_right
                if not is_right:
                    break
    return [r / max(1, t) for r, t in zip(right, tried, strict=True)]


def anchors(batch: TrainBatch, texts_B: Tensor, depth: int) -> Tensor:
    """Text and position [N, 2] of anchors with at least ``depth`` tokens after them."""
    length = batch.texts.tokens_BL.shape[1]
    inside_BL = torch.arange(length, device=texts_B.device) + depth + 1
    fits_BL = inside_BL[None] < batch.texts.lengths_B[:, None]
    return (batch.anchors_BL & fits_BL & texts_B[:, None]).nonzero()


def _logits(prediction: Prediction, texts: Tensor, at: Tensor) -> list[Tensor]:
    """Float32, in pieces."""
    output_RK = prediction.output_RK.float()
    states_NK = prediction.states_BLK[texts, at].float()
    return [piece @ output_RK.T for piece in torch.split(states_NK, _ROWS_AT_ONCE) if len(piece)]


def _target_probs(batch: TrainBatch, rows: Tensor, head_RE: Tensor) -> list[Tensor]:
    parts = [part for part in torch.split(rows, _ROWS_AT_ONCE) if len(part)]
    return [batch.teacher.log_probs(head_RE, part).exp() for part in parts]
