"""Plans: which drafter, which rows, how many nodes; and when to try what does not seem to pay.

docs/understand/control.md has the whole story.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from foredraft.control.acceptance import MOST_SLOTS, Acceptance, Array, Kind, kind_of
from foredraft.control.base import Row
from foredraft.control.ledger import Ledger
from foredraft.control.pooled import Pooled, PooledRow, best_prefix
from foredraft.control.times import DraftTimes
from foredraft.core.cost import CostModel, LinearPrice, Price, PriceList
from foredraft.core.params import SamplingParams
from foredraft.core.traits import DrafterTraits

Drafters = Sequence[str | None]
"""Who drafts for each of the running requests; None: nobody."""

_MOST_NODES = 16, 4
"""Of one step: so many, and so many a row."""
_MARGIN = 1.01
"""By how much drafting has to be better before it begins; once begun it has to be better at all."""
_STAKE = 0.5
"""Of what may still be lost that one step may put at risk."""
TRIAL_STEPS, _TRIAL_ROWS = 6, 2
_TRIALS = ((_TRIAL_ROWS, 4), (1, 4), (1, 2), (1, 1))
"""Rows and nodes of each: the first that can be paid."""
FIRST_PAUSE, _LONGEST_PAUSE = 16, 1024
_MOST_ROWS = 1 << 20
_LONGEST_WAIT = 64
"""New requests between two chances of a drafter that does not seem to pay, at most."""
_UNKNOWN, _UNKNOWN_HEAD = 0.02, 0.2
"""Of a plain step, for each row: how long drafting takes before anything is known. A drafter that
promises something was trained, and runs layers."""
_LEAVING = 1.1
"""How much better it has to go with another drafter before one is let go that cannot return."""


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


class Planner:
    """Makes plans.

    Args:
        drafters: to choose from.
        cost: of steps.
        times: of drafters; None: not to be had. Then a drafter takes what its forwards promise.
        acceptance: of what they draft.
        ledger: what may be lost.

    Attributes:
        drafters: by name.
        rests_until: no trial before so many steps have been run.
        num_trials: so far.
    """

    def __init__(
        self,
        drafters: Sequence[DrafterTraits],
        cost: CostModel,
        times: DraftTimes | None,
        acceptance: Acceptance,
        ledger: Ledger,
    ) -> None:
        self.drafters = {drafter.name: drafter for drafter in drafters}
        self._cost, self._times = cost, times
        self._acceptance, self._ledger = acceptance, ledger
        self._drafter_of: dict[int, str | None] = {}
        self._num_rows = 0
        self._pause, self.rests_until, self._next_trial = FIRST_PAUSE, FIRST_PAUSE, 0
        self._chances: dict[str, tuple[int, int]] = {}
        self.num_trials = 0

    def plan(
        self, rows: Sequence[Row], others: Sequence[Row], current: Plan | None, num_steps: int
    ) -> Plan:
        """The plan for the next few steps.

        Args:
            rows: that may draft.
            others: further rows of the batch.
            current: the plan so far.
            num_steps: how many steps have been run.
        """
        self._drafter_of = {row.request_id: row.drafter for row in rows}
        self._num_rows = num_rows = len(rows) + len(others)
        most = _MOST_NODES[0] + _MOST_NODES[1] * len(rows)
        prices = self._cost.with_nodes([(1, len(row.tokens)) for row in (*rows, *others)], most)
        self._ledger.begin(prices[0], num_rows)
        plain = Plan(None, {}, prices[0], num_rows / prices[0], None, LinearPrice(1.0))
        plans = [self._with_drafter(d, rows, prices, current) for d in self.drafters.values()]
        paying = [p for p in plans if p is not None and self._weight(p) > plain.plain_rate]
        if not paying:
            return self._trial(rows, prices, current, num_steps) or plain
        if current is not None and current.drafter is not None and not current.is_trial:
            self._pause = FIRST_PAUSE  # it has paid for longer than a trial
            self._chances.pop(current.drafter, None)
        return max(paying, key=self._weight)

    def _weight(self, plan: Plan) -> float:
        """What plans are compared by: the rate, less where a drafter is let go that stays away."""
        assert plan.pooled is not None
        leaves = any(self._would_leave(number, plan.drafter) for number in plan.budgets)
        return plan.pooled.rate / (_LEAVING if leaves else 1.0)

    def _would_leave(self, request_id: int, wanted: str | None) -> bool:
        """Whether a request's drafter would have to go for this one, and could not come back."""
        now = self._drafter_of.get(request_id)
        return now not in (None, wanted) and not self.drafters[now].joins_late

    def _with_drafter(
        self,
        drafter: DrafterTraits,
        rows: Sequence[Row],
        prices: Sequence[float],
        current: Plan | None,
    ) -> Plan | None:
        """The best plan with this drafter; None if plain decoding is as good, or if a loss could
        not be paid.

        Where it could not be paid for all rows it may be for some.
        """
        able = [row for row in rows if self._can_have(row, drafter)]
        able = able[: max(1, 2 * self._most_rows(drafter.name))]
        while able:
            plan = self._with_drafter_for(able, drafter, rows, prices, current)
            if plan is not None:
                return plan
            asking_ms = self._asking_ms(drafter, rows, prices[0], len(able), len(able))
            if asking_ms < self._stake(prices[0]):
                return None
            able = able[: len(able) // 2]
        return None

    def _with_drafter_for(
        self,
        able: Sequence[Row],
        drafter: DrafterTraits,
        rows: Sequence[Row],
        prices: Sequence[float],
        current: Plan | None,
    ) -> Plan | None:
        pool = [
            PooledRow(
                min(drafter.most_nodes, row.room, MOST_SLOTS),
                self._acceptance.rates(drafter.name, row.request_id),
            )
            for row in able
        ]
        pooled = best_prefix(
            pool,
            self._num_rows,
            PriceList(tuple(prices)).between,
            partial(self._asking_ms, drafter, rows, prices[0]),
            most_nodes=len(prices) - 1,
            most_ms=prices[0] + self._stake(prices[0]),
        )
        plain_rate = self._num_rows / prices[0]
        drafts_now = current is not None and current.drafter == drafter.name
        if not pooled.nodes or pooled.rate <= plain_rate * (1.0 if drafts_now else _MARGIN):
            return None
        budgets = {row.request_id: n for row, n in zip(able, pooled.budgets, strict=True) if n}
        price = _price(prices, self._num_rows, pooled.nodes)
        loss_ms = pooled.worst_ms - prices[0]
        return Plan(drafter.name, budgets, prices[0], plain_rate, pooled, price, loss_ms)

    def _asking_ms(
        self,
        drafter: DrafterTraits,
        rows: Sequence[Row],
        plain_ms: float,
        num_asked: int,
        num_nodes: float,
    ) -> float:
        """What a drafter takes for some of the rows, and so many nodes of all of them together."""
        if not num_asked:
            return 0.0
        now = sum(row.drafter == drafter.name for row in rows)
        following = max(now, num_asked)
        return self._drafter_ms(drafter, num_asked, following, plain_ms, num_nodes / num_asked)

    def _drafter_ms(
        self,
        drafter: DrafterTraits,
        num_asked: int,
        num_following: int,
        plain_ms: float,
        depth: float,
    ) -> float:
        """Likewise; ``depth``: nodes of each row that is asked for."""
        share = drafter.round_share
        if self._times is None:
            return 0.0 if share is None else depth * share * plain_ms
        round_ms = self._times.round_ms(drafter.name, num_asked)
        if round_ms is None:
            guess = num_asked * (_UNKNOWN if drafter.promise is None else _UNKNOWN_HEAD)
            round_ms = plain_ms * (guess if share is None else share)
        num_rounds = 1.0 if share is None else depth
        return num_rounds * round_ms + self._times.follow_ms(drafter.name, num_following)

    def _most_rows(self, name: str) -> int:
        """That it is known to draft for at once."""
        return _MOST_ROWS if self._times is None else self._times.most_rows(name)

    def _trial(
        self,
        rows: Sequence[Row],
        prices: Sequence[float],
        current: Plan | None,
        num_steps: int,
    ) -> Plan | None:
        """A few rows draft a little, if the pause is over and the loss can be paid."""
        if current is not None and current.drafter is not None:  # it has just stopped
            if current.is_trial:
                self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            self.rests_until = num_steps + self._pause
        if num_steps < self.rests_until:
            return None
        self.rests_until = num_steps + self._pause
        names = [*self.drafters]
        for _ in names:
            drafter = self.drafters[names[self._next_trial % len(names)]]
            self._next_trial += 1
            for num_rows, num_nodes in _TRIALS:
                trial = self._trial_of(drafter, rows, prices, num_rows, num_nodes)
                if trial is not None:
                    self.num_trials += 1
                    return trial
        return None

    def _trial_of(
        self,
        drafter: DrafterTraits,
        rows: Sequence[Row],
        prices: Sequence[float],
        num_rows: int,
        num_nodes: int,
    ) -> Plan | None:
        able = [
            row
            for row in rows
            if self._can_have(row, drafter)
            and row.room
            and not self._would_leave(row.request_id, drafter.name)
        ][:num_rows]
        budgets = {row.request_id: min(num_nodes, row.room) for row in able}
        num_nodes = sum(budgets.values())
        loss = self._asking_ms(drafter, rows, prices[0], len(budgets), num_nodes)
        loss += prices[num_nodes] - prices[0]
        # The last resort is worth one step: if steps were thought too dear, it corrects that.
        num_lost = TRIAL_STEPS / 2 if num_nodes > 1 else 1.0
        if not budgets or not self._ledger.can_lose(num_lost * loss, prices[0]):
            return None
        price = _price(prices, self._num_rows, num_nodes)
        plain_rate = self._num_rows / prices[0]
        return Plan(drafter.name, budgets, prices[0], plain_rate, None, price, loss, True)

    def best_for_new(self, params: SamplingParams, drafters: Drafters, context: int) -> str | None:
        """Who is to follow a new request: by requests like it, in a batch of rows like it.

        A drafter that cannot join later is tried with few requests until it is known what it takes.

        Args:
            drafters: of the running requests.
            context: tokens in the cache of a usual row.
        """
        num_rows = len(drafters) + 1
        most = _MOST_NODES[0] + _MOST_NODES[1] * num_rows
        prices = PriceList(self._cost.with_nodes([(1, context)] * num_rows, most))
        kind = kind_of(params)
        rates = {
            name: self._rate_for_new(
                drafter, self._acceptance.kind_rates(name, kind), num_rows, prices
            )
            for name, drafter in self.drafters.items()
        }
        enough = _MARGIN * num_rows / prices.ms(0)
        for name in sorted(rates, key=lambda name: -rates[name]):
            if rates[name] > enough and self._may_follow(name, drafters, prices):
                best = name
                break
        else:
            best = None
        if best is None or self.drafters[best].joins_late:
            pays = enough if best is None else rates[best]
            return self._given_a_chance(kind, drafters, prices, pays) or best
        return best

    def _may_follow(self, name: str, drafters: Drafters, prices: PriceList) -> bool:
        """Whether one more request with it is not too new, and what it drafts can be paid."""
        same = sum(other == name for other in drafters)
        asking = self._drafter_ms(self.drafters[name], same + 1, same + 1, prices.ms(0), 1.0)
        is_known = same < max(_TRIAL_ROWS, 2 * self._most_rows(name))
        return is_known and self._ledger.can_lose(asking, prices.ms(0))

    def _given_a_chance(
        self, kind: Kind, drafters: Drafters, prices: PriceList, enough: float
    ) -> str | None:
        """One that does not seem to pay, and could not come later, follows now and then.

        Only where it would pay if it did what was hoped, and ever more seldom. Following is cheap;
        whether it gets to draft is decided as for all others.

        Args:
            enough: the rate that pays.
        """
        num_rows = len(drafters) + 1
        for name, drafter in self.drafters.items():
            if drafter.joins_late or name in drafters:
                continue
            hoped = self._rate_for_new(
                drafter, self._acceptance.hoped(name, kind), num_rows, prices
            )
            if hoped <= enough:
                continue
            left, pause = self._chances.get(name, (0, 1))
            is_due = left <= 0 and self._may_follow(name, drafters, prices)
            new = (pause, min(2 * pause, _LONGEST_WAIT)) if is_due else (left - 1, pause)
            self._chances[name] = new
            if is_due:
                return name
        return None

    def _rate_for_new(
        self, drafter: DrafterTraits, rates_2K: Array, num_rows: int, prices: PriceList
    ) -> float:
        """The best rate of so many rows that draft alike."""
        kept_2K = rates_2K[:, : drafter.most_nodes]
        totals: list[tuple[float, float]] = [(n, a) for n, a in kept_2K.cumsum(1).T.tolist()]

        def step_ms(nodes: float) -> float:
            asking = self._drafter_ms(drafter, num_rows, num_rows, prices.ms(0), nodes)
            return prices.between(num_rows * nodes) + asking

        return max(num_rows * (1.0 + accepted) / step_ms(nodes) for nodes, accepted in totals)

    def _can_have(self, row: Row, drafter: DrafterTraits) -> bool:
        if row.drafter == drafter.name:
            return True
        return drafter.joins_late and drafter.name not in row.excluded_drafters

    def can_pay(self, plan: Plan) -> bool:
        """Whether another step of a plan may be lost."""
        return not plan.loss_ms or self._ledger.can_lose(plan.loss_ms, plan.plain_ms)

    def _stake(self, plain_ms: float) -> float:
        """Milliseconds that one step may put at risk."""
        return _STAKE * self._ledger.left_ms(plain_ms)


def _price(prices: Sequence[float], num_rows: int, num_nodes: float) -> Price:
    """Of one row's nodes, in the batch as it is going to be: an average node of it."""
    if num_rows == 1:
        return PriceList(tuple(prices))
    nodes = max(1, round(num_nodes))
    node_ms = (prices[min(nodes, len(prices) - 1)] - prices[0]) / nodes
    return LinearPrice(num_rows * node_ms / prices[0])
