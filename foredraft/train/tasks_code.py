"""Requests to write, complete and explain code, put together from parts."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from foredraft.train.topics import listed


@dataclass(frozen=True)
class Work:
    """What a function does: its name and docstring for a noun {n}, and its code for a value {v}."""

    name: str
    says: str
    code: str
    do: Callable[[Any], object]


_NOUNS = listed(
    """price, order, score, name, grade, temperature, distance, item, token, word, line,
    record, user, message, cell, point, segment, node, edge, color, invoice, ticket, shipment,
    measurement, sample"""
)
_LANGUAGES = ("Python", "Python", "JavaScript", "Java", "C++", "Go", "SQL", "Rust", "Bash")
_JOBS = (
    "reads a CSV file and prints the average of each column",
    "counts the words of a text file", "finds the shortest path between two nodes of a graph",
    "keeps a list of tasks and lets the user mark them as done", "draws a triangle of stars",
    "downloads a web page and lists its links", "converts temperatures between units",
    "simulates a queue at a bank", "implements a stack with push, pop and peek",
    "merges two sorted lists", "reverses a linked list", "checks whether brackets are balanced",
    "generates a random password", "plays tic-tac-toe against the user",
    "validates an email address",    "groups a list of records by a key",
    "inverts a binary tree", "searches a matrix for a number",
    "prints a calendar of a month", "caches the results of a slow function", "parses a date",
    "removes duplicates from a list and keeps the order", "computes a moving average",
    "multiplies two matrices", "encodes a text with a Caesar cipher", "rolls dice and keeps score",
)  # fmt: skip
_TOPICS = (
    "a list and a tuple", "a class and an object", "recursion and iteration",
    "a process and a thread",    "an array and a linked list", "a stack and a queue",
    "GET and POST", "git merge and git rebase",
    "unit tests and integration tests", "a compiler and an interpreter", "TCP and UDP",
    "depth-first and breadth-first search", "SQL and NoSQL databases", "a set and a dictionary",
)  # fmt: skip
_LISTS: tuple[Work, ...] = (
    Work("largest_{n}_gap", "Return the largest difference between neighbouring {n}s.",
         "max(abs(a - b) for a, b in zip({v}, {v}[1:]))",
         lambda v: max(abs(a - b) for a, b in pairwise(v))),
    Work("count_{n}s_above", "Count the {n}s that are above the mean of all of them.",
         "sum(x > sum({v}) / len({v}) for x in {v})",
         lambda v: sum(x > sum(v) / len(v) for x in v)),
    Work("every_second_{n}", "Return every second {n}, starting with the first one.",
         "{v}[::2]", lambda v: v[::2]),
    Work("running_{n}_total", "Return the list of running totals of the given {n}s.",
         "[sum({v}[: i + 1]) for i in range(len({v}))]", lambda v: list(accumulate(v))),
    Work("rotate_{n}s", "Move the last {n} to the front.",
         "[{v}[-1], *{v}[:-1]]", lambda v: [v[-1], *v[:-1]]),
    Work("{n}s_without_extremes", "Sort the {n}s, without the smallest and the largest one.",
         "sorted({v})[1:-1]", lambda v: sorted(v)[1:-1]),
    Work("double_odd_{n}s", "Double every odd {n} and leave the others as they are.",
         "[2 * x if x % 2 else x for x in {v}]", lambda v: [2 * x if x % 2 else x for x in v]),
    Work("{n}_range", "Return the smallest and the largest {n} as a tuple.",
         "(min({v}), max({v}))", lambda v: (min(v), max(v))),
    Work("sum_of_even_{n}s", "Add up all even {n}s.",
         "sum(x for x in {v} if x % 2 == 0)", lambda v: sum(x for x in v if x % 2 == 0)),
    Work("index_of_smallest_{n}", "Return the index of the smallest {n}.",
         "{v}.index(min({v}))", lambda v: v.index(min(v))),
)  # fmt: skip
_TEXTS: tuple[Work, ...] = (
    Work("swap_{n}_case", "Swap upper and lower case of a {n}.",
         "{v}.swapcase()", lambda v: v.swapcase()),
    Work("count_{n}_spaces", "Count the spaces in the given {n}.",
         "{v}.count(' ')", lambda v: v.count(" ")),
    Work("initials_of_{n}", "Return the first letters of all words of the {n}.",
         "''.join(word[0] for word in {v}.split())",
         lambda v: "".join(word[0] for word in v.split())),
    Work("longest_part_of_{n}", "Return the longest word of the {n}; the first one of several.",
         "max({v}.split(), key=len)", lambda v: max(v.split(), key=len)),
    Work("mask_{n}", "Replace all characters of the {n} but the last two with stars.",
         "'*' * (len({v}) - 2) + {v}[-2:]", lambda v: "*" * (len(v) - 2) + v[-2:]),
    Work("sort_{n}_words", "Sort the words of the {n} by their length.",
         "' '.join(sorted({v}.split(), key=len))", lambda v: " ".join(sorted(v.split(), key=len))),
    Work("{n}_to_snake_case", "Write the {n} in lower case, with underscores for spaces.",
         "{v}.lower().replace(' ', '_')", lambda v: v.lower().replace(" ", "_")),
)  # fmt: skip
_WORDS = ("red kite", "old stone bridge", "Seven small boats", "late train home", "Blue moon rises")


def code_task(random_: random.Random) -> str:
    """A request that has to do with code; half of them are functions to complete."""
    pick = random_.choice
    if random_.random() < 0.55:
        return _completion(random_)
    job, language, noun = pick(_JOBS), pick(_LANGUAGES), pick(_NOUNS)
    return pick(
        (
            f"Write a {language} program that {job}.",
            f"Write a {language} function that {job}. Add comments.",
            f"How do I write code in {language} that {job}?",
            f"Write a Python class `{noun.capitalize()}` with methods to add, remove and list "
            f"{noun}s.",
            f"Write an SQL query that finds the ten most recent {noun}s of each {pick(_NOUNS)}.",
            f"What is the difference between {pick(_TOPICS)}?",
            f"What does this function do?\n\n```python\n{_function(random_, with_body=True)}```",
            f"Write unit tests for this function.\n\n```python\n"
            f"{_function(random_, with_body=True)}```",
            f"Is there a bug in this code?\n\n```python\n{_function(random_, with_body=True)}```",
        )
    )


def _completion(random_: random.Random) -> str:
    ask = random_.choice(
        (
            "Complete the following Python function.\n\n```python\n{}```",
            "Complete this function:\n\n```python\n{}```",
            "```python\n{}```\nFill in the body of this function.",
            "Write the body of this Python function.\n{}",
        )
    )
    return ask.format(_function(random_, with_body=False))


def _function(random_: random.Random, with_body: bool) -> str:
    """Signature, docstring and examples, and perhaps what it returns."""
    noun, is_list = random_.choice(_NOUNS), random_.random() < 0.6
    work = random_.choice(_LISTS if is_list else _TEXTS)
    variable = random_.choice(
        (f"{noun}s", "values", "items", "data") if is_list else (noun, "text")
    )
    name, says = work.name.format(n=noun), work.says.format(n=noun)
    kind = "list[int]" if is_list else "str"
    lines = [f"def {name}({variable}: {kind}):", f'    """{says}']
    for _ in range(random_.randint(0, 3)):
        value: object = random_.choice(_WORDS)
        if is_list:
            value = [random_.randint(-9, 60) for _ in range(random_.randint(3, 6))]
        lines += [f"    >>> {name}({value!r})", f"    {work.do(value)!r}"]
    lines.append('    """')
    if with_body:
        lines.append(f"    return {work.code.format(v=variable)}")
    return "\n".join(lines) + "\n"
