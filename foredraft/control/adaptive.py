"""The default controller: drafts where it pays and as much as pays, and hardly loses elsewhere.

Every few steps, and whenever rows come or go, it plans anew: for each loaded drafter it pools the
slots of all rows (`pooled`), weighs what they are expected to commit (`acceptance`) against the
forward and the drafter's own time (`times`), and compares the best of them with plain decoding.
Where nothing pays, drafters are sent away: following a text costs time, too. They come back for
short trials, ever more rarely as long as these fail. All of it lives within what a `Ledger` leaves.

It looks at records of past steps only. So no budget depends on a token that is drafted under it,
which drawn drafts need (docs/understand/verify.md#non-anticipation). docs/understand/control.md
has the whole story.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from foredraft.control.acceptance import LIKELY_CAUSES, Acceptance, Hope, Lessons, Promise
from foredraft.control.base import Allowance, Row
from foredraft.control.ledger import Ledger
from foredraft.control.planner import TRIAL_STEPS, Plan, Planner
from foredraft.control.times import DraftTimes
from foredraft.core.cost import CostModel
from foredraft.core.record import RowStep, StepRecord
from foredraft.core.traits import DrafterTraits

_log = logging.getLogger("foredraft")
_EVERY, _EVERY_PLAIN = 8, 32
"""Steps between two plans, at most: while rows draft, and while nothing is learnt."""
_LOOKED_AT = 64
"""Steps between two looks at what drafters promised."""
_LATER_HOPE = 0.3
"""Of drafters behind the first that promise nothing, until something is known of them."""
_USUAL_TIMES = ((1, 1.0), (2, 1.1), (4, 1.3), (8, 2.0), (16, 3.3))
"""In plain steps, where nothing was measured: a usual CPU."""


@dataclass
class Experience:
    """What was learnt of drafters; engines on the same models share it."""

    lessons: Lessons = field(default_factory=dict)
    times: DraftTimes = field(default_factory=DraftTimes)


class AdaptiveBudget:
    """See the module docstring and `foredraft.control.base.Controller`.

    Where other controllers decide for rows of the same batch, theirs count as they are: what is
    weighed, and what the ledger books, is what this one's drafts add.

    Args:
        drafters: to choose from, the best one for a single request first.
        cost: what steps cost here. None: a usual machine's proportions, and of the drafters' own
            times only the forwards that they say they take.
        experience: of controllers on the same models.
        ledger: bounds the loss.
    """

    def __init__(
        self,
        drafters: Sequence[DrafterTraits],
        cost: CostModel | None = None,
        experience: Experience | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self._is_measured, self._cost = cost is not None, cost or CostModel(_USUAL_TIMES)
        experience = experience or Experience()
        self._times = experience.times
        hopes = {
            d.name: Hope.of(d.promise, d.round_share is not None).less(
                _LATER_HOPE if i and d.promise is None else 1.0
            )
            for i, d in enumerate(drafters)
        }
        self._acceptance = Acceptance(experience.lessons, hopes)
        self.ledger = ledger or Ledger()
        times = self._times if self._is_measured else None
        self._planner = Planner(drafters, self._cost, times, self._acceptance, self.ledger)
        self._plan: Plan | None = None
        self._planned_for: tuple[int, ...] = ()
        self._left, self._every = 0, 1
        self._context = 64
        self._num_steps = self._num_drafting = 0
        self._told: set[tuple[str, str]] = set()

    # ---- what the engine asks -------------------------------------------------------------------

    def begin(self, row: Row, others: Sequence[Row]) -> str | None:
        self._acceptance.begin(row.request_id, row.params)
        if row.params.speculation in self._planner.drafters:  # one that is asked for by name
            return row.params.speculation
        drafters = [other.drafter for other in others]
        return self._planner.best_for_new(row.params, drafters, self._context)

    def allow(self, rows: Sequence[Row], others: Sequence[Row] = ()) -> list[Allowance]:
        if not rows:
            return []
        for row in rows:
            self._acceptance.begin(row.request_id, row.params)
        ids = tuple(row.request_id for row in (*rows, *others))
        self._left -= 1
        plan, can_pay = self._plan, self._planner.can_pay
        if plan is None or ids != self._planned_for or self._left <= 0 or not can_pay(plan):
            plan = self._planner.plan(rows, others, plan, self._num_steps)
            rest = min(self._planner.rests_until - self._num_steps, _EVERY_PLAIN)
            self._every = min(2 * self._every, _EVERY) if plan.drafter else max(_EVERY, rest)
            if self._plan is None or plan.drafter != self._plan.drafter:
                self._every = 1
            self._left = TRIAL_STEPS if plan.is_trial else self._every
            self._plan, self._planned_for = plan, ids
        return [self._allowance(row, plan) for row in rows]

    def observe(self, record: StepRecord) -> None:
        rows = [row for row in record.rows if self._acceptance.knows(row.request_id)]
        if not rows:
            return
        times = record.times
        self._context = sum(row.context for row in rows) // len(rows)
        plain, forward = self._cost.ms(_plain_sizes(record, rows)), self._cost.ms(record.sizes)
        drafter_ms = self._drafter_ms(record, rows, plain, forward)
        if record.is_decoding:
            self._times.wait()
            worth = plain * sum(len(row.committed) or 1 for row in rows) / len(rows)
            self.ledger.book(forward + drafter_ms, worth, plain)
        else:
            self.ledger.book(times.score_ms + drafter_ms, times.score_ms, times.score_ms)
        self._num_steps += 1
        if self._num_steps % _LOOKED_AT == 0:
            self._tell_of_promises()
        self._num_drafting += any(len(row.proposal.tree) for row in rows)
        for row in rows:
            if row.drafter is not None:
                self._acceptance.observe(row.drafter, row)

    def _drafter_ms(
        self, record: StepRecord, rows: Sequence[RowStep], plain_ms: float, forward_ms: float
    ) -> float:
        """What drafters take in a step for these rows; the times of a single drafter are kept.

        Args:
            plain_ms: the forward as it would be without drafts.
            forward_ms: the forward as it should be: where it took longer, all else did, too.
        """
        times, drafters = record.times, {row.drafter for row in rows} - {None}
        if not self._is_measured:
            return plain_ms * self._promised_share(rows)
        if not drafters:
            return 0.0
        spent_ms = times.draft_ms + times.learn_ms
        num_followed = sum(row.drafter is not None for row in rows)
        num_followed_in_all = sum(row.drafter is not None for row in record.rows)
        if num_followed < num_followed_in_all:  # other controllers' drafters took their part
            return spent_ms * num_followed / num_followed_in_all
        if len(drafters) > 1 or not record.is_decoding:
            return spent_ms
        num_asked = sum(row.budget > 0 for row in rows)
        (name,) = drafters
        assert name is not None
        num_rounds, share = 1, self._planner.drafters[name].round_share
        if share is not None:
            num_rounds = max(min(len(row.proposal.tree), row.budget) for row in rows)
        slowness = max(1.0, times.score_ms / forward_ms)
        return self._times.observe(
            *(name, num_asked, times.draft_ms / slowness),
            *(num_followed, times.learn_ms / slowness, num_rounds),
            expected_ms=None if share is None else share * plain_ms,
        )

    def _promised_share(self, rows: Sequence[RowStep]) -> float:
        """What the drafters' forwards of a step should take, in plain steps; other work is free."""
        most_nodes: dict[str, int] = {}
        for row in rows:
            if row.drafter is not None:
                nodes = max(most_nodes.get(row.drafter, 0), len(row.proposal.tree))
                most_nodes[row.drafter] = nodes
        drafters = self._planner.drafters
        return sum(n * (drafters[name].round_share or 0.0) for name, n in most_nodes.items())

    def end(self, request_id: int) -> None:
        self._acceptance.end(request_id)

    # ---- for people -----------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """What it has done so far and what it would do next; see `foredraft tune load`."""
        plan, ledger = self._plan, self.ledger
        return {
            "steps": self._num_steps,
            "drafting": self._num_drafting,
            "trials": self._planner.num_trials,
            "plain_ms": ledger.plain_ms,
            "spent_ms": ledger.spent_ms,
            "saved": ledger.saved_ms / ledger.plain_ms if ledger.plain_ms else 0.0,
            "balance_ms": ledger.balance_ms,
            "drafter": plan.drafter if plan else None,
            "budget": max(plan.budgets.values(), default=0) if plan else 0,
        }

    @property
    def plan(self) -> Plan | None:
        """The last one."""
        return self._plan

    @property
    def promises(self) -> list[Promise]:
        """What drafters do, beside what was measured when they were made."""
        return self._acceptance.promises()

    def _tell_of_promises(self) -> None:
        for promise in self.promises:
            if promise.is_broken and (promise.drafter, promise.noise) not in self._told:
                self._told.add((promise.drafter, promise.noise))
                _log.warning(
                    "drafter %s: its first token is right in %.0f %% of drafts (%s), and %.0f %% "
                    "were measured when it was made. Texts stay right and come slower. Likely "
                    "causes: %s",
                    *(promise.drafter, 100 * promise.seen, promise.noise, 100 * promise.promised),
                    LIKELY_CAUSES,
                )

    def _allowance(self, row: Row, plan: Plan) -> Allowance:
        budget = max(0, min(plan.budgets.get(row.request_id, 0), row.room))
        drafter = plan.drafter if budget else row.drafter
        if drafter is not None and not budget and not self._stays(drafter, plan):
            drafter = None
        spare = self._planner.drafters[drafter].spare if budget and drafter else 0
        return Allowance(drafter, budget, plan.price, row.room, spare)

    def _stays(self, name: str, plan: Plan) -> bool:
        """Whether a drafter goes on following a row that drafts nothing for now.

        One that could come back at any time does not. One that could not stays as long as following
        can be paid, unless another has taken its place.
        """
        if plan.drafter == name:
            return True
        if self._planner.drafters[name].joins_late or (
            plan.drafter is not None and not plan.is_trial
        ):
            return False
        return self.ledger.left_ms(plan.plain_ms) > 0.0


def _plain_sizes(record: StepRecord, rows: Sequence[RowStep]) -> list[tuple[int, int]]:
    """(tokens, context) of each row of a step, had these rows drafted nothing."""
    if len(rows) == len(record.rows):
        return [(1, row.context) for row in rows]
    own = {row.request_id for row in rows}
    return [(1 if row.request_id in own else row.num_tokens, row.context) for row in record.rows]
