"""One step of learning: from a batch to changed weights.

Shape legend: B texts, L tokens, N positions that are learnt, T positions in replies, R output rows,
C candidates (rows that the target finds likely), V vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from foredraft.core.errors import TrainingError
from foredraft.drafters.heads.base import HeadModule
from foredraft.train.batches import TrainBatch
from foredraft.train.folder import Counters
from foredraft.train.heads.base import Prediction, training_of
from foredraft.train.losses import Goal, loss_named, product_loss
from foredraft.train.optimiser import Optimiser, product_dtype, rate_share
from foredraft.train.options import TrainOptions
from foredraft.train.target import TrainingTarget

_SURVIVAL_KEPT = 0.95
_LEAST_WEIGHT = 0.05
_CANDIDATES = 64
"""Number of the target's likeliest tokens that are trained on at each position."""


@dataclass(frozen=True)
class NameableTokens:
    """The tokens that a head can name, as training needs them.

    Attributes:
        head_RE: the target's own head for them, in the dtype of products.
        row_of_V: output row of each token; -1: none.
    """

    head_RE: Tensor
    row_of_V: Tensor

    @classmethod
    def of(cls, module: HeadModule, target: TrainingTarget, dtype: torch.dtype) -> NameableTokens:
        """Those of a module, their head in that dtype."""
        vocab = target.shape.vocab_size
        ids_R = module.output_ids_R
        ids_R = torch.arange(module.shape.vocab_size) if ids_R is None else ids_R.cpu()
        row_of_V = torch.full((vocab,), -1, dtype=torch.int64)
        row_of_V[ids_R] = torch.arange(len(ids_R))
        return cls(target.parts.head_rows(ids_R).to(dtype), row_of_V.to(target.device))


class Learner:
    """A module with its optimiser.

    Attributes:
        dtype: of products.
        rows: the module's output rows.
    """

    def __init__(self, module: HeadModule, target: TrainingTarget, options: TrainOptions) -> None:
        self.module = module.to(target.device).float()
        self._training = training_of(self.module)
        self._target, self._options, self._loss = target, options, loss_named(options.loss)
        self._averaged = copy.deepcopy(self.module) if options.average else None
        self.dtype = product_dtype(target.device, options.float32)
        self._optimiser = Optimiser(self.module, options.rates, self.dtype)
        self.rows = NameableTokens.of(module, target, self.dtype)

    @property
    def kept(self) -> HeadModule:
        """The weights that are measured and saved: the running mean, if there is one."""
        return self._averaged or self.module

    def state(self) -> dict[str, dict[str, Tensor]]:
        """The whole state that the next step depends on."""
        groups: dict[str, dict[str, Tensor]] = {
            "module": self.module.state_dict(),
            "optimiser": self._optimiser.state(),
        }
        if self._averaged is not None:
            groups["averaged"] = self._averaged.state_dict()
        return groups

    def load(self, groups: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Continue from a `state`."""
        self.module.load_state_dict(groups["module"])
        self._optimiser.load(groups.get("optimiser", {}))
        if self._averaged is not None:
            self._averaged.load_state_dict(groups.get("averaged", groups["module"]))

    def learn(self, batch: TrainBatch, counters: Counters) -> tuple[float, list[float]]:
        """One step of the optimiser: the loss, and the overlap by depth."""
        with self.autocast():
            depth = self._options.depth_at(counters)
            predictions = self._training.predictions(batch.texts, depth)
        total, overlaps = self._total_loss(batch, predictions, counters)
        with self.autocast():
            extra = self._training.extra_loss(batch.texts, predictions)
        if extra is not None:
            total = total + extra.float()
        total.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), self._options.clip)
        loss = float(total.detach())
        if not math.isfinite(loss) or not math.isfinite(float(norm)):
            raise TrainingError(
                f"the loss is {loss} and the norm of its gradient {float(norm)} at step "
                f"{counters.step}: training cannot go on. The last state and the best head are "
                "whole; try a lower --lr, or --loss soft"
            )
        self._optimiser.step(rate_share(self._options.done(counters)))
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
        """The target's likeliest output rows [T, C], and their probabilities."""
        log_probs_TR = batch.teacher.log_probs(self.rows.head_RE)
        num = min(_CANDIDATES, log_probs_TR.shape[1])
        values_TC, rows_TC = log_probs_TR.topk(num, -1)
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
        """Positions where a prediction is trained, and the target's distributions there."""
        shift, rows_BL = prediction.shift, batch.teacher.rows_BL
        about_BL = torch.full_like(rows_BL, -1)
        about_BL[:, : max(0, rows_BL.shape[1] - shift)] = rows_BL[:, shift:]
        places = (about_BL >= 0).nonzero()
        texts, at = places[:, 0], places[:, 1]
        labels_N = self.rows.row_of_V[batch.texts.tokens_BL[texts, at + shift]]
        weights_N = torch.full((len(places),), weight / max(1, len(places)), device=places.device)
        return places, Goal(*candidates, about_BL[texts, at], labels_N, weights_N)

    def _depth_weights(
        self, predictions: Sequence[Prediction], survival: Sequence[float]
    ) -> list[float]:
        """Weights by how often drafting reaches each depth in the last batches."""
        survived = [*accumulate(survival, mul, initial=1.0)]
        return [
            max(_LEAST_WEIGHT, survived[min(p.depth - 1, len(survived) - 1)]) for p in predictions
        ]

    @torch.no_grad()
    def _average(self, step: int) -> None:
        if self._averaged is None:
            return
        # A short memory at first, so that the initial values are forgotten soon.
        kept = min(self._options.average, (1 + step) / (10 + step))
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
