"""Whatever can continue a prompt and be timed: our drafters, plain decoding, and peers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from foredraft.bench.measure import measure
from foredraft.core.params import Coupling, SamplingParams
from foredraft.core.record import StepRecord
from foredraft.core.request import SpeculationStats
from foredraft.drafters import drafter_spec
from foredraft.llm import LLM
from foredraft.options import LoadOptions


@dataclass(frozen=True)
class ContenderRun:
    """One timed generation.

    Attributes:
        first_s: seconds until the first tokens, ``num_first`` of them.
        total_s: seconds in all.
        stats: what speculation did; None for peers.
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
        ...


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
        self._steps.clear()
        run = measure(self._llm.stream(prompt_ids, replace(params, coupling=self._coupling)))
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


class TransformersContender:
    """``generate`` of transformers on the same checkpoint and dtype, greedy.

    Args:
        dtype: its name.
        assistant: "ngram" for its prompt lookup; None for plain decoding.
    """

    def __init__(
        self, directory: str | Path, dtype: str, device: str, assistant: str | None = None
    ) -> None:
        self.name = "transformers" + (f" {assistant}" if assistant else "")
        self._options: dict[str, Any] = {"prompt_lookup_num_tokens": 8} if assistant else {}
        self._model = transformers_model(directory, dtype, device)

    def run(self, prompt_ids: Sequence[int], params: SamplingParams) -> ContenderRun:
        clock = _Clock()
        ids = torch.tensor([list(prompt_ids)], device=self._model.device)
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=params.max_tokens,
            do_sample=False,
            streamer=clock,
            **self._options,
        )
        total_s = time.perf_counter() - clock.started
        generated = tuple(output[0, ids.shape[1] :].tolist())
        return ContenderRun(generated, clock.first_s, total_s, 1)


def transformers_model(directory: str | Path, dtype: str, device: str) -> Any:
    """The checkpoint as transformers loads it, ready to run."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, dtype), use_safetensors=True, trust_remote_code=False
    )
    return model.to(device).eval()


class _Clock:
    """A streamer that notes when the first token came. The first call carries the prompt."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.first_s = 0.0
        self._calls = 0

    def put(self, value: object) -> None:
        self._calls += 1
        if self._calls == 2:
            self.first_s = time.perf_counter() - self.started

    def end(self) -> None:
        pass


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
