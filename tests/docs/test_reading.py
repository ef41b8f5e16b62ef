"""Pages tied to code: the walk through the engine, the notebook, decisions, verification."""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
import tomllib
from typing import Any

import pytest

from foredraft.core import verify
from foredraft.engine.step import step
from tests.docs.pages import REPO, blocks, code_spans, links
from tests.exactness.mutants import MUTANTS
from tools import newcomer

PAGE = REPO / "docs" / "understand" / "life-of-a-token.md"


def test_the_step_is_shown_as_it_is() -> None:
    source = textwrap.dedent(inspect.getsource(step))
    [function] = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    first = function.body[1].lineno - 1  # behind the docstring
    body = textwrap.dedent("\n".join(source.splitlines()[first:]))
    assert ("py", body + "\n") in blocks(PAGE)


def test_the_walk_goes_in_the_order_of_the_code() -> None:
    source, page = inspect.getsource(step), PAGE.read_text()
    calls = ["drafting.allow", "drafting.propose", "target.score", "turn.verify", "turn.commit"]
    calls += ["cache.keep", "drafting.observe"]
    at = [source.index(f"{call}(") for call in calls]
    assert at == sorted(at)
    section = page[page.index("**Allow.**") :]
    names = [call.removeprefix("drafting.") for call in calls]
    names = [name[0].upper() + name[1:] if "." in name else name for name in names]
    told = [section.index(f"[`{name}`]") for name in names]
    assert told == sorted(told)


# ------------------------------------------------------------- the notebook runs from top to bottom


NOTEBOOK = REPO / "examples" / "notebook" / "foredraft.ipynb"


def cells() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return found


def sources() -> list[str]:
    """Of the cells with Python, but for the one that installs."""
    made = ["".join(each["source"]) for each in cells() if each["cell_type"] == "code"]
    return [source for source in made if "%pip" not in source]


def test_it_has_ten_cells_and_no_outputs() -> None:
    assert len(cells()) == 10
    assert not any(each.get("outputs") or each.get("execution_count") for each in cells())
    for source in sources():
        compile(source, "cell", "exec")


@pytest.mark.slow
@pytest.mark.real_model
def test_every_cell_runs_and_says_what_it_promises(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    printed = []
    for source in sources():
        exec(compile(source, "cell", "exec"), names)  # noqa: S102
        printed.append(capsys.readouterr().out)
    assert names["one"].stats.steps > names["other"].stats.steps, "drafts save forwards"
    assert float(printed[4].rsplit(" ", 1)[1]) < 0.01, "words come out as p has them"
    hashes = {line.split()[1] for line in printed[6].splitlines()}
    assert len(hashes) == 1, "one seed, one text"


# -------------------------------------------------------------------- every decision is in the list


DECISIONS = REPO / "docs" / "decisions"


def test_the_list_has_every_decision() -> None:
    listed = {target for _, target in links(DECISIONS / "index.md")}
    assert listed == {path.name for path in DECISIONS.glob("0*.md")}


def test_every_dependency_has_a_reason() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    optional = [name for extra in project["optional-dependencies"].values() for name in extra]
    needed = {re.split(r"[^\w-]", line)[0] for line in [*project["dependencies"], *optional]}
    explained = {span for page in DECISIONS.glob("*.md") for span in code_spans(page)}
    assert needed - {"foredraft"} <= explained


# ------------------------- the page on verification names every rule and every mutant that there is


VERIFY = REPO / "docs" / "understand" / "verify.md"


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_explained(name: str) -> None:
    assert re.sub(", (chain|tree)$", "", name) in code_spans(VERIFY)


def test_every_rule_is_linked() -> None:
    rules = [name for name in vars(verify) if name.startswith("verify_")]
    assert len(rules) == 3
    for rule in rules:
        assert f"[`{rule}`](../../foredraft/core/verify.py)" in VERIFY.read_text(), rule


# --------------------------- the runner of the readme's commands reads the readme as a person would


def test_the_readme_installs_then_generates_chats_and_serves() -> None:
    blocks = [*newcomer.blocks((REPO / "README.md").read_text())]
    commands = [c for language, text in blocks if language == "sh" for c in newcomer.commands(text)]
    assert commands[0] == "make demo"
    assert any(command.startswith(newcomer._KEEPS) for command in commands), "foredraft is found"
    for name in ("foredraft generate", "foredraft chat", "foredraft serve"):
        assert any(command.startswith(name) for command in commands), name
    assert any(language == "python" for language, _ in blocks)
