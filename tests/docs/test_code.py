"""Code in the pages runs and prints what the pages say; commands have the options they show."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
from click import Context
from typer.main import get_command

from benchmarks.__main__ import app as benchmarks
from foredraft.cli.main import COMMANDS, app
from foredraft.drafters.registry import head_kinds
from tests.docs.pages import PAGES, REPO, blocks, code_spans, page_id

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
