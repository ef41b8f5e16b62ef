"""The default controller: drafts where it pays and as much as pays, and hardly loses elsewhere.

Every few steps, and whenever rows come or go, it plans anew: each row gets the drafter that pays
most for it, the draft positions of all rows are pooled (`pooled`), and what they are expected to
commit (`acceptance`) is weighed against the forward and the drafters' own times (`times`). The best
plan is compared with plain decoding. Where nothing pays, drafters are sent away: following a text
costs time, too. They come back for short trials, ever more rarely as long as these fail. All of it
lives within what a `Ledger` leaves.

While all steps draft, how long a plain one takes is not seen. Where that may decide, one is run.

It looks at records of past steps only. So no budget depends on a token that is drafted under it,
which drawn drafts need (docs/understand/verify.md#non-anticipation). docs/understand/control.md
has the whole story.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from foredraft.control.acceptance import LIKELY_CAUSES, Acceptance, FirstToken, Prior
from foredraft.control.base import Allowance, Row
from foredraft.control.experience import Experience
from foredraft.control.ledger import Ledger
from foredraft.control.planner import TRIAL_STEPS, Plan, Planner, guessed_ms
from foredraft.control.times import HICCUP
from foredraft.core.cost import CostModel
from foredraft.core.record import NO_TIMES, RowStep, StepRecord, StepTimes
from foredraft.core.traits import DrafterTraits

_log = logging.getLogger("foredraft")
_EVERY, _EVERY_PLAIN = 8, 32
"""Steps between two plans, at most: while rows draft, and while nothing is learnt."""
_LOOKED_AT = 64
"""Steps between two comparisons of first tokens with what was measured."""
_LEAST_DRAFTING = 16
"""Steps between two that are run without drafts for their time alone, at least."""
_LATER_SHARE = 0.3
"""Prior acceptance of drafters behind the first, of which nothing was measured: so much less."""
_MOST_FIRST_TIMES, _MOST_FIRST_PROMPTS = 8, 2
"""Steps whose drafter took several forwards' time and that teach no price: a GPU compiles and
records work of a new shape, once; and of prompts of each size, to a power of two. Times that stay
so long are a price."""
_PROMPT_SHARE = 0.05
"""Of the target's time for a prompt: what a drafter is taken to need for it the first times."""
_MOST_OWED = 16
"""Plain steps owed for texts that drafters read unasked; with more owed, such a text is a loss."""


class AdaptiveBudget:
    """See the module docstring and `foredraft.control.base.Controller`.

    Where other controllers decide for rows of the same batch, theirs count as they are: what is
    weighed, and what the ledger books, is what this one's drafts add.

    Args:
        drafters: to choose from, the best one for a single request first.
        cost: what steps cost here.
        experience: of controllers on the same models.
    """

    def __init__(
        self,
        drafters: Sequence[DrafterTraits],
        cost: CostModel,
        experience: Experience | None = None,
    ) -> None:
        self._cost = cost
        self._experience = experience = experience or Experience()
        self._times = experience.times
        priors = {
            d.name: Prior.of(d).less(_LATER_SHARE if i and d.promise is None else 1.0)
            for i, d in enumerate(drafters)
        }
        self._acceptance = Acceptance(experience.kinds, priors)
        self.ledger = Ledger()
        self._planner = Planner(drafters, cost, experience, self._acceptance, self.ledger)
        self.plan: Plan | None = None  # the last one
        self._planned_for: tuple[int, ...] = ()
        self._left, self._every = 0, 1
        self._context = 64
        self._num_steps = self._num_drafting = self._plain_at = 0
        self._told: set[tuple[str, str]] = set()  # drafter and noise
        self._followed: dict[int, str] = {}  # by request: the drafter in its last step
        self._num_committed: dict[int, int] = {}
        # By drafter and size of a prompt, see `_MOST_FIRST_TIMES`; 0: of a step behind it.
        self._num_long: Counter[tuple[str, int]] = Counter()

    # ---- what the engine asks -------------------------------------------------------------------

    def begin(self, row: Row, others: Sequence[Row]) -> str | None:
        self._acceptance.begin(row.request_id, row.params)
        if row.params.speculation in self._planner.drafters:  # one that is asked for by name
            return row.params.speculation
        return self._planner.best_for_new(row, others, self._context)

    def allow(self, rows: Sequence[Row], others: Sequence[Row] = ()) -> list[Allowance]:
        if not rows:
            return []
        for row in rows:
            self._acceptance.begin(row.request_id, row.params)
        ids = tuple(row.request_id for row in (*rows, *others))
        self._left -= 1
        plan, can_pay = self.plan, self._planner.can_pay
        if plan is None or ids != self._planned_for or self._left <= 0 or not can_pay(plan):
            plan = self._planner.plan(rows, others, plan, self._num_steps)
            rest = min(self._planner.rests_until - self._num_steps, _EVERY_PLAIN)
            self._every = min(2 * self._every, _EVERY) if plan.budgets else max(_EVERY, rest)
            if self.plan is None or plan.names != self.plan.names:
                self._every = 1
            self._left = TRIAL_STEPS if plan.is_trial else self._every
            self.plan, self._planned_for = plan, ids
        if not others and self._times_plain(plan, len(rows)):
            self._left = 0
            plan = replace(plan, budgets={}, reason="plain decoding is timed")
        return [self._allowance(row, plan) for row in rows]

    def _times_plain(self, plan: Plan, num_rows: int) -> bool:
        """Whether a step is to show how long one without drafts takes, while all others draft."""
        if self._num_steps < self._plain_at + _LEAST_DRAFTING:
            return False
        if not self._planner.is_in_doubt(plan, num_rows):
            return False
        self._plain_at = self._num_steps
        return True

    def observe(self, record: StepRecord) -> None:
        rows = [row for row in record.rows if self._acceptance.knows(row.request_id)]
        if not rows:
            return
        times = record.times
        self._context = sum(row.context for row in rows) // len(rows)
        drafted = any(len(row.proposal.tree) for row in rows)
        plain = forward = self._cost.ms(_plain_sizes(record, rows))
        if drafted or not record.is_decoding:
            forward = self._cost.ms(record.sizes)
        drafter_ms = self._drafter_ms(record, rows, plain, forward)
        if record.is_decoding:
            self._times.wait()
            worth = plain * sum(len(row.committed) or 1 for row in rows) / len(rows)
            self.ledger.book(forward + drafter_ms, worth, plain)
        else:
            self.ledger.book(times.score_ms + drafter_ms, times.score_ms, times.score_ms)
        self._num_steps += 1
        if self._num_steps % _LOOKED_AT == 0:
            self._warn_of_first_tokens()
            self._warn_of_draft_model()
        if drafted:
            self._num_drafting += 1
        for row in rows:
            self._note(row)

    def _note(self, row: RowStep) -> None:
        number = row.request_id
        committed = self._num_committed.get(number, 0) + len(row.committed)
        self._num_committed[number] = committed
        if row.drafter != self._followed.get(number):
            self._followed.pop(number, None)
        if row.drafter is not None:
            self._followed[number] = row.drafter
            self._acceptance.observe(row.drafter, row)
        if row.finish_reason in ("stop", "length"):
            self._experience.lengths.note(committed)

    def _drafter_ms(
        self, record: StepRecord, rows: Sequence[RowStep], plain_ms: float, forward_ms: float
    ) -> float:
        """Drafting time of a step for these rows, without hiccups of the machine.

        Args:
            plain_ms: the forward as it would be without drafts.
            forward_ms: the forward as it should be: where it took longer, all else did, too.
        """
        times, by_drafter = record.times, dict[str, list[RowStep]]()
        for row in rows:
            if row.drafter is not None:
                by_drafter.setdefault(row.drafter, []).append(row)
        # Planning, which no drafter did, is shared out by the rows that were asked for.
        planning_ms = times.draft_ms - sum(each.draft_ms for each in times.drafters.values())
        planning_ms = max(0.0, planning_ms) / max(1, _num_asked(record.rows))
        spent_ms = 0.0
        for name, mine in by_drafter.items():
            taken = times.drafters.get(name, NO_TIMES)
            draft_ms = taken.draft_ms + planning_ms * _num_asked(mine)
            taken = replace(taken, draft_ms=draft_ms)
            spent_ms += self._joining_ms(name, mine, taken)
            spent_ms += self._drafting_ms(record, name, mine, taken, plain_ms, forward_ms)
        return spent_ms

    def _joining_ms(self, name: str, rows: Sequence[RowStep], taken: StepTimes) -> float:
        """Time of joining texts and of prefills by draft models: the investments of a step."""
        new = sum(r.context + r.num_read for r in rows if self._followed.get(r.request_id) != name)
        joined_ms = self._times.joined(name, new, taken.begin_ms) if new else taken.begin_ms
        if not taken.num_read:
            return joined_ms + taken.read_ms
        self.ledger.invest(taken.read_ms)
        self._times.has_read(name, taken.num_read, taken.read_ms)
        return joined_ms

    def _drafting_ms(
        self,
        record: StepRecord,
        name: str,
        rows: Sequence[RowStep],
        taken: StepTimes,
        plain_ms: float,
        forward_ms: float,
    ) -> float:
        """Learn a drafter's time to propose and to follow from a step."""
        num_asked = _num_asked(rows)
        num_rounds, drafter = 1, self._planner.drafters[name]
        share, expected_ms = drafter.round_share, None
        draft_ms, learn_ms = taken.draft_ms, taken.learn_ms
        known_ms = self._times.round_ms(name, num_asked)
        if share is not None:
            num_rounds = max(min(len(row.proposal.tree), row.budget) for row in rows)
            expected_ms = share * plain_ms
        elif not drafter.reads:
            follow_ms = self._times.follow_ms(name, len(rows))
            most_ms = (
                max(forward_ms, follow_ms) if record.is_decoding else _PROMPT_SHARE * forward_ms
            )
            is_long = draft_ms > HICCUP * max(plain_ms, known_ms or 0.0)
            if is_long or learn_ms > HICCUP * most_ms:
                size = 0 if record.is_decoding else max(r.num_read for r in rows).bit_length()
                self._num_long[name, size] += 1
                most = _MOST_FIRST_PROMPTS if size else _MOST_FIRST_TIMES
                is_long = self._num_long[name, size] <= most
            if is_long:
                guess_ms = guessed_ms(drafter, plain_ms)
                learn_ms = follow_ms or guess_ms if record.is_decoding else most_ms
                return (guess_ms if known_ms is None else known_ms) + learn_ms
        usual_ms, rounds = expected_ms if known_ms is None else known_ms, max(num_rounds, 1)
        if not record.is_decoding:
            most_ms = draft_ms if usual_ms is None else HICCUP * rounds * usual_ms
            return min(draft_ms, most_ms) + learn_ms
        lost_ms, most_ms = 0.0, max(HICCUP * rounds * (known_ms or 0.0), plain_ms)
        if known_ms and draft_ms > most_ms and not drafter.reads and self._is_first(name, rows):
            # It reads texts as it first drafts for them, and does not say so.
            read_ms, draft_ms = draft_ms - rounds * known_ms, rounds * known_ms
            if self.ledger.owed_ms < _MOST_OWED * plain_ms:
                self.ledger.invest(read_ms)
            else:
                lost_ms = read_ms
        slowness = max(1.0, record.times.score_ms / forward_ms)
        return lost_ms + self._times.observe(
            *(name, num_asked, draft_ms / slowness),
            *(len(rows), learn_ms / slowness, num_rounds),
            expected_ms=expected_ms,
        )

    def _is_first(self, name: str, rows: Sequence[RowStep]) -> bool:
        """Whether a drafter has not drafted before for one of the rows that it was asked for."""
        asked = [row for row in rows if row.budget and not row.num_forced]  # else nothing counts it
        return not all(self._acceptance.num_seen(name, row.request_id) for row in asked)

    def end(self, request_id: int) -> None:
        self._acceptance.end(request_id)
        self._followed.pop(request_id, None)
        self._num_committed.pop(request_id, None)

    # ---- for people -----------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """Its decisions so far and its next one; see `foredraft measure`."""
        plan, ledger = self.plan, self.ledger
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
    def first_tokens(self) -> list[FirstToken]:
        """The drafters' acceptance beside that which was measured at training."""
        return self._acceptance.first_tokens()

    def _warn_of_first_tokens(self) -> None:
        for found in self.first_tokens:
            if found.is_below and (found.drafter, found.noise) not in self._told:
                self._told.add((found.drafter, found.noise))
                _log.warning(
                    "drafter %s: its first token is right in %.0f %% of drafts (%s), and %.0f %% "
                    "were measured when it was made. Texts stay right and come slower. Likely "
                    "causes: %s",
                    *(found.drafter, 100 * found.seen, found.noise, 100 * found.promised),
                    LIKELY_CAUSES,
                )

    def _warn_of_draft_model(self) -> None:
        """A user named it: a warning says once that it does not draft."""
        names = [name for name, each in self._planner.drafters.items() if each.reads]
        key = names[0] if names else "", ""
        if names and self.plan and not self.plan.budgets and key not in self._told:
            self._told.add(key)
            _log.warning(
                "%s drafts nothing for now (%s); it is tried again from time to time",
                *(names[0], self.plan.reason),
            )

    def _allowance(self, row: Row, plan: Plan) -> Allowance:
        budget = max(0, min(plan.budgets.get(row.request_id, 0), row.room))
        drafter = plan.drafters[row.request_id] if budget else row.drafter
        if drafter is not None and not budget and not self._stays(drafter, plan):
            drafter = None
        spare, share = 0, None
        if budget and drafter:
            spare, share = self._planner.drafters[drafter].spare, self._token_share(drafter, plan)
        return Allowance(drafter, budget, plan.prices, row.room, spare, plan.reason, share)

    def _token_share(self, name: str, plan: Plan) -> float | None:
        """See `Allowance`. A share from load, or an earlier start, is of the machine as it was."""
        if self._planner.drafters[name].round_share is None:
            return None
        ms = self._times.round_ms(name, [*plan.drafters.values()].count(name))
        return None if ms is None else ms / plan.plain_ms

    def _stays(self, name: str, plan: Plan) -> bool:
        """Whether a drafter goes on following a row that drafts nothing for now.

        One that could come back at any time does not. One that could not, or would have to read
        the text again, stays as long as following can be paid, unless another has taken its place.
        """
        if name in plan.names:
            return True
        if not self._planner.keeps_text(name) or (plan.budgets and not plan.is_trial):
            return False
        return self.ledger.left_ms(plan.plain_ms) > self._times.follow_ms(name, 1)


def _num_asked(rows: Sequence[RowStep]) -> int:
    return sum(row.budget > 0 for row in rows)


def _plain_sizes(record: StepRecord, rows: Sequence[RowStep]) -> list[tuple[int, int]]:
    """(tokens, context) of each row of a step, had these rows drafted nothing."""
    if len(rows) == len(record.rows):
        return [(1, row.context) for row in rows]
    own = {row.request_id for row in rows}
    return [(1 if row.request_id in own else row.num_tokens, row.context) for row in record.rows]
