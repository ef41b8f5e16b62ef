"""Requests of many kinds, put together from parts: what people ask a chat model for.

A model that makes up its own prompts asks for few kinds of things. The words and templates are in
``tasks.toml``, which explains how they are written. For base models there are beginnings of texts
instead of requests.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

_PLACEHOLDER = re.compile(r"\{(?:([A-Za-z][A-Za-z_]*)(\d*)|(\d+)-(\d+)[a-z]?)\}")
_MOST_TRIES = 50
Words = Mapping[str, Sequence[str]]
Given = Mapping[str, Callable[[], str]]


@cache
def task_data() -> Mapping[str, Any]:
    """The content of ``tasks.toml``, with the lists of words split up."""
    data = tomllib.loads(Path(__file__).with_name("tasks.toml").read_text(encoding="utf-8"))
    lists = {name: " ".join(text.split()).split(", ") for name, text in data["words"].items()}
    return data | {"templates": data["templates"] | lists}


def made_up_task(random_: random.Random, plain: bool = False) -> tuple[str, str]:
    """A request of any kind: one of ``[chat]`` or ``[plain]`` in ``tasks.toml``, and its text.

    Args:
        random_: decides about everything.
        plain: the beginning of a text for a base model, instead of a request to a chat model.
    """
    data = task_data()
    weights: Mapping[str, int] = data["plain" if plain else "chat"]
    templates: Words = data["templates"]
    (kind,) = random_.choices([*weights], [*weights.values()])
    given = {
        "function": lambda: _function(random_, with_body=True),
        "stub": lambda: _function(random_, with_body=False),
    }
    return kind, _filled(random_.choice(templates[kind]), random_, templates, given)


def _filled(template: str, random_: random.Random, templates: Words, given: Given) -> str:
    """A template with all placeholders replaced; each name stands for one thing throughout."""
    chosen: dict[str, str] = {}

    def choose(name: str) -> str:
        if name in given:
            return given[name]()
        others = {text for key, text in chosen.items() if key.rstrip("0123456789") == name}
        for _ in range(_MOST_TRIES):
            text = _filled(random_.choice(templates[name]), random_, templates, given)
            if text not in others:
                break
        return text

    def replace(match: re.Match[str]) -> str:
        name, number, low, high = match.groups()
        key = match[0] if name is None else f"{name.lower()}{number}"
        if key not in chosen:
            chosen[key] = (
                str(random_.randint(int(low), int(high))) if name is None else choose(name.lower())
            )
        text = chosen[key]
        return text[:1].upper() + text[1:] if name is not None and name[0].isupper() else text

    return _PLACEHOLDER.sub(replace, template)


def _function(random_: random.Random, with_body: bool) -> str:
    """A Python function: signature, docstring and examples, and perhaps what it returns."""
    noun = random_.choice(task_data()["templates"]["noun"])
    work = random_.choice(task_data()["functions"])
    is_list = work["takes"] != "str"
    variable = random_.choice(
        (f"{noun}s", "values", "items", "data") if is_list else (noun, "text")
    )
    name, says = (work[key].replace("{noun}", noun) for key in ("name", "says"))
    lines = [f"def {name}({variable}: {work['takes']}):", f'    """{says}']
    for value, result in random_.sample(work["examples"], random_.randint(0, 3)):
        lines += [f"    >>> {name}({value})", f"    {result}"]
    lines.append('    """')
    if with_body:
        lines.append(f"    return {work['code'].replace('{value}', variable)}")
    return "\n".join(lines) + "\n"
