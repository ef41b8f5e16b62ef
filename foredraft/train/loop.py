"""The loop: batches in, a head out, resumable after a kill at any moment."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from foredraft.core.errors import ConfigError
from foredraft.drafters.heads.base import HeadModule, TextBatch
from foredraft.drafters.heads.store import META, finish_saving, read_head, read_info, save_head
from foredraft.train.acceptance import Acceptance, AcceptanceCount
from foredraft.train.batches import TrainBatch, Window, batches_of, load_batch, windows_of
from foredraft.train.capture import Capture, Pause
from foredraft.train.card import model_card
from foredraft.train.curves import Curves, Recent, draw_curves, read_curves
from foredraft.train.learner import Learner
from foredraft.train.optimiser import rate_share
from foredraft.train.plan import Monitor, Result, Status, TrainPlan
from foredraft.train.start import take_over
from foredraft.train.state import Counters, load_state, save_state
from foredraft.train.target import TrainingTarget
from foredraft.train.texts import Text, digest_of, frequent_tokens, usable
from foredraft.version import __version__

_TEST_TOKENS = 12


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
        start_from: a head whose weights to begin with; None: the target's.

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
        start_from: HeadModule | None = None,
    ) -> None:
        self._target, self._out, self._plan, self._monitor = target, out, plan, monitor
        self._pause, self._provenance = pause, provenance
        self._texts = usable(texts, target.shape.vocab_size, target.max_context)
        self._state_path = out / "training" / "state.safetensors"
        finish_saving(out)
        self._recipe = {
            "kind": kind.kind,
            "target": target.identity.fingerprint,
            "options": dict(options),
            "output_rows": plan.output_rows,
        }
        self._learner = self._resume(kind, options, start_from)
        self._taps = self._learner.module.taps
        target.check_taps(self._taps)
        self._capture = Capture(target, self._texts, self._taps, capture_root, capture_bytes)
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

    def _resume(
        self,
        kind: type[HeadModule],
        options: Mapping[str, Any],
        start_from: HeadModule | None,
    ) -> Learner:
        """Where training was left, or a new head."""
        saved, shape = load_state(self._state_path, self._recipe), self._target.shape
        if saved is None:
            self.counters = Counters()
            rows = frequent_tokens(self._texts, self._plan.output_rows, shape.vocab_size)
            module = kind.start(self._target, rows, options)
            if start_from is not None:
                take_over(module, start_from)
            return Learner(module, self._target, self._plan)
        self.counters = saved.counters
        self.counters.resumed += 1
        self.counters.evaluated = min(self.counters.evaluated, self._plan.done(self.counters))
        module = kind.from_config(shape, saved.recipe["config"])
        # What output rows stand for decides about more than weights, so it comes first.
        module.load_state_dict(saved.groups["module"])
        learner = Learner(module, self._target, self._plan)
        learner.load(saved.groups)
        return learner

    # ------------------------------------------------------------------------------- running

    def run(self) -> Result:
        """Train until the plan is fulfilled or the monitor wants to stop.

        Raises:
            TrainingError: the loss is no number any more, or the disk is full. The state before
                and the best head are whole.
        """
        self._capture.fill(self._monitor, self._pause)
        self._curves = Curves(self._out / "training" / "curves.jsonl", self.counters.tokens)
        self._recent = Recent()
        saved_at = time.monotonic()
        self._enter_order()
        if self.counters.evaluated < 0:
            self._evaluate()
        elif self._plan.done(self.counters) < 1:
            self._measure_best()
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
        loss, overlap = self._learner.learn(batch, counters)
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

    def _load(self, windows: Sequence[Window]) -> TrainBatch:
        return load_batch(windows, self._texts, self._capture, self._target, self._learner.dtype)

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
    def measure(self, module: HeadModule | None = None) -> Acceptance:
        """Acceptance on held-out text, of the weights as they are or of another module."""
        learner, depth = self._learner, self._plan.depth
        module = (module or learner.kept).to(self._target.device).eval()
        texts = {self._texts[w.text].temperature for batch in self._evaluation for w in batch}
        count, head_RE = AcceptanceCount(depth, texts != {0.0}), learner.head_RE.float()
        for windows in self._evaluation:
            self._pause()
            batch = self._load(windows)
            with learner.autocast():
                predictions = module.predictions(batch.texts, depth)
            count.add(predictions, batch, head_RE, learner.row_of_V)
        module.train()
        return count.result()

    def _measure_best(self) -> None:
        """The head that is kept, measured as those after it will be: there may be other text."""
        if not (self._out / META).exists():
            return
        module, info = self._learner.module, read_info(self._out)
        if info.config == module.config:
            self._acceptance = self.measure(read_head(self._out, type(module), info))
            self.counters.best = self._acceptance.score

    def _evaluate(self) -> None:
        self._acceptance = self.measure()
        self.counters.evaluated = self._plan.done(self.counters)
        self._curves.add(self._line(self._status()) | self._acceptance.as_dict())
        if self._acceptance.score > self.counters.best:
            self.counters.best = self._acceptance.score
            self._keep_best(self._acceptance)
        self.save()
        curves = self._out / "training" / "curves.jsonl"
        draw_curves({self._out.name: read_curves(curves)}, curves.with_suffix(".png"))
        self._monitor.evaluated(self._status())

    def _keep_best(self, acceptance: Acceptance) -> None:
        module, identity = self._learner.kept, self._target.identity
        with self._learner.autocast():
            module.calibrate(self._load(windows).texts for windows in self._evaluation)
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
            "dtype": str(self._learner.dtype).removeprefix("torch."),
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
            {layer: batch.taps[layer][:1, :end] for layer in self._taps},
        )

    # -------------------------------------------------------------------------------- saving

    def save(self) -> None:
        """Write the state; the one before is there until this one is whole."""
        self._curves.flush()
        recipe = self._recipe | {"config": self._learner.module.config}
        save_state(self._state_path, self.counters, recipe, self._learner.state())

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
