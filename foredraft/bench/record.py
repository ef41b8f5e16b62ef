"""Runs of drafters on the user's prompts under a load: nodes and committed tokens of each step.

Acceptance depends on text, model and drafter; step times depend on machine and load. So what was
recorded here can be priced for another load or machine, which `outlook` does.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from statistics import median
from typing import Any

from foredraft.bench.load import Load, OurServer, serve
from foredraft.bench.prompts import encoded_prompts
from foredraft.control.times import DraftTimes
from foredraft.core.cost import Attention, CostModel
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.core.record import StepRecord, StepTimes
from foredraft.drafters import drafter_spec
from foredraft.llm import LLM
from foredraft.options import LoadOptions
from foredraft.trace.format import TracedRow, TracedStep
from foredraft.trace.record import Tracer
from foredraft.trace.replay import is_decoding

AUTO, PLAIN = "auto", "none"
_FEW = (2, 4)
"""Numbers of nodes recorded besides the drafter's most."""
_INTERRUPTED = 1.25
"""A step that takes this many times its usual time was interrupted by the machine."""


@dataclass(frozen=True)
class Setting:
    """A setting to run: a drafter with its options and its number of nodes.

    Attributes:
        drafter: its name; "auto" and "none" among them.
        num_draft_tokens: a step; None: the controller chooses.
        options: the drafter's own, as pairs of name and value.
    """

    drafter: str
    num_draft_tokens: int | None = None
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """The drafter, with its options."""
        return " ".join((self.drafter, *(f"{name}={value}" for name, value in self.options)))

    @property
    def flags(self) -> str:
        """As options of all commands."""
        flags = [f"--drafter {self.drafter.replace('_', '-')}"]
        flags += [f"--drafter-option {shlex.quote(f'{n}={value}')}" for n, value in self.options]
        if self.num_draft_tokens is not None:
            flags.append(f"--num-draft-tokens {self.num_draft_tokens}")
        return " ".join(flags)

    def load_options(self, loaded: LoadOptions) -> LoadOptions:
        """Those of a view on a loaded model."""
        model = loaded.draft_model
        if self.drafter in (AUTO, PLAIN) or drafter_spec(self.drafter).draft_model == "none":
            model = None
        return replace(
            loaded,
            drafter=self.drafter,
            draft_model=model,
            num_draft_tokens=self.num_draft_tokens,
            drafter_options=dict(self.options),
            prefix_caching=False,  # each request has to read its prompt
        )


@dataclass
class Recording:
    """The recording of one setting.

    Attributes:
        setting: drafter and nodes.
        load: requests at once.
        takes_rounds: whether each token of a draft takes a forward of its own.
        replies: the steps of each request that read no prompt.
        prompts: the number of the prompt of each request.
        times: of the drafter.
        rest_ms: of each step by its rows, beside drafter and forward.
        prompt_tokens: of each request.
        pace: measured step time over the cost models' prediction.
        tokens_per_s: measured in full steps that read no prompt; 0.0: there was none.
        texts: of each prompt that ended, by its number.
        reason: why the controller drafted nothing in its last step, if it did not.
    """

    setting: Setting
    load: int = 1
    takes_rounds: bool = False
    replies: list[list[TracedRow]] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    times: DraftTimes = field(default_factory=DraftTimes)
    rest_ms: list[float] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    pace: float = 1.0
    tokens_per_s: float = 0.0
    texts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    reason: str = ""

    @property
    def most_nodes(self) -> int | None:
        """Nodes that it was asked for; None: the controller chose, by this load."""
        return self.setting.num_draft_tokens

    def asked_for(self, most_nodes: int | None) -> Setting:
        """The setting with at most that many nodes, or with the controller's choice."""
        return replace(self.setting, num_draft_tokens=most_nodes if self.most_nodes else None)

    def num_different(self, plain: Recording) -> int:
        """Prompts whose text is not the plain one."""
        both = self.texts.keys() & plain.texts.keys()
        return sum(self.texts[number] != plain.texts[number] for number in both)

    def note(self, times: StepTimes, rows: Sequence[tuple[bool, int]]) -> None:
        """Record the drafter's time in a step without prefill.

        Args:
            rows: of each row whether it was asked for drafts, and its nodes.
        """
        num_asked, deepest = sum(asked for asked, _ in rows), max(nodes for _, nodes in rows)
        num_rounds = deepest if self.takes_rounds else 1
        self.times.observe(
            *(
                self.setting.drafter,
                num_asked,
                times.draft_ms,
                len(rows),
                times.learn_ms,
                num_rounds,
            )
        )

    def draft_ms(self, num_rows: int, deepest: int) -> float:
        """Drafting time of a step with ``num_rows`` rows, the largest draft with ``deepest``
        nodes."""
        round_ms = self.times.round_ms(self.setting.drafter, num_rows) or 0.0
        num_rounds = deepest if self.takes_rounds else 1
        return num_rounds * round_ms + self.times.follow_ms(self.setting.drafter, num_rows)

    def step_rest_ms(self, num_rows: int) -> float:
        """Time of a step beside drafter and forward."""
        return num_rows * median(self.rest_ms) if self.rest_ms else 0.0

    def step_ms(self, step: StepRecord, cost: CostModel) -> float:
        """Step time by the cost models."""
        rows = step.rows
        deepest = max(len(row.proposal.tree) for row in rows)
        beside = self.draft_ms(len(rows), deepest) + self.step_rest_ms(len(rows))
        return cost.ms(step.sizes) + beside


@dataclass(frozen=True)
class Work:
    """The requests that all settings run.

    Attributes:
        prompts: token ids.
        params: of all requests; their seeds differ.
        categories: of the prompts.
    """

    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    categories: Sequence[str] = ()

    @classmethod
    def of(cls, llm: LLM, path: str | None, limit: int | None, params: SamplingParams) -> Work:
        """Prompts of a file, or the built-in ones.

        Raises:
            ConfigError: no prompt fits.
        """
        room = llm.target.max_context - params.max_tokens
        found = encoded_prompts(llm, path, limit)
        fitting = [(prompt.category, ids) for prompt, ids in found if len(ids) <= room]
        if not fitting:
            raise ConfigError(f"no prompt leaves room for {params.max_tokens} tokens")
        categories, prompts = zip(*fitting, strict=True)
        return cls(prompts, params, categories)

    def under(self, load: int) -> Load:
        """The load of ``load`` requests at once, until each prompt has been answered."""
        number = max(len(self.prompts), load)
        prompts = [self.prompts[i % len(self.prompts)] for i in range(number)]
        return Load(prompts, self.params, load, stays_full=True)


class Runner(OurServer):
    """Runs loads with one setting, and records them as a `Recording`.

    Args:
        llm: holds the models.

    Attributes:
        records: of all steps under the load.
    """

    records: list[StepRecord]

    def __init__(self, llm: LLM, setting: Setting) -> None:
        super().__init__(setting.flags, self._new_llm)
        self.setting, self._loaded = setting, llm

    def _new_llm(self, load: int, note: Callable[[StepRecord], None]) -> LLM:
        self.records = []

        def noted(record: StepRecord) -> None:
            note(record)
            self.records.append(record)

        options = self.setting.load_options(self._loaded.options)
        return self._loaded.with_drafter(options, trace=noted, is_apart=True)

    def recording(self, num_prompts: int) -> Recording:
        """The recording of the load that has ended.

        Args:
            num_prompts: different ones.
        """
        drafters = self.llm.policy.drafters.values()
        in_rounds = [each.traits.round_share is not None for each in drafters]
        found = Recording(self.setting, self._load.concurrency, in_rounds == [True])
        found.texts = {each.number: each.token_ids for each in self.served.finished}
        plan = getattr(self.llm.controller, "plan", None)
        found.reason = "" if plan is None or plan.budgets else plan.reason
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

    def time(self, recording: Recording, cost: CostModel) -> None:
        """Set ``pace`` and ``tokens_per_s`` of a recording of this run.

        The pace is that of the whole run, so that the prediction for the recorded setting equals
        the measurement. Models follow the machine from step to step and forget, or take the median
        of what they saw; either may be some hundredths off in all steps of a run.
        """
        said_ms, took_ms, tokens = self._totals(recording, cost)
        recording.pace = took_ms / said_ms if said_ms else 1.0
        recording.tokens_per_s = 1e3 * tokens / took_ms if took_ms else 0.0

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
        drafters: the other recordings, each drafter's by rising most nodes.
        cost: of the forwards that all of them ran.
    """

    plain: Recording
    drafters: Sequence[Sequence[Recording]]
    cost: CostModel

    def elsewhere(self, cost: CostModel) -> Recorded:
        """The same steps on a machine whose forwards take that long.

        Without auto: the controller chose by the times of this machine.
        """
        drafters = [
            [replace(each, pace=1.0, tokens_per_s=0.0) for each in same]
            for same in self.drafters
            if same[0].setting.drafter != AUTO
        ]
        return Recorded(replace(self.plain, pace=1.0, tokens_per_s=0.0), drafters, cost)


def record(
    llm: LLM,
    settings: Sequence[Setting],
    work: Work,
    loads: Sequence[int],
    advance: Callable[[str], None],
) -> tuple[dict[int, Recorded], CostModel]:
    """Run settings and plain decoding under each load; also the costs of all their forwards.

    All take turns, so that a slow moment of the machine hits all of them.

    Args:
        settings: of `recorded_settings`.
        advance: told of each request that has ended.
    """
    runners = [Runner(llm, setting) for setting in (Setting(PLAIN), *settings)]
    attention = llm.cost.attention if llm.cost else None
    found, all_steps = dict[int, Recorded](), list[StepRecord]()
    for load in loads:
        serve(runners, work.under(load), advance)
        plain, *others = (runner.recording(len(work.prompts)) for runner in runners)
        steps = [step for runner in runners for step in runner.records]
        all_steps += steps
        cost = cost_of_steps(steps, attention)
        for runner, each in zip(runners, [plain, *others], strict=True):
            runner.time(each, cost)
        by_drafter = groupby(others, lambda each: replace(each.setting, num_draft_tokens=None))
        found[load] = Recorded(plain, [[*same] for _, same in by_drafter], cost)
    return found, cost_of_steps(all_steps, attention)


def cost_of_steps(steps: Iterable[StepRecord], attention: Attention | None) -> CostModel:
    """The model of costs through steps that were run.

    Args:
        attention: what contexts add.
    """
    attention = attention or Attention()
    return CostModel.through(
        [
            (
                sum(tokens for tokens, _ in step.sizes),
                max(step.times.score_ms - attention.ms(step.sizes), 0.1 * step.times.score_ms),
            )
            for step in steps
        ],
        attention,
    )


def recorded_settings(llm: LLM, drafters: Iterable[Setting]) -> list[Setting]:
    """Each drafter with the most nodes that it is asked for, and with few; others are replayed.

    How often drafts hold can be replayed from the most, but what few of them take cannot.
    """
    asked, found = llm.options.num_draft_tokens, list[Setting]()
    for each in drafters:
        if each.drafter == AUTO:
            found.append(each)
            continue
        most = asked or drafter_spec(each.drafter).num_draft_tokens
        sizes = [size for size in _FEW if size < most] + [most]
        found += [replace(each, num_draft_tokens=size) for size in sizes]
    return found


def num_requests(work: Work, loads: Sequence[int], num_settings: int) -> int:
    """How often ``advance`` will be called."""
    return num_settings * sum(len(work.under(load).prompts) for load in loads)
