"""One schedule after another, each from its seed alone, and what must hold at every step of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from foredraft.cache.base import common_prefix
from foredraft.control.adaptive import AdaptiveBudget
from foredraft.control.base import Controller
from foredraft.core.cost import CostModel
from foredraft.core.params import SamplingParams
from foredraft.core.record import StepRecord
from foredraft.core.traits import OWN
from foredraft.drafters.base import Drafter
from foredraft.drafters.none import NoDrafter
from foredraft.drafters.text.ngram import NgramDrafter
from foredraft.engine.engine import Engine, EngineOptions
from foredraft.engine.guard import LoadedDrafter
from foredraft.engine.policy import Policy
from foredraft.engine.request import Event, GenerationResult, Request
from tests.engine.helpers import check_sums, engine_of
from tests.simulator.parts import (
    VOCAB_SIZE,
    Dice,
    Interrupted,
    Noting,
    SimCache,
    SimController,
    SimDrafter,
    SimHead,
    SimSelfDraft,
    SimTarget,
)

NUM_MODELS = 40
INTERRUPTED = 0.3
"""Share of the schedules, of those with faults, in which steps are interrupted."""
_PATIENCE = 40
"""A schedule may take so many steps for each that its requests need alone."""


@dataclass
class Asked:
    """One reply: what was asked for, and what has come of it."""

    prompt: list[int]
    params: SamplingParams
    events: list[Event] = field(default_factory=list)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token for event in self.events for token in event.token_ids)


class Simulation:
    """A schedule: arrivals, aborts, refusals, faults. ``run`` raises where something is broken.

    Attributes:
        num_steps: steps that the engine made.
        seen: what happened, by name.
    """

    def __init__(self, seed: int) -> None:
        dice = self.dice = Dice(f"schedule {seed}")
        self.model = dice.randrange(NUM_MODELS)
        calm = dice.happens(0.3)  # no faults: nothing may end in an error but by the model

        def rate(most: float) -> float:
            return 0.0 if calm or dice.happens(0.5) else dice.uniform(0.0, most)

        self.is_calm = calm
        self.target = SimTarget(self.model, dice, rate(0.05))
        self.memory = dice.choice([None, None, 40, 60, 100, 250])
        block_size = dice.choice([1, 2, 4, 16])
        self.cache = SimCache(self.memory, block_size, dice, rate(0.1), rate(0.1))
        self.target.cache = self.cache
        self.cost = CostModel(((1, 900.0), (4, 1000.0), (8, 1500.0))) if dice.happens(0.5) else None
        self.drafters: dict[Policy, dict[str, Drafter]] = {}
        self.policies = [
            self._new_policy(rate(0.1), rate(0.1), rate(0.1))
            for _ in range(dice.choice([1, 1, 2, 3]))
        ]
        self.policies[-1].is_apart = dice.happens(0.3)
        self._interrupting = rate(0.01) if dice.happens(INTERRUPTED) else 0.0
        self._ticks = 0
        options = EngineOptions(
            max_batch_size=dice.randint(1, 6),
            max_step_tokens=dice.choice([1, 3, 8, 32]),
            eos_token_ids=(0,) if dice.happens(0.3) else (),
            cost=self.cost,
            trace=self._trace,
            prefix_caching=dice.happens(0.7),
            clock=self._clock,
            new_seed=lambda: dice.getrandbits(64),
        )
        self.engine = Engine(self.target, self.policies[0], options)
        # Small replies are to run out of memory, too.
        self.engine._headroom = dice.choice([0, 0, 5, 64])
        self._open, self._close = self.engine._open, self.engine._close
        self.engine._open, self.engine._close = self._checked_open, self._checked_close  # type: ignore[method-assign]
        self.left: list[tuple[str | None, list[int]]] = []
        """Texts that requests have left in the cache, and whose they are."""
        self.distrusted: set[int] = set()
        self.torn: set[int] = set()
        """Requests of an interrupted step whose entries are not those that they count."""
        self.complaint = ""  # a trace that raises is only switched off
        self._stepping: Policy | None = None
        self.all_is_kept = self.memory is None and options.prefix_caching
        self.asked: dict[int, Asked] = {}
        self.live: set[int] = set()
        self.num_steps = 0
        self.seen: dict[str, int] = {}

    def run(self) -> None:
        dice = self.dice
        left, aborting = dice.randint(1, 14), dice.choice([0.0, 0.02, 0.2])
        needed = 0
        while left or self.live:
            while left and (not self.live or dice.happens(0.3)):
                left -= 1
                needed += self._submit()
            if self.live and dice.happens(aborting):
                self._abort(dice.choice(sorted(self.live)))
                self._check()
            self._abort_inside = dice.happens(aborting / 2)
            self._step()
            self.num_steps += 1
            self._check()
            assert self.num_steps <= _PATIENCE * (needed + 10), "somebody starves"
        assert not self.cache.slots, "an idle engine holds slots"
        assert not self.cache.usage.used, "an idle engine holds memory beside its cache"
        assert not self.engine.has_work
        self.seen["preemption"] = self.engine.stats().preemptions
        self.seen["token from the cache"] = self.engine.stats().prefix_cached_tokens

    def _step(self) -> None:
        """One step for a policy; an interrupted one has to leave everything usable."""
        apart = [policy for policy in self.policies if policy.is_apart]
        self._stepping = self.dice.choice([None, *apart])
        self.dice.interrupting = self._interrupting
        try:
            events = self.engine.step(self._stepping)
        except Interrupted:
            self._count("interrupted step")
            self._after_interrupt()
        else:
            for event in events:
                self._take(event)
        finally:
            self.dice.interrupting = 0.0

    def _after_interrupt(self) -> None:
        """No drafter drafts for the rows of the step, until the controller names one again."""
        for row in self._running():
            if self.cache.length(row.slot) != row.num_cached:
                self.torn.add(row.request_id)
            controller: Any = row.policy.controller
            controller.said[row.request_id] = None
        self._forget_asked()

    def _clock(self) -> float:
        """Steps ask for the time between all that they do."""
        self.dice.interrupt()
        self._ticks += 1
        return float(self._ticks)

    def _new_policy(self, failing: float, nonsense: float, failing_control: float) -> Policy:
        """One drafter, or as by default: a head, one on the target's own cache, one that copies."""
        dice, most = self.dice, self.dice.randint(0, 6)
        copies = SimDrafter(dice, failing, nonsense)
        head = SimHead(dice, failing, nonsense, self.cache)
        own_cache = SimSelfDraft(dice, failing, nonsense, self.cache)
        alone: list[Drafter] = [
            NoDrafter(),
            NgramDrafter(min_ngram_size=1),
            copies,
            head,
            own_cache,
        ]
        drafters: dict[str, Drafter] = dice.choice(
            [
                {OWN: dice.choice(alone)},
                {"head": head, "copies": copies},
                {"self_draft": own_cache, "copies": copies},
                {"head": head, "self_draft": own_cache, "copies": copies},
            ]
        )
        loaded = [
            LoadedDrafter(drafter, self.target, name, 4, not drafter.layers, self._clock)
            for name, drafter in drafters.items()
        ]
        controller: Controller = SimController(dice, most, failing_control, [*drafters])
        if dice.happens(0.3):
            cost = self.cost or CostModel(((1, 900.0), (8, 1500.0)))
            controller = Noting(AdaptiveBudget([each.traits for each in loaded], cost))
        policy = Policy(controller, loaded)
        self.drafters[policy] = drafters
        return policy

    def _submit(self) -> int:
        """A random request; returns how many steps it needs alone at most."""
        dice = self.dice
        prompt = [dice.randrange(VOCAB_SIZE) for _ in range(dice.choice([1, 2, 5, 20, 35]))]
        if self.asked and dice.happens(0.5):  # a conversation goes on, or begins like another
            earlier = dice.choice([*self.asked.values()])
            text = [*earlier.prompt, *earlier.token_ids]
            prompt = text[: dice.randint(1, len(text))][:60] + prompt[:5]
        params = SamplingParams(
            temperature=dice.choice([0.0, 0.7, 1.0, 2.0]),
            top_k=dice.choice([0, 0, 3]),
            top_p=dice.choice([1.0, 0.8]),
            seed=dice.getrandbits(64),
            max_tokens=dice.choice([1, 2, 7, 25]),
            stop_token_ids=dice.choice([(), (), (3,)]),
            ignore_eos=dice.happens(0.2),
            coupling="drawn" if dice.happens(0.1) else "seeded",
            n=dice.choice([1, 1, 1, 1, 3]),
            logprobs=dice.choice([None, None, None, 0, 2]),
            prompt_logprobs=dice.choice([None, None, None, None, 1]),
            **self._rules(),
        )
        tenant = dice.choice([None, "a", "b"])
        policy = dice.choice(self.policies)
        priority = dice.choice([0, 0, 0, 1])
        rows = self.engine.prepare(prompt, params, policy=policy, tenant=tenant, priority=priority)
        self.engine.add(rows, self._read)
        for row in rows:
            self.asked[row.request_id] = Asked(prompt, replace(params, n=1, seed=row.seed))
            self.live.add(row.request_id)
        return len(rows) * (len(prompt) + params.max_tokens)

    def _rules(self) -> dict[str, Any]:
        """Rules that look at the text, for some requests."""
        dice = self.dice
        if dice.happens(0.6):
            return {}
        return {
            "repetition_penalty": dice.choice([1.0, 1.5]),
            "presence_penalty": dice.choice([0.0, 1.0]),
            "frequency_penalty": dice.choice([0.0, 0.5]),
            "logit_bias": dice.choice([{}, {2: 3.0}]),
            "allowed_token_ids": dice.choice([None, (0, 1, 2, 3, 5)]),
            "min_tokens": dice.choice([0, 1]),
        }

    def _abort(self, request_id: int) -> None:
        assert self.engine.cancel(request_id) is not None
        assert request_id not in self.live, "its last event has been delivered"

    def _trace(self, record: StepRecord) -> None:
        """Told in the middle of a step."""
        for row in record.rows:
            policy = self._row(row.request_id).policy
            asked = dict[int, int]()
            for drafter in self.drafters[policy].values():
                asked |= getattr(drafter, "asked", {})
            is_known = row.drafter is None or hasattr(self.drafters[policy][row.drafter], "asked")
            # One that was asked in a try of the step that failed need not be asked again.
            is_counted = row.budget not in (0, asked.get(row.request_id))
            if is_known and is_counted and not row.proposal.tree.tokens:
                self.complaint = "what was not asked is counted"
            if policy.is_apart and policy is not self._stepping and not record.num_waiting:
                self.complaint = "who stays apart takes part in the steps of others"
        self._forget_asked()
        if self._abort_inside and self.live:
            self._abort_inside = False
            assert self.engine.cancel(self.dice.choice(sorted(self.live))) is None

    def _forget_asked(self) -> None:
        for drafters in self.drafters.values():
            for drafter in drafters.values():
                getattr(drafter, "asked", {}).clear()

    def _read(self, event: Event) -> None:
        """Events that a reader gets."""
        asked = self.asked[event.request_id]
        assert event.request_id in self.live, "an event after the last one"
        asked.events.append(event)
        if event.result is not None:
            self.live.discard(event.request_id)
            self._check_result(asked, event.result)

    def _take(self, event: Event) -> None:
        """Events that the stepping caller gets: the same."""
        assert event in self.asked[event.request_id].events[-2:]  # its last may have come, too

    def _check(self) -> None:
        """Invariants between any two steps."""
        assert not self.complaint, self.complaint
        scheduler, cache, running = self.engine._scheduler, self.cache, self._running()
        for row in running:
            if row.finish_reason != "error":  # and is there no longer, but for an interrupt
                row.check()
            assert cache.length(row.slot) == row.num_cached or row.request_id in self.torn
            assert list(cache.context(row.slot)) == row.tokens[: cache.length(row.slot)]
        slots = [row.slot for row in running]
        assert sorted(slots) == sorted(cache.slots), "a slot belongs to one running row"
        shared = Counter(row.policy if row.policy.is_apart else None for row in scheduler.running)
        assert max(shared.values(), default=0) <= self.engine.max_batch_size
        waiting: list[Request] = scheduler._waiting
        assert all(row.slot < 0 and not row.num_cached for row in waiting)
        assert {row.request_id for row in (*scheduler.running, *waiting)} == self.live
        orders = [[row.order for row in rows] for rows in (scheduler.running, waiting)]
        assert all(order == sorted(order) for order in orders)
        cache.check()
        assert self.memory is None or cache.usage.used + cache.usage.cached <= self.memory
        for policy, drafters in self.drafters.items():
            rows = [row for row in running if row.policy is policy]
            for name, drafter in drafters.items():
                mine = {row.request_id for row in rows if row.drafter == name}
                assert getattr(drafter, "followed", mine) == mine, "a drafter follows others"
                assert not getattr(drafter, "complaint", ""), drafter.complaint  # type: ignore[attr-defined]
            for row in rows:
                self._check_drafter(row)

    def _check_drafter(self, row: Request) -> None:
        """The drafter that was named for a row drafts for it, if it can: also after a
        preemption."""
        controller: Any = row.policy.controller
        name = controller.said.get(row.request_id)
        can_begin_anywhere = name is not None and row.policy.drafters[name].traits.joins_late
        if can_begin_anywhere and name not in row.excluded_drafters:
            assert row.drafter == name, f"{name} was named, {row.drafter} drafts"

    def _running(self) -> list[Request]:
        """Rows with a place; others have given it up, and were interrupted before they left."""
        running = self.engine._scheduler.running
        assert all(row.slot >= 0 or (row.is_over and self._interrupting) for row in running)
        return [row for row in running if row.slot >= 0]

    def _row(self, request_id: int) -> Request:
        row = self.engine._scheduler.find(request_id)
        assert row is not None
        return row

    def _checked_open(self, row: Request) -> None:
        """The cached length of a text does not depend on drafters, and bad entries are never
        found."""
        leader = row.leader
        is_copied = (
            leader is not None
            and leader.has_read_prompt
            and self.cache.length(leader.slot) >= leader.num_prompt
        )
        self._open(row)
        if is_copied:
            assert row.num_cached == row.num_prompt - 1, "a prompt is read twice"
            return
        found = self.cache.origins(row.slot, 0, row.num_cached)
        assert found.isdisjoint(self.distrusted), "bad entries are found again"
        if self.all_is_kept and row.prompt_logprobs is None:
            texts = [text for tenant, text in self.left if tenant == row.tenant]
            size = self.cache.block_size
            uncertain = []  # an interrupted step has left them behind: they may be found, or not
            for other in self.engine._scheduler.running:
                if other.tenant == row.tenant:
                    held = other.tokens[: other.num_cached // size * size]
                    is_full = other.num_published * size == len(held)
                    is_published = is_full or not self._interrupting
                    (texts if is_published and not other.is_over else uncertain).append(held)
            least, most = (
                max((common_prefix(row.tokens[:-1], text) for text in each), default=0)
                for each in (texts, texts + uncertain)
            )
            assert least <= row.num_cached <= most, "what is cached is not found"

    def _checked_close(self, row: Request) -> None:
        """Note what a request leaves."""
        if row.slot >= 0 and row.casts_doubt:
            self.distrusted |= self.cache.origins(row.slot, 0, self.cache.length(row.slot))
            self.all_is_kept = False
        elif row.slot >= 0:
            held = row.tokens[: self.cache.length(row.slot)]
            self.left.append((row.tenant, held))
        self._close(row)

    def _check_result(self, asked: Asked, result: GenerationResult) -> None:
        reason = result.finish_reason
        self._count(reason)
        assert result.token_ids == asked.token_ids
        assert result.seed == asked.params.seed
        check_sums(result, sum(event.num_accepted for event in asked.events))
        alone = self._alone(asked)
        by_model = reason == "error" and str(result.error).startswith("NonFiniteScoresError: ")
        mine, theirs = ((r.finish_reason, r.token_ids) for r in (result, alone))
        is_drawn = asked.params.coupling == "drawn"  # another text of the same distribution
        if by_model and mine != theirs and not is_drawn:  # bad entries
            assert not self.is_calm
            by_model = False
            self._count("error by a bad entry")
        elif reason == "error" and not by_model:
            by_memory = self.memory is not None and "no room for" in str(result.error)
            assert not by_memory or self._is_too_large(result, asked.params.max_tokens)
            by_interrupt = result.request_id in self.torn and "interrupted" in str(result.error)
            assert by_memory or by_interrupt or "njected" in str(result.error), result.error
            assert by_memory or by_interrupt or not self.is_calm
            self._count("error by a fault")
        if is_drawn:
            return
        if reason in ("stop", "length") or by_model:
            assert (reason, result.token_ids) == (alone.finish_reason, alone.token_ids)
            # As text: log probabilities that are no number equal nothing.
            assert str(result.logprobs) == str(alone.logprobs)
            found, expected = result.prompt_logprobs or (), alone.prompt_logprobs or ()
            # A bad entry may end a prompt sooner that the model would have ended, too.
            assert found == (expected if not by_model else expected[: len(found)])
        else:
            assert result.token_ids == alone.token_ids[: len(result.token_ids)]

    def _is_too_large(self, result: GenerationResult, max_tokens: int) -> bool:
        """Whether a request does not even fit alone."""
        size, num_made = self.cache.block_size, len(result.token_ids)
        beside = min(self.engine._headroom, max_tokens - num_made)
        num_blocks = -(-(result.num_prompt_tokens + num_made + beside) // size)
        return num_blocks > self.cache.memory.num_tokens // size

    def _alone(self, asked: Asked) -> GenerationResult:
        """The same request by itself, where nothing fails and nothing is drafted."""
        target = SimTarget(self.model)
        engine = engine_of(
            target,
            NoDrafter(),
            SimController(Dice(0), 0, 0.0),
            eos_token_ids=tuple(self.engine._eos_token_ids),
        )
        engine.submit(asked.prompt, asked.params)
        *_, last = engine.run()
        assert last.result is not None
        return last.result

    def _count(self, name: str) -> None:
        self.seen[name] = self.seen.get(name, 0) + 1
