"""Every drafter has a page that agrees with its spec; the worked example is the real package."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import foredraft.drafters
from foredraft.cli.drafters import described
from foredraft.drafters import drafter_names, drafter_spec
from tests.docs.pages import REPO, blocks

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
        drafter = described(drafter_spec(name))
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
        assert found[2] == written, "FOREDRAFT_WRITE=1 pytest tests/docs/test_drafters.py writes it"


def test_add_a_drafter_shows_the_example_as_it_is() -> None:
    shown = blocks(REPO / "docs" / "extend" / "add-a-drafter.md")
    assert ("python", (EXAMPLE / "foredraft_recall.py").read_text()) in shown
    assert ("toml", (EXAMPLE / "pyproject.toml").read_text()) in shown
    head = (REPO / "examples" / "foredraft-toy-head-drafter" / "foredraft_toy_head.py").read_text()
    assert all(content in head for language, content in shown if language == "py")
