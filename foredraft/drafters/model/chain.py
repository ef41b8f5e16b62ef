"""Drafting a chain token by token from something that predicts the next one.

A draft model does, and so do some layers of the target. The tokens are chosen or drawn, as each
request's coupling asks. A draft model's cache is here, too.

Shape legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from foredraft.cache.base import common_prefix, owner_of
from foredraft.core.choices import Choice, DrawKey
from foredraft.core.proposal import Proposal
from foredraft.core.tree import EMPTY_TREE, ROOT, TokenTree
from foredraft.drafters.base import DraftRow, Reading
from foredraft.models.base import ScoreRow, Target, read


class ChainDraft:
    """One row's chain under construction.

    Attributes:
        chance: that all of it is accepted, as far as the chances of its tokens are known.
    """

    def __init__(self, row: DraftRow) -> None:
        self.row, self.chance = row, 1.0
        self._draft = row.draft()
        self._has_ended = False

    @property
    def tokens(self) -> list[int]:
        """The tokens drafted so far. Do not change the list."""
        return self._draft.tokens

    @property
    def num_left(self) -> int:
        """The number of tokens that the chain may still grow by."""
        return self.row.budget - len(self._draft) if self.goes_on else 0

    @property
    def goes_on(self) -> bool:
        """Whether more may follow, by what is known of the text."""
        if self._has_ended or not self.tokens:
            return not self._has_ended
        # Drawn drafts are as long as they are to be.
        return self.row.params.coupling == "drawn" or self.tokens[-1] not in self.row.stop_ids

    @property
    def draw_key(self) -> DrawKey | None:
        """The key that draws the next token; None: the draw needs more than scaled logits."""
        return self._draft.draw_key(len(self._draft) - 1)

    def take(self, choice: Choice | int | None) -> int | None:
        """Add the token that follows the last one, and return it; None ends the chain.

        Args:
            choice: the token, with its chance or without.
        """
        if choice is None:
            self._has_ended = True
            return None
        token, chance = choice if isinstance(choice, Choice) else (choice, None)
        self._draft.take(len(self._draft) - 1, token, chance)
        self.chance *= 1.0 if chance is None else chance
        return token

    def follow(self, tree: TokenTree, extend: Callable[[int], int | None]) -> list[int]:
        """Grow for as long as a tree has foreseen it; the nodes on the way.

        Args:
            tree: guesses of what the chain grows by.
            extend: grows it by what is said after the last token (0) or after a node (its number
                and one), and returns the token.
        """
        node, path = ROOT, list[int]()
        while self.num_left:
            token = extend(node + 1)
            child = None if token is None else tree.child_with_token(node, token)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def extend(self, logits_V: Tensor) -> int | None:
        """Add the token that follows the last one, and return it; None ends the chain.

        Args:
            logits_V: what the draft model says about it.
        """
        if not self._draft.extend(len(self._draft) - 1, logits_V):
            self._has_ended = True
            return None
        if self.row.params.coupling == "seeded":
            self.chance *= self._draft.chances[-1]
        return self.tokens[-1]

    def build(self) -> Proposal:
        return self._draft.build()


def read_by(model: Target, row: DraftRow) -> Sequence[int]:
    """The tokens that a draft model goes on from: one without an encoder reads the source first."""
    return row.tokens if model.capabilities.encoder else row.context


_MOST_PENDING = 512
"""A longer text is read but for its end, so that a draft forward stays small."""
_MOST_REWOUND = 16
"""Guesses of a draft that are kept until the target has spoken: the cache can take them back."""
_FEW = 8
"""Unread tokens that the first forward of a draft reads along: alone they would take another."""


@dataclass
class _Slot:
    """One request's slot.

    Attributes:
        owner: only slots with the same owner share entries; None: no other slot does.
        cached: the tokens whose entries it holds.
        num_confirmed: the number of them that are known to be committed.
    """

    number: int
    owner: bytes | None = None
    cached: list[int] = field(default_factory=list)
    num_confirmed: int = 0

    def rewind(self, tokens: Sequence[int]) -> None:
        """Forget cached tokens that were not committed; the last of ``tokens`` stays pending.

        Of a text that was translated committed ones may have changed, too.
        """
        limit = min(len(self.cached), len(tokens) - 1)
        agreed = min(self.num_confirmed, limit)
        if self.cached[:agreed] != list(tokens[:agreed]):
            agreed = 0
        while agreed < limit and self.cached[agreed] == tokens[agreed]:
            agreed += 1
        del self.cached[agreed:]
        self.num_confirmed = agreed


class DraftCache:
    """The requests' slots in the cache of a draft model.

    Texts that begin alike share entries, as they do in the target's cache: with requests that are
    running, with those that are over, and with themselves before they made way for others.
    """

    def __init__(self, model: Target) -> None:
        self._model, self._cache = model, model.cache
        self._slots: dict[int, _Slot] = {}
        self._cache.rewinds = _MOST_REWOUND

    def begin(self, row: DraftRow) -> None:
        if not row.shares:
            self._slots[row.request_id] = _Slot(self._cache.allocate())
            return
        tokens, source = read_by(self._model, row), row.source
        salt = row.tenant if source is None else f"{source.digest} of {row.tenant!r}"
        owner = owner_of(salt)
        number, num_found = self._cache.share(owner, tokens)
        for other in self._slots.values():
            alike = common_prefix(other.cached, tokens) if other.owner == owner else 0
            if alike > num_found:
                self._cache.free(number)
                number, num_found = self._cache.fork(other.number), alike
        num_found = self._cache.truncate(number, max(0, min(num_found, len(tokens) - 1)))
        self._slots[row.request_id] = _Slot(number, owner, [*tokens[:num_found]], num_found)

    def end(self, request_id: int) -> None:
        slot = self._slots.pop(request_id)
        if slot.owner is None:
            self._cache.free(slot.number)
        else:
            self._cache.retire(slot.number, slot.cached[: self._cache.length(slot.number)])

    def slot(self, request_id: int) -> int:
        return self._slots[request_id].number

    def has_room(self, row: DraftRow, num_drafted: int) -> bool:
        """Whether the model can read a row's text and so many draft tokens."""
        return len(read_by(self._model, row)) + num_drafted <= self._model.max_context

    def read(self, rows: Sequence[DraftRow], most_tokens: int) -> list[Reading]:
        """Read on in texts, in one forward of ``most_tokens`` at the most."""
        left, reads, found = most_tokens, list[tuple[DraftRow, ScoreRow]](), list[Reading]()
        for row in rows:
            pending = self._unread(row) if self.has_room(row, 0) else []
            missing = max(0, len(pending) - 1)
            num_read = min(missing, left) if missing > _FEW else 0
            if num_read:
                slot, tokens = self.slot(row.request_id), pending[:num_read]
                reads.append((row, ScoreRow(slot, tokens, wants_logits=False, source=row.source)))
            left -= num_read
            num_left = missing - num_read
            found.append(Reading(num_read, num_left if num_left > _FEW else 0))
        if reads:
            self._model.score([score_row for _, score_row in reads])
        for row, score_row in reads:
            self.keep(row.request_id, score_row.pending)
            self._cache.publish(score_row.slot, self._slots[row.request_id].cached)
        return found

    def catch_up(self, row: DraftRow) -> list[int]:
        """Drop what was rejected since the last draft; return what is to be read.

        That is never nothing. Of a long text all but the end is read here: what `read` has left.
        """
        slot, pending = self._slots[row.request_id], self._unread(row)
        num_early = (len(pending) - 1) // _MOST_PENDING * _MOST_PENDING
        read(self._model, slot.number, pending[:num_early], row.source)
        slot.cached += pending[:num_early]
        return pending[num_early:]

    def keep(
        self,
        request_id: int,
        pending: Sequence[int],
        tree: TokenTree = EMPTY_TREE,
        path: Sequence[int] = (),
    ) -> None:
        """Keep what the last forward read: ``pending`` and the nodes of ``path``."""
        slot = self._slots[request_id]
        self._cache.keep(slot.number, len(pending), path)
        slot.cached += [*pending, *(tree.tokens[node] for node in path)]

    def _unread(self, row: DraftRow) -> list[int]:
        """The tokens behind those that are cached, once what was rejected is dropped."""
        slot, tokens = self._slots[row.request_id], read_by(self._model, row)
        slot.rewind(tokens)
        slot.num_confirmed = self._cache.truncate(slot.number, slot.num_confirmed)
        del slot.cached[slot.num_confirmed :]
        return [*tokens[slot.num_confirmed :]]
