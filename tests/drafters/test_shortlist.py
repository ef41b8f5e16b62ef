"""Which tokens a draft model may name beside the frequent ones."""

from __future__ import annotations

import pytest

from foredraft.core.errors import ConfigError
from foredraft.drafters import build_drafter
from foredraft.drafters.model.shortlist import Shortlists
from foredraft.drafters.spec import DrafterContext
from foredraft.models.base import MOST_OTHERS, Shortlist
from tests.conformance.harness import fused_decoder
from tests.drafters.heads import tiny_target


def test_rare_tokens_of_the_text_may_be_named_the_last_ones_first() -> None:
    lists = Shortlists(100)
    assert lists.of(1, [1, 2, 200, 99, 100]) == Shortlist(100, (100, 200))
    assert lists.of(1, [1, 2, 200, 99, 100, 3, 200, 300]) == Shortlist(100, (300, 200, 100))
    assert lists.of(2, [1]) == Shortlist(100)
    lists.end(1)
    assert lists.of(1, [1]) == Shortlist(100)


def test_a_text_that_brings_many_rare_tokens_has_all() -> None:
    lists, text = Shortlists(100), [1] * 10
    for token in range(200, 207):
        text += [1, token]
        assert lists.of(1, text) is not None
    text.append(300)
    assert lists.of(1, text) is None
    text += [200, 201, 202] * 30  # nothing new
    found = lists.of(1, text)
    assert found is not None
    assert set(found.others) == {*range(200, 207), 300}


def test_others_are_few() -> None:
    lists, text = Shortlists(100), [token for rare in range(200, 300) for token in (rare, *[1] * 9)]
    found = lists.of(1, text)
    assert found is not None
    assert found.others == tuple(range(299, 299 - MOST_OTHERS, -1))


def test_a_size_that_is_no_number_of_tokens_is_refused() -> None:
    context = DrafterContext(tiny_target(fused_decoder()), tiny_target(fused_decoder()))
    for size in (-1, 1.5, "64k"):
        with pytest.raises(ConfigError, match="draft_vocab_size"):
            build_drafter(
                "draft_model",
                DrafterContext(**{**vars(context), "options": {"draft_vocab_size": size}}),
            )
