"""Retrieval: the datastore against a search by hand, its files, and the drafts from it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from foredraft.core.errors import ConfigError
from foredraft.drafters import build_drafter
from foredraft.drafters.base import Drafter
from foredraft.drafters.spec import DrafterContext
from foredraft.drafters.text.retrieval import Datastore, Interval, build_index
from foredraft.models.files.progress import SilentProgress
from foredraft.models.table import TableModel
from tests.drafters.following import Followed, first_level

VOCAB = 100
MANUAL = list(range(10, 60))
DOCUMENTS = st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=4)


def find(datastore: Datastore, pattern: list[int]) -> Interval | None:
    match = datastore.starting_with(pattern[0])
    for token in pattern[1:]:
        match = match and datastore.narrow(match, token)
    return match


def occurrences(documents: list[list[int]], pattern: list[int]) -> Counter[int]:
    """The token after each occurrence; -1 is the end of a document."""
    found: Counter[int] = Counter()
    for document in documents:
        for start in range(len(document) - len(pattern) + 1):
            end = start + len(pattern)
            if document[start:end] == pattern:
                found[document[end] if end < len(document) else -1] += 1
    return found


@given(DOCUMENTS, st.lists(st.integers(0, 2), min_size=1, max_size=5))
def test_every_occurrence_is_found(documents: list[list[int]], pattern: list[int]) -> None:
    datastore = Datastore.of_documents(documents, 3)
    expected = occurrences(documents, pattern)
    match = find(datastore, pattern)
    assert (match.end - match.first if match else 0) == expected.total()
    if match:
        followers = dict(datastore.ranked_followers(match))
        assert {t: round(share * expected.total(), 9) for t, share in followers.items()} == {
            token: count for token, count in expected.items() if token >= 0 and token in followers
        }


@given(DOCUMENTS)
def test_suffixes_are_sorted(documents: list[list[int]]) -> None:
    datastore = Datastore.of_documents(documents, 3)
    ids, suffixes = list(datastore._ids), list(datastore._suffixes)
    assert [ids[i:] for i in suffixes] == sorted(ids[i:] for i in range(len(ids)))


def test_frequent_followers_are_estimated_from_a_sample() -> None:
    datastore = Datastore.of_documents([[1, 2] * 400 + [1, 3] * 100], 5)
    match = datastore.starting_with(1)
    assert match is not None
    ranked = datastore.ranked_followers(match)
    assert ranked[0][0] == 2
    assert ranked[0][1] == pytest.approx(0.8, abs=0.1)


def test_tokens_outside_the_vocabulary_match_nothing() -> None:
    datastore = Datastore.of_documents([[1, 2, 3]], 5)
    assert datastore.starting_with(4) is None
    assert datastore.starting_with(7) is None
    assert datastore.starting_with(-1) is None


# ------------------------------------------------------------------------------------------ files


@pytest.fixture
def index(tmp_path: Path) -> Path:
    path = tmp_path / "index"
    assert build_index(path, [MANUAL, [1, 2, 3]], "abc", VOCAB, SilentProgress()) == 53
    return path


def test_an_index_on_disk_is_the_one_in_memory(index: Path) -> None:
    stored = Datastore.open(index, "abc", VOCAB)
    fresh = Datastore.of_documents([MANUAL, [1, 2, 3]], VOCAB)
    for name in ("_ids", "_suffixes", "_starts"):
        assert list(getattr(stored, name)) == list(getattr(fresh, name))
    assert [*index.parent.iterdir()] == [index]


def test_an_index_of_another_tokenizer_is_refused(index: Path) -> None:
    with pytest.raises(ConfigError, match="written with tokenizer abc and this model's is xyz"):
        Datastore.open(index, "xyz", VOCAB)
    with pytest.raises(ConfigError, match="vocabulary of 50"):
        Datastore.open(index, None, 50)


def test_a_damaged_index_is_refused(index: Path) -> None:
    index.write_bytes(index.read_bytes()[:-3])
    with pytest.raises(ConfigError, match="cannot be read"):
        Datastore.open(index, "abc", VOCAB)


@pytest.mark.parametrize(
    "changes",
    [
        {"suffixes": None},
        {"ids": torch.zeros(3, 2, dtype=torch.int32)},
        {"ids": torch.zeros(55)},
        {"suffixes": torch.full((55,), 99)},
        {"starts": torch.zeros(5, dtype=torch.int64)},
    ],
)
def test_an_index_with_other_tensors_is_refused(index: Path, changes: dict[str, Any]) -> None:
    with safe_open(index, "pt") as file:
        about, tensors = file.metadata(), load_file(index) | changes
    found = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(found, index, about)
    with pytest.raises(ConfigError, match=r"is damaged .*make it anew"):
        Datastore.open(index, "abc", VOCAB)


def test_only_an_index_is_replaced(index: Path, tmp_path: Path) -> None:
    build_index(index, [MANUAL], "abc", VOCAB, SilentProgress())
    text = tmp_path / "notes.txt"
    text.write_text("mine")
    with pytest.raises(ConfigError, match="is no index, and is not replaced"):
        build_index(text, [MANUAL], "abc", VOCAB, SilentProgress())
    assert text.read_text() == "mine"


def test_nothing_to_index_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no text"):
        build_index(tmp_path / "index", [[], []], "abc", VOCAB, SilentProgress())
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------- drafter


def build(**options: Any) -> Drafter:
    target = TableModel.random(VOCAB, seed=0)
    return build_drafter("retrieval", DrafterContext(target, options=options))


def test_continuations_come_from_the_index(index: Path) -> None:
    request = Followed(build(index=index), [99, *MANUAL[:5]])
    tree = request.draft()
    assert len(tree) > 2
    assert list(tree.tokens) == MANUAL[5 : 5 + len(tree)]
    assert len(Followed(build(index=index), [99, 98, 99, 98, 99]).draft()) == 0


def test_different_continuations_form_a_trie(tmp_path: Path) -> None:
    documents = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2, 3, 6, 7]]
    build_index(tmp_path / "index", documents, "abc", VOCAB, SilentProgress())
    tree = Followed(build(index=tmp_path / "index"), [1, 2, 3], node_cost=0.01).draft()
    assert first_level(tree) == [4, 6]
    assert set(tree.tokens) == {4, 5, 6, 7}


def test_without_an_index_the_prompt_is_searched() -> None:
    request = Followed(build(), [*MANUAL, 99, *MANUAL[:6]])
    assert request.draft().tokens[:3] == tuple(MANUAL[6:9])


def test_the_end_of_a_document_is_the_end_of_the_draft(index: Path) -> None:
    assert Followed(build(index=index), MANUAL[40:]).draft().tokens == ()
    tree = Followed(build(index=index), MANUAL[40:48]).draft()
    assert list(tree.tokens) == MANUAL[48:]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"index": "/no/such/place"}, "is no index"),
        ({"indx": "x"}, "did you mean 'index'"),
    ],
)
def test_wrong_options_are_explained(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(**options)
