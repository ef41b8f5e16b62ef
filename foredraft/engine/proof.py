"""Live proof: while the engine is idle, some steps that drafted are repeated without drafts."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from foredraft.core.checks import checked_int
from foredraft.core.proposal import DrawnProposal
from foredraft.engine.policy import Policy
from foredraft.engine.request import Event, Request
from foredraft.engine.turn import Turn

if TYPE_CHECKING:
    from foredraft.engine.engine import Engine

_log = logging.getLogger("foredraft")

MOST_TOKENS = 2048
"""Most tokens of text before a step that is proven: prefilling more would take too long."""
_MOST_SAMPLES = 16
"""Most steps that wait for their proof; beyond it the oldest is dropped."""
_LATER = 0.25
"""Seconds until the engine is checked again for live requests."""


@dataclass(frozen=True)
class _Sample:
    """One request's part of a step: the tokens committed after its first ``num_tokens`` tokens."""

    request: Request
    num_tokens: int
    committed: tuple[int, ...]


class LiveProof:
    """Samples steps, and lets an idle engine generate them again from scratch.

    The same seed gives the same text whatever is drafted, so plain decoding must commit the same
    tokens. The cache is not used, so wrongly accepted tokens and wrongly kept entries are both
    found. Drawn drafts are left out, because another draw is not a fault.

    While other requests run no proof is made, and one under way is dropped.

    Args:
        engine: whose steps these are.
        plain: a policy without drafters that stays apart, for the requests that repeat the steps.
        every: one in ``every`` steps that drafted is proven.
        tell: called after each proof; True: the tokens were the same.

    Attributes:
        wake: called when there is a new step to prove.
        num_steps: steps that were repeated.
        num_differences: repeated steps with other tokens. Anything but 0 is a fault.

    Raises:
        ConfigError: ``every`` is not a whole number, 1 or more.
    """

    def __init__(
        self,
        engine: Engine,
        plain: Policy,
        every: int,
        tell: Callable[[bool], None] = lambda is_same: None,
    ) -> None:
        self.every = checked_int("every", every, 1)
        self.num_steps = self.num_differences = 0
        self.wake: Callable[[], None] = lambda: None
        self._engine, self._tell = engine, tell
        self._policy = plain
        self._num_seen, self._ids = 0, itertools.count(-1, -1)
        self._samples: deque[_Sample] = deque(maxlen=_MOST_SAMPLES)
        self._current: tuple[_Sample, Request] | None = None

    def see(self, batch: Sequence[Turn]) -> None:
        """Take note of a step. The engine calls it and holds its lock."""
        if self._current is not None:
            own = self._current[1]
            # other requests have work: the proof waits
            if any(turn.request is not own for turn in batch):
                self._current = None
                self._engine.cancel(own.request_id)
        for turn in batch:
            if _can_be_proven(turn):
                self._num_seen += 1
                if self._num_seen % self.every == 0:
                    num_tokens = turn.context + turn.num_read
                    self._samples.append(_Sample(turn.request, num_tokens, turn.committed))
                    self.wake()

    def owns(self, request: Request) -> bool:
        """Whether a request is the proof's own: it is in no trace and in no figure."""
        return request.policy is self._policy

    def advance(self) -> float | None:
        """One step of a proof, if no other request has work.

        Returns:
            Seconds until the next call; None: only after another step of a request.
        """
        engine = self._engine
        with engine.lock:
            if engine.num_live > (self._current is not None):
                return _LATER if self._samples else None
            if self._current is None:
                if not self._samples:
                    return None
                sample = self._samples.popleft()
                self._current = sample, self._again(sample)
                engine.add([self._current[1]], self._take)
            engine.step(self._policy)
        return 0.0

    def _again(self, sample: _Sample) -> Request:
        """A request that continues the same tokens, with the same rules and noise.

        Its id is none of the engine's own.
        """
        request = sample.request
        tokens = request.tokens[: sample.num_tokens]
        asked = replace(
            request.params,
            max_tokens=len(sample.committed),
            n=1,
            min_tokens=0,
            logprobs=None,
            prompt_logprobs=None,
            speculation="auto",
        )
        return Request(
            next(self._ids),
            tokens,
            len(tokens),
            asked,
            request.seed,
            self._policy,
            request.rules,
            stop_ids=request.stop_ids,
            tenant=request.tenant,
            source=request.source,
            shares=False,
        )

    def _take(self, event: Event) -> None:
        if self._current is None or event.result is None:
            return
        sample, self._current = self._current[0], None
        if event.result.finish_reason in ("cancelled", "error"):
            return
        is_same = event.result.token_ids == sample.committed
        self.num_steps += 1
        self.num_differences += not is_same
        if not is_same:
            _log.error(
                "live proof: behind %d tokens of request %d a step with drafts committed %s, and "
                "plain decoding writes %s; please report this, and serve without drafts meanwhile",
                sample.num_tokens,
                sample.request.request_id,
                list(sample.committed),
                list(event.result.token_ids),
            )
        self._tell(is_same)


def _can_be_proven(turn: Turn) -> bool:
    proposal = turn.proposal
    return (
        len(proposal.tree) > 0
        and not isinstance(proposal, DrawnProposal)
        and len(turn.committed) > 0
        and turn.finish_reason != "error"
        and turn.context + turn.num_read <= MOST_TOKENS
    )
