"""One model loaded in several ways, to be timed beside each other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import product

from foredraft.core.errors import ConfigError
from foredraft.kernels.instructions import SWITCH, available
from foredraft.llm import LLM
from foredraft.options import LoadOptions

ALL = "all"


@dataclass(frozen=True)
class Variant:
    """A way to load the target.

    Attributes:
        name: how tables call it.
        llm: holds the loaded target.
    """

    name: str
    llm: LLM


def instruction_names(asked: str | None) -> list[str | None]:
    """Names of instruction sets, with commas, or "all"; None: the machine's own choice.

    Raises:
        ConfigError: one that this machine has not.
    """
    if asked is None:
        return [None]
    here = [one.name for one in available()]
    names = here if asked == ALL else [name.strip() for name in asked.split(",")]
    for name in names:
        if name not in here:
            raise ConfigError(
                f"this machine runs no {name!r} kernels; --isa may be: {', '.join([*here, ALL])}"
            )
    return list(names)


def load_variants(
    options: LoadOptions,
    load: Callable[[LoadOptions], LLM],
    isa: str | None = None,
    formats: Sequence[str] = (),
    threads: Sequence[int | None] = (),
    caches: Sequence[str] = (),
) -> list[Variant]:
    """Every instruction set with every format of weights and cache and number of threads.

    Args:
        options: what they have in common.
        load: makes an LLM of options.
        isa: see `instruction_names`.
        formats: as ``weights`` of the options; none: theirs.
        threads: likewise.
        caches: likewise as ``cache_dtype``.
    """
    found: list[Variant] = []
    ways = product(
        instruction_names(isa),
        formats or [options.weights],
        caches or [options.cache_dtype],
        threads or [options.threads],
    )
    for name, weights, cache, count in ways:
        asked = replace(options, weights=weights, cache_dtype=cache, threads=count)
        with _switched_to(name) if name else nullcontext():
            llm = load(asked)
        parts = [name, weights if formats else None]
        parts += [f"{cache} cache"] if caches else []
        parts += [f"{count or 'own'} threads"] if threads else []
        found.append(Variant(" ".join(filter(None, parts)) or "target", llm))
    return found


@contextmanager
def _switched_to(name: str) -> Iterator[None]:
    """Kernels that are loaded meanwhile are of this instruction set."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[SWITCH]
        else:
            os.environ[SWITCH] = before
