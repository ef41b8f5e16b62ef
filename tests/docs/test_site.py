"""The site shows every page, builds without a broken link, and documents what is public."""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.results import render
from tests.docs.pages import PAGES, REPO, TABLES

DOCS = REPO / "docs"
SITE = tomllib.loads((REPO / "zensical.toml").read_text())["project"]


def nav_pages(part: Any) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    else:
        for each in part.values() if isinstance(part, dict) else part:
            yield from nav_pages(each)


def api_objects() -> list[str]:
    """Objects described by the pages under docs/reference."""
    text = "\n".join(page.read_text() for page in sorted((DOCS / "reference").glob("*.md")))
    return re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)


def imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name, None)
    return importlib.import_module(path) if found is None else found


def test_navigation_shows_every_page_once() -> None:
    """Those of single drafters are in the table of `drafters/index.md`."""
    pages = {page for page in PAGES if DOCS in page.parents}
    pages -= {*(DOCS / "drafters").glob("*.md")} - {DOCS / "drafters" / "index.md"}
    shown = list(nav_pages(SITE["nav"]))
    pages.add(TABLES)
    assert sorted(shown) == sorted(str(page.relative_to(DOCS)) for page in pages)


def test_every_exported_name_is_in_the_reference() -> None:
    public = [f"foredraft.{name}" for name in importlib.import_module("foredraft").__all__]
    listed = {imported(path) for path in api_objects()}
    assert [
        path
        for path in public
        if inspect.isclass(imported(path))
        and imported(path) not in listed
        and sys.modules[imported(path).__module__] not in listed
    ] == []


@pytest.mark.parametrize("path", api_objects())
def test_everything_public_has_a_docstring(path: str) -> None:
    documented = imported(path)
    assert documented.__doc__
    home = documented.__name__ if inspect.ismodule(documented) else documented.__module__
    for name, member in vars(documented).items():
        described = callable(member) or isinstance(member, classmethod | staticmethod | property)
        foreign = getattr(member, "__module__", home) != home
        if described and not foreign and not name.startswith("_"):
            assert inspect.getdoc(member), f"{path}.{name} is public and has no docstring"


def test_the_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    pytest.importorskip("zensical")
    shutil.copytree(DOCS, tmp_path / "docs")
    results = tmp_path / "docs" / "results"
    (results / TABLES.name).write_text(render(results))
    shutil.copy(REPO / "zensical.toml", tmp_path)
    (tmp_path / "foredraft").symlink_to(REPO / "foredraft")
    subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"],
        cwd=tmp_path,
        check=True,
        timeout=120,
    )
    step = (tmp_path / "site" / "understand" / "life-of-a-token" / "index.html").read_text()
    assert 'href="https://github.com/foredraft/foredraft/blob/main/foredraft/' in step
