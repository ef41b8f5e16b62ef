"""The loop: batches in, a head out, resumable after a kill at any moment.

Shape legend: B texts, L tokens, N positions that are learnt, R output rows.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from foredraft.core.errors import ConfigError, TrainingError
from foredraft.drafters.common.head import HeadModule, Prediction, TextBatch
from foredraft.drafters.common.head_files import finish_saving, save_head
from foredraft.models.progress import Progress
from foredraft.train.acceptance import Acceptance, AcceptanceCount
from foredraft.train.batches import TrainBatch, Window, batches_of, load_batch, windows_of
from foredraft.train.capture import Capture, Pause
from foredraft.train.card import model_card
from foredraft.train.curves import Curves, draw_curves, read_curves
from foredraft.train.losses import Goal, loss_named, product_loss
from foredraft.train.optimiser import Optimiser, Rates, rate_share
from foredraft.train.state import Counters, load_state, save_state
from foredraft.train.target import TrainingTarget
from foredraft.train.texts import Text, check_ids, digest_of
from foredraft.version import __version__

_SURVIVAL_KEPT = 0.95
_TEST_TOKENS = 12
_LEAST_WEIGHT = 0.05
_CANDIDATES = 64
"""Of the target's likeliest tokens, so many are learnt from at each position."""


@dataclass(frozen=True)
class TrainPlan:
    """How to train.

    Attributes:
        tokens: to learn from, repetitions counted; None: as many as fit the time.
        minutes: of learning, over all resumptions; None: as long as the tokens take.
        batch_tokens: of one step, padding included.
        sequence: tokens of a row; longer texts are cut into windows.
        depth: draft tokens that are trained and measured.
        first_depth_until: share of the training in which only the first draft token is trained: it
            is learnt several times as fast alone, and the others stand on it.
        loss: see `losses`.
        renormalise: train on the target's distribution over the output rows alone.
        survival: weigh depths by how often drafting gets there; otherwise all weigh the same.
        output_rows: tokens that the head can name, the most frequent ones; 0: all.
        rates: learning rates.
        clip: largest norm of the gradient.
        average: decay of a running mean of the weights, which is then what is kept; 0: none.
        evaluations: how often acceptance is measured.
        held_out_texts: texts that it is measured on, at most.
        save_s: seconds between saved states.
        seed: of the order of the texts.
        float32: no bfloat16 products, also where they are fast.
    """

    tokens: int | None = None
    minutes: float | None = None
    batch_tokens: int = 1024
    sequence: int = 512
    depth: int = 3
    first_depth_until: float = 0.4
    loss: str = "lk"
    renormalise: bool = False
    survival: bool = True
    output_rows: int = 8192
    rates: Rates = field(default_factory=Rates)
    clip: float = 1.0
    average: float = 0.0
    evaluations: int = 20
    held_out_texts: int = 96
    save_s: float = 60.0
    seed: int = 0
    float32: bool = False

    def __post_init__(self) -> None:
        loss_named(self.loss)
        if self.tokens is None and self.minutes is None:
            raise ConfigError("say how long to train: tokens, minutes, or both")
        least = {"tokens": 1, "minutes": 0, "batch_tokens": 16, "sequence": 16, "depth": 1}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and not low <= value < math.inf:
                raise ConfigError(f"{name} is {value}; it must be at least {low}")
        if self.batch_tokens < self.sequence:
            raise ConfigError(
                f"a batch of {self.batch_tokens} tokens cannot hold a row of {self.sequence}; give "
                "larger batches or shorter sequences"
            )

    def done(self, counters: Counters) -> float:
        """The share that is behind us."""
        shares = [0.0]
        if self.tokens is not None:
            shares.append(counters.tokens / self.tokens)
        if self.minutes is not None:
            shares.append(counters.seconds / max(1e-9, 60 * self.minutes))
        return max(shares)


@dataclass(frozen=True)
class Status:
    """What a monitor is told after each step.

    Attributes:
        done: share of the training.
        loss: of the last steps.
        overlap: by depth, of the last steps.
        tokens_per_s: of learning.
        left_s: estimated seconds.
        acceptance: at the last evaluation.
    """

    done: float
    tokens: int
    loss: float
    overlap: tuple[float, ...]
    tokens_per_s: float
    left_s: float
    acceptance: Acceptance | None


class Monitor(Progress, Protocol):
    """Told how training goes, and asked whether it is to stop."""

    def step(self, status: Status) -> None: ...

    def evaluated(self, status: Status) -> None: ...

    def wants_stop(self) -> bool: ...


@dataclass(frozen=True)
class Result:
    """How a call of `Trainer.run` ended.

    Attributes:
        done: share of the training that is behind us.
        acceptance: of the weights that are kept.
    """

    done: float
    tokens: int
    seconds: float
    acceptance: Acceptance | None


class Trainer:
    """Trains a head in a directory, from nothing or from where it was left.

    Args:
        kind: the class of its module.
        options: of the kind.
        target: whose head it is to be.
        texts: of the target's own; some are kept from training.
        out: the directory: the best head so far, and the state in its folder ``training``.
        plan: how to train.
        monitor: told how it goes.
        pause: called before each step and forward; returns when it may go on.
        capture_root: where states of the target are kept.
        capture_bytes: at most so many.
        provenance: more about the data, for the card.

    Raises:
        ConfigError: texts, options or directory do not fit.
    """

    def __init__(
        self,
        kind: type[HeadModule],
        options: Mapping[str, Any],
        target: TrainingTarget,
        texts: Sequence[Text],
        out: Path,
        plan: TrainPlan,
        monitor: Monitor,
        pause: Pause,
        capture_root: Path,
        capture_bytes: float,
        provenance: Mapping[str, Any],
    ) -> None:
        self._target, self._out, self._plan, self._monitor = target, out, plan, monitor
        self._pause, self._provenance = pause, provenance
        self._texts = usable(texts, target)
        self._loss = loss_named(plan.loss)
        self._state_path = out / "training" / "state.safetensors"
        finish_saving(out)
        self._recipe = {
            "kind": kind.kind,
            "target": target.identity.fingerprint,
            "options": dict(options),
            "output_rows": plan.output_rows,
        }
        self._resume(kind, options)
        target.check_taps(self._module.taps)
        self._capture = Capture(target, self._texts, self._module.taps, capture_root, capture_bytes)
        self._prepare_rows()
        self._windows = [
            window
            for number, text in enumerate(self._texts)
            if not text.is_held_out
            for window in windows_of(number, text, plan.sequence)
        ]
        if not self._windows:
            raise ConfigError("all of these texts are kept from training; give more text")
        self._evaluation = self._evaluation_batches()
        self._acceptance: Acceptance | None = None

    def _resume(self, kind: type[HeadModule], options: Mapping[str, Any]) -> None:
        saved = load_state(self._state_path, self._recipe)
        if saved is None:
            self.counters = Counters()
            rows = frequent_tokens(self._texts, self._plan.output_rows, self._target)
            self._module = kind.start(self._target, rows, options)
        else:
            self.counters = saved.counters
            self.counters.resumed += 1
            self._module = kind.from_config(self._target.shape, saved.recipe["config"])
            self._module.load_state_dict(saved.groups["module"])
        self._module = self._module.to(self._target.device).float()
        self._averaged = copy.deepcopy(self._module) if self._plan.average else None
        self._optimiser = Optimiser(self._module, self._plan.rates)
        if saved is not None:
            self._optimiser.load(saved.groups.get("optimiser", {}))
            if self._averaged is not None and "averaged" in saved.groups:
                self._averaged.load_state_dict(saved.groups["averaged"])

    def _prepare_rows(self) -> None:
        ids_R, device = self._module.output_ids_R, self._target.device
        vocab = self._target.shape.vocab_size
        ids_R = torch.arange(vocab) if ids_R is None else ids_R.cpu()
        self._head_RE = self._target.head_rows(ids_R)
        row_of_V = torch.full((vocab,), -1, dtype=torch.int64)
        row_of_V[ids_R] = torch.arange(len(ids_R))
        self._row_of_V = row_of_V.to(device)
        self._dtype = compute_dtype(device, self._plan.float32)

    # ------------------------------------------------------------------------------- running

    def run(self) -> Result:
        """Train until the plan is fulfilled or the monitor wants to stop.

        Raises:
            TrainingError: the loss is no number any more, or the disk is full. The state before
                and the best head are whole.
        """
        self._capture.fill(self._monitor, self._pause)
        self._curves = Curves(self._out / "training" / "curves.jsonl", self.counters.tokens)
        self._recent = _Recent()
        saved_at = time.monotonic()
        self._enter_order()
        if self.counters.evaluated < 0:
            self._evaluate()
        while self._plan.done(self.counters) < 1 and not self._monitor.wants_stop():
            self._step()
            if self._plan.done(self.counters) >= self._next_evaluation():
                self._evaluate()
                saved_at = time.monotonic()
            elif time.monotonic() - saved_at > self._plan.save_s:
                self.save()
                saved_at = time.monotonic()
        self.save()
        return Result(
            self._plan.done(self.counters),
            self.counters.tokens,
            self.counters.seconds,
            self._acceptance,
        )

    def _next_evaluation(self) -> float:
        done = max(0.0, self.counters.evaluated)
        return min(
            1.0, (math.floor(done * self._plan.evaluations + 1e-6) + 1) / self._plan.evaluations
        )

    def _enter_order(self) -> None:
        """Other texts or batches than before begin with a new epoch."""
        plan = self._plan
        order = f"{digest_of(self._texts)} {plan.batch_tokens} {plan.sequence} {plan.seed}"
        if self.counters.order not in ("", order):
            self.counters.epoch += 1
            self.counters.position = 0
        self.counters.order = order
        self._batches = self._epoch_batches()

    def _epoch_batches(self) -> list[list[Window]]:
        plan = self._plan
        return batches_of(self._windows, plan.batch_tokens, plan.seed, self.counters.epoch)

    def _step(self) -> None:
        self._pause()
        began = time.monotonic()
        counters = self.counters
        if counters.position >= len(self._batches):
            counters.epoch, counters.position = counters.epoch + 1, 0
            self._batches = self._epoch_batches()
        batch = self._load(self._batches[counters.position])
        loss, overlap = self._learn(batch)
        counters.position += 1
        counters.step += 1
        counters.tokens += batch.num_tokens
        elapsed = time.monotonic() - began
        counters.seconds += elapsed
        self._recent.add(loss, overlap, batch.num_tokens, elapsed)
        status = self._status()
        if self._recent.is_due():
            self._curves.add(self._line(status) | {"loss": status.loss, "overlap": status.overlap})
            self._recent.restart()
        self._monitor.step(status)

    def _learn(self, batch: TrainBatch) -> tuple[float, list[float]]:
        """One step of the optimiser: the loss, and the overlap by depth."""
        with self._autocast():
            predictions = self._module.predictions(batch.texts, self._depth())
        total, overlaps = self._total_loss(batch, predictions)
        with self._autocast():
            extra = self._module.extra_loss(batch.texts, predictions)
        if extra is not None:
            total = total + extra.float()
        total.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self._module.parameters(), self._plan.clip)
        loss = float(total.detach())
        if not math.isfinite(loss) or not math.isfinite(float(norm)):
            raise TrainingError(
                f"the loss is {loss} and the norm of its gradient {float(norm)} at step "
                f"{self.counters.step}: training cannot go on. The state before it and the best "
                f"head are in {self._out}; try a lower --lr, or --loss soft"
            )
        self._optimiser.step(rate_share(self._plan.done(self.counters)))
        self._average()
        return loss, overlaps

    def _depth(self) -> int:
        plan = self._plan
        return 1 if plan.done(self.counters) < plan.first_depth_until else plan.depth

    def _total_loss(
        self, batch: TrainBatch, predictions: Sequence[Prediction]
    ) -> tuple[Tensor, list[float]]:
        candidates = self._candidates(batch)
        weights = self._depth_weights(predictions)
        total, overlaps = torch.zeros((), device=self._target.device), []
        for prediction, weight in zip(predictions, weights, strict=True):
            places, goal = self._goal(batch, prediction, candidates, weight / sum(weights))
            states_NK = prediction.states_BLK[places[:, 0], places[:, 1]]
            summed, overlap_N = product_loss(states_NK, prediction.output_RK, goal, self._loss)
            total = total + summed
            overlaps.append(float(overlap_N.mean()) if len(overlap_N) else 0.0)
        self._follow_survival(overlaps)
        return total, overlaps

    @torch.no_grad()
    def _candidates(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """Output rows [T, C] that the target finds likely, and how likely."""
        log_probs_TR = batch.teacher.log_probs(self._head_RE)
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
        about_BL[:, : rows_BL.shape[1] - shift] = rows_BL[:, shift:]
        places = (about_BL >= 0).nonzero()
        texts, at = places[:, 0], places[:, 1]
        labels_N = self._row_of_V[batch.texts.tokens_BL[texts, at + shift]]
        weights_N = torch.full((len(places),), weight / max(1, len(places)), device=places.device)
        return places, Goal(*candidates, about_BL[texts, at], labels_N, weights_N)

    def _depth_weights(self, predictions: Sequence[Prediction]) -> list[float]:
        """By how often drafting gets to a depth, as far as the last batches tell."""
        if not self._plan.survival:
            return [1.0] * len(predictions)
        survived = [1.0]
        for share in self.counters.survival:
            survived.append(survived[-1] * share)
        return [
            max(_LEAST_WEIGHT, survived[min(p.depth - 1, len(survived) - 1)]) for p in predictions
        ]

    def _follow_survival(self, overlaps: list[float]) -> None:
        kept = self.counters.survival
        for number, new in enumerate(overlaps):
            if number == len(kept):
                kept.append(new)
            kept[number] += (1 - _SURVIVAL_KEPT) * (new - kept[number])

    @torch.no_grad()
    def _average(self) -> None:
        if self._averaged is None:
            return
        # A short memory at first: the start is to be forgotten soon.
        kept = min(self._plan.average, (1 + self.counters.step) / (10 + self.counters.step))
        own = dict(self._module.named_parameters())
        for name, mean in self._averaged.named_parameters():
            mean.lerp_(own[name], 1 - kept)

    def _autocast(self) -> torch.autocast:
        lower = self._dtype != torch.float32
        return torch.autocast(self._target.device.type, torch.bfloat16, enabled=lower)

    def _load(self, windows: Sequence[Window]) -> TrainBatch:
        return load_batch(windows, self._texts, self._capture, self._target, self._dtype)

    # ----------------------------------------------------------------------------- measuring

    def _evaluation_batches(self) -> list[list[Window]]:
        held_out = [number for number, text in enumerate(self._texts) if text.is_held_out]
        if not held_out:
            raise ConfigError(
                "none of these texts is kept from training, so acceptance cannot be measured; give "
                "more text (some 100 replies at least)"
            )
        greedy = [n for n in held_out if self._texts[n].temperature == 0]
        sampled = [n for n in held_out if self._texts[n].temperature != 0]
        most = self._plan.held_out_texts
        chosen = greedy[: max(most // 2, most - len(sampled))]
        chosen += sampled[: most - len(chosen)]
        plan = self._plan
        windows = [windows_of(n, self._texts[n], plan.sequence)[0] for n in sorted(chosen)]
        return batches_of(windows, plan.batch_tokens, 0, 0)

    @torch.no_grad()
    def measure(self) -> Acceptance:
        """Acceptance of the weights as they are, on held-out text."""
        module = (self._averaged or self._module).eval()
        count, head_RE = AcceptanceCount(self._plan.depth), self._head_RE.float()
        for windows in self._evaluation:
            self._pause()
            with self._autocast():
                batch = self._load(windows)
                count.add(module, batch, head_RE, self._row_of_V)
        module.train()
        return count.result()

    def _evaluate(self) -> None:
        self._acceptance = self.measure()
        self.counters.evaluated = self._plan.done(self.counters)
        self._curves.add(self._line(self._status()) | self._acceptance.as_dict())
        if self._acceptance.score > self.counters.best:
            self.counters.best = self._acceptance.score
            self._keep_best(self._acceptance)
        self.save()
        draw_curves(
            read_curves(self._out / "training" / "curves.jsonl"),
            self._out / "training" / "curves.png",
        )
        self._monitor.evaluated(self._status())

    def _keep_best(self, acceptance: Acceptance) -> None:
        module, identity = self._averaged or self._module, self._target.identity
        provenance, measured = self._full_provenance(), acceptance.as_dict()
        num_parameters = sum(parameter.numel() for parameter in module.parameters())
        card = model_card(module.kind, identity, num_parameters, provenance, measured)
        info = {"target": identity, "provenance": provenance, "measured": measured}
        save_head(self._out, module, info, self._test_text(), self._plan.depth, card)

    def _full_provenance(self) -> dict[str, Any]:
        plan, counters = self._plan, self.counters
        return {
            **self._provenance,
            "texts": len(self._texts),
            "text tokens": self._capture.num_tokens,
            "tokens learnt from": counters.tokens,
            "steps": counters.step,
            "epochs": counters.epoch,
            "minutes": round(counters.seconds / 60, 2),
            "loss": plan.loss,
            "rates": vars(plan.rates),
            "batch tokens": plan.batch_tokens,
            "sequence": plan.sequence,
            "depth": plan.depth,
            "seed": plan.seed,
            "dtype": str(self._dtype).removeprefix("torch."),
            "foredraft": __version__,
            "torch": torch.__version__,
        }

    def _test_text(self) -> TextBatch:
        batch = self._load(self._evaluation[0][:1]).texts
        end = min(_TEST_TOKENS, batch.tokens_BL.shape[1])
        return TextBatch(
            batch.tokens_BL[:1, :end],
            batch.lengths_B[:1].clamp(max=end),
            batch.embeddings_BLE[:1, :end],
            {layer: batch.taps[layer][:1, :end] for layer in self._module.taps},
        )

    # -------------------------------------------------------------------------------- saving

    def save(self) -> None:
        """Write the state; the one before is there until this one is whole."""
        groups = {"module": self._module.state_dict(), "optimiser": self._optimiser.state()}
        if self._averaged is not None:
            groups["averaged"] = self._averaged.state_dict()
        self._curves.flush()
        recipe = self._recipe | {"config": self._module.config}
        save_state(self._state_path, self.counters, recipe, groups)

    def _line(self, status: Status) -> dict[str, Any]:
        counters = self.counters
        return {
            "tokens": counters.tokens,
            "seconds": round(counters.seconds, 2),
            "step": counters.step,
            "rate": rate_share(status.done),
        }

    def _status(self) -> Status:
        counters, done = self.counters, self._plan.done(self.counters)
        left_s = counters.seconds * (1 / done - 1) if done > 0 else math.inf
        return Status(
            done,
            counters.tokens,
            self._recent.loss,
            self._recent.overlap,
            self._recent.tokens_per_s,
            max(0.0, left_s),
            self._acceptance,
        )


class _Recent:
    """Means over the last steps."""

    def __init__(self, every_s: float = 10.0) -> None:
        self._every_s = every_s
        self.loss, self.overlap, self.tokens_per_s = math.nan, (), 0.0
        self.restart()

    def restart(self) -> None:
        self._began = time.monotonic()
        self._losses: list[float] = []
        self._overlaps: list[list[float]] = []
        self._tokens, self._seconds = 0, 0.0

    def add(self, loss: float, overlap: list[float], tokens: int, seconds: float) -> None:
        self._losses.append(loss)
        self._overlaps.append(overlap)
        self._tokens += tokens
        self._seconds += seconds
        num = len(self._losses)
        self.loss = sum(self._losses) / num
        self.overlap = tuple(round(sum(each) / num, 4) for each in zip(*self._overlaps))
        self.tokens_per_s = self._tokens / max(1e-9, self._seconds)

    def is_due(self) -> bool:
        return time.monotonic() - self._began >= self._every_s


def usable(texts: Sequence[Text], target: TrainingTarget) -> list[Text]:
    """Texts with a reply, cut to the target's context.

    Raises:
        ConfigError: they are of another vocabulary, or there are none.
    """
    check_ids(texts, target.shape.vocab_size, "the text")
    most = target.max_context
    return [
        text
        if len(text.tokens) <= most
        else Text(text.tokens[:most], text.num_prompt, text.temperature, False, text.source)
        for text in texts
        if len(text.tokens) > text.num_prompt and text.num_prompt < most
    ]


def frequent_tokens(
    texts: Sequence[Text], num_rows: int, target: TrainingTarget
) -> list[int] | None:
    """The tokens that replies for training use most, ascending; None: all of the vocabulary."""
    vocab = target.shape.vocab_size
    if not 0 < num_rows < vocab:
        return None
    counts_V = torch.zeros(vocab, dtype=torch.int64)
    for text in texts:
        if not text.is_held_out:
            counts_V += torch.bincount(torch.from_numpy(text.reply_ids), minlength=vocab)
    ranked = counts_V.argsort(descending=True, stable=True)[:num_rows]
    return sorted(ranked.tolist())


def compute_dtype(device: torch.device, float32: bool) -> torch.dtype:
    """bfloat16 where its products are fast."""
    if float32:
        return torch.float32
    fast = device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if fast else torch.float32
