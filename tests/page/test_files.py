"""The page's files: nothing from elsewhere, no markup from text, all small."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from foredraft.llm import LLM
from foredraft.server.page_routes import PAGE
from tests.page.conftest import page_app

FILES = sorted(path for path in PAGE.rglob("*") if path.is_file())
SCRIPTS = [path for path in FILES if path.suffix == ".js"]


def name(path: Path) -> str:
    return path.relative_to(PAGE).as_posix()


@pytest.fixture(scope="module")
def client(tiny: LLM) -> TestClient:
    return TestClient(page_app(tiny), "http://localhost")


@pytest.mark.parametrize("path", FILES, ids=name)
def test_they_are_served_as_they_are_under_a_strict_policy(client: TestClient, path: Path) -> None:
    answer = client.get("/" if name(path) == "index.html" else f"/page/files/{name(path)}")
    assert answer.status_code == 200
    assert answer.content == path.read_bytes()
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "*" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_they_load_nothing_from_elsewhere(path: Path) -> None:
    text = path.read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|//[a-z]+\.|@import|@font-face", text)
    assert len(text.splitlines()) <= 300


@pytest.mark.parametrize("path", SCRIPTS, ids=name)
def test_no_script_makes_markup_of_text(path: Path) -> None:
    forbidden = (
        "innerHTML|outerHTML|insertAdjacentHTML|document.write|DOMParser|eval\\(|Function\\("
    )
    assert not re.search(forbidden, path.read_text())


@pytest.mark.parametrize("path", SCRIPTS, ids=name)
def test_scripts_import_what_is_there(path: Path) -> None:
    for imported in re.findall(r'from "(\.[^"]+)"', path.read_text()):
        assert (path.parent / imported).resolve().is_file(), imported


def test_the_index_names_files_that_are_there_and_has_nothing_inline() -> None:
    text = (PAGE / "index.html").read_text()
    for named in re.findall(r'(?:src|href)="/page/files/([^"]+)"', text):
        assert (PAGE / named).is_file(), named
    assert not re.search(r"<style|style=|\son[a-z]+=|<script(?![^>]*src=)", text)


@pytest.mark.parametrize(
    "asked", ["../page_routes.py", "..%2fpage_routes.py", "/etc/passwd", "js/", "nothing.js", ""]
)
def test_no_other_file_can_be_had(client: TestClient, asked: str) -> None:
    assert client.get(f"/page/files/{asked}").status_code == 404


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """As WCAG defines it."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_what_is_read_and_operated_stands_out(theme: int) -> None:
    found = re.findall(
        r"--(\w+): light-dark\((#\w{6}), (#\w{6})\)", (PAGE / "css/base.css").read_text()
    )
    colours = {name: pair[theme] for name, *pair in found}
    for ground in ("paper", "raised"):
        for ink in ("ink", "soft", "ghost", "draft", "copy", "correction", "bonus", "bad"):
            assert contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground)
        assert contrast(colours["edge"], colours[ground]) >= 3.0
    assert contrast(colours["soft"], colours["sunk"]) >= 4.5
