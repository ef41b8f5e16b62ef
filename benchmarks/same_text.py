"""``same-text``: whether drafts or company change a text, here and in llama.cpp.

Each engine continues the same prompts alone, with drafts, and several at once, and every text is
compared with the same engine's text alone. llama.cpp runs as llama-cpp-python has it: its own
loop with a draft model and with prompt lookup, and sequences in one batch.
At temperatures above 0 every reply has the seed that it has alone; a token takes one random number
in either engine, with drafts or without (llama.cpp's sampler is made anew for each reply, and its
tokens are those that a ``std::mt19937`` of the seed draws from the logits, in order of the ids).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Protocol

import typer

from benchmarks.course import Course, loading, with_draft_model
from benchmarks.llama_batch import LlamaContext
from benchmarks.llama_cpp import LlamaDrafts, gguf_of, open_llama
from benchmarks.peer_process import Peer
from foredraft.bench.prompts import encoded_prompts
from foredraft.bench.report import Report, Table, check_outputs
from foredraft.cli import options as o
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.engine.policy import Trace
from foredraft.llm import LLM
from foredraft.options import LoadOptions

ALONE, AGAIN, COMPANY = "alone", "alone, again", "at once"
MODEL, LOOKUP = "draft model", "prompt lookup"
Texts = list[list[int]]
_ENTERED = loading(drafter="auto", drafter_options={}, max_batch_size=8, prefix_caching=False)
_DRAFTS = 4
_EVEN = 1_000_000  # a limit, with which prompts come evenly over the categories


class Engine(Protocol):
    """Writes texts in several ways, of which the first is the plain one."""

    @property
    def name(self) -> str: ...
    @property
    def ways(self) -> Sequence[str]: ...

    def write(self, way: str, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Texts:
        """The replies to prompts; those of one call are company where ``way`` says so."""
        ...


class Ours:
    """foredraft on a loaded model, drafting in several ways.

    Args:
        drafters: by way, its drafter; the first is asked of several requests at once as well.
        trace: is given every step of requests that run alone.
    """

    name = "foredraft"

    def __init__(
        self, loaded: LLM, drafters: Mapping[str, LoadOptions], trace: Trace | None = None
    ) -> None:
        plain = replace(next(iter(drafters.values())), draft_model=None, drafter_options={})
        options = {ALONE: replace(plain, drafter="none"), **drafters}
        llms = {way: loaded.with_drafter(each, trace=trace) for way, each in options.items()}
        first, asked = next(iter(drafters.items()))
        self._at_once = {COMPANY: llms[ALONE], f"{COMPANY}, {first}": loaded.with_drafter(asked)}
        self._alone = llms | {AGAIN: llms[ALONE]}
        self.ways = (ALONE, AGAIN, *drafters, *self._at_once)

    def write(self, way: str, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Texts:
        asked = [list(ids) for ids in prompts]
        if way in self._at_once:
            results = self._at_once[way].generate(asked, params)
        else:
            results = [self._alone[way].generate([ids], params)[0] for ids in asked]
        return [list(result.token_ids) for result in results]


class LlamaCppTexts:
    """llama.cpp on the same files, in the process that has it.

    Args:
        target, draft: GGUF files.
        context: most tokens of prompt and reply.
        stop_ids: tokens that end a reply.
        at_once: most sequences of a batch.
    """

    def __init__(
        self, target: str, draft: str, context: int, threads: int, stop_ids: Sequence[int],
        at_once: int,
    ) -> None:  # fmt: skip
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        self._stop_ids = frozenset(stop_ids)
        # Scores of all tokens in every way, as drafts need them: one graph for all.
        self._llama = open_llama(target, "", context, threads, logits_all=True)
        small = open_llama(draft, "", context, threads)
        self._many = LlamaContext(self._llama, at_once, context, threads)
        self._drafts = {MODEL: LlamaDrafts(small, _DRAFTS), LOOKUP: LlamaPromptLookupDecoding()}

    def write(self, way: str, prompts: Sequence[Sequence[int]], **sampling: Any) -> Texts:
        """See `Engine`; of the sampling parameters those that are given."""
        params = SamplingParams.of(**sampling)
        if way == COMPANY:
            return self._at_once(prompts, params)
        self._llama.draft_model = self._drafts.get(way)
        return [[*self._tokens(ids, params)] for ids in prompts]

    def _tokens(self, ids: Sequence[int], params: SamplingParams) -> Iterator[int]:
        self._llama.n_tokens = 0  # nothing is reused: a prefix would be read in another batch
        self._llama.set_seed(params.seed)
        written = self._llama.generate(
            list(ids), temp=params.temperature, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0
        )
        for token in islice(written, params.max_tokens):
            yield token
            if token in self._stop_ids:
                return

    def _at_once(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Texts:
        """Prompts are read one after the other; then a decode is one token of every sequence."""
        many, samplers, texts = self._many, [], []
        many.clear()
        for place, ids in enumerate(prompts):
            self._llama.set_seed(params.seed)
            samplers.append(
                self._llama._init_sampler(
                    temp=params.temperature, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0
                )
            )
            texts.append([self._drawn(samplers[place], many.read(ids, place))])
        while running := [i for i, text in enumerate(texts) if self._goes_on(text, params)]:
            many.run((texts[i][-1], len(prompts[i]) + len(texts[i]) - 1, i, True) for i in running)
            for at, i in enumerate(running):
                texts[i].append(self._drawn(samplers[i], at))
        return texts

    def _drawn(self, sampler: Any, index: int) -> int:
        api = self._many.api
        return int(api.llama_sampler_sample(sampler.sampler, self._many.handle, index))

    def _goes_on(self, text: Sequence[int], params: SamplingParams) -> bool:
        return text[-1] not in self._stop_ids and len(text) < params.max_tokens


class Theirs:
    """llama.cpp in a process of its own.

    Args:
        python: of an environment that has it; None: this one has.
        options: of `LlamaCppTexts`.
    """

    name = "llama.cpp"
    ways = (ALONE, AGAIN, MODEL, LOOKUP, COMPANY)

    def __init__(self, python: Path | None, **options: Any) -> None:
        self._peer = Peer(LlamaCppTexts, self.name, python, **options)

    def write(self, way: str, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Texts:
        sampling = {name: getattr(params, name) for name in ("max_tokens", "temperature", "seed")}
        asked = [list(ids) for ids in prompts]
        texts: Texts = self._peer.ask(call="write", way=way, prompts=asked, **sampling)
        return texts


class TextLog:
    """Texts as they are written, in JSON lines; a run goes on where it was stopped."""

    def __init__(self, path: Path | None, compared: Mapping[str, Any]) -> None:
        self._path = path
        lines = path.read_text().splitlines(keepends=True) if path and path.exists() else []
        whole = [line for line in lines if line.endswith("\n")]  # a kill may have cut the last
        first, *self._lines = [json.loads(line) for line in whole] or [dict(compared)]
        if first != json.loads(json.dumps(compared)):
            raise ConfigError(f"{path} is of another comparison: name a new file")
        if path:
            path.write_text("".join(whole) or json.dumps(first) + "\n")

    def find(self, **key: Any) -> list[int] | None:
        found = [line["tokens"] for line in self._lines if line | key == line]
        return found[0] if found else None

    def add(self, tokens: list[int], **key: Any) -> None:
        self._lines.append(key | {"tokens": tokens})
        if self._path:
            with self._path.open("a") as file:
                file.write(json.dumps(self._lines[-1]) + "\n")


@dataclass(frozen=True)
class Parted:
    """How many texts of a way are not those of the engine alone.

    Attributes:
        texts: compared.
        differ: not equal.
        first: median position of the first other token, over those that differ; None: none does.
        tokens: of the texts alone.
    """

    engine: str
    way: str
    temperature: float
    texts: int
    differ: int
    first: float | None
    tokens: int

    @classmethod
    def of(cls, engine: str, way: str, temperature: float, alone: Texts, other: Texts) -> Parted:
        firsts = [_first_difference(a, b) for a, b in zip(alone, other, strict=True) if a != b]
        return cls(
            engine, way, temperature, len(alone), len(firsts), median(firsts) if firsts else None,
            sum(map(len, alone)),
        )  # fmt: skip


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def write_all(
    engine: Engine,
    prompts: Mapping[str, Sequence[int]],
    params: SamplingParams,
    at_once: int,
    log: TextLog,
) -> list[Parted]:
    """Every way of an engine at one temperature, so far as the log has not got it."""
    names, found = [*prompts], {}
    for way in engine.ways:
        size = at_once if way.startswith(COMPANY) else 1
        texts: dict[str, list[int]] = {}
        for first in range(0, len(names), size):
            group = names[first : first + size]
            key = {"engine": engine.name, "way": way, "temperature": params.temperature}
            known = {name: log.find(prompt=name, **key) for name in group}
            if None in known.values():
                written = engine.write(way, [prompts[name] for name in group], params)
                known = dict(zip(group, written, strict=True))
                for name, tokens in zip(group, written, strict=True):
                    log.add(tokens, prompt=name, **key)
            texts |= {name: tokens for name, tokens in known.items() if tokens is not None}
        found[way] = [texts[name] for name in names]
    alone = found[engine.ways[0]]
    return [
        Parted.of(engine.name, way, params.temperature, alone, found[way])
        for way in engine.ways[1:]
    ]


def parted_table(found: Sequence[Parted]) -> Table:
    """A line for each engine, way and temperature."""
    rows = [vars(each) | {"share": each.differ / each.texts} for each in found]
    return Table("texts", rows, _COLUMNS)


_COLUMNS = {
    "engine": "{engine}",
    "T": "{temperature:g}",
    "beside the text alone": "{way}",
    "texts": "{texts:d}",
    "differ": "{differ:d}",
    "share": "{share:.0%}",
    "first other token (median)": "{first:.0f}",
}


@o.with_options
def same_text(
    load: Annotated[LoadOptions, _ENTERED],
    course: Course,
    longest: Annotated[int, typer.Option(min=1, help="Longer prompts are left out.")] = 256,
    log: Annotated[
        Path | None, typer.Option(help="Keep each text in this file, and go on from it.")
    ] = None,
    python: Annotated[
        Path | None, typer.Option(help="Python of an environment with llama.cpp; else this one.")
    ] = None,
    peer_threads: Annotated[
        int,
        typer.Option(min=1, help="llama.cpp's: they wait in a loop, and change no bit."),
    ] = 1,
    output: o.Output = None,
) -> None:
    """Count texts that change with drafts or with company, here and in llama.cpp.

    The model and the draft model are GGUF files, or names of such. The exit status is 1 if one of
    ours differs.
    """
    check_outputs(output)
    if not load.draft_model:
        raise ConfigError("name a small GGUF file of the same vocabulary with --draft-model")
    loaded = LLM.load(**vars(with_draft_model(load)))
    ngram = replace(load, drafter="ngram", draft_model=None)
    ours = Ours(loaded, {MODEL: replace(load, drafter="draft_model"), LOOKUP: ngram})
    encoded = encoded_prompts(loaded, course.prompts, _EVEN)
    short = {prompt.id: ids for prompt, ids in encoded if len(ids) <= longest}
    prompts = dict(islice(short.items(), course.limit))
    kept = TextLog(log, {"load": vars(load) | {"drafter_options": {}}, "course": vars(course)})
    context = longest + course.max_tokens + 16
    assert loaded.tokenizer is not None
    theirs = Theirs(
        python, target=gguf_of(load.model), draft=gguf_of(load.draft_model), context=context,
        threads=peer_threads, stop_ids=[*loaded.tokenizer.eos_token_ids],
        at_once=load.max_batch_size,
    )  # fmt: skip
    found: list[Parted] = []
    for temperature in course.temperatures:
        params = replace(course.params(), temperature=temperature)
        for engine in (ours, theirs):
            found += write_all(engine, prompts, params, load.max_batch_size, kept)
    Report([parted_table(found)], seed=course.seed).give(output)
    if any(each.differ for each in found if each.engine == ours.name):
        raise typer.Exit(1)
