"""A page served for headless Chromium; tests that want one skip where it is missing."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from foredraft.llm import LLM
from tests.page.conftest import page_app


@contextmanager
def served(llm: LLM) -> Iterator[str]:
    """The address of a page over ``llm``, while the context lasts."""
    import uvicorn

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = uvicorn.Config(page_app(llm), port=port, log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}/"
    server.should_exit = True
    thread.join(20)


def say(page: Any, text: str) -> None:
    page.fill("textarea", text)
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn.reply .facts b")
