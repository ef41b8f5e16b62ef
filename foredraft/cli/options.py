"""Options that several commands share, declared once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from foredraft.core.errors import ConfigError
from foredraft.options import BACKENDS, DEFAULT_MODEL, DEVICES, DTYPES, WEIGHTS, LoadOptions

if TYPE_CHECKING:
    from foredraft.core.params import SamplingParams
    from foredraft.engine.engine import Trace
    from foredraft.llm import LLM
    from foredraft.trace.files import TraceFile
    from foredraft.trace.record import Tracer

_MODEL, _DRAFT, _SAMPLING = "Model", "Drafting", "Sampling"


def _option(panel: str, name: str, text: str) -> Any:
    return typer.Option(name, help=text, rich_help_panel=panel)


Model = Annotated[
    str, _option(_MODEL, "--model", "A built-in name, a checkpoint directory, or a hub id.")
]
Dtype = Annotated[str, _option(_MODEL, "--dtype", f"One of {', '.join(DTYPES)}.")]
Weights = Annotated[
    str,
    _option(
        _MODEL, "--weights", f"One of {', '.join(WEIGHTS)}. int8 and int4 are faster, less precise."
    ),
]
Device = Annotated[str, _option(_MODEL, "--device", f"One of {', '.join(DEVICES)}.")]
Backend = Annotated[str, _option(_MODEL, "--backend", f"One of {', '.join(BACKENDS)}.")]
Exact = Annotated[
    bool, _option(_MODEL, "--exact", "Insist on the same text bit for bit; see the documentation.")
]
Threads = Annotated[
    int | None, _option(_MODEL, "--threads", "CPU threads; one a core when not given.")
]
MaxContext = Annotated[
    int | None, _option(_MODEL, "--max-context", "Most tokens of prompt and reply together.")
]
CacheMemory = Annotated[
    str | None,
    _option(_MODEL, "--cache-memory", "Most memory of the cache, such as 2GB; else a quarter."),
]
PrefixCaching = Annotated[
    bool,
    _option(
        _MODEL,
        "--prefix-caching/--no-prefix-caching",
        "Do not read again what an earlier prompt began with, too.",
    ),
]
Drafter = Annotated[
    str,
    _option(_DRAFT, "--drafter", "ngram, draft_model, none, any installed one, or auto."),
]
DraftModel = Annotated[
    str | None,
    _option(_DRAFT, "--draft-model", "A smaller model of the same vocabulary, for draft-model."),
]
NumDraftTokens = Annotated[
    int | None,
    _option(_DRAFT, "--num-draft-tokens", "Most draft tokens a step; 0 is plain decoding."),
]
DrafterOptions = Annotated[
    list[str] | None,
    _option(_DRAFT, "--drafter-option", "NAME=VALUE for the drafter; may be repeated."),
]
Temperature = Annotated[
    float, _option(_SAMPLING, "--temperature", "0 always takes the most likely token.")
]
TopK = Annotated[int, _option(_SAMPLING, "--top-k", "Keep the k most likely tokens; 0 keeps all.")]
TopP = Annotated[
    float, _option(_SAMPLING, "--top-p", "Keep the most likely tokens up to this mass.")
]
MinP = Annotated[
    float, _option(_SAMPLING, "--min-p", "Drop tokens below this fraction of the likeliest one.")
]
Seed = Annotated[
    int | None, _option(_SAMPLING, "--seed", "The same seed gives the same text, drafted or not.")
]
MaxTokens = Annotated[int, _option(_SAMPLING, "--max-tokens", "Most tokens to generate.")]
Stop = Annotated[
    list[str] | None, _option(_SAMPLING, "--stop", "Text that ends the reply; may be repeated.")
]
RepetitionPenalty = Annotated[
    float, _option(_SAMPLING, "--repetition-penalty", "Above 1: less of what is there already.")
]
PresencePenalty = Annotated[
    float, _option(_SAMPLING, "--presence-penalty", "Off the logits of tokens in the reply.")
]
FrequencyPenalty = Annotated[
    float, _option(_SAMPLING, "--frequency-penalty", "Likewise, for each time they are in it.")
]
MinTokens = Annotated[
    int, _option(_SAMPLING, "--min-tokens", "Nothing ends the reply before it has so many.")
]
JsonSchema = Annotated[
    str | None, _option(_SAMPLING, "--json-schema", "The reply is JSON by the schema in this file.")
]
Regex = Annotated[
    str | None, _option(_SAMPLING, "--regex", "The reply matches this regular expression.")
]
Choices = Annotated[
    list[str] | None, _option(_SAMPLING, "--choice", "The reply is one of these; to be repeated.")
]
Coupling = Annotated[
    str,
    _option(_SAMPLING, "--coupling", "seeded, or drawn: the same distribution, another text."),
]
RandomWeights = Annotated[
    str | None,
    _option(_MODEL, "--random-weights", "Instead: this shape, random weights, for timing only."),
]
Prompts = Annotated[
    str | None,
    typer.Option(help="JSON lines with id, category and turns; a few built-in ones otherwise."),
]
Limit = Annotated[int | None, typer.Option(min=1, help="At most this many prompts in all.")]
MaxStepTokens = Annotated[
    int | None,
    _option(
        _MODEL,
        "--max-step-tokens",
        "Most tokens of prompts read in one step; fewer keep the pace of replies. Else 512.",
    ),
]
TraceTo = Annotated[
    Path | None,
    typer.Option("--trace", help="Write what each step did to this file; see `foredraft trace`."),
]
InstructionSets = Annotated[
    str | None,
    typer.Option("--isa", help="Instruction sets with commas, or all that this machine runs."),
]
Formats = Annotated[
    str | None,
    typer.Option(help="Several of --weights, with commas: each is loaded and timed."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
JsonFile = Annotated[
    str | None, typer.Option("--json", help="Also write all figures to this file.")
]


@dataclass(frozen=True)
class ModelOptions:
    """Which target, and how it runs."""

    model: Model = DEFAULT_MODEL
    dtype: Dtype = "auto"
    weights: Weights = "auto"
    device: Device = "auto"
    backend: Backend = "auto"
    threads: Threads = None
    exact: Exact = False
    max_context: MaxContext = None
    cache_memory: CacheMemory = None
    prefix_caching: PrefixCaching = True


@dataclass(frozen=True)
class DraftOptions:
    """What drafts for it."""

    drafter: Drafter = "auto"
    draft_model: DraftModel = None
    num_draft_tokens: NumDraftTokens = None
    drafter_option: DrafterOptions = None


@dataclass(frozen=True)
class SamplingOptions:
    """What to draw, and when to stop."""

    temperature: Temperature = 0.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    seed: Seed = None
    max_tokens: MaxTokens = 256
    stop: Stop = None
    coupling: Coupling = "seeded"
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: PresencePenalty = 0.0
    frequency_penalty: FrequencyPenalty = 0.0
    min_tokens: MinTokens = 0
    json_schema: JsonSchema = None
    regex: Regex = None
    choice: Choices = None

    def params(self, **more: Any) -> SamplingParams:
        """The request that these options describe.

        Raises:
            ConfigError: a value that cannot be used.
        """
        from foredraft.cli.grammar import one_grammar
        from foredraft.core.params import SamplingParams

        given = vars(self) | {"stop": tuple(self.stop or ())}
        names = ("json_schema", "regex", "choice")
        given["grammar"] = one_grammar(**{name: given.pop(name) for name in names})
        return SamplingParams.of(**given | more)


def with_option_objects(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose option objects are spelled out on the command line.

    A parameter whose type is a dataclass stands for that class's fields, each an option; the
    command is called with the object. So options that go together are declared once.
    """
    groups: dict[str, type[Any]] = {}
    parameters: list[Parameter] = []
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in signature(command).parameters.items():
        if isinstance(hints[name], type) and is_dataclass(hints[name]):
            groups[name] = hints[name]
            parameters += _fields_as_parameters(hints[name])
        else:
            kind = Parameter.KEYWORD_ONLY
            parameters.append(parameter.replace(annotation=hints[name], kind=kind))

    def run(**given: Any) -> None:
        objects = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**given, **objects)

    run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, __name__
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def flags(group: type[Any]) -> dict[str, str]:
    """How the fields of an option object are spelled on the command line."""
    hints = get_type_hints(group, include_extras=True)
    # Within `Annotated` typer reads the first argument as a name, and keeps it as the default.
    return {f.name: str(hints[f.name].__metadata__[0].default) for f in fields(group)}


def _fields_as_parameters(group: type[Any]) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(f.name, Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in fields(group)
    ]


def load_options(*groups: ModelOptions | DraftOptions, **more: Any) -> LoadOptions:
    """The asked-for configuration from command-line values; ``more`` stands above ``groups``."""
    options: dict[str, Any] = {}
    for group in groups:
        options |= vars(group)
    options["drafter_options"] = parse_drafter_options(options.pop("drafter_option", None) or ())
    return LoadOptions.of(**options | more)


def parse_drafter_options(texts: Iterable[str]) -> dict[str, int | float | str]:
    """NAME=VALUE texts as a drafter takes them.

    Raises:
        ConfigError: one is not of that form.
    """
    return dict(map(_parse_option, texts))


def _parse_option(text: str) -> tuple[str, int | float | str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"--drafter-option {text!r} is not NAME=VALUE")
    for convert in (int, float):
        try:
            return name.replace("-", "_"), convert(value)
        except ValueError:
            continue
    return name.replace("-", "_"), value


@contextmanager
def load_traced(options: LoadOptions, path: Path | None, **about: Any) -> Iterator[LLM]:
    """Load an LLM whose steps are written to ``path``, if there is one, until the end.

    Args:
        **about: more for the first line of the trace.
    """
    if path is None:
        yield load_llm(options)
        return
    from foredraft.trace.files import TraceFile

    with TraceFile(path) as file:
        tracer = file.tracer()
        llm = load_llm(options, trace=tracer)
        begin_trace(file, tracer, llm, **about)
        yield llm


def begin_trace(file: TraceFile, tracer: Tracer, llm: LLM, **about: Any) -> None:
    """Write the first line, now that it is known what runs."""
    tracer.read_with(llm.tokenizer)
    file.begin(
        model=llm.options.model,
        drafter=llm.drafter_name,
        num_draft_tokens=llm.options.num_draft_tokens,
        **about,
    )


def load_llm(
    options: LoadOptions, random_weights: str | None = None, trace: Trace | None = None
) -> LLM:
    """Load with a progress bar for whatever must be downloaded or converted first.

    Args:
        random_weights: the shape of a target to make up, instead of the model in ``options``.
        trace: told of every step of a model that is loaded.
    """
    if random_weights:
        from foredraft.bench.random_model import random_llm

        return random_llm(random_weights, options)
    from foredraft.cli.progress import RichProgress
    from foredraft.llm import LLM

    with RichProgress() as progress:
        return LLM.load(**vars(options), progress=progress, trace=trace)
