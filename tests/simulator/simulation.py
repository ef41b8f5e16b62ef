"""One schedule after another, each from its seed alone, and what must hold at every step of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from foredraft.core.params import SamplingParams
from foredraft.core.record import StepRecord
from foredraft.drafters.base import Drafter
from foredraft.drafters.ngram import NgramDrafter
from foredraft.drafters.none import NoDrafter
from foredraft.engine.request import Event, GenerationResult, Request, RequestOptions
from tests.engine.helpers import check_sums, engine_of
from tests.simulator.parts import (
    VOCAB_SIZE,
    Dice,
    SimCache,
    SimController,
    SimDrafter,
    SimTarget,
)

NUM_MODELS = 40
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
        self.cache = SimCache(self.memory, dice.choice([1, 2, 4, 16]), dice, rate(0.1))
        self.target.cache = self.cache
        self.drafter = self._new_drafter(rate(0.1), rate(0.1))
        self.engine = engine_of(
            self.target,
            self.drafter,
            SimController(dice, dice.randint(0, 6), rate(0.1)),
            max_batch_size=dice.randint(1, 6),
            max_step_tokens=dice.choice([1, 3, 8, 32]),
            eos_token_ids=(0,) if dice.happens(0.3) else (),
            trace=self._trace,
            prefix_caching=dice.happens(0.7),
            clock=iter(range(1 << 60)).__next__,
            new_seed=lambda: dice.getrandbits(64),
        )
        # Small replies are to run out of memory, too.
        self.engine._places._headroom = dice.choice([0, 0, 5, 64])
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
            for event in self.engine.step():
                self._take(event)
            self.num_steps += 1
            self._check()
            assert self.num_steps <= _PATIENCE * (needed + 10), "somebody starves"
        assert not self.cache.slots, "an idle engine holds slots"
        assert not self.cache.usage.used, "an idle engine holds memory beside its cache"
        assert not getattr(self.drafter, "followed", None), "a drafter follows what is over"
        assert not self.engine.has_work
        self.seen["preemption"] = self.engine.stats().preemptions
        self.seen["token from the cache"] = self.engine.prefixes.stats.cached_tokens

    def _new_drafter(self, failing: float, nonsense: float) -> Drafter:
        simulated = [SimDrafter(self.dice, failing, nonsense) for _ in range(3)]
        drafters: list[Drafter] = [NoDrafter(), NgramDrafter(min_ngram_size=1), *simulated]
        return self.dice.choice(drafters)

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
        options = RequestOptions(tenant, dice.choice([0, 0, 0, 1]))
        rows = self.engine.prepare(prompt, params, options)
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
        if self._abort_inside and self.live:
            self._abort_inside = False
            assert self.engine.cancel(self.dice.choice(sorted(self.live))) is None

    def _read(self, event: Event) -> None:
        """What a reader is handed."""
        asked = self.asked[event.request_id]
        assert event.request_id in self.live, "an event after the last one"
        asked.events.append(event)
        if event.result is not None:
            self.live.discard(event.request_id)
            self._check_result(asked, event.result)

    def _take(self, event: Event) -> None:
        """What the one who steps is handed: the same."""
        assert event in self.asked[event.request_id].events[-2:]  # its last may have come, too

    def _check(self) -> None:
        """What holds between any two steps."""
        scheduler, cache = self.engine._scheduler, self.cache
        for row in scheduler.running:
            row.check()
            assert cache.length(row.slot) == row.num_cached
            assert list(cache.context(row.slot)) == row.tokens[: row.num_cached]
        slots = [row.slot for row in scheduler.running]
        assert sorted(slots) == sorted(cache.slots), "a slot belongs to one running row"
        assert len(slots) <= self.engine.max_batch_size
        waiting: list[Request] = scheduler._waiting
        assert all(row.slot < 0 and not row.num_cached for row in waiting)
        assert {row.request_id for row in (*scheduler.running, *waiting)} == self.live
        orders = [[row.order for row in rows] for rows in (scheduler.running, waiting)]
        assert all(order == sorted(order) for order in orders)
        cache.check()
        assert self.memory is None or cache.usage.used + cache.usage.cached <= self.memory
        followed: set[int] = getattr(self.drafter, "followed", set())
        assert followed <= {row.request_id for row in scheduler.running}

    def _check_result(self, asked: Asked, result: GenerationResult) -> None:
        reason = result.finish_reason
        self._count(reason)
        assert result.token_ids == asked.token_ids
        assert result.seed == asked.params.seed
        check_sums(result, sum(event.num_accepted for event in asked.events))
        alone = self._alone(asked)
        by_model = reason == "error" and str(result.error).startswith("NonFiniteScoresError: ")
        if reason == "error" and not by_model:
            by_memory = self.memory is not None and "no room for" in str(result.error)
            assert by_memory or "njected" in str(result.error), result.error
            assert by_memory or not self.is_calm
            self._count("error by a fault")
        if asked.params.coupling == "drawn":
            return  # another text of the same distribution
        if reason in ("stop", "length") or by_model:
            assert (reason, result.token_ids) == (alone.finish_reason, alone.token_ids)
            # As text: log probabilities that are no number equal nothing.
            assert str(result.logprobs) == str(alone.logprobs)
            assert str(result.prompt_logprobs) == str(alone.prompt_logprobs)
        else:
            assert result.token_ids == alone.token_ids[: len(result.token_ids)]

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
