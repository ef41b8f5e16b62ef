"""The page's figures, paces and words are right: in headless Chromium, on a small model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foredraft.audit.report import AuditReport, Finding, Level
from foredraft.core.params import SamplingParams
from foredraft.llm import LLM
from foredraft.options import LoadOptions
from foredraft.trace.files import TraceFile
from tests.page.chromium import say, served
from tests.page.stub import told_run

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def address(tiny: LLM) -> Iterator[str]:
    with served(tiny) as address:
        yield address


def store(page: Any, address: str, script: str) -> Any:
    """The result of ``script``, which has the functions of store.js as ``store``."""
    page.goto(address)
    page.wait_for_selector(".hello")
    return page.evaluate(
        f'async () => {{ const store = await import("/page/files/js/store.js"); {script} }}'
    )


def event(*, draft: int, accepted: int, ms: float, **row: Any) -> dict[str, Any]:
    """A decoding step of a chain of ``draft`` tokens."""
    tokens = list(range(draft))
    times = {"draft_ms": 0, "score_ms": ms, "verify_ms": 0, "learn_ms": 0}
    chain = {"tokens": tokens, "parents": [token - 1 for token in tokens]}
    committed = [{"token": 0, "text": "x", "by": "draft"}] * (accepted + 1)
    step = {"draft": chain, "path": tokens[:accepted], "num_accepted": accepted}
    return {
        "decoding": True,
        "times": times,
        "row": {**step, "committed": committed, "num_read": 1, **row},
    }


def test_a_place_counts_only_where_the_draft_had_a_token_below_the_accepted_path(
    page: Any, address: str
) -> None:
    tree = {"tokens": [1, 2, 3, 4], "parents": [-1, -1, 1, 2]}  # 1 alone; 2, 3, 4 in a line
    short = event(draft=0, accepted=0, ms=1)
    short["row"] |= {"draft": tree, "path": [0], "num_accepted": 1}
    long = json.loads(json.dumps(short))
    long["row"] |= {"path": [1, 2], "num_accepted": 2}
    places = store(page, address, f"return store.summary({json.dumps([short, long])}).places;")
    assert [(p["count"], p["rate"]) for p in places] == [(2, 1.0), (1, 1.0), (1, 0.0)]


def test_speed_up_and_acceptance_have_one_definition_each(page: Any, address: str) -> None:
    plain = [event(draft=0, accepted=0, ms=ms) for ms in (8, 8, 14)]
    fast = [event(draft=4, accepted=3, ms=16), event(draft=4, accepted=0, ms=14)]
    prompt = event(draft=0, accepted=0, ms=500) | {"decoding": False}
    figures = store(
        page,
        address,
        f"""
        const [plain, fast, prompt] = {json.dumps([plain, fast, prompt])};
        [prompt, ...plain, ...plain, ...plain, ...plain].forEach(store.recordPlain);
        [prompt, ...fast].forEach(store.record);
        const plainMs = store.plainStep(99).ms;
        return {{
            plainMs, saved: fast.map((step) => store.saved(step, plainMs)),
            race: store.raceSpeedup([prompt, ...fast], [prompt, ...plain]),
            dials: store.speedup(store.all(), plainMs), ...store.summary(),
        }};""",
    )
    assert figures["plainMs"] == pytest.approx(10)
    assert figures["race"] == figures["dials"] == pytest.approx(5 * 10 / 30)
    assert sum(figures["saved"]) == pytest.approx(5 * 10 - 30)
    assert figures["acceptance"] == pytest.approx(3 / 8)
    assert figures["placesRight"] == pytest.approx(3 / 5), "the fourth of the first, and the next"


def test_a_race_and_the_dials_say_the_same_speed_up(page: Any, address: str) -> None:
    page.goto(address + "#race")
    page.click("text=Start the race")
    page.wait_for_selector(".finish")
    said = re.findall(r"\d+\.\d+×", page.inner_text(".finish"))
    assert len(said) == 1, "one race, one speed-up"
    page.click("nav >> text=Dials")
    page.wait_for_selector(".tile")
    assert set(re.findall(r"(?:Speed-up|measured): (\d+\.\d+×)", page.inner_text(".dials"))) == {
        *said
    }
    text = page.text_content(".dials")
    assert set(re.findall(r"measured: (\d+\.\d+×)", text)) == {*said}
    assert len(re.findall(r"Acceptance: \d", text)) == 1
    [right] = re.findall(r"([>\d]+ %)of places", text)
    assert f"at {right}" in text, "the dot stands where the tile says"


def test_the_dials_judge_by_plain_steps_of_this_tab_alone(page: Any, address: str) -> None:
    """On a machine that was busy since, the server's own measurement would ring the alarm."""
    slow, plain = event(draft=2, accepted=0, ms=900), event(draft=0, accepted=0, ms=1)
    store(page, address, f"for (let i = 0; i < 14; i++) store.record({json.dumps(slow)});")
    page.click("nav >> text=Dials")
    page.wait_for_selector("text=What was gained or lost is known when")
    assert not page.is_visible(".alarm")
    assert "measured:" not in page.text_content(".dials")
    page.evaluate(
        f"""async () => {{ const store = await import("/page/files/js/store.js");
        for (let i = 0; i < 14; i++) store.recordPlain({json.dumps(plain)}); }}"""
    )
    page.click("nav >> text=Chat")
    page.click("nav >> text=Dials")
    page.wait_for_selector("text=Speculation is costing you here")
    assert "time lost" in page.inner_text(".dials")


def test_a_step_without_a_draft_loses_what_was_spent_on_the_question(
    page: Any, address: str
) -> None:
    times = {"draft_ms": 2, "score_ms": 20, "verify_ms": 1, "learn_ms": 3}
    drafting, idle = (event(draft=n, accepted=n, ms=0) | {"times": times} for n in (2, 0))
    found = store(
        page,
        address,
        f"return {json.dumps([drafting, idle])}.map((step) => store.drafting(step, 10));",
    )
    assert found == [3 * 10 - 26, -(2 + 3)]


def test_a_tree_says_what_a_node_has_by_itself(page: Any, address: str) -> None:
    draft = {"tokens": [4, 5], "parents": [-1, 0], "texts": ["a", "b"], "chances": [0.5, 0.25]}
    figures = store(
        page,
        address,
        f"""
        const {{ treePicture }} = await import("/page/files/js/tree.js");
        const row = {{ draft: {json.dumps(draft)}, path: [] }};
        return [...treePicture(row).querySelectorAll("text.p")].map((text) => text.textContent);""",
    )
    assert figures == ["50 %", "50 %"], "each after what stands to its left"


@pytest.mark.parametrize("copies", [True, False])
def test_who_copies_is_said_by_the_server_and_not_by_a_list(
    page: Any, address: str, copies: bool
) -> None:
    row = {"drafter": "somebody_elses", "copies": copies, "draft": {"tokens": [1]}}
    found = store(
        page,
        address,
        f"""
        const {{ isCopy }} = await import("/page/files/js/tokens.js");
        const row = {json.dumps(row)};
        const named = {{ ...row, draft: {{ tokens: [1], authors: ["copy"] }} }};
        return [isCopy(row, 0), isCopy(named, 0)];""",
    )
    assert found == [copies, True]


def test_the_why_of_a_greedy_token_says_nothing_but_words(page: Any, address: str) -> None:
    page.goto(address)
    say(page, "the ferry and the ferry")
    for token in range(3):
        page.locator(".turn .token").nth(token).click()
        page.locator("#why").wait_for(state="visible")
        text = page.inner_text("#why")
        assert "At temperature 0" in text
        assert not re.search(r"\bnull\b|\bundefined\b|\bNaN\b", text)


def test_copies_beyond_the_budget_are_named(page: Any, address: str) -> None:
    told = told_run("river").replace('"budget": 1', '"budget": 0')
    page.route("**/page/run", lambda route: route.fulfill(body=told))
    page.goto(address)
    say(page, "x")
    page.click(".turn .token")
    page.wait_for_selector("text=The draft: 1 token, 1 of them copies beyond the 0 allowed")


def test_step_by_step_means_it_also_when_the_model_has_ended(page: Any, address: str) -> None:
    page.route("**/page/run", lambda route: route.fulfill(body=told_run("river")))
    page.goto(address)
    page.click(".pace >> text=step")
    page.fill("textarea", "x")
    page.keyboard.press("Enter")
    following = page.locator("text=Next step")
    following.wait_for(state="visible")
    page.wait_for_timeout(300)  # all of the run is here
    assert page.locator(".turn .token").count() == 0
    following.click()
    page.wait_for_selector(".turn .token")
    page.wait_for_selector(".turn.reply .facts b")


def test_a_run_of_the_tab_is_replayed_as_the_command_does(page: Any, address: str) -> None:
    page.goto(address)
    page.select_option(".composer select", "suffix")
    say(page, "the ferry and the ferry")
    tokens = re.findall(r"(\d+) tokens", page.inner_text(".facts"))[0]
    page.click("nav >> text=Replay")
    page.wait_for_selector(".timeline")
    told = page.inner_text(".timeline figcaption")
    [counted] = re.findall(r"(\d+) tokens", told)
    assert 0 < int(counted) <= int(tokens), "the first belongs to the prompt"
    line = page.locator(".line-of-time")
    line.focus()
    line.press("Home")
    assert "Step 1:" in page.inner_text(".step-told")
    line.press("ArrowRight")
    assert "Step 2:" in page.inner_text(".step-told")
    rows = page.locator(".request tbody tr th").all_inner_texts()  # stretches hold all tokens
    assert rows[0].startswith("1–")
    assert rows[-1].endswith(f"–{counted}")
    page.click("text=Run it again")
    page.wait_for_selector(".again .timeline")
    assert "for the same text" in page.inner_text(".again")


def test_files_of_traces_and_audits_are_shown(
    page: Any, address: str, tiny: LLM, tmp_path: Path
) -> None:
    trace, audit, other = (tmp_path / name for name in ("t.jsonl", "a.json", "o"))
    with TraceFile(trace) as file:
        file.begin(model="tiny", drafter="ngram", num_draft_tokens=4)
        llm = LLM(
            tiny.target,
            tiny.tokenizer,
            LoadOptions(drafter="ngram"),
            trace=file.tracer(tiny.tokenizer),
        )
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        for prompt in ([1, 2, 1, 2, 1, 2], [3, 4, 3]):
            llm.generate([prompt], params)
    level = Level("bits", Finding.DIFFERENT, "1 of 9 texts differ", {"texts": [{"seed": 1}]}, [])
    report = AuditReport("here", [level], {}, ["bits"], 1.0, 0)
    audit.write_text(json.dumps(report.as_dict()))
    other.write_text("<html>")
    page.goto(address + "#replay")
    page.wait_for_selector(".drop")
    page.set_input_files("#replay-file", trace)
    page.wait_for_selector(".timeline")
    assert page.locator(".replayed option").all_inner_texts() == ["request 0", "request 1"]
    counted = page.inner_text(".timeline")
    assert re.search("(19|20) tokens", counted), "the first belongs to a prompt that was read"
    page.set_input_files("#replay-file", audit)
    page.wait_for_selector(".audit")
    assert page.inner_text(".verdict") == "It differs"
    assert "1 of 9 texts differ" in page.inner_text(".levels")
    page.set_input_files("#replay-file", other)
    page.wait_for_selector(".replayed .bad")
    assert "neither a trace nor" in page.inner_text(".replayed .bad")
