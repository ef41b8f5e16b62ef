"""Contenders, which continue a prompt and are timed: our drafters and plain decoding."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from foredraft.bench.measure import MeasuredRun, measure, measuring
from foredraft.core.params import Coupling, SamplingParams
from foredraft.core.record import SpeculationStats, StepRecord
from foredraft.drafters import drafter_spec
from foredraft.engine.request import Event
from foredraft.llm import LLM
from foredraft.options import LoadOptions


@dataclass(frozen=True)
class ContenderRun:
    """One timed generation.

    Attributes:
        first_s: seconds until the first tokens, ``num_first`` of them.
        total_s: seconds in all.
        stats: drafted and accepted tokens; None for peers.
        draft_s: seconds in the drafter, proposing and observing.
        verify_s: seconds in the target's forwards that read no prompt.
    """

    token_ids: tuple[int, ...]
    first_s: float
    total_s: float
    num_first: int
    stats: SpeculationStats | None = None
    draft_s: float = 0.0
    verify_s: float = 0.0

    @property
    def decode_s(self) -> float:
        return self.total_s - self.first_s

    @property
    def num_decoded(self) -> int:
        return len(self.token_ids) - self.num_first


class Contender(Protocol):
    """Something to time."""

    @property
    def name(self) -> str: ...

    def run(self, prompt_ids: Sequence[int], params: SamplingParams) -> ContenderRun:
        """Raises `PeerFailed` if it is a peer's, which crashed."""


AUTO = "auto"


class OurContender:
    """foredraft with one drafter, on a target that others share.

    Args:
        llm: holds the loaded models.
        options: names the drafter.
        name: how results call it; the drafter's name when None.
        coupling: of its requests.
    """

    def __init__(
        self,
        llm: LLM,
        options: LoadOptions,
        name: str | None = None,
        coupling: Coupling = "seeded",
    ) -> None:
        self._steps: list[StepRecord] = []
        self._coupling = coupling
        self._llm = llm.with_drafter(options, trace=self._steps.append)
        self.name = name or self._llm.drafter_name

    def run(self, prompt_ids: Sequence[int], params: SamplingParams) -> ContenderRun:
        return self._of(measure(self._started(prompt_ids, params)))

    def running(
        self, prompt_ids: Sequence[int], params: SamplingParams
    ) -> Generator[Event, None, ContenderRun]:
        """The same, with a pause behind each event."""
        return self._of((yield from measuring(self._started(prompt_ids, params))))

    def _started(self, prompt_ids: Sequence[int], params: SamplingParams) -> Iterator[Event]:
        self._steps.clear()
        return self._llm.stream(prompt_ids, replace(params, coupling=self._coupling))

    def _of(self, run: MeasuredRun) -> ContenderRun:
        if run.result.error:
            raise RuntimeError(f"{self.name}: {run.result.error}")
        return ContenderRun(
            run.result.token_ids,
            run.first_event_s,
            run.total_s,
            run.num_first,
            run.result.stats,
            sum(s.times.draft_ms + s.times.learn_ms for s in self._steps) / 1e3,
            sum(s.times.score_ms for s in self._steps if s.is_decoding) / 1e3,
        )


def our_contenders(
    llm: LLM,
    options: LoadOptions,
    variants: Mapping[str, Mapping[str, Any]],
    couplings: Sequence[Coupling] = ("seeded",),
) -> list[OurContender]:
    """One contender a variant, each with its drafter's own budget unless ``options`` gives one.

    "auto" runs as it would by itself: whatever drafter is the best, under the adaptive controller.

    Args:
        variants: by name, whose first word is the drafter's: the drafter's options.
        couplings: drafters run once with each; plain decoding is seeded. With "drawn" the name
            says so.
    """
    found = []
    for name, drafter_options in variants.items():
        drafter = name.split()[0]
        asked = replace(options, drafter=drafter, drafter_options=drafter_options)
        if drafter != AUTO:
            spec = drafter_spec(drafter)
            # A comparison of drafters: how much each drafts is not to depend on the controller.
            budget = options.num_draft_tokens
            budget = spec.num_draft_tokens if budget is None else budget
            model = options.draft_model if spec.draft_model != "none" else None
            asked = replace(asked, num_draft_tokens=budget, draft_model=model)
        for coupling in ("seeded",) if drafter == "none" else couplings:
            label = f"{name} (drawn)" if coupling == "drawn" else name
            found.append(OurContender(llm, asked, label, coupling))
    return found
