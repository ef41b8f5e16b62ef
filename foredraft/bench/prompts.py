"""Prompts to measure with: a few of our own, or a file of the user's.

The gain depends on how much the reply repeats, so every figure names its category.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.core.errors import ConfigError

if TYPE_CHECKING:
    from foredraft.llm import LLM


@dataclass(frozen=True)
class BenchPrompt:
    """A conversation's user messages, and what kind of task it is."""

    id: str
    category: str
    text: str
    more: tuple[str, ...] = ()

    @property
    def turns(self) -> tuple[str, ...]:
        """The first message, and those that follow the model's answers."""
        return self.text, *self.more


@cache
def built_in_prompts() -> tuple[BenchPrompt, ...]:
    """A few of our own, interleaved by category: any number from the front is a fair mix."""
    return tuple(_read(Path(__file__).with_name("prompts.jsonl")))


def load_prompts(path: str | None, limit: int | None = None) -> list[BenchPrompt]:
    """Prompts of a JSON-lines file (``category``, ``turns``, perhaps ``id``), or the built-in ones.

    Args:
        limit: at most this many, taken evenly over the categories.

    Raises:
        ConfigError: the file is not there or a line of it is malformed.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is {limit}; it must be at least 1")
    prompts = list(built_in_prompts()) if path is None else _read(Path(path))
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
            turns, category = entry["turns"], entry["category"]
            if not isinstance(turns, list) or not all(isinstance(each, str) for each in turns):
                raise ValueError(f"turns is no list of texts: {turns!r:.60}")
            if not isinstance(category, str):
                raise ValueError(f"category is no text: {category!r:.60}")
            first, *more = turns
            name = entry.get("id", entry.get("question_id", number))  # as in SPEED-Bench
            prompts.append(BenchPrompt(str(name), category, first, tuple(more)))
        except (ValueError, LookupError, TypeError) as error:
            lacking = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise ConfigError(
                f"{path}, line {number}: expected an object with category and turns: {lacking}"
            ) from error
    if not prompts:
        raise ConfigError(f"{path} holds no prompts")
    return prompts


def _spread(prompts: list[BenchPrompt], limit: int) -> list[BenchPrompt]:
    """The first ones of each category in turn."""
    groups: dict[str, list[BenchPrompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    layers = zip_longest(*groups.values())
    return [each for layer in layers for each in layer if each is not None][:limit]
