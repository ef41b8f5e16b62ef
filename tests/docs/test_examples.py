"""The commands that pages on evidence show are run, in their order, on a tiny model."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foredraft.cli.main import app
from foredraft.llm import LLM
from tests.docs.pages import REPO, blocks
from tests.models.checkpoints import NATIVE_CONFIGS, save_checkpoint
from tests.server.conftest import running

PAGES = [REPO / "docs" / "operate" / name for name in ("audit.md", "measure.md", "traces.md")]
SHORT = {
    "audit": "--max-tokens 16 --detect 0.4 --set alpha=0.01 --set power=0.6 --no-plant-faults",
    "audit server": "--set max_requests=40 --set reply_tokens=8 --time-limit 5",
    "measure": "--max-tokens 8 --limit 2 --loads 1,2 --drafters ngram",
    "generate": "--max-tokens 8",
}
"""Added to the commands, so that they take seconds."""
ELSEWHERE = ("train",)
"""Commands with tests of their own: tests/cli/test_train.py."""
ENDS_WELL = {"audit": (0, 3)}
"""So short an audit may be inconclusive."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("examples") / "tiny"
    save_checkpoint(directory, NATIVE_CONFIGS["llama-tied"]())
    return directory


def examples(page: Path) -> Iterator[list[str]]:
    """The words of each command, without comments."""
    for language, content in blocks(page):
        if language == "sh":
            for line in content.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words and words[0] == "foredraft" and not {*ELSEWHERE} & {*words}:
                    yield words[1:]


def made_short(words: list[str], model: Path, url: str) -> list[str]:
    """The command for a tiny model, and a server of it."""
    name = words[0]
    added = [] if name == "trace" else ["--model", str(model), "--dtype", "float32"]
    key = "audit server" if "--endpoint" in words else name
    replaced = {
        "http://127.0.0.1:8000": url,
        "http://127.0.0.1:8001": url,
        "smollm2-135m-instruct": str(model),
        "blend": "suffix",  # the tiny model has no head
    }
    words = [replaced.get(word, word) for word in words]
    return [*words, *added, *shlex.split(SHORT.get(key, ""))]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_a_page_run(
    page: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    prompts = [{"id": f"p{n}", "category": "c", "turns": [f"The river {n}"]} for n in range(3)]
    for name in ("mine.jsonl", "speed-bench.jsonl"):
        Path(name).write_text("\n".join(map(json.dumps, prompts)))
    llm = LLM.load(str(model), dtype="float32", drafter="ngram")
    with running(lambda trace: llm) as server:
        before = ["generate", "The", "--trace", "run.jsonl", "--drafter", "ngram", "--model"]
        CliRunner().invoke(app, [*before, str(model), "--dtype", "float32"])
        for words in examples(page):
            result = CliRunner().invoke(app, made_short(words, model, server.url))
            good = ENDS_WELL.get(words[0], (0,))
            assert result.exit_code in good, (words, result.output, result.exception)
