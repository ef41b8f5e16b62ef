"""Runs of the page: one lane or several on the loaded target, with evidence for each step.

Lanes take turns. The one whose clock is behind makes the next step, and a clock counts its own
lane's steps alone: so two lanes race on one machine without slowing each other down.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from foredraft.control.adaptive import AdaptiveBudget
from foredraft.core.cost import CostModel
from foredraft.core.errors import ConfigError, unknown
from foredraft.core.params import SamplingParams
from foredraft.core.record import StepTimes
from foredraft.drafters import drafter_spec, ready_drafters
from foredraft.engine.request import GenerationResult
from foredraft.llm import LLM
from foredraft.models.timing import forward_ms, measure_cost
from foredraft.options import LoadOptions
from foredraft.server.context import served_name
from foredraft.trace.format import TracedRow, TracedStep
from foredraft.trace.record import Tracer

MAX_TOKENS = 512
MAX_DRAFT_TOKENS = 32
MAX_LANES = 3
_MAX_LLMS = 6
_CURVE = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 17)

Text = Annotated[str, Field(max_length=20_000)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Message(_Body):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: Text


class LaneSpec(_Body):
    """How one lane drafts.

    Attributes:
        drafter: a name of `Lanes.drafters`, which then drafts at every step; None does as the
            server does, whose controller may choose among several, or none.
        num_draft_tokens: most a step; None is the drafter's own.
    """

    drafter: Annotated[str, Field(max_length=40)] | None = None
    num_draft_tokens: Annotated[int, Field(ge=0, le=MAX_DRAFT_TOKENS)] | None = None


class RunBody(_Body):
    """A request of the page: a conversation in one lane, or the same in several.

    Attributes:
        begin: the first words of the reply, prefilled with the prompt.
    """

    messages: Annotated[tuple[Message, ...], Field(min_length=1, max_length=64)]
    lanes: Annotated[tuple[LaneSpec, ...], Field(min_length=1, max_length=MAX_LANES)] = (
        LaneSpec(),
    )
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 0.0
    seed: Annotated[int, Field(ge=0, lt=2**53)] = 0
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = 160
    coupling: Literal["seeded", "drawn"] = "seeded"
    begin: Text = ""

    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            seed=self.seed,
            max_tokens=self.max_tokens,
            coupling=self.coupling,
        )


class Lanes:
    """Engines of the page's own on the loaded target; the least recently used one goes."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._made, self._lock = lru_cache(_MAX_LLMS)(self._make), threading.Lock()

    @property
    def drafters(self) -> tuple[str, ...]:
        """Drafters for lanes: the server's own, and those that need no files."""
        return tuple(dict.fromkeys((self._llm.drafter_name, *ready_drafters(self._llm.target))))

    def get(self, spec: LaneSpec) -> _Watched:
        """The engine for a lane."""
        if spec.drafter is not None and spec.drafter not in self.drafters:
            raise unknown("drafter", spec.drafter, self.drafters)
        with self._lock:  # one of each
            return self._made(spec)

    def info(self) -> dict[str, Any]:
        """The model, its drafters, and the time of a forward of n tokens."""
        llm = self._llm
        plan, cost = llm.plan, self._cost
        name = llm.drafter_name
        return {
            "model": served_name(plan.name if plan else "model"),
            "number_format": plan.number_format if plan else "",
            "drafter": name,
            "active": tuple(llm.policy.drafters) or (name,),
            "drafters": self.drafters,
            "read_bytes": plan.read_bytes if plan else None,
            "curve": [(n, round(ms, 3)) for n, ms in cost.times(_CURVE, 128)],
        }

    @cached_property
    def _cost(self) -> CostModel:
        with self._llm.engine.lock:
            return self._llm.cost or measure_cost(self._llm.target)

    def forward_ms(self, num_tokens: int) -> float:
        """Measure the time of a forward of that many tokens."""
        with self._llm.engine.lock:
            return forward_ms(self._llm.target, num_tokens)

    def encode(self, messages: Sequence[Message], begin: str = "") -> list[int]:
        """A conversation's ids; one message as plain text where the model has no template.

        Args:
            begin: the first words of the reply.

        Raises:
            ConfigError: the model has neither tokenizer nor template, or the template refuses it.
        """
        tokenizer = self._llm.tokenizer
        if tokenizer is None:
            raise ConfigError("this model has no tokenizer here")
        if tokenizer.chat_template is None:
            return tokenizer.encode(messages[-1].content + begin)
        ids = tokenizer.encode_chat([m.model_dump() for m in messages])
        return ids + tokenizer.encode(begin, add_special_tokens=False) if begin else ids

    def _make(self, spec: LaneSpec) -> _Watched:
        asked, size = self._llm.options, spec.num_draft_tokens
        if spec.drafter is not None:
            size = drafter_spec(spec.drafter).num_draft_tokens if size is None else size
            if spec.drafter != self._llm.drafter_name:
                asked = LoadOptions()
            asked = replace(asked, drafter=spec.drafter)  # maybe the first of several of "auto"
        if size is not None:
            asked = replace(asked, num_draft_tokens=size)
        return _Watched(self._llm, asked)


class _Watched:
    """An LLM of a lane, and the steps of each of its requests, to be taken."""

    def __init__(self, llm: LLM, options: LoadOptions) -> None:
        self._steps: dict[int, deque[tuple[StepTimes, TracedRow]]] = {}
        tracer = Tracer(self._keep, llm.tokenizer)
        self.llm = llm.with_drafter(options, trace=tracer, is_apart=True, keeps_evidence=True)

    def _keep(self, step: TracedStep) -> None:
        for row in step.rows:
            self._steps.setdefault(row.request_id, deque(maxlen=64)).append((step.times, row))

    @property
    def controller(self) -> dict[str, Any] | None:
        """The controller's next plan and its ledger; None for a fixed budget."""
        controller = self.llm.controller
        return controller.report() if isinstance(controller, AdaptiveBudget) else None

    def take(self, request_id: int) -> Iterator[tuple[StepTimes, TracedRow]]:
        """The steps of a request since the last call."""
        steps = self._steps.get(request_id, deque())
        while steps:
            yield steps.popleft()

    def forget(self, request_id: int) -> None:
        self._steps.pop(request_id, None)


class _Lane:
    """One lane of a run.

    Attributes:
        clock_ms: time of its steps.
        is_over: whether its text is finished.
    """

    def __init__(
        self, number: int, watched: _Watched, prompt: list[int], body: RunBody, tenant: str | None
    ) -> None:
        self._number, self._watched = number, watched
        self._events = watched.llm.stream(prompt, body.params(), tenant=tenant)
        self._request_id: int | None = None
        self.clock_ms, self._first_ms, self._num_first = 0.0, 0.0, 0
        self.is_over = False

    def advance(self) -> Iterator[dict[str, Any]]:
        """One step, as events of the page."""
        event = next(self._events)
        self._request_id = event.request_id
        for times, row in self._watched.take(event.request_id):
            yield self._step(times, row)
        if event.result is not None:
            self.is_over = True
            yield self._end(event.result)

    def close(self) -> None:
        """End it, wherever it is."""
        self._events.close()  # type: ignore[attr-defined]
        if self._request_id is not None:
            self._watched.forget(self._request_id)

    def _step(self, times: StepTimes, row: TracedRow) -> dict[str, Any]:
        """One step. ``decoding``: the request had a token before it; the others read the prompt."""
        self.clock_ms += times.total_ms
        decoding = bool(self._num_first)
        if row.committed and not decoding:
            self._first_ms, self._num_first = self.clock_ms, len(row.committed)
        drafter = row.drafter or self._watched.llm.drafter_name
        copies = drafter_spec(drafter).copies
        return self._event(
            "step",
            controller=self._watched.controller,
            decoding=decoding,
            times=asdict(times),
            row=row.model_dump(mode="json") | {"drafter": drafter, "copies": copies},
        )

    def _end(self, result: GenerationResult) -> dict[str, Any]:
        decode_ms = self.clock_ms - self._first_ms
        num_decoded = len(result.token_ids) - self._num_first
        return self._event(
            "end",
            text=result.text,
            sha256=hashlib.sha256(result.text.encode()).hexdigest(),
            finish_reason=result.finish_reason,
            error=result.error,
            num_tokens=len(result.token_ids),
            num_prompt_tokens=result.num_prompt_tokens,
            seed=result.seed,
            stats=asdict(result.stats),
            tokens_per_s=round(1e3 * num_decoded / decode_ms, 2) if decode_ms > 0.0 else 0.0,
        )

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        return {"type": kind, "lane": self._number, "clock_ms": round(self.clock_ms, 3), **more}


def run_lanes(lanes: Lanes, body: RunBody, tenant: str | None = None) -> Iterator[dict[str, Any]]:
    """Run a page's request; events by step, and one at each lane's end.

    Lanes that run side by side share no cached tokens, neither with each other nor with earlier
    requests. Otherwise the second lane would find the prompt in the cache.

    Nothing runs before the first event is asked for; closing it early ends all lanes.

    Raises:
        ConfigError, PromptError: the request cannot be run.
    """
    prompt = lanes.encode(body.messages, body.begin)
    made = [*map(lanes.get, body.lanes)]
    tenants = [tenant] if len(made) == 1 else [secrets.token_hex(16) for _ in made]
    pairs = enumerate(zip(made, tenants, strict=True))
    return _run([_Lane(i, watched, prompt, body, own) for i, (watched, own) in pairs])


def _run(running: list[_Lane]) -> Iterator[dict[str, Any]]:
    try:
        while left := [lane for lane in running if not lane.is_over]:
            yield from min(left, key=lambda lane: lane.clock_ms).advance()
    finally:
        for lane in running:
            lane.close()
