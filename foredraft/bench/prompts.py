"""Prompts to measure with: a few of our own, or a file of the user's.

Speculation pays by how much the reply repeats, so every figure names its category.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.core.errors import ConfigError

if TYPE_CHECKING:
    from foredraft.llm import LLM


@dataclass(frozen=True)
class BenchPrompt:
    """One user message and what kind of task it is."""

    id: str
    category: str
    text: str


_PASSAGE = """\
The tide mill at Harrow Creek is the last one on the coast that still grinds flour. Twice a day \
the sea fills the mill pond through a pair of oak gates, and when the tide turns, the weight of \
the water closes them by itself. The miller then waits two hours, until the level in the creek \
has fallen below the wheel, before she opens the sluice. For the next five hours the wheel turns \
the stones at about twelve turns a minute, and the mill can grind two hundred kilograms of wheat. \
The mill was built in 1782, lost its roof in the storm of 1953, and stood empty for thirty years. \
In 1984 a group of volunteers bought it for one pound, rebuilt the wheel from local elm, and \
opened the mill to visitors. Today it sells its flour to three bakeries and to anyone who comes."""

_LETTER = """\
Dear members, the annual meeting of the allotment society will take place on Saturday 14 March at \
ten in the morning in the village hall. We will elect a new treasurer, because Mr Okafor is \
stepping down after nine years. The committee proposes to raise the yearly rent from forty to \
forty-five pounds, to pay for the repair of the water tank. Members who cannot come may send their \
vote by post until 10 March. After the meeting there will be soup, bread and the first rhubarb \
cake of the year. Please bring your own bowl. The seed swap starts at noon in the small room."""

_REPORT = """\
The north bridge was inspected on 3 June. The inspectors found rust on four of the sixteen bolts \
of the east bearing, a crack of eleven centimetres in the south railing, and a blocked drain above \
the second pier. The deck and the cables are in good condition. The rust on the bolts should be \
removed and the bolts painted before winter. The railing should be welded within two weeks, and \
until then the southern footpath must stay closed. The drain was cleared on the day of the \
inspection. The next inspection is due in June of next year."""

_BASKET_CODE = """\
class Basket:
    def __init__(self, owner):
        self.owner = owner
        self.items = []

    def add(self, name, price, count):
        self.items.append((name, price, count))

    def remove(self, name):
        self.items = [item for item in self.items if item[0] != name]

    def total(self):
        result = 0
        for name, price, count in self.items:
            result = result + price * count
        return result

    def describe(self):
        lines = []
        for name, price, count in self.items:
            lines.append(f"{count} x {name} at {price}")
        return "\\n".join(lines)
"""

_LOG_CODE = """\
def read_log(path):
    entries = []
    with open(path) as file:
        for line in file:
            parts = line.strip().split(",")
            if len(parts) != 3:
                continue
            time, level, message = parts
            entries.append({"time": time, "level": level, "message": message})
    return entries


def count_levels(entries):
    counts = {}
    for entry in entries:
        level = entry["level"]
        if level not in counts:
            counts[level] = 0
        counts[level] = counts[level] + 1
    return counts
"""

_TEMPERATURE_CODE = """\
def to_fahrenheit(celsius):
    return celsius * 9 / 5 + 32

def to_celsius(fahrenheit):
    return (fahrenheit - 32) * 5 / 9

def print_table(start, stop, step):
    value = start
    while value <= stop:
        print(value, to_fahrenheit(value))
        value = value + step

def warmest(readings):
    best = readings[0]
    for reading in readings:
        if reading > best:
            best = reading
    return best
"""


def _summary(text: str) -> str:
    return f"Summarise this text in a few sentences, keeping its own words:\n\n{text}"


def _edit(change: str, code: str) -> str:
    return f"{change} Repeat the whole code.\n\n```python\n{code}```"


BUILT_IN = (
    BenchPrompt("chat-tea", "chat", "Explain to a friend how to make a good cup of tea."),
    BenchPrompt("summarise-mill", "summarise", _summary(_PASSAGE)),
    BenchPrompt("edit-basket", "edit", _edit("Rename the class to ShoppingCart.", _BASKET_CODE)),
    BenchPrompt("chat-moon", "chat", "Why does the moon always show us the same side?"),
    BenchPrompt("summarise-letter", "summarise", _summary(_LETTER)),
    BenchPrompt("edit-log", "edit", _edit("Rename entries to records.", _LOG_CODE)),
    BenchPrompt("chat-town", "chat", "Write a short story about a town without clocks."),
    BenchPrompt("summarise-bridge", "summarise", _summary(_REPORT)),
    BenchPrompt("edit-heat", "edit", _edit("Add a docstring to each function.", _TEMPERATURE_CODE)),
    BenchPrompt("chat-plan", "chat", "Plan a quiet Sunday for two people who like walking."),
)
"""Interleaved by category, so that any number of them from the front is a fair mix."""

DEMO = BUILT_IN[:3]
"""One of each category."""


def load_prompts(path: str | None, limit: int | None = None) -> list[BenchPrompt]:
    """Prompts of a JSON-lines file (``id``, ``category``, ``turns``), or the built-in ones.

    Args:
        path: the file; only the first turn of each line is used.
        limit: at most this many, taken evenly over the categories.

    Raises:
        ConfigError: the file is not there or a line of it is malformed.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is {limit}; it must be at least 1")
    prompts = list(BUILT_IN) if path is None else _read(Path(path))
    return prompts if limit is None else _spread(prompts, limit)


def encoded_prompts(
    llm: LLM, path: str | None, limit: int | None = None
) -> list[tuple[BenchPrompt, list[int]]]:
    """Prompts with their token ids, as `load_prompts` finds them.

    A target without a tokenizer gets random token ids below 1000, four prompts unless ``limit``
    says otherwise.
    """
    if llm.tokenizer is not None:
        return [(each, prompt_ids(llm, each)) for each in load_prompts(path, limit)]
    encoded = []
    for number in range(4 if limit is None else limit):
        draw = random.Random(number)
        ids = [draw.randrange(3, 1000) for _ in range(64)]
        encoded.append((BenchPrompt(f"random-{number}", "random", ""), ids))
    return encoded


def prompt_ids(llm: LLM, prompt: BenchPrompt) -> list[int]:
    """The prompt as a message, or as it stands where the model has no chat template."""
    assert llm.tokenizer is not None
    if llm.tokenizer.chat_template is None:
        return llm.tokenizer.encode(prompt.text)
    return llm.tokenizer.encode_chat([{"role": "user", "content": prompt.text}])


def _read(path: Path) -> list[BenchPrompt]:
    if not path.is_file():
        raise ConfigError(f"no such prompts file: {path}")
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            prompts.append(BenchPrompt(str(entry["id"]), entry["category"], entry["turns"][0]))
        except (ValueError, LookupError, TypeError) as error:
            lacking = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise ConfigError(
                f"{path}, line {number}: expected an object with id, category and turns: {lacking}"
            ) from error
    if not prompts:
        raise ConfigError(f"{path} holds no prompts")
    return prompts


def _spread(prompts: list[BenchPrompt], limit: int) -> list[BenchPrompt]:
    """The first ones of each category in turn."""
    by_category: dict[str, list[BenchPrompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    taken: list[BenchPrompt] = []
    depth = 0
    while len(taken) < min(limit, len(prompts)):
        layer = [group[depth] for group in by_category.values() if depth < len(group)]
        taken.extend(layer[: limit - len(taken)])
        depth += 1
    return taken
