"""The page on verification names every rule and every mutant that there is."""

from __future__ import annotations

import re

import pytest

from foredraft.core import verify
from tests.docs.pages import REPO, code_spans
from tests.exactness.mutants import MUTANTS

PAGE = REPO / "docs" / "understand" / "verify.md"


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_explained(name: str) -> None:
    assert re.sub(", (chain|tree)$", "", name) in code_spans(PAGE)


def test_every_rule_is_linked() -> None:
    rules = [name for name in vars(verify) if name.startswith("verify_")]
    assert len(rules) == 3
    for rule in rules:
        assert f"[`{rule}`](../../foredraft/core/verify.py)" in PAGE.read_text(), rule
