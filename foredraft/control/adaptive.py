"""The default controller: drafts where it pays and as much as pays, and hardly loses elsewhere.

Every few steps, and whenever rows come or go, it plans anew: for each loaded drafter it pools the
slots of all rows (`pooled`), weighs what they are expected to commit (`acceptance`) against the
forward and the drafter's own time (`times`), and compares the best of them with plain decoding.
Where nothing pays, drafters are sent away: following a text costs time, too. They come back for
short trials, ever more rarely as long as these fail. All of it lives within what a `Ledger` leaves.

It looks at records of past steps only. So no budget depends on a token that is drafted under it,
which drawn drafts need (docs/verify.md#non-anticipation). docs/control.md has the whole story.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from foredraft.control.acceptance import MOST_SLOTS, Acceptance, Kind, Lessons, kind_of
from foredraft.control.base import Allowance
from foredraft.control.ledger import Ledger
from foredraft.control.pooled import Pooled, PooledRow, best_prefix
from foredraft.control.times import DraftTimes
from foredraft.core.cost import CostModel, LinearPrice, Price, PriceList
from foredraft.core.params import SamplingParams
from foredraft.core.record import StepRecord
from foredraft.core.request import Request

_EVERY = 8
"""Steps between two plans."""
_MOST_NODES = 16, 4
"""Of one step: so many, and so many a row."""
_MARGIN = 1.01
"""By how much drafting has to be better before it begins; once begun it has to be better at all."""
_STAKE = 0.4
"""Of what may still be lost that one step may put at risk."""
_TRIAL_STEPS, _TRIAL_ROWS = 6, 2
_TRIALS = ((_TRIAL_ROWS, 4), (1, 4), (1, 2), (1, 1))
"""Rows and nodes of each: the first that can be paid."""
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 1024
_LEAVING = 1.1
"""How much better it has to go with another drafter before one is let go that cannot return."""
_LATER_HOPE = 0.3
"""Of drafters behind the first, until something is known of them."""
_USUAL_TIMES = ((1, 1.0), (2, 1.1), (4, 1.3), (8, 2.0), (16, 3.3))
"""In plain steps, where nothing was measured: a usual CPU."""


@dataclass(frozen=True)
class LoadedDrafter:
    """One of the drafters that the controller chooses from.

    Attributes:
        most_nodes: that it may draft for a row.
        joins_late: whether it can begin in the middle of a text.
    """

    name: str
    most_nodes: int
    joins_late: bool


@dataclass
class Experience:
    """What was learnt of drafters; engines on the same models share it."""

    lessons: Lessons = field(default_factory=dict)
    times: DraftTimes = field(default_factory=DraftTimes)


@dataclass(frozen=True)
class Plan:
    """How the next few steps draft.

    Attributes:
        drafter: for all rows that can have it; None: plain decoding.
        budgets: by request; others draft nothing.
        plain_ms, plain_rate: of plain decoding: a step, and committed tokens a millisecond.
        pooled: what is expected.
        price: of a row's nodes.
        loss_ms: of a step in which nothing is accepted.
        is_trial: tried although it is not expected to pay.
    """

    drafter: str | None
    budgets: Mapping[int, int]
    plain_ms: float
    plain_rate: float
    pooled: Pooled | None
    price: Price
    loss_ms: float = 0.0
    is_trial: bool = False


class AdaptiveBudget:
    """See the module docstring and `foredraft.control.base.Controller`.

    Args:
        drafters: to choose from, the best one for a single request first.
        max_context: most tokens a row of the target may hold.
        cost: what steps cost here; followed from now on. None: a usual machine's proportions, and
            no times of drafters.
        experience: of engines on the same models.
        ledger: bounds the loss.
    """

    def __init__(
        self,
        drafters: Sequence[LoadedDrafter],
        max_context: int,
        cost: CostModel | None = None,
        experience: Experience | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self._drafters = {drafter.name: drafter for drafter in drafters}
        self._max_context = max_context
        self._is_measured, self._cost = cost is not None, cost or CostModel(_USUAL_TIMES)
        experience = experience or Experience()
        self._times, self._acceptance = (
            experience.times,
            Acceptance(
                experience.lessons,
                {d.name: _LATER_HOPE if i else 1.0 for i, d in enumerate(drafters)},
            ),
        )
        self.ledger = ledger or Ledger()
        self._following: dict[int, str | None] = {}
        self._plan: Plan | None = None
        self._planned_for: tuple[int, ...] = ()
        self._left, self._every = 0, 1
        self._context = 64
        self._pause, self._rests_until, self._next_trial = _FIRST_PAUSE, _FIRST_PAUSE, 0
        self._counts = {"steps": 0, "drafting": 0, "trials": 0, "plans": 0}

    # ---- what the engine asks -------------------------------------------------------------------

    def first(self, request_id: int, params: SamplingParams) -> str | None:
        """Which drafter follows a new request from its beginning; None: none.

        For `SwitchDrafter`. Those that cannot join later are tried with few requests first, until
        it is known what they take, and with one in a while where they did not pay.
        """
        self._acceptance.begin(request_id, params)
        num_rows = len(self._following) + 1
        self._following[request_id] = self._best_for_new(params, num_rows)
        return self._following[request_id]

    def allow(self, rows: Sequence[Request]) -> list[Allowance]:
        if not rows:
            return []
        for row in rows:
            self._acceptance.begin(row.request_id, row.params)
            self._following.setdefault(row.request_id, None)
        asked = tuple(row.request_id for row in rows)
        self._left -= 1
        plan = self._plan
        if plan is None or asked != self._planned_for or self._left <= 0 or not self._can_pay(plan):
            plan = self._new_plan(rows)
            self._every = min(2 * self._every, _EVERY) if plan.drafter else _EVERY
            if self._plan is None or plan.drafter != self._plan.drafter:
                self._every = 1
            self._left = _TRIAL_STEPS if plan.is_trial else self._every
            self._plan, self._planned_for = plan, asked
        return [self._allowance(row, plan) for row in rows]

    def observe(self, record: StepRecord) -> None:
        times, rows = record.times, record.rows
        if not rows:
            return
        self._context = sum(row.context for row in rows) // len(rows)
        following = {self._following.get(row.request_id) for row in rows} - {None}
        drafter_ms = times.draft_ms + times.learn_ms if self._is_measured and following else 0.0
        if record.is_decoding:
            if self._is_measured:
                self._cost.observe(record.sizes, times.score_ms)
            plain = self._cost.ms([(1, row.context) for row in rows])
            forward = self._cost.ms(record.sizes)
            worth = plain * sum(len(row.committed) or 1 for row in rows) / len(rows)
            self.ledger.book(forward + drafter_ms, worth, plain)
        else:
            self.ledger.book(times.score_ms + drafter_ms, times.score_ms, times.score_ms)
        self._counts["steps"] += 1
        self._counts["drafting"] += any(len(row.proposal.tree) for row in rows)
        for row in rows:
            name = self._following.get(row.request_id)
            if name is not None:
                self._acceptance.observe(name, row)
        if self._is_measured and len(following) == 1 and record.is_decoding:
            num_asked = sum(row.budget > 0 for row in rows)
            followed = sum(self._following.get(row.request_id) is not None for row in rows)
            (name,) = following
            assert name is not None
            self._times.observe(name, num_asked, times.draft_ms, followed, times.learn_ms)

    def end(self, request_id: int) -> None:
        self._following.pop(request_id, None)
        self._acceptance.end(request_id)

    # ---- for people -----------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """What it has done so far and what it would do next; see `foredraft tune load`."""
        plan, ledger = self._plan, self.ledger
        return {
            **self._counts,
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

    # ---- plans ----------------------------------------------------------------------------------

    def _allowance(self, row: Request, plan: Plan) -> Allowance:
        budget = min(plan.budgets.get(row.request_id, 0), self._room(row))
        before = self._following[row.request_id]
        wanted = plan.drafter if budget else before
        if wanted is not None and not budget and not self._stays(wanted, plan):
            wanted = None
        self._following[row.request_id] = wanted
        return Allowance(max(0, budget), plan.price, wanted)

    def _stays(self, name: str, plan: Plan) -> bool:
        """Whether a drafter goes on following a row that drafts nothing for now.

        One that could come back at any time does not. One that could not stays as long as following
        can be paid, unless another has taken its place.
        """
        if plan.drafter == name:
            return True
        if self._drafters[name].joins_late or (plan.drafter is not None and not plan.is_trial):
            return False
        return self._balance(plan.plain_ms) > 0.0

    def _new_plan(self, rows: Sequence[Request]) -> Plan:
        self._counts["plans"] += 1
        most = _MOST_NODES[0] + _MOST_NODES[1] * len(rows)
        prices = self._cost.with_nodes([(1, len(row.tokens)) for row in rows], most)
        plain = Plan(None, {}, prices[0], len(rows) / prices[0], None, LinearPrice(1.0))
        found = [self._with_drafter(d, rows, prices) for d in self._drafters.values()]
        paying = [plan for plan in found if plan is not None]
        if not paying:
            return self._trial(rows, prices) or plain
        if self._plan is not None and self._plan.drafter is not None and not self._plan.is_trial:
            self._pause = _FIRST_PAUSE  # it has paid for longer than a trial
        return max(paying, key=self._weight)

    def _weight(self, plan: Plan) -> float:
        """What plans are compared by: the rate, less where a drafter is let go that stays away."""
        assert plan.pooled is not None
        leaves = any(
            name not in (None, plan.drafter) and not self._drafters[name].joins_late
            for name in self._following.values()
            if name is not None
        )
        return plan.pooled.rate / (_LEAVING if leaves else 1.0)

    def _with_drafter(
        self, drafter: LoadedDrafter, rows: Sequence[Request], prices: Sequence[float]
    ) -> Plan | None:
        """The best plan with this drafter; None if plain decoding is as good, or if a loss could
        not be paid.

        Where it could not be paid for all rows it may be for some.
        """
        able = [row for row in rows if self._can_have(row, drafter)]
        able = able[: max(1, 2 * self._times.most_rows(drafter.name))]
        while able:
            plan = self._with_drafter_for(able, drafter, rows, prices)
            if plan is not None:
                return plan
            if self._asking_ms(drafter, rows, prices[0], len(able)) < self._stake(prices[0]):
                return None
            able = able[: len(able) // 2]
        return None

    def _with_drafter_for(
        self,
        able: Sequence[Request],
        drafter: LoadedDrafter,
        rows: Sequence[Request],
        prices: Sequence[float],
    ) -> Plan | None:
        pool = [
            PooledRow(
                min(drafter.most_nodes, self._room(row), MOST_SLOTS),
                self._acceptance.rates(drafter.name, row.request_id),
            )
            for row in able
        ]
        pooled = best_prefix(
            pool,
            len(rows),
            PriceList(tuple(prices)).between,
            partial(self._asking_ms, drafter, rows, prices[0]),
            most_nodes=len(prices) - 1,
            most_ms=prices[0] + self._stake(prices[0]),
        )
        plain_rate = len(rows) / prices[0]
        drafts_now = self._plan is not None and self._plan.drafter == drafter.name
        if not pooled.nodes or pooled.rate <= plain_rate * (1.0 if drafts_now else _MARGIN):
            return None
        budgets = {row.request_id: n for row, n in zip(able, pooled.budgets, strict=True) if n}
        price = _price(prices, len(rows), pooled.nodes)
        loss_ms = pooled.worst_ms - prices[0]
        return Plan(drafter.name, budgets, prices[0], plain_rate, pooled, price, loss_ms)

    def _asking_ms(
        self, drafter: LoadedDrafter, rows: Sequence[Request], plain_ms: float, num_asked: int
    ) -> float:
        if not self._is_measured or not num_asked:
            return 0.0
        now = sum(self._following.get(row.request_id) == drafter.name for row in rows)
        return self._times.step_ms(drafter.name, num_asked, max(now, num_asked), plain_ms)

    def _trial(self, rows: Sequence[Request], prices: Sequence[float]) -> Plan | None:
        """A few rows draft a little, if the pause is over and the loss can be paid."""
        steps = self._counts["steps"]
        if self._plan is not None and self._plan.drafter is not None:  # it has just stopped
            if self._plan.is_trial:
                self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            self._rests_until = steps + self._pause
        if steps < self._rests_until:
            return None
        self._rests_until = steps + self._pause
        names = [*self._drafters]
        for _ in names:
            drafter = self._drafters[names[self._next_trial % len(names)]]
            self._next_trial += 1
            for num_rows, num_nodes in _TRIALS:
                found = self._trial_of(drafter, rows, prices, num_rows, num_nodes)
                if found is not None:
                    self._counts["trials"] += 1
                    return found
        return None

    def _trial_of(
        self,
        drafter: LoadedDrafter,
        rows: Sequence[Request],
        prices: Sequence[float],
        num_rows: int,
        num_nodes: int,
    ) -> Plan | None:
        able = [row for row in rows if self._can_have(row, drafter) and self._room(row)][:num_rows]
        budgets = {row.request_id: min(num_nodes, self._room(row)) for row in able}
        loss = self._asking_ms(drafter, rows, prices[0], len(budgets))
        loss += prices[sum(budgets.values())] - prices[0]
        if not budgets or not self.ledger.can_lose(_TRIAL_STEPS / 2 * loss, prices[0]):
            return None
        price = _price(prices, len(rows), sum(budgets.values()))
        plain_rate = len(rows) / prices[0]
        return Plan(drafter.name, budgets, prices[0], plain_rate, None, price, loss, True)

    def _best_for_new(self, params: SamplingParams, num_rows: int) -> str | None:
        """By requests like it, in a batch of rows like it."""
        most = _MOST_NODES[0] + _MOST_NODES[1] * num_rows
        prices = PriceList(self._cost.with_nodes([(1, self._context)] * num_rows, most))
        rates = {
            drafter.name: self._rate_for_new(drafter, kind_of(params), num_rows, prices)
            for drafter in self._drafters.values()
        }
        for name in sorted(rates, key=lambda name: -rates[name]):
            same = sum(other == name for other in self._following.values())
            is_known = same < max(_TRIAL_ROWS, 2 * self._times.most_rows(name))
            asking = self._times.step_ms(name, same + 1, same + 1, prices.ms(0))
            if not self.ledger.can_lose(asking if self._is_measured else 0.0, prices.ms(0)):
                continue  # it would follow and not get to draft
            if is_known and rates[name] > _MARGIN * num_rows / prices.ms(0):
                return name
        return None

    def _rate_for_new(
        self, drafter: LoadedDrafter, kind: Kind, num_rows: int, prices: PriceList
    ) -> float:
        """The best rate of so many rows that draft alike."""
        rates_2K = self._acceptance.kind_rates(drafter.name, kind)[:, : drafter.most_nodes]
        totals: list[tuple[float, float]] = [(n, a) for n, a in rates_2K.cumsum(1).T.tolist()]
        asking = 0.0
        if self._is_measured:
            asking = self._times.step_ms(drafter.name, num_rows, num_rows, prices.ms(0))
        return max(
            num_rows * (1.0 + accepted) / (prices.between(num_rows * nodes) + asking)
            for nodes, accepted in totals
        )

    def _can_have(self, row: Request, drafter: LoadedDrafter) -> bool:
        return drafter.joins_late or self._following.get(row.request_id) == drafter.name

    def _can_pay(self, plan: Plan) -> bool:
        return not plan.loss_ms or self.ledger.can_lose(plan.loss_ms, plan.plain_ms)

    def _stake(self, plain_ms: float) -> float:
        """Milliseconds that one step may put at risk."""
        return _STAKE * self._balance(plain_ms)

    def _balance(self, plain_ms: float) -> float:
        self.ledger.can_lose(0.0, plain_ms)
        assert self.ledger.balance_ms is not None
        return self.ledger.balance_ms

    def _room(self, row: Request) -> int:
        # The last token a step commits is the target's own, so one fewer can be drafted.
        return max(0, min(row.num_remaining - 1, self._max_context - len(row.tokens)))


def _price(prices: Sequence[float], num_rows: int, num_nodes: float) -> Price:
    """Of one row's nodes, in the batch as it is going to be: an average node of it."""
    if num_rows == 1:
        return PriceList(tuple(prices))
    nodes = max(1, round(num_nodes))
    node_ms = (prices[min(nodes, len(prices) - 1)] - prices[0]) / nodes
    return LinearPrice(num_rows * node_ms / prices[0])
