"""Recordings of drafters on prompts, or from a trace: nodes and committed tokens of each step.

Acceptance depends on text, model and drafter; step times depend on machine and load. So recordings
leave the machine's part out, which `outlook` adds.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import log2
from statistics import median

from foredraft.bench.load import Load, OurServer, serve
from foredraft.bench.prompts import encoded_prompts
from foredraft.control.times import DraftTimes
from foredraft.core.cost import Attention, CostModel
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.core.record import StepRecord, StepTimes
from foredraft.core.traits import OWN
from foredraft.drafters import drafter_spec
from foredraft.llm import LLM
from foredraft.options import LoadOptions
from foredraft.trace.files import Trace
from foredraft.trace.format import TracedRow, TracedStep
from foredraft.trace.record import Tracer
from foredraft.trace.replay import is_decoding

AUTO, PLAIN = "auto", "none"
_SIZES_PER_OCTAVE, _LEAST_STEPS = 4, 3
"""Groups of forward sizes per doubling, and the least number of steps in a group."""
_FEW = (2, 4)
"""Numbers of nodes recorded besides the drafter's most."""
_INTERRUPTED = 1.25
"""A step that takes this many times its usual time was interrupted by the machine."""


@dataclass(frozen=True)
class Setting:
    """A setting to run: a drafter and its number of nodes.

    Attributes:
        drafter: its name; "auto" and "none" among them.
        num_draft_tokens: a step; None: the controller chooses.
        head: the folder of a trained head.
    """

    drafter: str
    num_draft_tokens: int | None = None
    head: str | None = None

    @property
    def name(self) -> str:
        """Name of the drafter or head."""
        return self.head or self.drafter

    @property
    def flags(self) -> str:
        """As options of all commands."""
        name = f"--drafter {self.drafter.replace('_', '-')}"
        if self.head is not None:
            name += f" --drafter-option head={shlex.quote(self.head)}"
        number = self.num_draft_tokens
        return name if number is None else f"{name} --num-draft-tokens {number}"

    def options(self, loaded: LoadOptions) -> LoadOptions:
        """Those of a view on a loaded model."""
        number = self.num_draft_tokens
        model = loaded.draft_model
        if self.drafter in (AUTO, PLAIN) or drafter_spec(self.drafter).draft_model == "none":
            model = None
        return replace(
            *(loaded,),
            drafter=self.drafter,
            draft_model=model,
            num_draft_tokens=number,
            drafter_options={} if self.head is None else {"head": self.head},
            prefix_caching=False,  # each request has to read its prompt
        )


@dataclass
class Recording:
    """The recording of one drafter.

    Attributes:
        drafter: its name.
        load: requests at once; 0: any number, for it drafted the same under each.
        most_nodes: that it was asked for; None: the controller chose, by this load.
        takes_rounds: whether each token of a draft takes a forward of its own.
        replies: the steps of each request that read no prompt.
        prompts: the number of the prompt of each request.
        times: of the drafter.
        rest_ms: of each step by its rows, beside drafter and forward.
        prompt_tokens: of each request.
        head: the folder of the trained head that drafted, where one was named.
        pace: measured step time over the cost models' prediction.
    """

    drafter: str
    load: int = 0
    most_nodes: int | None = None
    takes_rounds: bool = False
    replies: list[list[TracedRow]] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    times: DraftTimes = field(default_factory=DraftTimes)
    rest_ms: list[float] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    head: str | None = None
    pace: float = 1.0

    def setting(self, most_nodes: int | None) -> Setting:
        """The setting with at most that many nodes, or with the controller's choice."""
        return Setting(self.drafter, most_nodes if self.most_nodes else None, self.head)

    def note(self, times: StepTimes, rows: Sequence[tuple[bool, int]]) -> None:
        """Record the drafter's time in a step without prefill.

        Args:
            rows: of each row whether it was asked for drafts, and its nodes.
        """
        num_asked, deepest = sum(asked for asked, _ in rows), max(nodes for _, nodes in rows)
        num_rounds = deepest if self.takes_rounds else 1
        self.times.observe(
            *(self.drafter, num_asked, times.draft_ms, len(rows), times.learn_ms, num_rounds)
        )

    def draft_ms(self, num_rows: int, deepest: int) -> float:
        """Drafting time of a step with ``num_rows`` rows, the largest draft with ``deepest``
        nodes."""
        round_ms = self.times.round_ms(self.drafter, num_rows) or 0.0
        num_rounds = deepest if self.takes_rounds else 1
        return num_rounds * round_ms + self.times.follow_ms(self.drafter, num_rows)

    def step_rest_ms(self, num_rows: int) -> float:
        """Time of a step beside drafter and forward."""
        return num_rows * median(self.rest_ms) if self.rest_ms else 0.0

    def step_ms(self, step: StepRecord, cost: CostModel) -> float:
        """Step time by the cost models."""
        rows = step.rows
        deepest = max(len(row.proposal.tree) for row in rows)
        beside = self.draft_ms(len(rows), deepest) + self.step_rest_ms(len(rows))
        return cost.ms(step.sizes) + beside


def recorded_trace(trace: Trace) -> tuple[Recording, Recording]:
    """All requests of a trace, each as if it had a prompt of its own: without drafts, and as
    drafted.

    Raises:
        ConfigError: nothing was drafted in it.
    """
    budgets = [row.budget for step in trace.steps for row in step.rows]
    found = Recording(trace.run.drafter or OWN, most_nodes=max(budgets, default=0))
    rows: dict[int, list[TracedRow]] = {}
    for step in trace.steps:
        if all(map(is_decoding, step.rows)):
            found.note(step.times, [(row.budget > 0, len(row.draft.tokens)) for row in step.rows])
            found.rest_ms.append(step.times.verify_ms / len(step.rows))
        for row in step.rows:
            kept = rows.setdefault(row.request_id, [])
            if is_decoding(row):
                kept.append(row)
    found.replies = [reply for reply in rows.values() if reply]
    if not found.most_nodes or not found.replies:
        raise ConfigError("nothing was drafted in this trace, so it says nothing of drafts")
    found.prompts = [*range(len(found.replies))]
    found.prompt_tokens = [reply[0].position - 1 for reply in found.replies]
    bare = replace(found, drafter=PLAIN, most_nodes=0, times=DraftTimes())
    return bare, found


@dataclass(frozen=True)
class Work:
    """The requests that all settings run.

    Attributes:
        prompts: token ids.
        params: of all requests; their seeds differ.
    """

    prompts: Sequence[Sequence[int]]
    params: SamplingParams

    @classmethod
    def of(cls, llm: LLM, path: str | None, limit: int | None, params: SamplingParams) -> Work:
        """Prompts of a file, or the built-in ones.

        Raises:
            ConfigError: no prompt fits.
        """
        room = llm.target.max_context - params.max_tokens
        fitting = [ids for _, ids in encoded_prompts(llm, path, limit) if len(ids) <= room]
        if not fitting:
            raise ConfigError(f"no prompt leaves room for {params.max_tokens} tokens")
        return cls(fitting, params)

    def with_seeds_from(self, number: int) -> Work:
        """The same with other seeds, which matter at temperatures above 0."""
        return replace(self, params=replace(self.params, seed=(self.params.seed or 0) + number))

    def under(self, load: int) -> Load:
        """The load of ``load`` requests at once, until each prompt has been answered."""
        number = max(len(self.prompts), load)
        prompts = [self.prompts[i % len(self.prompts)] for i in range(number)]
        return Load(prompts, self.params, load, stays_full=True)


class Runner(OurServer):
    """Runs loads with one setting, and records them as a `Recording`.

    Args:
        llm: holds the models.
        cost: by which nodes are weighed; None: the machine's own.

    Attributes:
        records: of all steps under the load.
    """

    records: list[StepRecord]

    def __init__(self, llm: LLM, setting: Setting, cost: CostModel | None = None) -> None:
        super().__init__(setting.flags, self._new_llm)
        self.setting = setting
        self._loaded = copy(llm)
        self._loaded.cost = cost or llm.cost

    def _new_llm(self, load: int, note: Callable[[StepRecord], None]) -> LLM:
        self.records = []

        def noted(record: StepRecord) -> None:
            note(record)
            self.records.append(record)

        options = self.setting.options(self._loaded.options)
        return self._loaded.with_drafter(options, trace=noted, is_apart=True)

    def recording(self, num_prompts: int) -> Recording:
        """The recording of the load that has ended.

        Args:
            num_prompts: different ones.
        """
        drafters = self.llm.policy.drafters.values()
        found = Recording(
            self.setting.drafter,
            self._load.concurrency,
            self.setting.num_draft_tokens,
            len(drafters) == 1 and all(each.traits.round_share is not None for each in drafters),
            head=self.setting.head,
        )
        rows = dict[int, list[TracedRow]]()

        def keep(step: TracedStep) -> None:
            for row in step.rows:
                rows.setdefault(row.request_id, []).append(row)

        tracer = Tracer(keep, None)
        for record in self.records:
            tracer(record)
            if record.is_decoding:
                asked = [(row.budget > 0, len(row.proposal.tree)) for row in record.rows]
                found.note(record.times, asked)
        found.rest_ms = [
            step.rest_ms / step.num_rows
            for step in self.served.steps
            if step.is_decoding and step.num_rows
        ]
        for number, reply in enumerate(rows.values()):
            if decoded := [row for row in reply if is_decoding(row)]:
                found.replies.append(decoded)
                found.prompts.append(number % num_prompts)
                found.prompt_tokens.append(decoded[0].position - 1)
        return found

    def pace(self, recording: Recording, cost: CostModel) -> float:
        """See `Recording`: over the whole run, so that the prediction for the recorded setting
        equals the measurement.

        Models follow the machine from step to step and forget, or take the median of what they saw;
        either may be some hundredths off in all steps of a run.
        """
        said_ms, took_ms, _ = self._totals(recording, cost)
        return took_ms / said_ms if said_ms else 1.0

    def tokens_per_s(self, cost: CostModel) -> float:
        """In steps that read no prompt and were full."""
        _, took_ms, tokens = self._totals(self.recording(len(self._load.prompts)), cost)
        return 1e3 * tokens / took_ms if took_ms else 0.0

    def _totals(self, recording: Recording, cost: CostModel) -> tuple[float, float, int]:
        """Of full steps: predicted milliseconds, measured milliseconds, and tokens.

        A step that the machine interrupts counts as if it had not been. There are few in a run, but
        one of 50 ms is a twentieth of a second's steps, and it hits one setting and not another.
        """
        steps = [step for step in self.served.steps if step.is_decoding and step.num_rows]
        records = [record for record in self.records if record.is_decoding]
        both = [*zip(steps, records, strict=True)]
        full = [one for one in both if one[0].num_rows == self._load.concurrency] or both
        said = [recording.step_ms(record, cost) for _, record in full]
        took = [step.wall_ms for step, _ in full]
        if not full:
            return 0.0, 0.0, 0
        usual = median(ms / said_ms for ms, said_ms in zip(took, said, strict=True))
        most = [_INTERRUPTED * usual * said_ms for said_ms in said]
        return sum(said), sum(map(min, took, most)), sum(step.committed for step, _ in full)


@dataclass(frozen=True)
class Recorded:
    """All drafters under one load.

    Attributes:
        plain: the recording of plain decoding.
        drafters: the other recordings, by rising most nodes.
        cost: of the forwards that all of them ran.
    """

    plain: Recording
    drafters: Sequence[Sequence[Recording]]
    cost: CostModel


def record(
    llm: LLM,
    settings: Sequence[Setting],
    work: Work,
    loads: Sequence[int],
    advance: Callable[[str], None],
    elsewhere: CostModel | None = None,
) -> dict[int, Recorded]:
    """Record settings and plain decoding under each load.

    All take turns, so that a slow moment of the machine hits all of them.

    Args:
        settings: of `recorded_settings`.
        advance: told of each request that has ended.
        elsewhere: costs of another machine, by which nodes are weighed, and which count.
    """
    runners = [Runner(llm, setting, elsewhere) for setting in (Setting(PLAIN), *settings)]
    attention = llm.cost.attention if llm.cost else None
    found: dict[int, Recorded] = {}
    for load in loads:
        serve(runners, work.under(load), advance)
        plain, *others = (runner.recording(len(work.prompts)) for runner in runners)
        steps = [step for runner in runners for step in runner.records]
        cost = elsewhere or cost_of_steps(steps, attention)
        if elsewhere is None:
            for runner, each in zip(runners, [plain, *others], strict=True):
                each.pace = runner.pace(each, cost)
        by_drafter = groupby(others, lambda each: (each.drafter, each.head))
        found[load] = Recorded(plain, [[*same] for _, same in by_drafter], cost)
    return found


def cost_of_steps(steps: Iterable[StepRecord], attention: Attention | None) -> CostModel:
    """A model of costs through steps that were run: the median of each size counts.

    Args:
        attention: what contexts add.
    """
    attention = attention or Attention()
    by_size: dict[int, list[tuple[int, float]]] = {}
    for step in steps:
        num_tokens = sum(tokens for tokens, _ in step.sizes)
        ms = max(step.times.score_ms - attention.ms(step.sizes), 0.1 * step.times.score_ms)
        by_size.setdefault(round(_SIZES_PER_OCTAVE * log2(num_tokens)), []).append((num_tokens, ms))
    enough = {p: seen for p, seen in by_size.items() if len(seen) >= _LEAST_STEPS} or by_size
    blocks = list[tuple[float, int, list[int]]]()  # milliseconds, how many steps, sizes
    for _, seen in sorted(enough.items()):
        block = median(ms for _, ms in seen), len(seen), [round(median(n for n, _ in seen))]
        while blocks and blocks[-1][0] >= block[0]:  # times never fall with size
            ms, count, sizes = blocks.pop()
            total = count + block[1]
            block = (ms * count + block[0] * block[1]) / total, total, [*sizes, *block[2]]
        blocks.append(block)
    return CostModel(tuple((size, ms) for ms, _, sizes in blocks for size in sizes), attention)


def recorded_settings(
    llm: LLM, drafters: Iterable[str], head: tuple[str, str] | None = None
) -> list[Setting]:
    """Each drafter with the most nodes that it is asked for, and with few; others are replayed.

    How often drafts hold can be replayed from the most, but what few of them take cannot.

    Args:
        head: kind and folder of a trained head besides.
    """
    asked, found = llm.options.num_draft_tokens, list[Setting]()
    for name, folder in [*((name, None) for name in drafters), *([head] if head else [])]:
        if name == AUTO:
            found.append(Setting(AUTO))
            continue
        most = asked or drafter_spec(name).num_draft_tokens
        sizes = [size for size in _FEW if size < most] + [most]
        found += [Setting(name, size, folder) for size in sizes]
    return found


def num_requests(work: Work, loads: Sequence[int], num_settings: int) -> int:
    """How often ``advance`` will be called."""
    return num_settings * sum(len(work.under(load).prompts) for load in loads)


def measured_rates(
    llm: LLM, settings: Sequence[Setting], load: Load, rounds: int, advance: Callable[[str], None]
) -> Mapping[Setting, list[float]]:
    """Tokens a second of each setting under a load in each of some rounds, all in turns."""
    runners = [Runner(llm, setting) for setting in settings]
    attention = llm.cost.attention if llm.cost else None
    rates: dict[Setting, list[float]] = {setting: [] for setting in settings}
    for number in range(rounds):
        start = number % len(runners)
        serve([*runners[start:], *runners[:start]], load, advance)
        steps = [step for runner in runners for step in runner.records]
        cost = cost_of_steps(steps, attention)
        for runner in runners:
            rates[runner.setting].append(runner.tokens_per_s(cost))
    return rates
