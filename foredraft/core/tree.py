"""The shape of a draft: a parent array. A chain is a tree whose every node has one child."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from foredraft.core.errors import MalformedProposalError

ROOT = -1
"""The parent of first-level nodes: the last pending token, which is not part of the tree."""


@dataclass(frozen=True)
class TokenTree:
    """Draft tokens and, for each, the index of its parent (``ROOT`` or an earlier node).

    ``parents[i] < i`` always holds, so a single left-to-right pass visits parents first.

    Raises:
        MalformedProposalError: the lengths differ, a parent does not come before its child, or
            a token is not a non-negative integer.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", tuple(self.tokens))
        object.__setattr__(self, "parents", tuple(self.parents))
        if len(self.tokens) != len(self.parents):
            raise MalformedProposalError(
                f"a tree of {len(self.tokens)} tokens has {len(self.parents)} parents"
            )
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if type(token) is not int or token < 0:
                raise MalformedProposalError(f"node {node} has token {token!r}, not an id >= 0")
            if type(parent) is not int or not ROOT <= parent < node:
                raise MalformedProposalError(
                    f"node {node} has parent {parent!r}; it must be an earlier node or {ROOT}"
                )

    @classmethod
    def chain(cls, tokens: Iterable[int]) -> TokenTree:
        """The tree in which each token follows the one before it."""
        tokens = tuple(tokens)
        return cls(tokens, tuple(range(-1, len(tokens) - 1)))

    @classmethod
    def of_paths(cls, paths: Iterable[Iterable[int]], max_nodes: int) -> TokenTree:
        """The tree of these token paths from the root; paths share common prefixes.

        Args:
            max_nodes: further nodes are left out, from the last path on.
        """
        tokens: list[int] = []
        parents: list[int] = []
        known: dict[tuple[int, int], int] = {}
        for path in paths:
            parent = ROOT
            for token in path:
                if (parent, token) not in known:
                    if len(tokens) >= max_nodes:
                        break
                    known[parent, token] = len(tokens)
                    tokens.append(token)
                    parents.append(parent)
                parent = known[parent, token]
        return cls(tuple(tokens), tuple(parents))

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def is_chain(self) -> bool:
        """Whether no node has a sibling."""
        return self.parents == tuple(range(-1, len(self.tokens) - 1))

    @cached_property
    def children(self) -> dict[int, tuple[int, ...]]:
        """Nodes by parent, in drafting order; a key for ``ROOT`` and every inner node."""
        grouped: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            grouped.setdefault(parent, []).append(node)
        return {parent: tuple(nodes) for parent, nodes in grouped.items()}

    def child_with_token(self, parent: int, token: int) -> int | None:
        """The first child of ``parent`` that drafts ``token``, or None."""
        for node in self.children.get(parent, ()):
            if self.tokens[node] == token:
                return node
        return None

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance from the root of each node: 1 for its children."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @property
    def max_depth(self) -> int:
        """The most tokens one path can accept; 0 for the empty tree."""
        return max(self.depths, default=0)

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """For each node its ancestors below the root and itself, outermost first.

        This is the ancestor mask in sparse form: node i attends to exactly these nodes.
        """
        paths: list[tuple[int, ...]] = []
        for node, parent in enumerate(self.parents):
            paths.append((*(() if parent == ROOT else paths[parent]), node))
        return tuple(paths)

    def hang(self, tree: TokenTree, below: int) -> TokenTree:
        """This tree with another below its node ``below`` (or ``ROOT``); its nodes come last."""
        size = len(self)
        parents = (below if parent == ROOT else size + parent for parent in tree.parents)
        return TokenTree((*self.tokens, *tree.tokens), (*self.parents, *parents))

    def subset(self, nodes: Sequence[int]) -> TokenTree:
        """Some of the nodes, in the order given; those whose parent is left out become first-level.

        Args:
            nodes: no child before its parent.
        """
        indices = {node: index for index, node in enumerate(nodes)}
        parents = (indices.get(self.parents[node], ROOT) for node in nodes)
        return TokenTree(tuple(self.tokens[node] for node in nodes), tuple(parents))


EMPTY_TREE = TokenTree()
