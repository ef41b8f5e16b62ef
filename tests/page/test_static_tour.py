"""The tour without a server: one folder, opened from the disk."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from foredraft.llm import LLM
from foredraft.server.page_runs import Lanes
from tests.page.chromium import PARTS, answer_part
from tools.tour import make


@pytest.fixture(scope="module")
def folder(tiny: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tour")
    recorded = make.recording(tiny, say=lambda *_, **__: None)
    recorded["info"]["read_bytes"] = 100_000_000  # tables have no weights
    make.write(out, {"one": recorded, "two": recorded})
    return out


def test_the_index_names_files_that_are_there(folder: Path) -> None:
    text = (folder / "index.html").read_text()
    named = re.findall(r'(?:src|href|content)="([\w/.-]+\.\w+)"', text)
    assert {"tour.js", "recording-0.js", "recording-1.js", "css/tour.css"} <= set(named)
    assert all((folder / name).is_file() for name in named)
    assert "/page/" not in text


def test_the_script_is_whole(folder: Path) -> None:
    script = (folder / "tour.js").read_text()
    assert not re.search(r"^(import|export) ", script, re.MULTILINE)
    if node := shutil.which("node"):
        subprocess.run([node, "--check", folder / "tour.js"], check=True, timeout=60)


def test_whatever_the_tour_may_ask_is_recorded(tiny: LLM) -> None:
    lanes = Lanes(tiny)
    found = [*make.requests(lanes.drafters, make.served_of(lanes.info()))]
    assert {"yours", "law", "verify"} <= set(make.asked())
    for request, _ in found:
        assert make.RunBody(**request)
    seeds = {request.get("seed") for request, _ in found if request.get("max_tokens") == 1}
    assert seeds >= {*range(12)}
    assert make.canonical({"b": 1, "a": [0.7, "ü"]}) == '{"a":[0.7,"ü"],"b":1}'


def test_the_pair_has_answered_whatever_the_tour_asks() -> None:
    recorded = make.kept()
    assert recorded["info"]["drafter"] == "draft_model"
    assert {*make.FORWARDS} <= {*map(int, recorded["forwards"])}


def test_a_recording_that_lacks_something_is_refused(tmp_path: Path) -> None:
    make.keep(make.kept() | {"runs": {}}, tmp_path / "old.json.xz")
    with pytest.raises(ValueError, match=r"old\.json\.xz lacks \d+ runs: record it again"):
        make.kept(tmp_path / "old.json.xz")


def test_modules_that_import_each_other_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = {"a.js": 'import { b } from "./b.js";\n', "b.js": 'import { a } from "./a.js";\n'}
    monkeypatch.setattr(make, "_source", sources.__getitem__)
    with pytest.raises(ValueError, match=r"a\.js -> b\.js -> a\.js"):
        make.bundled("a.js")


def test_a_double_click_opens_it_and_a_link_holds_the_guesses(page: Any, folder: Path) -> None:
    page.goto((folder / "index.html").as_uri())
    parts = page.locator(".part")
    parts.nth(PARTS - 1).wait_for(state="attached")
    for i in range(PARTS):
        answer_part(page, i)
    assert f"of {PARTS} guesses were near" in page.inner_text(".tally")
    assert re.search(r"100 MB: .* reads [\d.]+ GB a second", page.inner_text("#tour-slow"))
    page.click(".tally summary")
    assert "guesses were near" in page.locator(".tally canvas").get_attribute("aria-label")
    link = page.evaluate("location.href")
    assert "#tour/yours/" in link
    page.evaluate("localStorage.clear()")
    page.goto("about:blank")
    page.goto(link)
    page.wait_for_selector("text=Whoever sent you this link: >> nth=0")
    assert not page.locator(".tally h2").count(), "the score is the sender's"
    size = page.locator("#tour-verify .scrub").first
    page.locator("#tour-verify >> text=I have no idea").click()
    page.wait_for_selector("#tour-verify[data-state=answered]")
    assert "Whoever sent you the link said" in page.inner_text("#tour-verify .answer")
    size = page.locator("#tour-verify .answer .scrub")
    assert size.get_attribute("aria-valuenow") == "4"
    size.press("ArrowRight")
    page.wait_for_selector("#tour-verify[data-state=answered]")
    now = page.locator("#tour-verify .answer .scrub").get_attribute("aria-valuenow")
    assert now == "6", "only recorded numbers can be had"
    page.click("header >> text=two")
    parts.nth(PARTS - 1).wait_for(state="attached")
