"""Plans: which rows draft, with which drafters, how many nodes; and when to try what does not seem
to pay.

docs/understand/control.md has the whole story.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from foredraft.control.acceptance import MOST_POSITIONS, Acceptance, Array, kind_of
from foredraft.control.base import Row
from foredraft.control.experience import Experience
from foredraft.control.ledger import Ledger
from foredraft.control.pooled import DrafterCost, Pooled, PooledRow, best_prefix
from foredraft.core.cost import CostModel, Prices, price_of, relative
from foredraft.core.traits import DrafterTraits

_MOST_NODES = 16, 4
"""Of one step: so many, and so many a row."""
_MARGIN = 1.01
"""By how much drafting has to be better before it begins; once begun it has to be better at all."""
_STAKE = 0.5
"""A single step may risk at most this fraction of what may still be lost."""
TRIAL_STEPS, _TRIAL_ROWS = 6, 2
_TRIALS = ((_TRIAL_ROWS, 4), (1, 4), (1, 2), (1, 1))
"""Rows and nodes of each: the first that can be paid."""
FIRST_PAUSE, _LONGEST_PAUSE = 16, 1024
_LONGEST_WAIT = 64
"""New requests between two chances of a drafter that does not seem to pay, at most."""
_DEVIATIONS = 1.0
"""Plain decoding is timed again where it would be faster if times were off by so much."""
_UNKNOWN, _UNKNOWN_HEAD = 0.02, 0.2
"""Assumed drafting time of a row, in plain steps, before any is measured: of drafters that copy
text, and of trained ones."""
_LEAVING = 1.1
_LEAVING_NEW, _NEW_DRAFTS = 1.5, 6
"""A switch needs so much more throughput where the row's drafter would lose the text that it has
read; and as long as it has made fewer drafts for the row than these: more may show its worth."""
_JOIN_STEPS = 16
"""Steps that what joining a text takes is spread over."""
_READ_SHARE, _NEARLY = 0.35, 0.8
"""A draft model that seems not to pay is tried on texts that it reads in this share of the reply's
time; for a request that is alone where its prior reaches this share of the best rate: prices that
were measured beside a busy neighbour must not keep it away for good."""
_READ_TOKENS, _LEAST_READ = 256, 0.35
"""Before reading was measured: a token of a prompt is taken for a part of a forward of so many
tokens, times the draft model's share, which is no less than this: a prompt takes arithmetic, and
few bits save bytes."""


@dataclass(frozen=True)
class Plan:
    """How the next few steps draft.

    Attributes:
        drafters, budgets: by request; others draft nothing.
        plain_ms, plain_rate: of plain decoding: a step, and committed tokens a millisecond.
        pooled: what is expected.
        prices: of a row's nodes.
        loss_ms: of a step in which nothing is accepted.
        is_trial: tried although it is not expected to pay.
        reason: why rows without a budget have none.
    """

    plain_ms: float
    plain_rate: float
    prices: Prices = (1.0,)
    drafters: Mapping[int, str] = field(default_factory=dict)
    budgets: Mapping[int, int] = field(default_factory=dict)
    pooled: Pooled | None = None
    loss_ms: float = 0.0
    is_trial: bool = False
    reason: str = ""

    @property
    def drafter(self) -> str | None:
        """The one that drafts for most rows; None: plain decoding."""
        names = Counter(self.drafters.values()).most_common(1)
        return names[0][0] if names else None

    @property
    def names(self) -> frozenset[str]:
        """Of the drafters that draft."""
        return frozenset(self.drafters.values())


@dataclass(frozen=True)
class _Batch:
    """The rows that a plan is made for, and what a step of them takes.

    Attributes:
        rows: that may draft.
        num_rows: all of the batch.
        step_ms: the forward with 0, 1, … nodes.
        drafter_of: the drafter of each of the rows now.
        now: the names of the drafters of the plan so far.
    """

    rows: Sequence[Row]
    num_rows: int
    step_ms: tuple[float, ...]
    drafter_of: Mapping[int, str | None]
    now: frozenset[str]

    @property
    def plain_ms(self) -> float:
        return self.step_ms[0]

    @property
    def plain_rate(self) -> float:
        return self.num_rows / self.step_ms[0]

    def prices(self, num_nodes: float) -> Prices:
        """Of a row's nodes, in the batch as it is going to be: an average node of it."""
        if self.num_rows == 1:
            return relative(self.step_ms)
        nodes = max(1, min(round(num_nodes), len(self.step_ms) - 1))
        rise = (self.step_ms[nodes] - self.step_ms[0]) / (nodes * self.step_ms[0])
        return 1.0, 1.0 + self.num_rows * rise


class Planner:
    """Makes plans.

    Args:
        drafters: to choose from.
        cost: of steps.
        experience: times of drafters, and lengths of replies.
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
        experience: Experience,
        acceptance: Acceptance,
        ledger: Ledger,
    ) -> None:
        self.drafters = {drafter.name: drafter for drafter in drafters}
        self._cost, self._times, self._lengths = cost, experience.times, experience.lengths
        self._acceptance, self._ledger = acceptance, ledger
        self._pause, self._next_trial = FIRST_PAUSE, 0
        # A drafter that a user named is tried at once.
        self.rests_until = 0 if any(each.reads for each in drafters) else FIRST_PAUSE
        self._chances: dict[str, tuple[int, int]] = {}
        self.num_trials = 0

    # ---- the next steps -------------------------------------------------------------------------

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
        batch = self._batch(rows, others, current)
        self._ledger.begin(batch.plain_ms, batch.num_rows)
        able = {name: self._able(batch, each) for name, each in self.drafters.items()}
        able = {name: rows for name, rows in able.items() if rows}
        found = [self._pooled(batch, {name: rows}) for name, rows in able.items()]
        names = frozenset().union(*(plan.names for plan in found if self._pays(batch, plan)))
        if len(able) > 1 and (mixed := self._assigned(batch, able, names)):
            found.append(self._pooled(batch, mixed))
        paying = [plan for plan in found if self._pays(batch, plan)]
        if not paying:
            reason = _why_plain(found, batch)
            plain = Plan(batch.plain_ms, batch.plain_rate, reason=reason)
            return self._trial(batch, current, num_steps) or plain
        if current is not None and not current.is_trial:
            for name in batch.now:
                self._pause = FIRST_PAUSE  # it has paid for longer than a trial
                self._chances.pop(name, None)
        return max(paying, key=lambda plan: self._weight(batch, plan, is_choice=True))

    def _batch(self, rows: Sequence[Row], others: Sequence[Row], current: Plan | None) -> _Batch:
        most = _MOST_NODES[0] + _MOST_NODES[1] * len(rows)
        step_ms = self._cost.with_nodes([(1, len(row.tokens)) for row in (*rows, *others)], most)
        drafter_of = {row.request_id: row.drafter for row in rows}
        now = frozenset() if current is None else current.names
        return _Batch(rows, len(rows) + len(others), step_ms, drafter_of, now)

    def _weight(self, batch: _Batch, plan: Plan, is_choice: bool = False) -> float:
        """Plans are compared by rate, less where a drafter is let go that loses by it; 0: a plan
        that drafts nothing, or is hardly better than plain decoding.

        Args:
            is_choice: whether the drafter that is let go may have a plan that pays, too.
        """
        assert plan.pooled is not None
        least = 1.0 if plan.names & batch.now else _MARGIN
        if not plan.budgets or plan.pooled.rate <= least * batch.plain_rate:
            return 0.0
        leaving = (
            self._leaving(number, batch.drafter_of[number], name, is_choice)
            for number, name in plan.drafters.items()
        )
        return plan.pooled.rate / max(leaving)

    def _pays(self, batch: _Batch, plan: Plan) -> bool:
        return self._weight(batch, plan) > batch.plain_rate

    def _leaving(self, request_id: int, now: str | None, wanted: str, is_choice: bool) -> float:
        """Another drafter needs so much more throughput for a row."""
        if now in (None, wanted) or not self.keeps_text(now):
            return 1.0
        is_new = is_choice and self._acceptance.num_seen(now, request_id) < _NEW_DRAFTS
        return _LEAVING_NEW if is_new else _LEAVING

    def _may_leave(self, now: str | None, wanted: str) -> bool:
        """Whether a row's drafter may go for this one: it stays, or can come back."""
        return now in (None, wanted) or self.drafters[now].joins_late

    def keeps_text(self, name: str) -> bool:
        """Whether a drafter cannot come back to a text that it has left, or must read it again."""
        return not self.drafters[name].joins_late or self.drafters[name].reads

    def _able(self, batch: _Batch, drafter: DrafterTraits) -> list[Row]:
        """The rows that it may draft for; of a drafter that is new only few."""
        rows = [row for row in batch.rows if row.room and self._can_have(row, drafter, batch)]
        return rows[: max(1, 2 * self._times.most_rows(drafter.name))]

    def _can_have(self, row: Row, drafter: DrafterTraits, batch: _Batch) -> bool:
        if row.drafter == drafter.name:
            return True
        if not drafter.joins_late or drafter.name in row.excluded_drafters:
            return False
        return not drafter.reads or self._may_read(row, drafter, batch.num_rows, batch.step_ms)

    def _assigned(
        self, batch: _Batch, able: Mapping[str, Sequence[Row]], paying: frozenset[str]
    ) -> dict[str, list[Row]] | None:
        """Each row with the drafter that pays most for it; None if one is best for all.

        Args:
            paying: drafters that pay alone.
        """
        best: dict[int, tuple[float, str]] = {}
        for name, rows in able.items():
            drafter, cost = self.drafters[name], self._drafter_cost(batch, name, batch.num_rows)
            for row in rows:
                rates_2K = self._acceptance.rates(name, row.request_id)
                rate = _best_rate(drafter, rates_2K, cost, batch.num_rows, batch.step_ms)
                rate /= self._leaving(row.request_id, row.drafter, name, row.drafter in paying)
                best[row.request_id] = max(best.get(row.request_id, (0.0, "")), (rate, name))
        found: dict[str, list[Row]] = {}
        for row in batch.rows:
            if row.request_id in best:
                found.setdefault(best[row.request_id][1], []).append(row)
        return found if len(found) > 1 else None

    def _pooled(self, batch: _Batch, assigned: Mapping[str, Sequence[Row]]) -> Plan:
        """The best plan in which these rows may draft with these drafters."""
        pairs = [(row, name) for name, rows in assigned.items() for row in rows]
        costs = {
            name: self._drafter_cost(batch, name, len(rows)) for name, rows in assigned.items()
        }
        pool = [
            PooledRow(
                min(self.drafters[name].most_nodes, row.room, MOST_POSITIONS),
                self._acceptance.rates(name, row.request_id),
                name,
                self._join_ms(row, name) / _JOIN_STEPS,
            )
            for row, name in pairs
        ]
        for stake in (_STAKE, 1.0):  # rather all of it than to follow until it is gone
            most_ms = batch.plain_ms + self._stake(batch.plain_ms, stake)
            pooled = best_prefix(pool, batch.num_rows, batch.step_ms, costs, most_ms)
            if any(pooled.budgets):
                break
        given = zip(pairs, pooled.budgets, strict=True)
        drafting = [(row, name, num_nodes) for (row, name), num_nodes in given if num_nodes]
        return Plan(
            batch.plain_ms,
            batch.plain_rate,
            batch.prices(pooled.nodes),
            {row.request_id: name for row, name, _ in drafting},
            {row.request_id: num_nodes for row, _, num_nodes in drafting},
            pooled,
            pooled.worst_ms - batch.plain_ms,
            reason="drafts of other requests pay more",
        )

    # ---- what drafters take ---------------------------------------------------------------------

    def _drafter_cost(self, batch: _Batch, name: str, most: int) -> DrafterCost:
        """Time of a drafter for up to this many of the rows."""
        now = sum(drafter == name for drafter in batch.drafter_of.values())
        return self._cost_of(self.drafters[name], most, now, batch.plain_ms)

    def _cost_of(
        self, drafter: DrafterTraits, most: int, following: int, plain_ms: float
    ) -> DrafterCost:
        times, share = self._times, drafter.round_share
        numbers = range(1, most + 1)
        known = [times.round_ms(drafter.name, n) for n in numbers]
        if share is None:
            guess = guessed_ms(drafter, plain_ms)
            asking = [n * guess if ms is None else ms for n, ms in zip(numbers, known, strict=True)]
        else:
            asking = [share * plain_ms if ms is None else ms for ms in known]
        follow = [times.follow_ms(drafter.name, max(following, n)) for n in numbers]
        return DrafterCost((0.0, *asking), (0.0, *follow), share is not None)

    def _join_ms(self, row: Row, name: str) -> float:
        """Time of joining the row's text, if the drafter does not follow it yet."""
        return 0.0 if row.drafter == name else self._times.join_ms(name, len(row.tokens))

    def _read_ms(self, drafter: DrafterTraits, num_tokens: int) -> float:
        """Time of a draft model's prefill of a text."""
        known = self._times.read_ms(drafter.name, num_tokens)
        if known is not None:
            return known
        token_ms = self._cost.ms([(_READ_TOKENS, 0)]) / _READ_TOKENS
        return num_tokens * token_ms * max(drafter.round_share or 0.0, _LEAST_READ)

    def _may_read(
        self, row: Row, drafter: DrafterTraits, num_rows: int, step_ms: tuple[float, ...]
    ) -> bool:
        """Whether what a draft model reads of a text is worth what it is expected to save."""
        rates_2K = self._acceptance.rates(drafter.name, row.request_id)
        rate = self._rate_for_new(drafter, rates_2K, num_rows, step_ms)
        saved = max(0.0, 1.0 - num_rows / (step_ms[0] * rate))
        read_ms = self._read_ms(drafter, len(row.tokens))
        return self._ledger.can_invest(read_ms, saved * self._reply_ms(row, num_rows, step_ms))

    def _reply_ms(self, row: Row, num_rows: int, step_ms: tuple[float, ...]) -> float:
        """The row's share of the time that the rest of its reply is expected to take plainly."""
        num_committed = row.params.max_tokens - row.num_remaining
        return self._lengths.remaining(num_committed, row.num_remaining) * step_ms[0] / num_rows

    # ---- trials ---------------------------------------------------------------------------------

    def _trial(self, batch: _Batch, current: Plan | None, num_steps: int) -> Plan | None:
        """A few rows draft a little, if the pause is over and the loss can be paid."""
        if current is not None and current.budgets:  # it has just stopped
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
                trial = self._trial_of(batch, drafter, num_rows, num_nodes)
                if trial is not None:
                    self.num_trials += 1
                    return trial
        return None

    def _trial_of(
        self, batch: _Batch, drafter: DrafterTraits, num_rows: int, num_nodes: int
    ) -> Plan | None:
        able = [
            row
            for row in batch.rows
            if row.room
            and self._may_leave(row.drafter, drafter.name)
            and self._can_have(row, drafter, batch)
        ][:num_rows]
        if not able:
            return None
        budgets = {row.request_id: min(num_nodes, row.room) for row in able}
        num_nodes = sum(budgets.values())
        cost = self._drafter_cost(batch, drafter.name, len(able))
        loss = cost.ms(len(able), num_nodes / len(able))
        loss += batch.step_ms[num_nodes] - batch.plain_ms
        loss += sum(self._join_ms(row, drafter.name) for row in able) / TRIAL_STEPS
        # The last resort is worth one step: if steps were thought too dear, it corrects that.
        num_lost = TRIAL_STEPS / 2 if num_nodes > 1 else 1.0
        if not self._ledger.can_lose(num_lost * loss, batch.plain_ms):
            return None
        return Plan(
            batch.plain_ms,
            batch.plain_rate,
            batch.prices(num_nodes),
            dict.fromkeys(budgets, drafter.name),
            budgets,
            loss_ms=loss,
            is_trial=True,
            reason="nothing pays: a few other requests try again",
        )

    def is_in_doubt(self, plan: Plan, num_rows: int) -> bool:
        """Whether plain decoding may be faster than a plan for so many rows: it would be, with one
        deviation of what is known of the ratio of their times."""
        if plan.pooled is None or not plan.budgets:
            return False
        doubt = self._cost.doubt(num_rows, num_rows + max(1, round(plan.pooled.nodes)))
        return math.log(plan.pooled.rate / plan.plain_rate) < _DEVIATIONS * doubt

    def can_pay(self, plan: Plan) -> bool:
        """Whether another step of a plan may be lost."""
        return not plan.loss_ms or self._ledger.can_lose(plan.loss_ms, plan.plain_ms)

    def _stake(self, plain_ms: float, share: float = _STAKE) -> float:
        """Milliseconds that one step may put at risk."""
        return share * self._ledger.left_ms(plain_ms)

    # ---- new requests ---------------------------------------------------------------------------

    def best_for_new(self, row: Row, others: Sequence[Row], context: int) -> str | None:
        """The drafter of a new request: the best for requests like it, in a batch of rows like it.

        A drafter that cannot join later is tried with few requests until it is known what it takes.

        Args:
            others: the requests that are running or about to begin.
            context: tokens in the cache of a usual row.
        """
        following = Counter(other.drafter for other in others)
        num_rows = len(others) + 1
        most = _MOST_NODES[0] + _MOST_NODES[1] * num_rows
        step_ms = self._cost.with_nodes([(1, context)] * num_rows, most)
        kind = kind_of(row.params)
        allowed = {n: d for n, d in self.drafters.items() if n not in row.excluded_drafters}
        rates = {
            name: self._rate_for_new(
                drafter, self._acceptance.kind_rates(name, kind), num_rows, step_ms
            )
            for name, drafter in allowed.items()
        }
        enough, best = _MARGIN * num_rows / step_ms[0], None
        # A drafter that may come at any time can wait for one that has to begin now.
        keen = {n: rate * (_LEAVING_NEW if self.keeps_text(n) else 1) for n, rate in rates.items()}
        for name in sorted(keen, key=lambda name: -keen[name]):
            drafter = self.drafters[name]
            if drafter.reads and not self._may_read(row, drafter, num_rows, step_ms):
                continue
            if rates[name] > enough and self._may_follow(name, following[name], step_ms[0]):
                best = name
                break
        if best is not None and self.keeps_text(best):
            return best
        pays = enough if best is None else rates[best]
        reply_ms = self._reply_ms(row, num_rows, step_ms)
        for name, drafter in allowed.items():
            if not self.keeps_text(name) or following[name]:
                continue
            hoped_2K = self._acceptance.prior_rates(name, kind)
            hoped = self._rate_for_new(drafter, hoped_2K, num_rows, step_ms)
            read_ms = self._read_ms(drafter, len(row.tokens)) if drafter.reads else 0.0
            least = _NEARLY * pays if drafter.reads and not others else pays
            is_worth_it = hoped > least and read_ms <= _READ_SHARE * reply_ms
            if is_worth_it and self._is_due(name, step_ms[0]):
                return name
        return best

    def _may_follow(self, name: str, following: int, plain_ms: float) -> bool:
        """Whether one more request with it is not too new, and what it drafts can be paid."""
        cost = self._cost_of(self.drafters[name], following + 1, following + 1, plain_ms)
        is_known = following < max(_TRIAL_ROWS, 2 * self._times.most_rows(name))
        return is_known and self._ledger.can_lose(cost.ms(following + 1, 1.0), plain_ms)

    def _is_due(self, name: str, plain_ms: float) -> bool:
        """Whether a drafter that does not seem to pay, and could not come later, has its chance:
        ever more seldom. Whether it gets to draft is decided as for all others."""
        left, pause = self._chances.get(name, (0, 1))
        is_due = left <= 0 and self._may_follow(name, 0, plain_ms)
        new = (pause, min(2 * pause, _LONGEST_WAIT)) if is_due else (left - 1, pause)
        self._chances[name] = new
        return is_due

    def _rate_for_new(
        self, drafter: DrafterTraits, rates_2K: Array, num_rows: int, step_ms: tuple[float, ...]
    ) -> float:
        """See `_best_rate`."""
        cost = self._cost_of(drafter, num_rows, num_rows, step_ms[0])
        return _best_rate(drafter, rates_2K, cost, num_rows, step_ms)


def _best_rate(
    drafter: DrafterTraits,
    rates_2K: Array,
    cost: DrafterCost,
    num_rows: int,
    step_ms: tuple[float, ...],
) -> float:
    """Committed tokens by time of so many rows that draft alike, with their best budget."""
    totals: list[tuple[float, float]] = rates_2K[:, : drafter.most_nodes].cumsum(1).T.tolist()
    return max(
        num_rows
        * (1.0 + accepted)
        / (price_of(step_ms, num_rows * nodes) + cost.ms(num_rows, nodes))
        for nodes, accepted in totals
    )


def guessed_ms(drafter: DrafterTraits, forward_ms: float) -> float:
    """Time of a drafter beside a forward of the target, before it was measured."""
    return forward_ms * (_UNKNOWN if drafter.promise is None else _UNKNOWN_HEAD)


def _why_plain(found: Sequence[Plan], batch: _Batch) -> str:
    """Why none of these plans is followed."""
    pooled = [plan.pooled for plan in found if plan.pooled is not None]
    if not pooled:
        return "no drafter can join this text"
    best = max(each.best_rate for each in pooled) / batch.plain_rate
    if best > _MARGIN:
        return f"budget of loss used up: best {best:.2f}"
    return f"nothing pays: best {best:.2f}"
