"""The loop: batches in, a head out, resumable after a kill at any moment."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from foredraft.core.errors import ConfigError
from foredraft.drafters.heads.base import HeadModule
from foredraft.drafters.trained import META
from foredraft.train.acceptance import AcceptanceCount, HeldOutAcceptance
from foredraft.train.batches import TrainBatch, Window, batches_of, load_batch, windows_of
from foredraft.train.capture import Capture
from foredraft.train.folder import (
    Counters,
    Curves,
    check_out,
    load_state,
    model_card,
    save_state,
    state_path,
    training_folder,
)
from foredraft.train.heads.base import TextBatch, start_head, training_of
from foredraft.train.heads.saving import load_tested, save_head
from foredraft.train.learner import Learner, NameableTokens
from foredraft.train.optimiser import rate_share
from foredraft.train.options import TrainOptions
from foredraft.train.progress import Monitor, Recent, Status, expected
from foredraft.train.target import TrainingTarget
from foredraft.train.texts import Text, digest_of, frequent_tokens, split_texts, usable
from foredraft.version import __version__

_TEST_TOKENS = 12
_PACE_AFTER = 3
"""Steps after which the pace of a run is said."""


@dataclass(frozen=True)
class Job:
    """Which head to train, and where.

    Attributes:
        out: the directory: the best head so far, and the state in its folder ``training``.
        kind_options: those of the kind, checked.
        start_from: the folder of a head to begin with, which keeps its options and output rows;
            None: a new one.
        capture_root: where states of targets are kept.
        capture_bytes: limit of their bytes.
        provenance: more about the data, for the card.
    """

    kind: type[HeadModule]
    out: Path
    capture_root: Path
    capture_bytes: float = 8e9
    kind_options: Mapping[str, Any] = field(default_factory=dict)
    start_from: Path | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)


class Trainer:
    """Trains a head in a directory, from nothing or from where it was left.

    An existing head is replaced only by one that is better on held-out text.

    Args:
        texts: of the target's own; some are kept from training.
        spent_s: seconds of this run that lie before: loading the target, writing text.

    Raises:
        ConfigError: texts, options or directory do not fit: see `folder.check_out`.
        ModelLoadError: the head or the state in the directory is damaged.
    """

    def __init__(
        self,
        job: Job,
        target: TrainingTarget,
        texts: Sequence[Text],
        options: TrainOptions,
        monitor: Monitor,
        spent_s: float = 0.0,
    ) -> None:
        self._job, self._target, self._options, self._monitor = job, target, options, monitor
        self._began = time.monotonic() - spent_s
        self._texts = usable(texts, target.shape.vocab_size, target.max_context)
        check_out(job.out, job.kind.kind, job.start_from)
        self._recipe = {
            "kind": job.kind.kind,
            "target": target.identity.fingerprint,
            "options": dict(job.kind_options),
            "output_rows": options.output_rows,
        }
        self._kept: HeadModule | None = None
        if (job.out / META).exists():
            self._kept = load_tested(job.out, job.kind, target.identity)
        self._learner = self._resumed_learner()
        taps = {*self._learner.module.taps, *(self._kept.taps if self._kept else ())}
        target.check_taps(sorted(taps))
        self._capture = Capture(
            target, self._texts, sorted(taps), job.capture_root, job.capture_bytes
        )
        self._acceptance: HeldOutAcceptance | None = None

    def _resumed_learner(self) -> Learner:
        """The saved learner, or a new head."""
        job, shape = self._job, self._target.shape
        saved = load_state(state_path(job.out), self._recipe)
        if saved is None:
            self.counters = Counters()
            return Learner(self._first_module(), self._target, self._options)
        self.counters = saved.counters
        self.counters.resumed += 1
        self.counters.evaluated = min(self.counters.evaluated, self._options.done(self.counters))
        module = job.kind.from_config(shape, saved.recipe["config"])
        # The token of each output row affects more than weights, so it is restored first.
        module.load_state_dict(saved.groups["module"])
        learner = Learner(module, self._target, self._options)
        learner.load(saved.groups)
        return learner

    def _first_module(self) -> HeadModule:
        """The head to start from, or a new one."""
        job, shape = self._job, self._target.shape
        if job.start_from is not None:
            older = load_tested(job.start_from, job.kind, self._target.identity)
            for name, value in job.kind_options.items():
                if job.kind.OPTIONS[name].checked(name, value, shape) != older.config[name]:
                    raise ConfigError(
                        f"{name} is {value!r} and {older.config[name]!r} in the head to start "
                        "from, which keeps its own: leave the option out"
                    )
            return older
        trained, _ = split_texts(self._texts)
        texts = [self._texts[n] for n in trained]
        rows = frequent_tokens(texts, self._options.output_rows, shape.vocab_size)
        return start_head(job.kind, self._target, rows, job.kind_options)

    # ------------------------------------------------------------------------------- running

    def run(self) -> Status:
        """Train until the options are fulfilled or the monitor wants to stop.

        Raises:
            TrainingError: the loss is no number any more, or the disk is full. The state before
                and the best head are whole.
        """
        options, counters = self._options, self.counters
        seconds = options.reading_s(counters, time.monotonic() - self._began)
        is_all_read = self._capture.fill(self._monitor, seconds)
        self._recent, self._steps_of_run = Recent(), 0
        if self._monitor.wants_stop():
            return self._status()
        self._curves = Curves(training_folder(self._job.out) / "curves.jsonl", counters.tokens)
        self._choose_texts(everything=is_all_read)
        self._measure_first()
        saved_at = time.monotonic()
        while options.done(counters) < 1 and not self._monitor.wants_stop():
            self._step()
            if options.done(counters) >= options.next_evaluation(counters):
                self._evaluate()
                saved_at = time.monotonic()
            elif time.monotonic() - saved_at > options.save_s:
                self.save()
                saved_at = time.monotonic()
        self.save()
        return self._status()

    def _choose_texts(self, everything: bool) -> None:
        """Windows to learn from and batches to measure on.

        Args:
            everything: of all texts; otherwise only of those that there was time to read.
        """
        options = self._options
        numbers = range(len(self._texts)) if everything else sorted(self._capture.captured)
        trained, held_out = split_texts([self._texts[n] for n in numbers])
        self._windows = [
            window
            for n in trained
            for window in windows_of(numbers[n], self._texts[numbers[n]], options.sequence)
        ]
        apart = [numbers[n] for n in held_out]
        self._evaluation = self._evaluation_batches(apart[::2])  # chooses the checkpoint
        self._reported = self._evaluation_batches(apart[1::2]) or self._evaluation
        order = digest_of([self._texts[n] for n in numbers])
        order = f"{order} {options.batch_tokens} {options.sequence} {options.seed}"
        if self.counters.order not in ("", order):  # other texts or batches: a new epoch begins
            self.counters.epoch += 1
            self.counters.position = 0
        self.counters.order = order
        self._batches = self._epoch_batches()

    def _epoch_batches(self) -> list[list[Window]]:
        options = self._options
        return batches_of(self._windows, options.batch_tokens, options.seed, self.counters.epoch)

    def _step(self) -> None:
        self._monitor.pause()
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
        self._steps_of_run += 1
        if self._steps_of_run == _PACE_AFTER:
            self._monitor.say(expected(status, counters.step, time.time()))
        if self._recent.is_due():
            self._curves.add(self._line(status) | {"loss": status.loss, "overlap": status.overlap})
            self._recent.restart()
        self._monitor.step(status)

    def _load(self, windows: Sequence[Window]) -> TrainBatch:
        return load_batch(windows, self._texts, self._capture, self._target, self._learner.dtype)

    # ----------------------------------------------------------------------------- measuring

    def _evaluation_batches(self, held_out: Sequence[int]) -> list[list[Window]]:
        """Texts to measure on: greedy ones and others, as evenly as there are."""
        greedy = [n for n in held_out if self._texts[n].temperature == 0]
        sampled = [n for n in held_out if self._texts[n].temperature != 0]
        options, most = self._options, -(-self._options.num_held_out // 2)
        chosen = greedy[: max(most // 2, most - len(sampled))]
        chosen += sampled[: most - len(chosen)]
        windows = [windows_of(n, self._texts[n], options.sequence)[0] for n in sorted(chosen)]
        return batches_of(windows, options.batch_tokens, 0, 0)

    @torch.no_grad()
    def measure(
        self, module: HeadModule, batches: Sequence[Sequence[Window]] = ()
    ) -> HeldOutAcceptance:
        """Acceptance of a head on held-out text: on that which chooses, unless others are given."""
        learner, depth, batches = self._learner, self._options.depth, batches or self._evaluation
        module = module.to(self._target.device).eval()
        rows = NameableTokens.of(module, self._target, torch.float32)
        temperatures = {self._texts[w.text].temperature for b in batches for w in b}
        count, head_RE = AcceptanceCount(depth, temperatures != {0.0}), rows.head_RE
        for windows in batches:
            self._monitor.pause()
            batch = self._load(windows)
            with learner.autocast():
                predictions = training_of(module).predictions(batch.texts, depth)
            count.add(predictions, batch, head_RE, rows.row_of_V)
        module.train()
        return count.result()

    def _measure_first(self) -> None:
        """Measure the existing head in the same way as later ones, or else the new one."""
        counters, began = self.counters, time.monotonic()
        self._monitor.stage("Measuring acceptance on held-out text")
        counters.best, kept, self._kept = 0.0, self._kept, None
        if kept is not None:
            self._acceptance = self.measure(kept)
            counters.best = self._acceptance.score
        counters.last_measuring_s = time.monotonic() - began
        if kept is None or counters.evaluated < 0:
            measuring_s = counters.measuring_s
            self._evaluate()
            counters.measuring_s = measuring_s  # it is counted below
        counters.prepared_s += time.monotonic() - self._began

    def _evaluate(self) -> None:
        """Measure the weights as they are, and keep them if they are the best so far."""
        began = time.monotonic()
        module = self._learner.kept
        acceptance = self.measure(module)
        self.counters.evaluated = self._options.done(self.counters)
        self._curves.add(self._line(self._status()) | acceptance.as_dict())
        if acceptance.score > self.counters.best:
            self.counters.best, self._acceptance = acceptance.score, acceptance
            self._keep_best()
        self.save()
        elapsed = time.monotonic() - began
        self.counters.last_measuring_s = elapsed
        self.counters.measuring_s += elapsed
        self._monitor.evaluated(self._status(acceptance))

    def _keep_best(self) -> None:
        """Write the head, with its acceptance on held-out text that chose nothing."""
        module, identity = self._learner.kept, self._target.identity
        with self._learner.autocast():
            training_of(module).calibrate(self._load(windows).texts for windows in self._evaluation)
        acceptance = self.measure(module, self._reported)
        provenance, measured = self._provenance(), acceptance.as_dict()
        num_parameters = sum(parameter.numel() for parameter in module.parameters())
        card = model_card(module.kind, identity, num_parameters, provenance, measured)
        info = {"target": identity, "provenance": provenance, "measured": measured}
        save_head(self._job.out, module, info, self._test_text(), self._options.depth, card)

    def _provenance(self) -> dict[str, Any]:
        options, counters = self._options, self.counters
        return {
            **self._job.provenance,
            "texts": len(self._texts),
            "text tokens": self._capture.num_tokens,
            "tokens learnt from": counters.tokens,
            "steps": counters.step,
            "epochs": counters.epoch,
            "minutes": round(counters.seconds / 60, 2),
            "loss": options.loss,
            "rates": vars(options.rates),
            "batch tokens": options.batch_tokens,
            "sequence": options.sequence,
            "depth": options.depth,
            "seed": options.seed,
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
            {layer: batch.taps[layer][:1, :end] for layer in self._learner.module.taps},
        )

    # -------------------------------------------------------------------------------- saving

    def save(self) -> None:
        """Write the state; the one before is there until this one is whole."""
        recipe = self._recipe | {"config": self._learner.module.config}
        save_state(state_path(self._job.out), self.counters, recipe, self._learner.state())

    def _line(self, status: Status) -> dict[str, Any]:
        counters = self.counters
        return {
            "tokens": counters.tokens,
            "seconds": round(counters.seconds, 2),
            "step": counters.step,
            "rate": rate_share(status.done),
        }

    def _status(self, acceptance: HeldOutAcceptance | None = None) -> Status:
        counters, recent = self.counters, self._recent
        return Status(
            self._options.done(counters),
            counters.tokens,
            counters.seconds,
            recent.loss,
            recent.overlap,
            recent.tokens_per_s,
            self._options.left_s(counters),
            acceptance or self._acceptance,
        )
