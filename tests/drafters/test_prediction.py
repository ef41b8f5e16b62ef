"""Predicted output: following the expected text, and finding back to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.drafters import build_drafter
from foredraft.drafters.base import Drafter
from foredraft.drafters.spec import DrafterContext
from foredraft.models.table import TableModel
from tests.drafters.following import Followed, first_level

VOCAB = 256
TEXT = "the old mill by the river grinds flour for three villages and one inn"


class Letters:
    """A tokenizer whose ids are code points."""

    vocab_size = VOCAB
    fingerprint = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [ord(letter) for letter in text]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, token_ids))


def build(tokenizer: Letters | None = None, **options: Any) -> Drafter:
    target = TableModel.random(VOCAB, seed=0)
    return build_drafter("prediction", DrafterContext(target, options=options, tokenizer=tokenizer))


def follow(prediction: str | None, prompt: str = "?", output: str = "") -> Followed:
    params = SamplingParams(prediction=prediction)
    request = Followed(build(Letters()), ids(prompt), params)
    request.commit(*ids(output))
    return request


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def drafted(request: Followed) -> str:
    """The first path of the draft, as text."""
    tree = request.draft()
    path, node = [], -1
    while node in tree.children:
        node = tree.children[node][0]
        path.append(chr(tree.tokens[node]))
    return "".join(path)


def test_a_right_prediction_is_followed_in_long_drafts() -> None:
    steps, _ = follow(TEXT).run(ids(TEXT))
    assert steps <= len(TEXT) // 8
    assert TEXT.startswith("the old mill" + drafted(follow(TEXT, output="the old mill")))


@pytest.mark.parametrize(
    ("output", "goes_on"),
    [
        ("the new m", "ill"),  # three letters replaced
        ("the very old m", "ill"),  # five inserted
        ("the mill by", " the river"),  # four left out
        ("Sure, here it is: the old m", "ill"),  # a beginning of its own
        ("the old mill, the ancient mill by the r", "iver"),
        ("the old mill by the river grinds flour for all villages", " and one"),
    ],
)
def test_it_finds_back_after_a_departure(output: str, goes_on: str) -> None:
    assert drafted(follow(TEXT, output=output)).startswith(goes_on)


def test_after_one_other_token_it_goes_on_behind_the_replaced_one() -> None:
    request = follow(TEXT, output="the old mall")
    assert drafted(request).startswith(" by")
    right_away = follow(TEXT, output="the old mi" + "X")
    assert ord("l") in first_level(right_away.draft())


def test_a_common_phrase_does_not_carry_it_off() -> None:
    """The phrase before the "y" occurs four times; the letter tells which one it is."""
    text = "in the barn and in the house and in the yard and in the field and in the pond"
    output = "in the barn and in the home and in the y"
    assert drafted(follow(text, output=output)).startswith("ard and")


def test_a_wrong_prediction_is_soon_ignored() -> None:
    other = ids("0123456789" * 12)
    steps, nodes = follow(TEXT).run(other)
    assert steps == len(other)
    assert nodes <= 12


def test_without_a_prediction_the_prompt_is_taken() -> None:
    request = follow(None, prompt=TEXT, output="the old mill")
    assert drafted(request).startswith(" by the")


def test_a_text_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="no tokenizer"):
        Followed(build(), [63], SamplingParams(prediction="aaab"))


@pytest.mark.parametrize("prediction", ["", "€ζ"])
def test_predictions_that_cannot_help_do_no_harm(prediction: str) -> None:
    request = follow(prediction, output="abc")
    assert len(request.draft()) == 0
