"""``contexts``: decoding speed by the length of what has been read, plain and with drafts."""

from __future__ import annotations

import json
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from benchmarks.compare import comparison_report, summaries
from benchmarks.contenders import our_contenders
from benchmarks.course import ENTERED, Course, Field, run_course, variants_of
from benchmarks.plots import check_plot, plot_lines
from foredraft.bench.prompts import load_prompts
from foredraft.bench.report import check_outputs
from foredraft.cli import options as o
from foredraft.llm import LLM
from foredraft.options import LoadOptions

_TASK = "\n\nWrite a new story in which something of all this happens."


@o.with_options
def contexts(
    load: Annotated[LoadOptions, ENTERED],
    entered: Field,
    course: Course,
    lengths: Annotated[str, typer.Option(help="Tokens of a prompt, with commas.")] = (
        "250,500,1000,2000,4000,8000"
    ),
    each: Annotated[int, typer.Option(min=1, help="Prompts of each length.")] = 2,
    output: o.Output = None,
    plot: Annotated[str | None, typer.Option(help="Draw tokens a second into this PNG.")] = None,
) -> None:
    """Compare drafters with plain decoding behind prompts of several lengths.

    A prompt is texts of --prompts one after another, up to its length, and a task. Lengths that
    leave no room for a reply are left out.
    """
    check_outputs(output)
    check_plot(plot)
    counts = o.numbers("--lengths", lengths, int, low=50)
    llm = o.load_llm(load)
    contenders = our_contenders(llm, load, variants_of(entered, load.draft_model))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.jsonl"
        path.write_text("\n".join(map(json.dumps, _prompts(llm, course.prompts, counts, each))))
        trials = run_course(llm, contenders, Course(**vars(course) | {"prompts": str(path)}))
    comparison_report(llm, trials, course.seed).give(output)
    if plot:
        plot_lines(summaries(trials, "none"), plot)


def _prompts(llm: LLM, path: str | None, lengths: list[int], each: int) -> list[dict[str, Any]]:
    """Lines of a file of prompts. No text comes twice if there are enough."""
    assert llm.tokenizer is not None
    texts = cycle(prompt.text for prompt in load_prompts(path))
    task, found = llm.tokenizer.encode(_TASK), []
    for length in lengths:
        for number in range(each):
            ids: list[int] = []
            while len(ids) < length:
                (text,) = islice(texts, 1)
                ids += llm.tokenizer.encode(text + "\n\n")
            kept = llm.tokenizer.decode(ids[: max(1, length - len(task))])
            name = f"{length} tokens"
            line = {"id": f"{name}, {number}", "category": name, "turns": [kept + _TASK]}
            found.append(line)
    return found
