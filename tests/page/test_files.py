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
    return TestClient(page_app(tiny))


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
