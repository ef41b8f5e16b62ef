"""A served page over a model of tables, and a browser that looks at it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from foredraft.llm import LLM
from foredraft.models.table import TableModel
from foredraft.models.text.tokenizer import Tokenizer
from foredraft.options import LoadOptions
from foredraft.server.app import create_app
from foredraft.server.settings import ServerSettings
from tests.models.checkpoints import VOCAB_SIZE, save_tokenizer

WAIT_MS = 120_000
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def page_app(llm: LLM) -> FastAPI:
    return create_app(lambda feed: llm, ServerSettings())


@contextmanager
def page_client(llm: LLM, **settings: Any) -> Iterator[TestClient]:
    """A client of a server that has loaded this model."""
    loaded = threading.Event()
    app = create_app(lambda feed: llm, ServerSettings(**settings), lambda _: loaded.set())
    with TestClient(app, "http://localhost") as client:
        assert loaded.wait(20)
        yield client


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    directory: Path = tmp_path_factory.mktemp("page") / "tiny"
    save_tokenizer(directory, TEMPLATE)
    target = TableModel.random(VOCAB_SIZE, seed=5, order=1, sharpness=6.0)
    return LLM(target, Tokenizer(directory), LoadOptions(drafter="suffix"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium; the test is skipped where it or playwright is missing."""
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("Chromium is not installed")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def forgiven() -> list[str]:
    """Console messages that this test allows."""
    return []


@pytest.fixture(params=["desktop", "phone"])
def page(browser: Any, request: pytest.FixtureRequest, forgiven: list[str]) -> Iterator[Any]:
    """A page that fails the test for whatever its console complains about."""
    size = {"desktop": (1280, 860), "phone": (390, 844)}[request.param]
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, reduced_motion="reduce"
    )
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
    yield page
    wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    context.close()
    assert not [said for said in complaints if not any(text in said for text in forgiven)]
    assert wide <= 0, "the page scrolls sideways"
