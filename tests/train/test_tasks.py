"""Requests that are made up from parts."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from foredraft.train.german import german_sentence
from foredraft.train.tasks import made_up_task
from foredraft.train.tasks_code import _LISTS, _TEXTS, Work, code_task

PASSAGES = [
    f"Passage {n} tells of ship {n}, built in {1900 + n}, and of its crew." for n in range(50)
]


def test_requests_differ_and_cover_all_kinds() -> None:
    made = [made_up_task(random.Random(number), PASSAGES) for number in range(3000)]
    kinds = Counter(kind for kind, _ in made)
    assert len(kinds) == 13
    assert min(kinds.values()) > 40
    assert len({text for _, text in made}) > 0.9 * len(made)
    assert not any("{" in text for kind, text in made if kind != "code")
    assert all("  " not in text and "\n " not in text for kind, text in made if kind != "code")


def test_the_same_number_gives_the_same_request() -> None:
    assert made_up_task(random.Random(7), PASSAGES) == made_up_task(random.Random(7), PASSAGES)


def test_kinds_that_need_passages_wait_for_some() -> None:
    kinds = {made_up_task(random.Random(number), [])[0] for number in range(500)}
    assert not kinds & {"summary", "reading", "editing"}


@pytest.mark.parametrize("work", [*_LISTS, *_TEXTS], ids=lambda work: work.name)
def test_examples_of_functions_are_what_their_code_says(work: Work) -> None:
    given: object = [3, 9, -2, 4] if work in _LISTS else "old Stone boat"
    assert eval(work.code.format(v="given"), {"given": given}) == work.do(given)


def test_code_and_german_have_no_gaps() -> None:
    source = random.Random(0)
    for _ in range(300):
        assert "{n}" not in code_task(source)
        assert german_sentence(source).endswith((".", "?"))
