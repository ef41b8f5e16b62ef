"""One step of learning: from a batch to changed weights.

Shape legend: B texts, L tokens, N positions that are learnt, T positions in replies, R output rows,
C candidates (rows that the target finds likely), V vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from foredraft.core.errors import TrainingError
from foredraft.drafters.heads.base import HeadModule, Prediction
from foredraft.train.batches import TrainBatch
from foredraft.train.losses import Goal, loss_named, product_loss
from foredraft.train.optimiser import Optimiser, rate_share
from foredraft.train.plan import TrainPlan
from foredraft.train.state import Counters
from foredraft.train.target import TrainingTarget

_SURVIVAL_KEPT = 0.95
_LEAST_WEIGHT = 0.05
_CANDIDATES = 64
"""Of the target's likeliest tokens, so many are learnt from at each position."""


class Learner:
    """A module with its optimiser.

    Args:
        module: what is trained.
        target: whose head it is.
        plan: how to train.

    Attributes:
        dtype: of products.
        head_RE: the target's head for the module's output rows.
        row_of_V: output row of each token; -1: none.
    """

    def __init__(self, module: HeadModule, target: TrainingTarget, plan: TrainPlan) -> None:
        self.module = module.to(target.device).float()
        self._target, self._plan, self._loss = target, plan, loss_named(plan.loss)
        self._averaged = copy.deepcopy(self.module) if plan.average else None
        self._optimiser = Optimiser(self.module, plan.rates)
        self.dtype = compute_dtype(target.device, plan.float32)
        vocab, ids_R = target.shape.vocab_size, module.output_ids_R
        ids_R = torch.arange(vocab) if ids_R is None else ids_R.cpu()
        self.head_RE = target.head_rows(ids_R)
        row_of_V = torch.full((vocab,), -1, dtype=torch.int64)
        row_of_V[ids_R] = torch.arange(len(ids_R))
        self.row_of_V = row_of_V.to(target.device)

    @property
    def kept(self) -> HeadModule:
        """The weights that are measured and saved: the running mean, if there is one."""
        return self._averaged or self.module

    def state(self) -> dict[str, dict[str, Tensor]]:
        """All that the next step depends on."""
        groups: dict[str, dict[str, Tensor]] = {
            "module": self.module.state_dict(),
            "optimiser": self._optimiser.state(),
        }
        if self._averaged is not None:
            groups["averaged"] = self._averaged.state_dict()
        return groups

    def load(self, groups: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from what `state` gave."""
        self.module.load_state_dict(groups["module"])
        self._optimiser.load(groups.get("optimiser", {}))
        if self._averaged is not None:
            self._averaged.load_state_dict(groups.get("averaged", groups["module"]))

    def learn(self, batch: TrainBatch, counters: Counters) -> tuple[float, list[float]]:
        """One step of the optimiser: the loss, and the overlap by depth."""
        with self.autocast():
            predictions = self.module.predictions(batch.texts, self._plan.depth_at(counters))
        total, overlaps = self._total_loss(batch, predictions, counters)
        with self.autocast():
            extra = self.module.extra_loss(batch.texts, predictions)
        if extra is not None:
            total = total + extra.float()
        total.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), self._plan.clip)
        loss = float(total.detach())
        if not math.isfinite(loss) or not math.isfinite(float(norm)):
            raise TrainingError(
                f"the loss is {loss} and the norm of its gradient {float(norm)} at step "
                f"{counters.step}: training cannot go on. The last state and the best head are "
                "whole; try a lower --lr, or --loss soft"
            )
        self._optimiser.step(rate_share(self._plan.done(counters)))
        self._average(counters.step)
        return loss, overlaps

    def _total_loss(
        self, batch: TrainBatch, predictions: Sequence[Prediction], counters: Counters
    ) -> tuple[Tensor, list[float]]:
        candidates = self._candidates(batch)
        weights = self._depth_weights(predictions, counters.survival)
        total, overlaps = torch.zeros((), device=self._target.device), []
        for prediction, weight in zip(predictions, weights, strict=True):
            places, goal = self._goal(batch, prediction, candidates, weight / sum(weights))
            states_NK = prediction.states_BLK[places[:, 0], places[:, 1]].to(self.dtype)
            summed, overlap_N = product_loss(states_NK, prediction.output_RK, goal, self._loss)
            total = total + summed
            overlaps.append(float(overlap_N.mean()) if len(overlap_N) else 0.0)
        _follow(counters.survival, overlaps)
        return total, overlaps

    @torch.no_grad()
    def _candidates(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """Output rows [T, C] that the target finds likely, and how likely."""
        log_probs_TR = batch.teacher.log_probs(self.head_RE)
        num = min(_CANDIDATES, log_probs_TR.shape[1])
        values_TC, rows_TC = log_probs_TR.topk(num, -1)
        if self._plan.renormalise:
            return rows_TC, values_TC.softmax(-1)
        # Their rounded logits may say a little more than all there is.
        probs_TC = values_TC.exp()
        return rows_TC, probs_TC / probs_TC.sum(-1, keepdim=True).clamp(min=1.0)

    def _goal(
        self,
        batch: TrainBatch,
        prediction: Prediction,
        candidates: tuple[Tensor, Tensor],
        weight: float,
    ) -> tuple[Tensor, Goal]:
        """Where a prediction is learnt, and what is to be said there."""
        shift, rows_BL = prediction.shift, batch.teacher.rows_BL
        about_BL = torch.full_like(rows_BL, -1)
        about_BL[:, : max(0, rows_BL.shape[1] - shift)] = rows_BL[:, shift:]
        places = (about_BL >= 0).nonzero()
        texts, at = places[:, 0], places[:, 1]
        labels_N = self.row_of_V[batch.texts.tokens_BL[texts, at + shift]]
        weights_N = torch.full((len(places),), weight / max(1, len(places)), device=places.device)
        return places, Goal(*candidates, about_BL[texts, at], labels_N, weights_N)

    def _depth_weights(
        self, predictions: Sequence[Prediction], survival: Sequence[float]
    ) -> list[float]:
        """By how often drafting gets to a depth, as far as the last batches tell."""
        if not self._plan.survival:
            return [1.0] * len(predictions)
        survived = [1.0]
        for share in survival:
            survived.append(survived[-1] * share)
        return [
            max(_LEAST_WEIGHT, survived[min(p.depth - 1, len(survived) - 1)]) for p in predictions
        ]

    @torch.no_grad()
    def _average(self, step: int) -> None:
        if self._averaged is None:
            return
        # A short memory at first: the start is to be forgotten soon.
        kept = min(self._plan.average, (1 + step) / (10 + step))
        own = dict(self.module.named_parameters())
        for name, mean in self._averaged.named_parameters():
            mean.lerp_(own[name], 1 - kept)

    def autocast(self) -> torch.autocast:
        """Products in `dtype`."""
        lower = self.dtype != torch.float32
        return torch.autocast(self._target.device.type, torch.bfloat16, enabled=lower)


def _follow(means: list[float], new: Sequence[float]) -> None:
    """Move running means towards new values; depths that are new begin with theirs."""
    means += new[len(means) :]
    for number, value in enumerate(new):
        means[number] += (1 - _SURVIVAL_KEPT) * (value - means[number])


def compute_dtype(device: torch.device, float32: bool) -> torch.dtype:
    """bfloat16 where its products are fast."""
    if float32:
        return torch.float32
    fast = device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if fast else torch.float32
