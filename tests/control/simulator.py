"""Steps without an engine: made-up drafters on a made-up target, with times of a cost model."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from foredraft.control.adaptive import AdaptiveBudget
from foredraft.control.experience import Experience
from foredraft.core.cost import CostModel, Times
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import NO_PROPOSAL, Proposal
from foredraft.core.record import RowStep, StepRecord, StepTimes
from foredraft.core.traits import DrafterTraits
from foredraft.core.tree import TokenTree
from foredraft.core.verify import Verdict
from foredraft.engine.request import Request
from tests.engine.helpers import new_request

FLAT: Times = ((1, 10.0), (2, 10.1), (4, 10.6), (8, 11.5), (16, 18.0), (32, 30.0), (48, 43.0))
"""Much like the default model's on two cores with AMX."""
STEEP: Times = ((1, 10.0), (2, 15.0), (4, 25.0), (8, 45.0), (16, 85.0), (32, 165.0))
"""Each token costs half a step: nothing but sure drafts pays."""


@dataclass
class MadeUp:
    """A drafter.

    Attributes:
        accepts: the chance that a node is accepted after the one before, by request and number of
            tokens committed so far.
        draft_ms, learn_ms: of one row.
        nodes: drafts so many where it may.
        round_ms: of one row and node, where each takes a forward; 0: none does.
        promise, is_guess: see `DrafterTraits`.
        read_ms: of a token of the prompt, with a model of its own; 0: it has none.
        unsaid_ms: of a token of a text, which it reads as it first drafts for it.
        shared: first tokens of each prompt that it has read for another.
        join_ms: to begin to follow a row in the middle of its text.
        looks_ms: to look whether there is anything to read, in each step.
    """

    accepts: Callable[[int, int], float]
    draft_ms: float = 0.0
    learn_ms: float = 0.0
    nodes: int = 16
    joins_late: bool = True
    round_ms: float = 0.0
    promise: tuple[float, float] | None = None
    is_guess: bool = False
    read_ms: float = 0.0
    join_ms: float = 0.0
    looks_ms: float = 0.0
    unsaid_ms: float = 0.0
    shared: int = 0

    def traits(self, name: str, round_share: float) -> DrafterTraits:
        share = round_share if self.round_ms else None
        found = DrafterTraits(name, self.nodes, self.joins_late, self.promise, share)
        return replace(found, reads=self.read_ms > 0.0, is_guess=self.is_guess)


@dataclass
class Simulation:
    """Requests that come as others end, so many at once.

    Attributes:
        believed: what the controller takes steps to cost at first; None: what they do cost.
        round_share: what it takes a draft forward to cost at first, in plain steps.
        prompt: tokens of a prompt.
        named: the drafter that a request asks for, by its number.
        slowness: of drafting and of the target's forward, by the number of the step: how many times
            as long they take there, because of others on the machine.
    """

    drafters: Mapping[str, MadeUp]
    times: Times = FLAT
    seed: int = 0
    params: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=96))
    experience: Experience | None = None
    believed: Times | None = None
    round_share: float = 0.35
    slowness: Callable[[int], tuple[float, float]] = lambda step: (1.0, 1.0)
    prompt: int = 32
    named: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.cost = CostModel(self.times)
        described = [each.traits(name, self.round_share) for name, each in self.drafters.items()]
        self.model = CostModel(self.believed or self.times)
        self.control = AdaptiveBudget(described, self.model, self.experience)
        self.rows: list[Request] = []
        self.count = 0
        self.at: dict[int, str | None] = {}
        self.last_drafted: dict[int, int] = {}
        self.drafted_by: Counter[str] = Counter()
        self._unread: set[int] = set()
        self._begun: dict[str, StepTimes] = {}
        self.spent_ms = self.plain_ms = 0.0
        self.worst_ms = 0.0
        self.drafted = self.committed = self.num_steps = 0

    def run(self, num_steps: int, concurrency: int) -> Simulation:
        for _ in range(num_steps):
            while len(self.rows) < concurrency:
                self._add()
            while len(self.rows) > concurrency:
                self._end(self.rows[-1])
            self._step()
        return self

    @property
    def speedup(self) -> float:
        return self.plain_ms / self.spent_ms

    def _add(self) -> None:
        params, named = self.params, self.named.get(self.count)
        if named is not None:
            params = replace(params, speculation=named)
        row = new_request([1] * self.prompt, params, self.count, num_cached=self.prompt - 1)
        if named is not None:
            row.excluded_drafters |= self.drafters.keys() - {named}
        row.drafter = self.at[row.request_id] = self.control.begin(row, self.rows)
        if row.drafter is not None:
            self._unread.add(row.request_id)
        self.rows.append(row)
        if self.believed is not None:  # its prompt is read
            self.model.observe([(32, 0)], self.cost.ms([(32, 0)]))
        self.count += 1

    def _end(self, row: Request) -> None:
        self.rows.remove(row)
        self.control.end(row.request_id)

    def _step(self) -> None:
        records = []
        by: dict[str, Counter[str]] = defaultdict(Counter)
        rounds: dict[str, list[int]] = defaultdict(list)
        for row in self.rows:
            row.room = row.num_remaining - 1
        for row, allowed in zip(self.rows, self.control.allow(self.rows), strict=True):
            if allowed.drafter != row.drafter:
                late = allowed.drafter is not None and self.drafters[allowed.drafter].joins_late
                row.drafter = self.at[row.request_id] = allowed.drafter if late else None
                if row.drafter is not None:
                    self._unread.add(row.request_id)
                    by[row.drafter]["begin_ms"] += self.drafters[row.drafter].join_ms
            name = row.drafter
            records.append(self._row(row, allowed.budget, name))
            if name is not None:
                drafter, mine = self.drafters[name], by[name]
                mine["draft_ms"] += drafter.draft_ms * (allowed.budget > 0)
                rounds[name].append(len(records[-1].proposal.tree))
                mine["learn_ms"] += drafter.learn_ms
                mine["read_ms"] += drafter.looks_ms
                if allowed.budget and row.request_id in self._unread:
                    self._unread.discard(row.request_id)
                    num_read = len(row.tokens) - drafter.shared
                    mine["read_ms"] += drafter.read_ms * num_read
                    mine["draft_ms"] += drafter.unsaid_ms * num_read
                    mine["num_read"] += num_read
        sizes = [(record.num_tokens, record.context) for record in records]
        slower_drafting, slower_forward = self.slowness(self.num_steps)
        for name, depths in rounds.items():
            by[name]["draft_ms"] += self.drafters[name].round_ms * sum(depths)
        for mine in by.values():
            mine["draft_ms"] *= slower_drafting
        forward = self.cost.ms(sizes) * slower_forward
        drafters = {name: StepTimes(**mine) for name, mine in by.items()}
        drafting, following, *reading = (
            sum(getattr(each, part) for each in drafters.values())
            for part in ("draft_ms", "learn_ms", "read_ms", "begin_ms", "num_read")
        )
        read_ms, joining, num_read = reading
        times = StepTimes(drafting, forward, 0.0, following, read_ms, joining, drafters, num_read)
        record = StepRecord(tuple(records), times)
        plain = self.cost.ms([(1, context) for _, context in sizes]) * slower_forward
        tokens = sum(len(each.committed) for each in records)
        self.spent_ms += record.times.total_ms
        self.plain_ms += plain * tokens / len(records)
        self.worst_ms = max(self.worst_ms, record.times.total_ms - plain)
        self.num_steps, self.committed = self.num_steps + 1, self.committed + tokens
        self.control.observe(record)
        if self.believed is not None:
            self.model.observe(record.sizes, forward)
        for row in [*self.rows]:
            if row.num_remaining <= 0:
                self._end(row)

    def _row(self, row: Request, budget: int, name: str | None) -> RowStep:
        proposal, path = NO_PROPOSAL, 0
        if name is not None and budget:
            drafter = self.drafters[name]
            nodes = min(budget, drafter.nodes)
            proposal = Proposal.chosen(TokenTree.chain([1] * nodes))
            while path < nodes and self.random.random() < drafter.accepts(
                row.request_id, len(row.tokens)
            ):
                path += 1
        self.drafted += len(proposal.tree)
        if proposal.tree.tokens:
            self.last_drafted[row.request_id] = self.num_steps
            self.drafted_by[str(name)] += len(proposal.tree)
        committed = (1,) * min(path + 1, row.num_remaining)
        context = row.num_cached
        row.tokens.extend(committed)
        row.num_cached += len(committed)
        asked = budget if name is not None else 0
        verdict = Verdict(tuple(range(path)), 1, "bonus")
        return RowStep(row.request_id, context, 1, name, asked, proposal, verdict, committed, path)


def constant(chance: float) -> Callable[[int, int], float]:
    return lambda request_id, length: chance
