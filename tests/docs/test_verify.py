"""The page on verification names every rule and every mutant that there is."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import REPO, code_spans
from tests.exactness.mutants import MUTANTS

PAGE = REPO / "docs" / "understand" / "verify.md"
NOT_RULES = {"evidence", "__init__", "maths", "verdict"}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_explained(name: str) -> None:
    assert re.sub(", (chain|tree)$", "", name) in code_spans(PAGE)


def test_every_rule_is_linked() -> None:
    files = (REPO / "foredraft" / "core" / "verify").glob("*.py")
    for rule in {path.stem for path in files} - NOT_RULES:
        assert f"core/verify/{rule}.py" in PAGE.read_text(), rule
