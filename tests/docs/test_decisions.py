"""The index lists every page, and every dependency has its reason written down."""

from __future__ import annotations

import re
import tomllib

from tests.docs.pages import LOG, REPO, code_spans, links

DOCS = REPO / "docs"


def test_the_index_lists_every_page() -> None:
    listed = {(DOCS / target).resolve() for _, target in links(DOCS / "README.md")}
    assert {*DOCS.rglob("*.md")} - {LOG, DOCS / "README.md"} <= listed


def test_every_dependency_has_a_reason() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    optional = [name for extra in project["optional-dependencies"].values() for name in extra]
    needed = {re.split(r"[^\w-]", line)[0] for line in [*project["dependencies"], *optional]}
    explained = {span for page in (DOCS / "decisions").glob("*.md") for span in code_spans(page)}
    assert needed - {"foredraft"} <= explained
