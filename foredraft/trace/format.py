"""The trace format, version 1: one JSON object a line, a `TracedRun` and then `TracedStep`s.

docs/operate/traces.md describes it for people. Fields may be added within a version;
readers ignore what they do not know. A field that goes away or changes its meaning makes a new
version.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from foredraft.core.record import StepTimes

VERSION = 1


class _Line(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=True)


class Candidate(_Line):
    """A token that might have come at a position.

    Attributes:
        target_prob: by the request's law, after temperature, filters and rules; at temperature 0
            it is 1 or 0.
        model_prob: softmax of the same logits at temperature 1.
        noise: the Gumbel noise of this token at this position, where the target draws with it.
        draft_prob: of the drafter's distribution there, for drawn drafts.
    """

    token: int
    text: str
    target_prob: float
    model_prob: float
    noise: float | None = None
    draft_prob: float | None = None


class NodeLaw(_Line):
    """The target's distribution after a node.

    Attributes:
        node: -1 is the text before the step.
        taken: the token that was committed there; None if verification did not reach the node.
        candidates: the likeliest ones, those that were drafted and the one taken, likeliest first.
    """

    node: int
    taken: int | None
    candidates: tuple[Candidate, ...]


class TracedDecision(_Line):
    """One decision of a ratio test: accepted where ``uniform < probability``."""

    node: int
    probability: float
    uniform: float
    accepted: bool


class Residual(_Line):
    """One of the likeliest tokens of the residual distribution after a ratio test."""

    token: int
    text: str
    prob: float


class Why(_Line):
    """The evidence for a verdict.

    Attributes:
        rule: "target-only" (the target draws, and a drafted token is accepted if it is that one),
            "block" or "traversal" (ratio tests, for drawn drafts).
        temperature: of the request.
        laws: at every node that has children in the draft, and at every one reached.
        decisions: of the ratio test, in the order they were made.
        residual: of the ratio test: the likeliest tokens and the one that was drawn.
    """

    rule: Literal["target-only", "block", "traversal"]
    seed: int
    temperature: float
    laws: tuple[NodeLaw, ...]
    decisions: tuple[TracedDecision, ...] = ()
    residual: tuple[Residual, ...] | None = None


class TracedDraft(_Line):
    """A draft; lists by node.

    Attributes:
        parents: of each node an earlier one, or -1 for the text before the step.
        authors: the drafter, or its part, that proposed the node, if there are several.
        chances: the drafter's own estimate that it and all above it are accepted.
        draft_probs: with which it was drawn, for drawn drafts.
        target_probs: by the target's law after its parent.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()
    authors: tuple[str, ...] | None = None
    chances: tuple[float, ...] | None = None
    draft_probs: tuple[float, ...] | None = None
    target_probs: tuple[float | None, ...] | None = None


class Committed(_Line):
    """A token of the text and its origin. ``text``: whole characters it completed."""

    token: int
    text: str
    by: Literal["draft", "correction", "bonus"]


class TracedRow(_Line):
    """One request's part of a step.

    Attributes:
        position: absolute position of the first token that the step might commit.
        num_read: pending tokens it read; more than 1 while a prompt is read.
        budget: nodes that the controller allowed.
        kind: the verdict's; None after a chunk of a prompt.
        path: accepted nodes, in order.
        num_accepted: draft tokens committed.
        drafter: the row's drafter, if several are loaded; else the run's.
    """

    request_id: int
    position: int
    num_read: int
    budget: int
    draft: TracedDraft
    kind: Literal["bonus", "correction", "failed"] | None
    path: tuple[int, ...]
    committed: tuple[Committed, ...]
    num_accepted: int
    finish_reason: str | None
    drafter: str | None = None
    why: Why | None = None


class TracedStep(_Line):
    """A step.

    Attributes:
        at_ms: when it ended, since the trace began.
        num_waiting: requests queued.
        num_preempted: requests that were preempted for it.
    """

    type: Literal["step"] = "step"
    step: int
    at_ms: float
    times: StepTimes
    num_waiting: int
    num_preempted: int = 0
    rows: tuple[TracedRow, ...]


class TracedRun(_Line):
    """The first line: the run's settings.

    Attributes:
        started: ISO 8601, UTC.
        params: of the request, where one command makes all of them.
    """

    type: Literal["run"] = "run"
    version: int = VERSION
    foredraft: str
    started: str
    model: str | None = None
    drafter: str | None = None
    num_draft_tokens: int | None = None
    params: dict[str, Any] = {}
