"""Links lead somewhere, and files and names that pages speak of exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, REPO, anchors, code_spans, links, page_id, prose

pytestmark = pytest.mark.parametrize("page", PAGES, ids=page_id)


def test_links_resolve(page: Path) -> None:
    for _, target in links(page):
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target


def test_no_section_stands_twice(page: Path) -> None:
    titles = re.findall(r"^##+ .+$", prose(page), re.MULTILINE)
    assert len(titles) == len(set(titles)), "a heading twice has one anchor only"


def test_linked_names_are_in_the_file(page: Path) -> None:
    for text, target in links(page):
        path = page.parent / target.partition("#")[0]
        name = re.fullmatch(r"`([\w.]+)`", text)
        if name and path.suffix == ".py" and path.name != text.strip("`"):
            source = path.read_text()
            for part in name[1].split("."):
                assert re.search(rf"(def|class) {part}\b|^ *{part}\b.*=", source, re.MULTILINE), (
                    f"{name[1]} is not defined in {target}"
                )


def test_paths_in_code_spans_exist(page: Path) -> None:
    for span in code_spans(page):
        if re.fullmatch(r"\.?[\w-]+(/[\w.-]+)+\.(py|md|toml|cpp|yml)", span):
            places = (REPO, REPO / "foredraft", page.parent)
            assert any((place / span).exists() for place in places), span


def test_dotted_names_resolve(page: Path) -> None:
    for span in code_spans(page):
        if re.fullmatch(r"foredraft(\.\w+)+", span) and span != "foredraft.drafters":
            module, _, name = span.rpartition(".")
            try:
                importlib.import_module(span)
            except ModuleNotFoundError:
                assert hasattr(importlib.import_module(module), name), span
