"""A draft model in a batch: it reads piece by piece and once, and it joins late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from foredraft.control.base import Allowance, Row
from foredraft.control.fixed import FixedBudget
from foredraft.core.params import SamplingParams
from foredraft.core.record import StepRecord
from foredraft.drafters.base import Drafter
from foredraft.drafters.growth import GrowthLimits
from foredraft.drafters.model.draft_model import DraftModelDrafter, DraftTreeDrafter
from foredraft.drafters.text.ngram import NgramDrafter
from foredraft.engine.engine import Engine, EngineOptions
from foredraft.engine.guard import LoadedDrafter
from foredraft.engine.policy import Policy
from foredraft.models.base import ScoreRow, Scores
from foredraft.models.table import TableModel, TokenCache
from tests.engine.helpers import counting_model, limited

MOST_READ, BUDGET = 64, 3
PARAMS = SamplingParams(temperature=0.0, max_tokens=40)


class Watched(TableModel):
    """Notes how many tokens of texts each forward reads."""

    def __init__(self) -> None:
        like = counting_model()
        super().__init__(like.vocab_size, like.probs)
        self.num_read: list[int] = []

    def score(self, rows: Sequence[ScoreRow], taps: Sequence[int] = ()) -> Scores:
        self.num_read.append(sum(len(row.pending) for row in rows))
        return super().score(rows, taps)


class Late(FixedBudget):
    """Names the drafter once a reply has so many tokens."""

    def __init__(self, num_plain: int) -> None:
        super().__init__(BUDGET)
        self._num_plain, self._begun = num_plain, dict[int, int]()

    def begin(self, row: Row, others: Sequence[Row]) -> str | None:
        return None

    def allow(self, rows: Sequence[Row], others: Sequence[Row] = ()) -> list[Allowance]:
        allowed = super().allow(rows, others)
        waits = [
            len(row.tokens) - self._begun.setdefault(row.request_id, len(row.tokens))
            for row in rows
        ]
        return [
            Allowance("own", each.budget) if waited >= self._num_plain else Allowance(None)
            for each, waited in zip(allowed, waits, strict=True)
        ]


@dataclass
class Watch:
    """An engine with a draft model, and what its steps did."""

    engine: Engine
    model: Watched
    steps: list[StepRecord]
    read: list[int]

    def submit(
        self, prompt: Sequence[int], params: SamplingParams = PARAMS, **options: object
    ) -> int:
        return self.engine.submit(prompt, params, **options)

    def step(self) -> None:
        before = len(self.model.num_read)
        self.engine.step()
        self.read.append(sum(self.model.num_read[before:]))

    def run(self) -> None:
        while self.engine.has_work:
            self.step()


def watch(
    make: type[Drafter] | None = None,
    controller: FixedBudget | None = None,
    target: TableModel | None = None,
    drafter: Drafter | None = None,
    model: Watched | None = None,
) -> Watch:
    watched = model or Watched()
    target = target or counting_model()
    drafter = drafter or DraftModelDrafter(watched)
    controller = controller or FixedBudget(BUDGET)

    def clock() -> float:
        """A second for each token that the draft model has read."""
        return float(sum(watched.num_read))

    policy = Policy(controller, [LoadedDrafter(drafter, target, joins_late=True, clock=clock)])
    steps: list[StepRecord] = []
    options = EngineOptions(max_step_tokens=MOST_READ, trace=steps.append, clock=clock)
    return Watch(Engine(target, policy, options), watched, steps, [])


def prompt_of(length: int, first: int = 0) -> list[int]:
    """Counts in threes: no reply continues it so."""
    return [(first + 3 * i) % 10 for i in range(length)]


def accepted(watch: Watch) -> int:
    return sum(row.num_accepted for record in watch.steps for row in record.rows)


@pytest.mark.parametrize("kind", ["chain", "tree", "cascade"])
def test_no_step_reads_more_than_a_chunk(kind: str) -> None:
    model = Watched()
    drafters: dict[str, Drafter] = {
        "chain": DraftModelDrafter(model),
        "tree": DraftTreeDrafter(model, GrowthLimits(3, 1, 1, round_cost=0.0)),
        "cascade": DraftModelDrafter(model, guesser=NgramDrafter()),
    }
    running = watch(drafter=drafters[kind], model=model)
    running.submit([1, 2])
    for _ in range(3):
        running.step()
    running.submit(prompt_of(1000))
    running.run()
    assert max(running.read) <= MOST_READ + 2 * (BUDGET + 1) * BUDGET
    assert accepted(running) > 50


def test_a_prompt_is_read_along_with_the_target() -> None:
    running = watch()
    running.submit(prompt_of(300))
    for _ in range(-(-300 // MOST_READ)):
        running.step()
    (last,) = running.steps[-1].rows
    assert last.num_accepted == BUDGET  # in the very step that reads the prompt's end


def test_several_replies_read_their_prompt_once() -> None:
    running = watch()
    running.submit(prompt_of(205), replace(PARAMS, n=4, temperature=1.0, seed=3))
    running.run()
    read_early = [n for n in running.read if n > 4 * (BUDGET + 1)]
    assert sum(read_early) <= 205 + 4 * 2 * (BUDGET + 1)
    assert sum(record.times.num_read for record in running.steps) == 204


def test_another_tenant_reads_for_itself() -> None:
    running = watch()
    running.submit(prompt_of(60), tenant="a")
    running.run()
    running.model.num_read.clear()
    running.submit(prompt_of(60), tenant="b")
    running.step()
    assert sum(running.model.num_read) >= 60


def test_it_joins_a_running_text() -> None:
    running = watch(controller=Late(10))
    running.submit(prompt_of(200), replace(PARAMS, max_tokens=60))
    running.run()
    drafted = [len(row.proposal.tree) for record in running.steps for row in record.rows]
    assert sum(drafted) > 30
    assert max(running.read) <= MOST_READ + 2 * (BUDGET + 1)
    # What it reads before it drafts is nobody's fault: it is not sent away.
    assert running.engine.stats().finished["length"] == 1


def test_a_row_that_gave_way_finds_its_entries_again() -> None:
    target = limited(counting_model(), 230)
    running = watch(target=target)
    params = replace(PARAMS, max_tokens=150)
    prompts = [prompt_of(30, first) for first in range(3)]
    for prompt in prompts:
        running.submit(prompt, params)
    running.run()
    assert running.engine.stats().preemptions > 0
    num_committed = sum(len(row.committed) for record in running.steps for row in record.rows)
    num_drafts = sum(row.budget for record in running.steps for row in record.rows)
    assert sum(running.read) < 3 * 30 + num_committed + num_drafts + 60


def test_it_leaves_when_the_text_outgrows_it() -> None:
    model = Watched()
    model.max_context = 50
    model.cache = TokenCache(50)
    running = watch(model=model, drafter=DraftModelDrafter(model))
    running.submit(prompt_of(30), replace(PARAMS, max_tokens=60))
    running.run()
    assert accepted(running) > 5
    assert running.engine.stats().finished == {"length": 1}


def test_time_spent_reading_is_told_apart() -> None:
    running = watch()
    running.submit(prompt_of(300))
    running.run()
    read = [record.times.read_ms / 1e3 for record in running.steps]
    assert read == [64, 64, 64, 64, 43, *[0] * (len(read) - 5)]
    assert read == [record.times.num_read for record in running.steps]
    assert all(record.times.draft_ms <= 1e3 * (BUDGET + 1) for record in running.steps)


def test_one_of_many_that_come_at_once_begins_as_one_of_many() -> None:
    """Else the first ones would read their texts for a draft model that pays for few alone."""
    numbers: list[int] = []

    class Counting(FixedBudget):
        def begin(self, row: Row, others: Sequence[Row]) -> str | None:
            numbers.append(len(others))
            return super().begin(row, others)

    target = counting_model()
    policy = Policy.of(target, NgramDrafter(), Counting(BUDGET))
    engine = Engine(target, policy, EngineOptions(max_batch_size=3))
    for _ in range(5):
        engine.submit([1, 2], PARAMS)
    engine.step()
    assert numbers == [2, 2, 2]
