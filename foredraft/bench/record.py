"""Runs of drafters on the user's prompts under a load: nodes and committed tokens of each step."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from foredraft.bench.load import Load, OurServer, ServedStep, serve
from foredraft.bench.prompts import encoded_prompts
from foredraft.control.adaptive import AdaptiveBudget
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.drafters import drafter_spec
from foredraft.llm import LLM
from foredraft.options import LoadOptions

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


@dataclass(frozen=True)
class Recording:
    """The recording of one setting.

    Attributes:
        steps: that read no prompt, if there are enough.
        prompts: the number of the prompt of each request, by its id.
        texts: of each prompt that ended, by its number.
        first_ms: until the first token of a request that joins the others, the median.
        reason: why the controller drafted nothing in its last step, if it did not.
        joules: of a token, where the machine tells it.
    """

    setting: Setting
    load: int
    steps: Sequence[ServedStep]
    prompts: Mapping[int, int]
    texts: Mapping[int, Sequence[int]]
    first_ms: float
    reason: str = ""
    joules: float | None = None

    def num_different(self, plain: Recording) -> int:
        """Prompts whose text is not the plain one."""
        both = self.texts.keys() & plain.texts.keys()
        return sum(self.texts[number] != plain.texts[number] for number in both)

    def timed(self) -> Iterator[tuple[ServedStep, float]]:
        """Each step with its milliseconds.

        A step that the machine interrupts counts as if it had not been. There are few in a run, but
        one of 50 ms is a twentieth of a second's steps, and it hits one setting and not another.
        """
        by_size = defaultdict[int, list[float]](list)
        for step in self.steps:
            by_size[step.num_rows + step.drafted].append(step.wall_ms)
        most = {size: _INTERRUPTED * median(ms) for size, ms in by_size.items()}
        for step in self.steps:
            yield step, min(step.wall_ms, most[step.num_rows + step.drafted])


@dataclass(frozen=True)
class Work:
    """The requests that all settings run.

    Attributes:
        params: of all requests; their seeds differ.
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


_ENOUGH = 8
"""Steps that each setting must have of a kind: else the next kind counts, for all of them."""


def counted(step: ServedStep, reads: bool) -> bool:
    """Whether a step counts: rows decode in it, and it reads no prompt, unless ``reads``.

    Under many short requests a prompt is read in nearly every step.
    """
    return step.num_rows > 0 and (reads or step.is_decoding)


class Runner(OurServer):
    """Runs loads with one setting, and records them as a `Recording`."""

    def __init__(self, llm: LLM, setting: Setting) -> None:
        options = setting.load_options(llm.options)
        super().__init__(
            setting.flags,
            lambda load, note: llm.with_drafter(options, trace=note, is_apart=True),
        )
        self.setting = setting

    def recording(self, num_prompts: int, reads: bool = False) -> Recording:
        """The recording of the load that has ended.

        Args:
            num_prompts: different ones.
            reads: steps that read a prompt count, too.
        """
        served = self.served
        control = self.llm.controller
        plan = control.plan if isinstance(control, AdaptiveBudget) else None
        return Recording(
            self.setting,
            self._load.concurrency,
            [step for step in served.steps if counted(step, reads)],
            {request_id: number % num_prompts for request_id, number in self.numbers.items()},
            {each.number: each.token_ids for each in served.finished},
            1e3 * median(each.first_s for each in served.finished),
            "" if plan is None or plan.budgets else plan.reason,
            served.token_joules,
        )


def record(
    llm: LLM,
    settings: Sequence[Setting],
    work: Work,
    loads: Sequence[int],
    advance: Callable[[str], None],
) -> dict[int, list[Recording]]:
    """Run plain decoding, and then settings, under each load.

    All take turns, so that a slow moment of the machine hits all of them.

    Args:
        settings: of `recorded_settings`.
        advance: called with a line of progress at the end of each request.
    """
    runners = [Runner(llm, setting) for setting in (Setting(PLAIN), *settings)]
    found = dict[int, list[Recording]]()
    for load in loads:
        serve(runners, work.under(load), advance)
        fewest = min(sum(counted(s, False) for s in each.served.steps) for each in runners)
        reads = fewest < _ENOUGH
        found[load] = [runner.recording(len(work.prompts), reads) for runner in runners]
    return found


def recorded_settings(llm: LLM, drafters: Iterable[Setting]) -> list[Setting]:
    """Each drafter with the most nodes that it is asked for, and with few."""
    asked, found = llm.options.num_draft_tokens, list[Setting]()
    for each in drafters:
        if each.drafter == AUTO:
            found.append(each)
            continue
        most = asked or drafter_spec(each.drafter).num_draft_tokens
        sizes = [size for size in _FEW if size < most] + [most]
        found += [replace(each, num_draft_tokens=size) for size in sizes]
    return found
