"""A model that replies with a text that was written beforehand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foredraft.llm import LLM
from foredraft.models.table import TableModel
from foredraft.models.text.tokenizer import Tokenizer
from tests.models.checkpoints import VOCAB_SIZE
from tests.server.conftest import loading


def one_of(name: str, *values: object) -> dict[str, Any]:
    """The schema of an object with one field, which has one of these values."""
    return {
        "type": "object",
        "properties": {name: {"enum": [*values]}},
        "required": [name],
        "additionalProperties": False,
    }


def replying(
    tokenizer: Tokenizer, text: str, begin: str = "", **options: Any
) -> Callable[..., LLM]:
    """Loads a model that replies to any conversation with ``text``.

    Args:
        begin: what the chat template writes behind the assistant's name.
    """
    script = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_ids[0]]
    before = tokenizer.encode(f"<|im_start|>assistant\n{begin}", add_special_tokens=False)

    vocab_size = max(VOCAB_SIZE, tokenizer.vocab_size)

    def conditional(context: tuple[int, ...]) -> list[float]:
        starts = [i for i, token in enumerate(context) if token == before[0]]
        written = len(context) - (starts[-1] if starts else 0) - len(before)
        token = script[min(max(written, 0), len(script) - 1)]
        return [1.0 if each == token else 1e-9 for each in range(vocab_size)]

    return loading(
        TableModel(vocab_size, conditional), tokenizer, **{"drafter": "suffix"} | options
    )
