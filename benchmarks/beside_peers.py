"""``peers``: other engines on the same GGUF files, each with its drafts and without.

Every engine reads the files that are named, in processes of its own, which wait for each other; a
text is compared with the same engine's text without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.compare import Trial, summarise
from benchmarks.contenders import Contender, our_contenders
from benchmarks.course import ENTERED, Course, run_course, with_draft_model
from benchmarks.llama_cpp import LlamaCppContender, gguf_of
from benchmarks.openvino_peer import OpenVinoContender
from benchmarks.peer_process import PeerContender
from benchmarks.peers import peer_names
from foredraft.bench.prompts import encoded_prompts
from foredraft.bench.report import Report, Table, check_outputs
from foredraft.cli import options as o
from foredraft.core.errors import ConfigError
from foredraft.llm import LLM
from foredraft.options import LoadOptions

_ENGINES: dict[str, tuple[type, str]] = {
    "llama.cpp": (LlamaCppContender, "llama-cpp-python"),
    "openvino": (OpenVinoContender, "openvino-genai"),
}
"""By name, the class that asks an engine and the package that it comes in."""
_OURS, _AUTO, _DRAFTS = "foredraft", " auto", " draft model"
_COLUMNS = {
    "engine": "{contender}",
    "tok/s": "{tokens_per_s:.1f}",
    "of its plain": "{speedup:.2f}x",
    "with prompts": "{request_speedup:.2f}x",
    "of our plain": "{over_ours:.2f}x",
    "texts": "{num_prompts:d}",
    "not its plain": "{num_different:d}",
}


@dataclass(frozen=True)
class Peers:
    """Other engines, and where they are installed.

    Attributes:
        engines: names with commas; all otherwise.
        environments: folder with a virtual environment of each engine's name.
        draft_tokens: of their drafts.
    """

    engines: str | None = None
    environments: str = ".venv-peers"
    draft_tokens: int = 3

    @property
    def chosen(self) -> Sequence[str]:
        """The engines' names."""
        return peer_names(self.engines, [*_ENGINES]) or [*_ENGINES]

    def python(self, name: str) -> Path:
        """The interpreter of an engine's environment.

        Raises:
            ConfigError: it is not there.
        """
        found = Path(self.environments) / name / "bin" / "python"
        if not found.exists():
            raise ConfigError(f"{found} is not there: `make peers` installs {name}")
        return found

    def version(self, name: str) -> str:
        """The version of an engine's package."""
        sites = map(str, self.python(name).parents[1].glob("lib/*/site-packages"))
        return next(iter(distributions(name=_ENGINES[name][1], path=[*sites]))).version

    def open(self, llm: LLM, files: Sequence[str], max_context: int) -> list[Contender]:
        """Each engine without drafts, then with the draft model, in processes of their own.

        Args:
            files: of the target and the draft model.
            max_context: most tokens of a prompt and its reply.
        """
        assert llm.tokenizer is not None
        target, draft = files
        options: dict[str, Any] = {"model": target, "threads": torch.get_num_threads(),
                                   "max_context": max_context,
                                   "stop_ids": [*llm.tokenizer.eos_token_ids]}  # fmt: skip
        drafts = {"draft_model": draft, "draft_tokens": self.draft_tokens}
        return [
            PeerContender(_ENGINES[name][0], name + way, self.python(name), **options, **more)
            for name in self.chosen
            for way, more in (("", {}), (_DRAFTS, drafts))
        ]


@o.with_options
def peers(
    load: Annotated[LoadOptions, ENTERED],
    course: Course,
    entered: Peers,
    output: o.Output = None,
) -> None:
    """Time other engines on the same GGUF files, plain and with the draft model, and their texts.

    The exit status is 1 if a text of ours differs from our plain one.
    """
    check_outputs(output)
    if any(course.temperatures):
        raise ConfigError("the engines draw other random numbers: compare them at temperature 0")
    if not load.draft_model:
        raise ConfigError("name a small model of the same vocabulary with --draft-model")
    versions = {name: entered.version(name) for name in entered.chosen}
    files = [gguf_of(name) for name in (load.model, load.draft_model)]
    load = with_draft_model(load)
    llm = LLM.load(**vars(load))
    plain, auto = our_contenders(llm, load, {"none": {}, "auto": {}})
    plain.name, auto.name = _OURS, _OURS + _AUTO
    longest = max(len(ids) for _, ids in encoded_prompts(llm, course.prompts, course.limit))
    # With drafts llama-cpp-python keeps the scores of a whole context in memory.
    context = min(llm.target.max_context, longest + course.max_tokens + 16)
    contenders: list[Contender] = [plain, auto, *entered.open(llm, files, context)]
    trials = run_course(llm, contenders, course)
    failures = {c.name: why for c in contenders if (why := getattr(c, "failure", None))}
    rows = table_of(trials)
    Report(
        [Table("engines", rows, _COLUMNS)],
        {"peers": versions, **({"failures": failures} if failures else {})},
        [f"{name}: {why}" for name, why in failures.items()],
        course.seed,
    ).give(output)
    if any(r["num_different"] for r in rows if r["contender"] == auto.name):
        raise typer.Exit(1)


def table_of(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """A line for each contender: its figures beside its engine's plain decoding and ours."""
    by_name: dict[str, list[Trial]] = {}
    for trial in trials:
        by_name.setdefault(trial.contender, []).append(trial)
    rows = []
    for name, mine in by_name.items():
        plain = by_name.get(name.removesuffix(_DRAFTS).removesuffix(_AUTO), mine)
        beside = [
            replace(one, identical=one.run.token_ids == other.run.token_ids)
            for one, other in zip(mine, plain, strict=True)
        ]
        row = vars(summarise("all", beside, plain))
        over = summarise("all", beside, by_name[_OURS]).speedup
        rows.append(row | {"over_ours": over})
    return rows
