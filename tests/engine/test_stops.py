"""Ends of replies: stop strings and ids, min_tokens, include_stop; inside drafts, too."""

from __future__ import annotations

from typing import Any

import pytest

from foredraft.core.params import SamplingParams
from foredraft.engine.text import TextAssembler
from tests.engine.helpers import LETTERS, counting_drafter, counting_model, generate, new_engine

WORDS = ["ab", "c", "abc", "st", "op", " ", "x"]


def assemble(words: list[str], **options: Any) -> tuple[str, str, int]:
    """The text, what was taken of it on the way, and after how many words it stopped."""
    assembler = TextAssembler(WORDS.__getitem__, **options)
    taken, count, stopped = "", 0, False
    for word in words:
        stopped, count = assembler.push(WORDS.index(word), drafted=True), count + 1
        taken += "".join(piece.text for piece in assembler.take(final=stopped))
        if stopped:
            break
    taken += "".join(piece.text for piece in assembler.take(final=True))
    assert taken == assembler.text, "what was handed out is never taken back"
    return assembler.text, taken, count


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"stop": ("stop",)}, ("ab", 3)),
        ({"stop": ("stop",), "include_stop": True}, ("abstop", 3)),
        ({"stop": ("bst",)}, ("a", 2)),
        ({"stop": ("bst",), "include_stop": True}, ("abst", 2)),
        ({"stop": ("to", "stop"), "include_stop": True}, ("abstop", 3)),
        ({"stop": ("p",), "include_stop": True}, ("abstop", 3)),
        ({"stop": ("t",), "include_stop": True}, ("abst", 2)),
        ({"stop": ("ab",), "min_tokens": 1}, ("abstopc", 5)),  # not the first, the second
        ({"stop": ("ab", "cab"), "min_tokens": 2}, ("abstop", 5)),
        ({"stop": ("bs",), "min_tokens": 1}, ("a", 2)),  # it begins too soon and ends in time
        ({"stop": ("stop",), "min_tokens": 3}, ("abstopcabstx", 7)),
        ({"stop": ("st", "x"), "min_tokens": 6}, ("abstopcabst", 7)),
    ],
)
def test_stop_strings(options: dict[str, Any], expected: tuple[str, int]) -> None:
    text, _, count = assemble(["ab", "st", "op", "c", "ab", "st", "x"], **options)
    assert (text, count) == expected


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 4])
@pytest.mark.parametrize(
    ("options", "text", "ids"),
    [
        ({"stop_token_ids": [4]}, "bcd", 4),
        ({"stop_token_ids": [4], "include_stop": True}, "bcde", 4),
        ({"stop": "de"}, "bc", 4),
        ({"stop": "de", "include_stop": True}, "bcde", 4),
        ({"stop": "de", "min_tokens": 4}, "bcdefghijabc", 14),
        ({"stop": "de", "min_tokens": 3}, "bc", 4),
    ],
)
def test_they_stop_drafted_text_where_they_stop_plain_text(
    options: dict[str, Any], text: str, ids: int, num_draft_tokens: int
) -> None:
    engine = new_engine(counting_model(), counting_drafter(), num_draft_tokens=num_draft_tokens)
    params = SamplingParams(max_tokens=20, **options)
    (result,) = generate(engine, [[0]], params)
    assert (result.text, len(result.token_ids), result.finish_reason) == (text, ids, "stop")
    assert result.stop_string == options.get("stop")


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_nothing_ends_a_reply_before_min_tokens(num_draft_tokens: int) -> None:
    engine = new_engine(counting_model(), counting_drafter(), num_draft_tokens=num_draft_tokens)
    params = SamplingParams(max_tokens=9, min_tokens=6, stop_token_ids=[2])
    (result,) = generate(engine, [[0]], params)
    assert 2 not in result.token_ids[:6]
    assert LETTERS[result.token_ids[0]] == "b"


def test_min_tokens_yields_to_a_full_context() -> None:
    target = counting_model()
    target.max_context = 8
    (result,) = generate(new_engine(target), [[0, 1, 2]], SamplingParams(min_tokens=50))
    assert (len(result.token_ids), result.finish_reason) == (5, "length")
