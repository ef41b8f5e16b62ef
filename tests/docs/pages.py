"""The pages a reader sees, and what can be checked in them."""

from __future__ import annotations

import re
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
TABLES = REPO / "docs" / "results" / "index.md"
"""The page of all tables, which is made when the site is built."""
PAGES = sorted(
    {
        *REPO.glob("*.md"),
        *(REPO / "docs").rglob("*.md"),
        *REPO.glob("examples/*/README.md"),
        REPO / "benchmarks" / "README.md",
    }
    - {*(REPO / "docs" / "lab").glob("*.md")}
    - {TABLES}
)
"""All pages but the lab notebook, which keeps what was true on its day, and `TABLES`."""


def page_id(page: Path) -> str:
    return str(page.relative_to(REPO))


def blocks(page: Path) -> list[tuple[str, str]]:
    """The fenced blocks of a page: language and content."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def links(page: Path) -> list[tuple[str, str]]:
    """Text and target of each link that stays in the repository."""
    found = re.findall(r"\[([^\]]+)\]\(([^)\s]+)\)", prose(page))
    return [(text, target) for text, target in found if "://" not in target]


def code_spans(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(page))


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
