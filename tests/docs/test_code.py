"""Code and examples in pages run, and drafters are described as they are."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from click import Context
from typer.main import get_command
from typer.testing import CliRunner

import foredraft.drafters
from benchmarks.__main__ import app as benchmarks
from foredraft.cli.drafters import described
from foredraft.cli.main import COMMANDS, app
from foredraft.drafters import drafter_names, drafter_spec
from foredraft.drafters.registry import head_kinds
from foredraft.llm import LLM
from tests.audit.marks import few_now
from tests.docs.pages import PAGES, REPO, blocks, code_spans, page_id
from tests.models.checkpoints import NATIVE_CONFIGS, save_checkpoint
from tests.server.conftest import running

WITH_PYTHON = [page for page in PAGES if any(language == "python" for language, _ in blocks(page))]
LOADS_A_MODEL = re.compile(r"LLM\.load|from_pretrained")


@pytest.mark.parametrize("page", WITH_PYTHON, ids=page_id)
def test_python_runs_and_prints_what_follows(
    page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The blocks of a page are one script; a text block right after one is its output.

    From the first block that loads a real model on, blocks are only compiled.
    """
    script, expected, runs, previous = "", "", True, ""
    for language, content in blocks(page):
        if language == "python":
            compile(content, page_id(page), "exec")
            runs = runs and not LOADS_A_MODEL.search(content)
            script += content if runs else ""
        elif language == "text" and previous == "python" and runs:
            expected += content
        previous = language
    path = tmp_path / "page.py"
    path.write_text(script)
    runpy.run_path(str(path))
    assert capsys.readouterr().out == expected


BENCHMARKS = ["python", "-m", "benchmarks"]


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Program and words of each command line on a page: `foredraft …`, `python -m benchmarks …`."""
    shell = "\n".join(
        content for language, content in blocks(page) if language in ("sh", "console")
    )
    lines = [*shell.replace("\\\n", " ").splitlines(), *code_spans(page)]
    for line in lines:
        words = line.removeprefix("$ ").split()
        if len(words) > 1 and words[0] == "foredraft":
            yield "foredraft", words[1:]
        elif len(words) > 3 and words[:3] == BENCHMARKS and words[3] != "…":
            yield "benchmarks", words[3:]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_and_their_options_exist(page: Path) -> None:
    if page == REPO / "docs" / "results" / "index.md":
        return  # commands as they were typed at the revisions that it names
    for program, words in commands(page):
        if program == "foredraft":
            assert words[0] in COMMANDS or words[0].startswith("-"), words
            name = words.pop(0)
            command = COMMANDS[name].load(name) if name in COMMANDS else get_command(app)
        else:
            command = get_command(benchmarks)
        while hasattr(command, "commands") and words and not words[0].startswith(("-", "…")):
            _, command, _ = command.resolve_command(Context(command), words)
            name = words.pop(0)
            assert command.name != "KIND" or name in ("KIND", *head_kinds()), name
        known = {n for each in command.params for n in (*each.opts, *each.secondary_opts)}
        known |= {"--help", "-h"}
        for word in words:
            if re.match(r"--?[a-z]", word):
                assert word.partition("=")[0] in known, word


# ------------------------------------------------- the commands that pages on evidence show are run


OPERATED = [REPO / "docs" / "operate" / name for name in ("audit.md", "measure.md", "traces.md")]
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


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", few_now(OPERATED, OPERATED[-1:]))
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


# ----------------------------------------------- every drafter has a page that agrees with its spec


EXAMPLE = REPO / "examples" / "foredraft-recall-drafter"
HERE = Path(foredraft.drafters.__file__).parent
FILES = [*HERE.glob("*.py"), *HERE.glob("*/*.py"), *HERE.glob("*/*/__init__.py")]
NAMES = {path.parent.name if path.stem == "__init__" else path.stem for path in FILES}
BUILT_IN = [name for name in drafter_names() if name in NAMES]


@pytest.mark.parametrize("name", BUILT_IN)
def test_page_agrees_with_the_spec(name: str) -> None:
    text, spec = (REPO / "docs" / "drafters" / f"{name}.md").read_text(), drafter_spec(name)
    table = re.search(r"^\| option .*\n((?:\|.*\n)+)", text, re.MULTILINE)
    listed = re.findall(r"^\| `(\w+)`", table[1], re.MULTILINE) if table else []
    assert sorted(listed) == sorted(spec.options)
    assert f"Default draft tokens: {spec.num_draft_tokens}." in text


def test_every_page_is_of_a_drafter() -> None:
    pages = {path.stem for path in (REPO / "docs" / "drafters").glob("*.md")}
    assert sorted(pages - {"index"}) == BUILT_IN


def test_the_table_of_drafters_is_that_of_the_specs() -> None:
    rows = ["| drafter | in one line | needs |", "|---|---|---|"]
    for name in BUILT_IN:
        drafter = described(name, drafter_spec(name))
        needs = "; ".join(drafter["needs"]) or "nothing"
        rows.append(f"| [{name}]({name}.md) | {drafter['summary']} | {needs} |")
    page = REPO / "docs" / "drafters" / "index.md"
    text = page.read_text()
    found = re.search(r"(<!-- drafters:.*?-->\n)(.*?)(<!-- /drafters -->)", text, re.DOTALL)
    assert found is not None
    written = "\n".join([*rows, ""])
    if os.environ.get("FOREDRAFT_WRITE"):
        page.write_text(text.replace(found[0], f"{found[1]}{written}{found[3]}"))
    else:
        assert found[2] == written, "FOREDRAFT_WRITE=1 pytest tests/docs/test_code.py writes it"


def test_add_a_drafter_shows_the_example_as_it_is() -> None:
    shown = blocks(REPO / "docs" / "extend" / "add-a-drafter.md")
    assert ("python", (EXAMPLE / "foredraft_recall.py").read_text()) in shown
    assert ("toml", (EXAMPLE / "pyproject.toml").read_text()) in shown
    head = (REPO / "examples" / "foredraft-toy-head-drafter" / "foredraft_toy_head.py").read_text()
    assert all(content in head for language, content in shown if language == "py")
