"""A page served for headless Chromium; tests that want one skip where it is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from foredraft.llm import LLM
from tests.server.conftest import running

PARTS = 11
"""Of the tour."""


@contextmanager
def served(llm: LLM) -> Iterator[str]:
    """The address of a page over ``llm``, while the context lasts."""
    with running(lambda _: llm) as server:
        yield f"{server.url}/"


def say(page: Any, text: str) -> None:
    page.fill("textarea", text)
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn.reply .facts b")


def guess(part: Any) -> None:
    """Guess something in a part of the tour, with the keyboard where it is a number."""
    text = part.locator("textarea")
    if text.count() and text.is_editable():
        text.fill("Name the months of the year.")
    elif text.count():
        part.locator(".answers .chip").first.click()  # the recorded ones
    what = part.locator(
        ".asking .scrub, .asking [role=radio], .well[role=slider], .node[role=button]"
    ).first
    what.wait_for()
    what.focus()
    what.press("ArrowUp" if what.get_attribute("role") == "slider" else "Enter")


def answer_part(page: Any, i: int) -> None:
    """Guess in a part of the tour and let the model answer."""
    part = page.locator(".part").nth(i)
    part.scroll_into_view_if_needed()
    button = part.locator(".go .main")
    assert button.is_disabled(), "nothing is told before it is guessed"
    assert not part.locator(".answer p").count()
    guess(part)
    button.click()
    page.wait_for_function(
        "i => document.querySelectorAll('.part')[i].dataset.state === 'answered'"
        " || document.querySelectorAll('.part')[i].querySelector('.answer > .bad')",
        arg=i,
    )
    assert part.locator(".answer > .bad").count() == 0, part.locator(".answer").inner_text()
    text = part.locator(".answer").inner_text()
    assert len(text) > 120
    assert "you" in text.lower(), "it stands beside what was guessed"
