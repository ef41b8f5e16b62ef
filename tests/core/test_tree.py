"""Trees: what a parent array means, and which arrays are none."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.core.errors import ForedraftError, MalformedProposalError
from foredraft.core.tree import EMPTY_TREE, ROOT, TokenTree
from tests.core.reference import is_path


@st.composite
def trees(draw: st.DrawFn, max_size: int = 12) -> TokenTree:
    size = draw(st.integers(0, max_size))
    parents = tuple(draw(st.integers(ROOT, node - 1)) for node in range(size))
    return TokenTree(tuple(draw(st.integers(0, 5)) for _ in range(size)), parents)


#        root
#       /    \
#      0      1
#     / \      \
#    2   3      4
BRANCHING = TokenTree(tokens=(7, 8, 9, 7, 8), parents=(ROOT, ROOT, 0, 0, 1))


def test_an_example() -> None:
    assert len(BRANCHING) == 5
    assert BRANCHING.children == {ROOT: (0, 1), 0: (2, 3), 1: (4,)}
    assert BRANCHING.depths == (1, 1, 2, 2, 2)
    assert BRANCHING.max_depth == 2
    assert BRANCHING.paths == ((0,), (1,), (0, 2), (0, 3), (1, 4))
    assert not BRANCHING.is_chain


@given(trees())
def test_parents_come_first_and_paths_end_at_their_node(tree: TokenTree) -> None:
    for node, (parent, path, depth) in enumerate(
        zip(tree.parents, tree.paths, tree.depths, strict=True)
    ):
        assert parent < node
        assert path[-1] == node
        assert len(path) == depth
        assert list(path) == sorted(path)
        assert [tree.parents[i] for i in path] == [ROOT, *path[:-1]]
        assert is_path(tree, path)


@given(trees(), st.integers(-1, 12), st.integers(0, 5))
def test_child_with_token_agrees_with_a_search(tree: TokenTree, parent: int, token: int) -> None:
    found = [i for i, p in enumerate(tree.parents) if p == parent and tree.tokens[i] == token]
    assert tree.child_with_token(parent, token) == (found[0] if found else None)


@pytest.mark.parametrize(
    ("tokens", "parents", "words"),
    [
        ((1,), (), "1 tokens has 0 parents"),
        ((), (ROOT,), "0 tokens has 1 parents"),
        ((1,), (0,), "node 0 has parent 0"),
        ((1, 2), (ROOT, 1), "node 1 has parent 1"),
        ((1, 2), (1, ROOT), "node 0 has parent 1"),
        ((1,), (-2,), "node 0 has parent -2"),
        ((1,), (None,), "node 0 has parent None"),
        ((1, 2), (ROOT, False), "node 1 has parent False"),
        ((-1,), (ROOT,), "node 0 has token -1"),
        ((1, 2.0), (ROOT, 0), "node 1 has token 2.0"),
        ((True,), (ROOT,), "node 0 has token True"),
        (("a",), (ROOT,), "node 0 has token 'a'"),
    ],
)
def test_malformed(tokens: tuple[Any, ...], parents: tuple[Any, ...], words: str) -> None:
    with pytest.raises(MalformedProposalError) as caught:
        TokenTree(tokens, parents)
    assert words in str(caught.value)
    assert isinstance(caught.value, ForedraftError)


@given(st.lists(st.integers(-3, 6), max_size=6), st.lists(st.integers(-3, 6), max_size=6))
def test_any_parent_array_is_a_tree_or_an_error(tokens: list[int], parents: list[int]) -> None:
    is_tree = (
        len(tokens) == len(parents)
        and all(token >= 0 for token in tokens)
        and all(ROOT <= parent < node for node, parent in enumerate(parents))
    )
    if is_tree:
        assert len(TokenTree(tuple(tokens), tuple(parents)).paths) == len(tokens)
    else:
        with pytest.raises(MalformedProposalError):
            TokenTree(tuple(tokens), tuple(parents))


def test_paths_share_what_they_begin_with() -> None:
    tree = TokenTree.of_paths([(1, 2, 3), (1, 2, 4), (5,), (1, 2)], max_nodes=9)
    assert (tree.tokens, tree.parents) == ((1, 2, 3, 4, 5), (-1, 0, 1, 1, -1))
    assert TokenTree.of_paths([], 3) == TokenTree.of_paths([(1,)], 0) == TokenTree()


def test_of_paths_that_do_not_fit_the_first_ones_stay() -> None:
    tree = TokenTree.of_paths([(1, 2, 3), (4, 5), (1, 2)], max_nodes=4)
    assert (tree.tokens, tree.parents) == ((1, 2, 3, 4), (-1, 0, 1, -1))


def test_a_tree_hangs_below_a_node_of_another() -> None:
    chain, tree = TokenTree.chain([1, 2]), TokenTree((3, 4, 5), (ROOT, ROOT, 1))
    joined = chain.hang(tree, 1)
    assert joined.tokens == (1, 2, 3, 4, 5)
    assert joined.parents == (ROOT, 0, 1, 1, 3)
    assert chain.hang(tree, ROOT).parents == (ROOT, 0, ROOT, ROOT, 3)
    assert EMPTY_TREE.hang(tree, ROOT) == tree
    assert chain.hang(EMPTY_TREE, 1) == chain


def test_some_nodes_of_a_tree_are_a_tree() -> None:
    tree = TokenTree((1, 2, 3, 4), (ROOT, 0, 0, 2))
    assert tree.subset(range(4)) == tree
    assert tree.subset([0, 2, 3]) == TokenTree((1, 3, 4), (ROOT, 0, 1))
    assert tree.subset([2, 1]) == TokenTree((3, 2), (ROOT, ROOT))  # their parent is left out
    assert tree.subset([]) == EMPTY_TREE
