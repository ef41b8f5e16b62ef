"""Every decision is in the list, and every dependency has its reason written down."""

from __future__ import annotations

import re
import tomllib

from tests.docs.pages import REPO, code_spans, links

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
