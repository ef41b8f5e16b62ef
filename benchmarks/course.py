"""The prompts, drafters and forwards that several benchmarks share, as options."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli import options as o
from foredraft.core.errors import ConfigError
from foredraft.options import LoadOptions

if TYPE_CHECKING:
    from benchmarks.compare import RunLog, Trial
    from benchmarks.contenders import Contender
    from benchmarks.forwards import Size
    from foredraft.core.params import SamplingParams
    from foredraft.llm import LLM

Prompts = Annotated[
    str | None,
    typer.Option(help="JSON lines with category and turns; a few built-in ones otherwise."),
]
Limit = Annotated[int | None, typer.Option(min=1, help="At most this many prompts in all.")]
Rounds = Annotated[int, typer.Option(min=1, help="Samples of each figure.")]


@dataclass(frozen=True)
class Field:
    """The drafters that are compared.

    Attributes:
        drafters: names with commas; all that can run otherwise. Each has a fixed budget, except
            auto: the default drafter under the adaptive controller.
        variants: a further drafter with options of its own, such as "suffix shared=true".
    """

    drafters: str | None = None
    variants: Sequence[str] = ()


@dataclass(frozen=True)
class Course:
    """The prompts that every drafter continues, and how.

    Attributes:
        prompts: JSON lines with category and turns; a few built-in ones otherwise.
        limit: at most this many prompts in all.
        temperature: one or more, with commas.
        top_p: keep the most likely tokens up to this mass.
        top_k: keep the k most likely tokens; 0 keeps all.
        max_tokens: most tokens of a reply.
        seed: used at temperatures above 0.
    """

    prompts: str | None = None
    limit: int | None = None
    temperature: str = "0"
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 128
    seed: int = 0

    @property
    def temperatures(self) -> list[float]:
        return o.numbers("--temperature", self.temperature, float)

    def params(self) -> SamplingParams:
        """Parameters of all requests except the temperature."""
        from foredraft.core.params import SamplingParams

        return SamplingParams.of(
            max_tokens=self.max_tokens, seed=self.seed, top_p=self.top_p, top_k=self.top_k
        )


def loading(**fixed: Any) -> o.Derived:
    """`LoadOptions` as options of a benchmark: every field is one, but for those that are fixed."""
    return replace(o.model(**fixed), flags=None, shown=None, section=None)


ENTERED = loading(
    drafter="auto",
    drafter_options={},
    max_batch_size=1,
    prefix_caching=False,  # every drafter has to read its prompts
)


def with_draft_model(load: LoadOptions) -> LoadOptions:
    """The options under which the draft model is loaded, if one is named."""
    return replace(load, drafter="draft_model") if load.draft_model else load


def variants_of(entered: Field, draft_model: str | None) -> dict[str, dict[str, Any]]:
    """Which drafters run with which options, by name; the baseline is the first of them.

    ``entered.variants`` alone replace the drafters that run by default.
    """
    from foredraft.drafters import drafter_key, drafter_spec, usable_specs

    only, more = entered.drafters, entered.variants
    names = [*map(drafter_key, o.names(only))]
    if only is None and not more:
        for name, spec in usable_specs().items():
            if spec.trained is None and (draft_model or not spec.needs_draft_model):
                names.append(name)
    variants: dict[str, dict[str, Any]] = {name: {} for name in ("none", *names)}
    for text in more:
        name, *options = text.split() or [""]
        name = drafter_key(name)
        variants[" ".join((name, *options))] = o.parse_assignments("--variant", options)
    for name in variants:
        drafter = name.partition(" ")[0]
        if drafter != "auto":
            drafter_spec(drafter)  # raises with the nearest name when it is unknown
    return variants


def run_course(
    llm: LLM,
    contenders: Sequence[Contender],
    course: Course,
    log: RunLog | None = None,
    turns: int | None = None,
) -> list[Trial]:
    """Every contender on every prompt (see `run_trials`), with a progress bar."""
    from benchmarks.compare import run_trials
    from benchmarks.timing import PeerFailed
    from foredraft.bench.prompts import encoded_prompts
    from foredraft.cli.display import progress_bar

    params, temperatures = course.params(), course.temperatures
    room = llm.target.max_context - params.max_tokens
    prompts = [
        (prompt, ids)
        for prompt, ids in encoded_prompts(llm, course.prompts, course.limit)
        if len(ids) <= room
    ]
    if not prompts:
        raise ConfigError(f"no prompt leaves room for {params.max_tokens} tokens in the context")
    for contender in contenders:  # the first forward of a process is slower
        with suppress(PeerFailed):  # it fails again when it counts
            contender.run(prompts[0][1][-16:], replace(params, max_tokens=4))
    with progress_bar(len(prompts) * len(contenders) * len(temperatures)) as advance:
        return run_trials(contenders, prompts, params, temperatures, advance, log, turns)


@dataclass(frozen=True)
class Forwards:
    """The forwards that are timed.

    Attributes:
        tokens: tokens of a row in one forward, with commas.
        rows: rows of the batch, with commas.
        context: tokens already in the cache, with commas.
    """

    tokens: str = "1,2,4,8,16,32"
    rows: str = "1"
    context: str = "256"

    @property
    def contexts(self) -> list[int]:
        return o.numbers("--context", self.context, int, low=1)

    @property
    def sizes(self) -> list[Size]:
        from benchmarks.forwards import Size

        counts = o.numbers("--tokens", self.tokens, int, low=1)
        return [Size(r, n) for r in o.numbers("--rows", self.rows, int, low=1) for n in counts]


def timed(steppers: Sequence[Any], sizes: Sequence[Size], rounds: int) -> Sequence[Any]:
    """Figures of all steppers, with a progress bar."""
    from benchmarks.forwards import time_steps
    from foredraft.cli.display import progress_bar

    with progress_bar(rounds + 1) as advance:
        return time_steps(steppers, sizes, rounds, lambda: advance("timing"))
