"""Usage of a prediction: the longest common subsequence, however the reply came."""

from __future__ import annotations

import random

import pytest

from foredraft.server.usage import ExpectedText, Repeated


def num_common(left: list[int], right: list[int]) -> int:
    """By the textbook."""
    row = [0] * (len(right) + 1)
    for token in left:
        above, row = row, [0]
        for number, other in enumerate(right):
            row.append(above[number] + 1 if token == other else max(above[number + 1], row[-1]))
    return row[-1]


@pytest.mark.parametrize("seed", range(60))
def test_the_longest_common_subsequence_is_counted(seed: int) -> None:
    generator = random.Random(seed)
    vocab = generator.choice((2, 5, 50))
    predicted, written = (
        [generator.randrange(vocab) for _ in range(generator.randrange(70))] for _ in range(2)
    )
    repeated = Repeated(ExpectedText(predicted))
    at = 0
    while at < len(written):
        size = generator.randrange(1, 9)
        repeated.add(written[at : at + size])
        at += size
        assert repeated.count == num_common(predicted, written[:at])
    assert repeated.num_predicted == len(predicted)


def test_a_long_prediction_that_comes_true_is_accepted() -> None:
    """Longer than what used to be compared, and with another beginning."""
    predicted = [number * 7 % 1000 for number in range(6000)]
    repeated = Repeated(ExpectedText(predicted))
    repeated.add([5, 5, *predicted[100:]])
    assert repeated.count in range(5900, 5903)


def test_several_replies_share_a_prediction() -> None:
    prediction = ExpectedText([1, 2, 3])
    first, second = Repeated(prediction), Repeated(prediction)
    first.add([1, 3])
    second.add([3])
    assert (first.count, second.count) == (2, 1)
