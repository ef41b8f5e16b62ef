"""N-grams: the longest suffix seen before, and a table that was learnt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from foredraft.core.errors import ConfigError, ModelLoadError
from foredraft.core.params import SamplingParams
from foredraft.drafters import build_drafter
from foredraft.drafters.base import DraftRow
from foredraft.drafters.spec import DrafterContext
from foredraft.drafters.text.ngram import NgramDrafter, NgramIndex
from foredraft.drafters.text.table import (
    AGREED,
    ALONE,
    NO_SHARES,
    PARTED,
    NgramTable,
    TableText,
    load_table,
    next_hash,
)
from foredraft.drafters.trained import identify
from foredraft.models.files.progress import SilentProgress
from foredraft.train.options import TableOptions
from foredraft.train.table import learn_table, train_table
from foredraft.train.target import TrainingTarget
from foredraft.train.texts import Text
from tests.drafters.heads import VOCAB, tiny_target
from tests.drafters.prices import FREE_NODES


def reference(tokens: Sequence[int], count: int, min_size: int, max_size: int) -> list[int]:
    """The slow reading: look for each suffix, longest first, from the end backwards."""
    for size in range(min(max_size, len(tokens)), min_size - 1, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[-size:]:
                text = list(tokens)
                for i in range(count):
                    text.append(text[start + size + i])
                return text[len(tokens) :]
    return []


@settings(max_examples=200)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    cuts=st.lists(st.integers(1, 30), max_size=5),
    sizes=st.tuples(st.integers(1, 3), st.integers(0, 3)),
    count=st.integers(1, 8),
)
def test_agrees_with_a_search_however_the_text_has_grown(
    tokens: list[int], cuts: list[int], sizes: tuple[int, int], count: int
) -> None:
    min_size, max_size = sizes[0], sizes[0] + sizes[1]
    index = NgramIndex(min_size, max_size)
    for length in sorted({min(cut, len(tokens)) for cut in cuts} | {len(tokens)}):
        grown = tokens[:length]
        assert index.lookup(grown, count) == reference(grown, count, min_size, max_size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_ngram_size": 0}, "min_ngram_size is 0; it must be at least 1"),
        ({"max_ngram_size": 1}, "max_ngram_size is 1; it must be at least 2"),
        ({"max_ngram_size": "4"}, "max_ngram_size must be a whole number"),
        ({"min_ngram_size": True}, "min_ngram_size must be a whole number"),
        ({"max_ngram_size": 3.0}, "max_ngram_size must be a whole number"),
    ],
)
def test_refuses_sizes_that_are_none(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NgramDrafter(**options)


# ------------------------------------------------------------------------------- a table of n-grams


TARGET = tiny_target()


def text_of(*tokens: int, num_prompt: int = 1, temperature: float = 0.0) -> Text:
    return Text(np.array(tokens, np.int64), num_prompt, temperature)


def table_of(*texts: Text) -> NgramTable:
    return learn_table(texts, VOCAB, TableOptions())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [text_of(*range(n, n + 20), 5, 5, n, num_prompt=3) for n in range(12)]
    directory = tmp_path_factory.mktemp("table")
    target = TrainingTarget(TARGET, "tiny", "its weights")
    train_table(target, texts, directory, TableOptions(), {"data": "counted"}, SilentProgress())
    return directory


def test_the_longest_known_context_says_what_follows() -> None:
    table = table_of(*[text_of(7, 1, 2, 3)] * 4, *[text_of(7, 9, 2, 4)] * 4)
    assert table.successors([1, 2])[0][0] == 3
    assert table.successors([9, 2])[0][0] == 4
    assert {token for token, _ in table.successors([80, 2])} == {3, 4}
    assert table.successors([80]) == table.successors([]) == []


def test_chances_are_those_of_the_counts_and_of_what_is_shorter() -> None:
    # 2 was followed by 3 in 6 of 8 cases, (9, 2) by 4 in both.
    table = table_of(*[text_of(7, 1, 2, 3)] * 6, *[text_of(7, 9, 2, 4)] * 2)
    alone = dict(table.successors([80, 2]))
    assert alone == pytest.approx({3: 8 / 12 * 6 / 8, 4: 8 / 12 * 2 / 8}, abs=0.003)
    both = dict(table.successors([80, 9, 2]))
    expected = {4: 2 / 6 + 4 / 6 * alone[4], 3: 4 / 6 * alone[3]}
    assert both == pytest.approx(expected, abs=0.006)


def test_prompts_are_read_and_not_learnt_and_texts_are_apart() -> None:
    table = table_of(*[text_of(1, 2, 3, 4, 5, num_prompt=3)] * 4)
    assert table.successors([2]) == []  # 3 is of the prompt
    assert table.successors([3])[0][0] == 4
    assert table.successors([5]) == []  # what the next text begins with
    assert table_of().successors([1]) == []


def test_what_came_once_is_left_out_and_what_a_shorter_context_says_too() -> None:
    assert len(table_of(text_of(1, 2, 3, 4))) == 0
    certain = table_of(*[text_of(1, 2, 3, 4, 5, 6)] * 40)
    assert len(certain) == 5  # one token says all that two to five do


def test_a_small_file_keeps_what_names_most_tokens_right() -> None:
    texts = [text_of(n, n, n + 1) for n in range(2, 60, 3)] * 3 + [text_of(70, 71, 72)] * 50
    table = learn_table(texts, VOCAB, TableOptions(megabytes=2 * 13e-6))
    assert len(table) == 2
    assert table.successors([71])[0][0] == 72
    # 6 comes most and is followed by anything; 71 by one token, half as often.
    texts = [text_of(5, 6, n, num_prompt=2) for n in range(10, 50)] * 3 + [text_of(70, 71, 72)] * 60
    table = learn_table(texts, VOCAB, TableOptions(megabytes=2 * 13e-6))
    assert table.successors([70])[0][0] == 71
    assert table.successors([71])[0][0] == 72


def test_opinions_of_table_and_text_are_weighed_together() -> None:
    table = table_of(*[text_of(0, 1, 2, 3)] * 8)
    text = TableText([1, 2, 50, 1], table, False)
    opinion = text.opinion(text.place)
    assert (opinion.first, opinion.situation) == (2, AGREED)
    parted = TableText([60, 1, 9, 60, 1], table, False)
    opinion = parted.opinion(parted.place)
    assert opinion.situation == PARTED
    assert {token for token, _ in opinion.chances} == {2, 9}
    alone = TableText([40, 1], table, False)
    assert alone.opinion(alone.place).situation == ALONE


def test_chances_follow_what_came() -> None:
    table = table_of(*[text_of(0, 1, 2, 3)] * 8)
    text = TableText([40, 1], table, False)
    before = next(iter(text.successors(text.place)))
    for token in (2, 30, 1, 2, 31, 1, 2, 32, 1):
        text.commit(token)
    fresh = TableText([40, 1], table, False)
    after = next(iter(text.successors((fresh.place[0], text.place[1]))))
    assert before[0] == after[0] == 2
    assert after[1] > before[1]


def test_it_drafts_what_it_learnt(folder: Path) -> None:
    drafter = build_drafter("table", DrafterContext(TARGET, options={"head": str(folder)}))
    tokens = [90, 6, 7]
    drafter.begin(DraftRow.of(0, tokens))
    params = SamplingParams.of(temperature=0.0)
    row = DraftRow.of(0, tokens, params, 4, prices=FREE_NODES)
    (proposal,) = drafter.propose([row])
    assert proposal.tree.tokens[:3] == (8, 9, 10)


def test_a_table_is_what_was_saved(folder: Path) -> None:
    table = load_table(folder, identify(TARGET, "tiny"), VOCAB)
    assert len(table)
    assert table.shares != NO_SHARES
    info = json.loads((folder / "head.json").read_text())
    assert info["provenance"]["data"] == "counted"
    assert set(info["measured"]) == {"greedy", "sampled"}
    assert "held-out replies" in (folder / "README.md").read_text()


def test_keys_stay_what_stored_tables_have_them() -> None:
    """Another hash would need another number of the format, or old tables would say nothing."""
    assert reduce(next_hash, [3, 49_151, 0], 0) == 2530583521009388411


def copy_of(folder: Path, where: Path) -> Path:
    where.mkdir()
    for path in folder.iterdir():
        (where / path.name).write_bytes(path.read_bytes())
    return where


def test_a_damaged_table_is_refused(folder: Path, tmp_path: Path) -> None:
    identity = identify(TARGET, "tiny")
    other = copy_of(folder, tmp_path / "weights")
    tensors = load_file(other / "weights.safetensors")
    tensors["chances"] = torch.ones_like(tensors["chances"])
    save_file(tensors, other / "weights.safetensors")
    with pytest.raises(ModelLoadError, match=r"is not what head\.json says"):
        load_table(other, identity, VOCAB)
    with pytest.raises(ModelLoadError, match="vocabulary of 4"):
        load_table(folder, identity, 4)


def test_a_table_of_another_target_is_refused(folder: Path, tmp_path: Path) -> None:
    other = copy_of(folder, tmp_path / "other")
    meta = json.loads((other / "head.json").read_text())
    meta["target"]["fingerprint"] = "0" * 16
    (other / "head.json").write_text(json.dumps(meta))
    with pytest.raises(ConfigError, match="trained for 'tiny'"):
        load_table(other, identify(TARGET, "tiny"), VOCAB)
