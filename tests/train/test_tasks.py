"""Requests that are made up from parts."""

from __future__ import annotations

import random
import re
from collections import Counter
from typing import Any

import pytest

from foredraft.train.tasks import made_up_task, task_data

PASSAGES = [
    f"Passage {n} tells of ship {n}, built in {1900 + n}, and of its crew." for n in range(50)
]


@pytest.mark.parametrize(("plain", "num_kinds"), [(False, 13), (True, 9)])
def test_requests_differ_and_cover_all_kinds(plain: bool, num_kinds: int) -> None:
    made = [made_up_task(random.Random(number), PASSAGES, plain) for number in range(3000)]
    kinds = Counter(kind for kind, *_ in made)
    assert len(kinds) == num_kinds
    assert min(kinds.values()) > 40
    assert len({text for _, text, _ in made}) > 0.9 * len(made)
    on_passages = {kind for kind, _, is_on_passages in made if is_on_passages}
    assert on_passages == ({"summary_begun"} if plain else {"summary", "reading", "editing"})
    no_code = [text for kind, text, _ in made if "code" not in kind]
    assert not any("{" in text for text in no_code)
    assert all("  " not in text and "\n " not in text for text in no_code)


def test_the_same_number_gives_the_same_request() -> None:
    assert made_up_task(random.Random(7), PASSAGES) == made_up_task(random.Random(7), PASSAGES)


@pytest.mark.parametrize("plain", [False, True])
def test_kinds_that_need_passages_wait_for_some(plain: bool) -> None:
    kinds = {made_up_task(random.Random(number), [], plain)[0] for number in range(500)}
    assert not kinds & {"summary", "reading", "editing", "summary_begun"}


@pytest.mark.parametrize("work", task_data()["functions"], ids=lambda work: work["name"])
def test_examples_of_functions_are_what_their_code_says(work: dict[str, Any]) -> None:
    assert len(work["examples"]) >= 3
    for value, result in work["examples"]:
        given = {"value": eval(value)}
        assert repr(eval(work["code"].replace("{value}", "value"), given)) == result


def test_templates_name_what_there_is() -> None:
    data = task_data()
    known = {*data["templates"], "passage", "passages", "phrase", "stub", "function"}
    for templates in data["templates"].values():
        for template in templates:
            for name in re.findall(r"\{([A-Za-z][A-Za-z_]*)\d*\}", template):
                assert name.lower() in known, template
    assert {*data["chat"], *data["plain"]} <= known


def test_code_and_german_have_no_gaps() -> None:
    for number in range(3000):
        kind, text, _ = made_up_task(random.Random(number), [])
        if kind == "code":
            assert not re.search(r"\{[a-z]*\}", text)
        if kind == "translation":
            assert "  " not in text
