"""Options that several commands share, declared once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.core.errors import ConfigError
from foredraft.plan import BACKENDS, DEFAULT_MODEL, DEVICES, DTYPES, WEIGHTS, LoadOptions

if TYPE_CHECKING:
    from foredraft.llm import LLM

_MODEL, _DRAFT, _SAMPLING = "Model", "Drafting", "Sampling"


def _option(panel: str, name: str, text: str) -> Any:
    return typer.Option(name, help=text, rich_help_panel=panel)


Model = Annotated[
    str, _option(_MODEL, "--model", "A built-in name, a checkpoint directory, or a hub id.")
]
Dtype = Annotated[str, _option(_MODEL, "--dtype", f"One of {', '.join(DTYPES)}.")]
Weights = Annotated[
    str,
    _option(_MODEL, "--weights", f"One of {', '.join(WEIGHTS)}. int8 is faster and less precise."),
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
Drafter = Annotated[
    str,
    _option(_DRAFT, "--drafter", "ngram, draft-model, none, any installed one, or auto."),
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
Coupling = Annotated[
    str,
    _option(_SAMPLING, "--coupling", "seeded, or drawn: the same distribution, another text."),
]
RandomWeights = Annotated[
    str | None,
    _option(_MODEL, "--random-weights", "Instead: this shape, random weights, for timing only."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
JsonFile = Annotated[
    str | None, typer.Option("--json", help="Also write all figures to this file.")
]


def load_options(
    model: str = DEFAULT_MODEL,
    drafter_option: list[str] | None = None,
    **options: Any,
) -> LoadOptions:
    """The asked-for configuration from command-line values."""
    drafter_options = parse_drafter_options(drafter_option or ())
    return LoadOptions.of(model=model, drafter_options=drafter_options, **options)


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


def load_llm(options: LoadOptions, random_weights: str | None = None) -> LLM:
    """Load with a progress bar for whatever must be downloaded or converted first.

    Args:
        random_weights: the shape of a target to make up, instead of the model in ``options``.
    """
    if random_weights:
        from foredraft.bench.random_model import random_llm

        return random_llm(random_weights, options)
    from foredraft.cli.progress import RichProgress
    from foredraft.llm import LLM

    with RichProgress() as progress:
        return LLM.load(**vars(options), progress=progress)
