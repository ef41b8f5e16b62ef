"""From step records to trace lines."""

from __future__ import annotations

import time
from collections.abc import Callable

from foredraft.core.record import RowStep, StepRecord, StepTimes
from foredraft.models.text.tokenizer import Tokenizer
from foredraft.trace import format as f
from foredraft.trace.texts import TokenTexts
from foredraft.trace.why import why


class Tracer:
    """The trace function of an engine: writes each step as a line.

    It explains verdicts if the engine keeps their evidence (``keeps_evidence``). Reading it takes
    time, too (not measured yet); it falls outside the times of the steps.

    Args:
        sink: handed each line, in the thread that runs the step.
        tokenizer: the target's, for texts; None leaves them empty.
    """

    def __init__(self, sink: Callable[[f.TracedStep], None], tokenizer: Tokenizer | None) -> None:
        self._sink, self._texts = sink, TokenTexts(tokenizer)
        self._began, self._num_steps = time.perf_counter(), 0

    def read_with(self, tokenizer: Tokenizer | None) -> None:
        """Set the tokenizer, if it was not known at the beginning."""
        self._texts = TokenTexts(tokenizer)

    def __call__(self, record: StepRecord) -> None:
        at_ms = 1e3 * (time.perf_counter() - self._began)
        parts = vars(record.times).items()  # those of single drafters are left out
        times = {name: round(ms, 3) for name, ms in parts if name != "drafters"}
        step = f.TracedStep.model_construct(
            type="step",
            step=self._num_steps,
            at_ms=round(at_ms, 3),
            times=StepTimes(**times),
            num_waiting=record.num_waiting,
            num_preempted=record.num_preempted,
            rows=tuple(map(self._row, record.rows)),
        )
        self._num_steps += 1
        self._sink(step)

    def _row(self, row: RowStep) -> f.TracedRow:
        told, draft = why(row, self._texts)
        verdict = row.verdict
        line = f.TracedRow.model_construct(
            request_id=row.request_id,
            position=row.context + row.num_read,
            num_read=row.num_read,
            budget=row.budget,
            draft=draft,
            kind=None if verdict is None else verdict.kind,
            path=() if verdict is None else verdict.path,
            committed=tuple(self._committed(row)),
            num_accepted=row.num_accepted,
            finish_reason=row.finish_reason,
            drafter=row.drafter,
            why=told,
        )
        if row.finish_reason:
            self._texts.end(row.request_id)
        return line

    def _committed(self, row: RowStep) -> list[f.Committed]:
        kind = "bonus" if row.verdict is None else row.verdict.kind
        return [
            f.Committed.model_construct(
                token=token,
                text=self._texts.push(row.request_id, token),
                by="draft" if i < row.num_accepted else kind,
            )
            for i, token in enumerate(row.committed)
        ]
