"""Whether a change costs speed: two checkouts on the same prompts, in turns, prompt by prompt."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from foredraft.bench.prompts import load_prompts
from foredraft.bench.report import Report, Table, check_outputs
from foredraft.cli import options as o
from foredraft.core.errors import ConfigError

_WORKER = """
import hashlib, json, sys, time
answers, sys.stdout = sys.stdout, sys.stderr
from foredraft import LLM, SamplingParams
models = {}
for line in sys.stdin:
    task = json.loads(line)
    kind = task["drafter"], task["rows"]
    if kind not in models:
        models[kind] = LLM.load(task["model"], drafter=kind[0], max_batch_size=kind[1])
    llm, params = models[kind], SamplingParams(**task["params"])
    prompts = [llm.encode([{"role": "user", "content": text}]) for text in task["prompts"]]
    began = time.perf_counter()
    results = llm.generate(prompts, params)
    seconds = time.perf_counter() - began
    ids = json.dumps([result.token_ids for result in results])
    digest = hashlib.sha256(ids.encode()).hexdigest()
    print(json.dumps({"seconds": seconds, "sha256": digest}), file=answers, flush=True)
"""
"""Uses only what every revision has; the same code runs in both checkouts."""


class Checkout:
    """A source tree whose process does one task at a time, and sleeps while another one works.

    Raises:
        ConfigError: there is no foredraft in the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        if not (self._folder / "foredraft").is_dir():
            raise ConfigError(f"{folder} is no checkout of foredraft")
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WORKER],
            cwd=self._folder,
            env=os.environ | {"PYTHONPATH": str(self._folder)},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def run(self, task: dict[str, Any]) -> dict[str, Any]:
        """Seconds that a task took, and a hash of the tokens."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise ConfigError(f"{self._folder} cannot run the task; it says why above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()


@dataclass(frozen=True)
class Pair:
    """A task as both checkouts did it.

    Attributes:
        old_s, new_s: seconds.
        is_same: whether the tokens are.
    """

    old_s: float
    new_s: float
    is_same: bool


def tasks(
    model: str, prompts: Sequence[str], max_tokens: int, loads: Sequence[int]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each with the name of its row: plain and default, at temperature 0 and 1, by load."""
    for rows in loads:
        for first in range(0, len(prompts) - rows + 1, rows):
            for temperature in (0.0, 1.0):
                for drafter in ("none", "auto"):
                    params = {"max_tokens": max_tokens, "temperature": temperature, "seed": 1}
                    task = {"model": model, "drafter": drafter, "rows": rows, "params": params}
                    name = f"{drafter}, {rows} at once, T={temperature:g}"
                    yield name, {**task, "prompts": prompts[first : first + rows]}


def compared(
    old: Checkout, new: Checkout, tasks: Sequence[tuple[str, dict[str, Any]]]
) -> dict[str, list[Pair]]:
    """Every task by both, in turns; which of them goes first alternates in each row of the table.

    Else one of them would always go on where its last task ended, with all of it in the caches.
    """
    pairs: dict[str, list[Pair]] = {}
    for name, task in tasks:
        if name not in pairs:  # loads the model, and warms up
            pairs[name] = []
            for checkout in (old, new):
                checkout.run({**task, "params": {**task["params"], "max_tokens": 8}})
        order = (old, new) if len(pairs[name]) % 2 else (new, old)
        answers = {checkout: checkout.run(task) for checkout in order}
        before, after = answers[old], answers[new]
        is_same = before["sha256"] == after["sha256"]
        pairs[name].append(Pair(before["seconds"], after["seconds"], is_same))
    return pairs


def revisions(
    old: Annotated[Path, typer.Argument(help="A checkout of the revision to compare with.")],
    new: Annotated[Path, typer.Argument(help="The other checkout.")] = Path(),
    model: Annotated[str, typer.Option(help="A model that both can load.")] = (
        "smollm2-135m-instruct"
    ),
    prompts: Annotated[str | None, typer.Option(help="A file of prompts.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts, evenly over the categories.")] = 32,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of each reply.")] = 64,
    loads: Annotated[str, typer.Option(help="Requests at once.")] = "1,4,16",
    output: o.Output = None,
) -> None:
    """Speed of two revisions, their prompts read in the time; and whether their texts are equal."""
    check_outputs(output)
    texts = [prompt.text for prompt in load_prompts(prompts, limit)]
    checkouts = Checkout(old), Checkout(new)
    try:
        every = [*tasks(model, texts, max_tokens, [int(load) for load in loads.split(",")])]
        pairs = compared(*checkouts, every)
    finally:
        for checkout in checkouts:
            checkout.close()
    rows = [
        {
            "what": name,
            "runs": len(done),
            "median": median(pair.old_s / pair.new_s for pair in done),
            "total": sum(pair.old_s for pair in done) / sum(pair.new_s for pair in done),
            "different": sum(not pair.is_same for pair in done),
        }
        for name, done in pairs.items()
    ]
    columns = {
        "": "{what}", "runs": "{runs:d}", "new to old, median": "{median:.3f}x",
        "in all": "{total:.3f}x", "other texts": "{different:d}",
    }  # fmt: skip
    Report([Table("revisions", rows, columns)]).give(output)
