"""The page in headless Chromium on the default model (`make test-page`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from foredraft.llm import LLM
from tests.page.chromium import PARTS, answer_part, say, served
from tests.page.stub import told_run

pytestmark = [pytest.mark.slow, pytest.mark.real_model, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served(LLM.load()) as address:
        yield address


def test_chat_shows_how_its_text_was_made_and_why(page: Any, address: str) -> None:
    page.goto(address)
    page.click("text=1×")
    page.select_option(".composer select", index=1)  # as served it may find that nothing pays
    say(page, "Repeat after me, three times: the old mill by the river.")
    made = {t.get_attribute("data-by") for t in page.query_selector_all(".turn .token")}
    assert "draft" in made
    assert made <= {"draft", "correction", "bonus", "plain"}
    page.locator(".turn .token[data-by=draft]").first.click()
    why = page.locator("#why")
    why.wait_for(state="visible")
    assert "accepted" in why.inner_text()
    assert why.locator(".tree .node.yes").count() >= 1
    word = why.locator(".word").inner_text()
    page.click("#why >> [aria-label='Token after']")
    assert why.locator(".note").first.inner_text() or why.locator(".word").inner_text() != word
    page.keyboard.press("Escape")
    why.wait_for(state="hidden")


def test_tokens_are_reached_from_the_keyboard(page: Any, address: str) -> None:
    page.goto(address)
    page.click("text=1×")
    say(page, "Name a river.")
    page.focus(".made")
    for key in ("ArrowRight", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    page.locator("#why").wait_for(state="visible")
    assert page.locator(".token.picked").count() == 1
    first = page.inner_text("#said")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#said") != first
    assert page.evaluate("() => document.getElementById('why').contains(document.activeElement)")
    page.keyboard.press("Escape")
    assert page.evaluate("() => document.activeElement.className") == "made"


def test_controls_are_reached_from_the_keyboard(page: Any, address: str) -> None:
    page.goto(address + "#race")
    page.wait_for_selector(".lane")
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.id") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("() => document.activeElement.id") == "view"
    assert page.locator(".lane").count() == 2, "the view stays"
    page.click("nav >> text=Chat")
    page.focus(".pace [aria-checked=true]")
    assert page.inner_text(".pace [aria-checked=true]") == "1×", "nobody's reply is slowed down"
    page.keyboard.press("ArrowRight")
    assert page.inner_text(".pace [aria-checked=true]") == "slow"
    assert page.locator(".pace [tabindex='0']").count() == 1


def test_a_ratio_test_shows_its_numbers_and_the_residual(page: Any, address: str) -> None:
    page.goto(address)
    page.click("text=1×")
    page.evaluate(
        "() => { const t = document.querySelector('.settings input');"
        " t.value = 1; t.dispatchEvent(new Event('input')); }"
    )
    page.select_option(".composer select >> nth=0", "blend")
    page.select_option(".composer select >> nth=1", "drawn")
    say(page, "Tell me about rivers in three sentences.")
    page.locator(".turn .token[data-by=correction]").first.click()
    why = page.locator("#why")
    assert "verification" in why.inner_text()
    assert why.locator(".coin").count() >= 1
    assert "The residual it was redrawn from" in why.inner_text()
    assert why.locator("section:has-text('redrawn') .row.taken").count() == 1


def test_stop_ends_a_slow_text_and_a_new_chat_is_empty(page: Any, address: str) -> None:
    page.goto(address)
    page.select_option(".composer select", index=1)
    page.click(".pace >> text=slow")
    page.click("text=Edit code")
    page.wait_for_selector(".ghost span.no")  # slow enough to be seen, whatever moves
    page.click("[aria-label=Stop]")
    page.wait_for_selector("text=Stopped.")
    seen = page.inner_text(".made")
    page.wait_for_timeout(800)
    assert page.inner_text(".made") == seen
    page.click("text=New chat")
    assert page.locator(".turn").count() == 0
    assert page.input_value("textarea") == ""


def test_what_goes_wrong_is_said_in_words(page: Any, address: str, forgiven: list[str]) -> None:
    forgiven.append("Failed to load resource")
    page.goto(address)
    page.wait_for_selector(".hello")
    answers = [
        (lambda route: route.abort(), "The server does not answer"),
        (
            lambda route: route.fulfill(status=429, json={"detail": "try again in a moment"}),
            "Try again in a moment.",
        ),
        (
            lambda route: route.fulfill(body=told_run("river", ends=False)),
            "broke before the end",
        ),
    ]
    for i, (answer, words) in enumerate(answers):
        page.route("**/page/run", answer)
        page.fill("textarea", "x")
        page.keyboard.press("Enter")
        page.wait_for_function("n => document.querySelectorAll('.facts .bad').length > n", arg=i)
        assert words in page.inner_text(".facts .bad >> nth=-1")
        page.unroute("**/page/run")
    assert page.locator("[aria-label=Send]").count() == 1, "it can be asked again"


def test_it_waits_for_a_model_that_is_being_loaded(
    page: Any, address: str, forgiven: list[str]
) -> None:
    forgiven.append("Failed to load resource")
    loading = {"error": {"message": "the model is still being loaded"}}
    page.route("**/page/info", lambda route: route.fulfill(status=503, json=loading), times=1)
    page.goto(address)
    page.wait_for_selector("text=The model is still being loaded. The page goes on")
    page.wait_for_selector(".hello")
    assert page.locator(".composer select option").count() > 1


def test_what_the_model_says_is_text_and_never_markup(page: Any, address: str) -> None:
    page.goto(address)
    page.wait_for_selector(".hello")
    evil = "<img src=x onerror=alert(1)><script>alert(1)</script>"
    page.route("**/page/run", lambda route: route.fulfill(body=told_run(evil)))
    page.click("text=1×")
    say(page, evil)
    page.click(".turn .token")
    page.locator("#why").wait_for(state="visible")
    assert "<img src=x" in page.inner_text("#why")
    assert page.locator("main img, main script, #why img, #why script").count() == 0


def test_what_people_say_is_text_and_never_markup(page: Any, address: str) -> None:
    page.goto(address)
    page.click("text=1×")
    say(page, "<img src=x onerror=alert(1)><b>bold</b> Say: <script>1</script>")
    assert page.locator(".turn img, .turn b:not(.facts b), .turn script").count() == 0
    assert "<img src=x" in page.inner_text(".turn.user")


def test_the_race_ends_in_two_equal_hashes(page: Any, address: str) -> None:
    page.goto(address + "#race")
    page.click("text=Start the race")
    page.wait_for_selector(".finish")
    plain, fast = (
        page.inner_text(f"[data-lane={lane}]").strip() for lane in ("plain", "speculative")
    )
    assert len(plain) == 64
    assert plain == fast
    texts = [lane.inner_text() for lane in page.locator(".lane .made").all()]
    assert texts[0] == texts[1]
    page.click("nav >> text=Dials")
    page.locator(".tile .big").nth(4).wait_for()


def test_the_tour_asks_first_and_then_the_model_answers(page: Any, address: str) -> None:
    page.goto(address + "#tour")
    parts = page.locator(".part")
    parts.nth(PARTS - 1).wait_for(state="attached")  # they are built when the script has run
    assert parts.count() == PARTS
    for i in range(PARTS):
        answer_part(page, i)
    assert "one text" in page.locator("#tour-exact").inner_text()
    card = page.locator("#tour-yours").locator("canvas")
    assert "The same text, byte for byte" in card.get_attribute("aria-label")
    with page.expect_download() as saved:
        page.locator("#tour-yours").locator("text=Save the picture").click()
    assert saved.value.suggested_filename == "foredraft.png"
    assert f"of {PARTS} guesses were near" in page.inner_text(".tally")


def test_a_part_answers_also_without_a_guess_and_in_the_sentence(page: Any, address: str) -> None:
    page.goto(address + "#tour")
    part = page.locator("#tour-noise")
    part.wait_for(state="attached")
    part.scroll_into_view_if_needed()  # it asks the model for its words when it is seen
    part.locator(".answers [role=radio]").first.wait_for()
    part.locator("text=I have no idea").click()
    page.wait_for_function(
        "() => document.getElementById('tour-noise').dataset.state === 'answered'"
    )
    bars = part.locator(".noise-row i.p")
    before = [bar.evaluate("bar => bar.style.getPropertyValue('--of')") for bar in bars.all()]
    heat = part.locator(".answer .scrub").first
    assert heat.get_attribute("aria-valuetext") == "0.8"
    heat.press("ArrowRight")
    assert heat.get_attribute("aria-valuetext") == "0.9"
    page.wait_for_function(
        "before => [...document.querySelectorAll('.noise-row i.p')]"
        ".some((bar, i) => bar.style.getPropertyValue('--of') !== before[i])",
        arg=before,
    )


def test_light_and_dark_are_kept(page: Any, address: str) -> None:
    page.goto(address)
    page.wait_for_selector(".hello")
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    after = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert before != after
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == after
