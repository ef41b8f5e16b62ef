"""The table of memory is that of the measurements."""

from __future__ import annotations

import os
import re

from benchmarks.memory import memory_table
from tests.docs.pages import REPO

PAGE = REPO / "docs" / "operate" / "memory.md"


def test_the_table_of_memory_shows_the_result_files() -> None:
    text = PAGE.read_text()
    found = re.search(r"(<!-- memory:.*?-->\n)(.*?)(\n<!-- /memory -->)", text, re.DOTALL)
    assert found is not None
    written = memory_table(REPO / "docs" / "results")
    if os.environ.get("FOREDRAFT_WRITE"):
        PAGE.write_text(text.replace(found[0], f"{found[1]}{written}{found[3]}"))
    else:
        assert found[2] == written, "FOREDRAFT_WRITE=1 pytest tests/docs/test_memory.py writes it"
