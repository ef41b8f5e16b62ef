"""The cache of a model with recurrent layers: states at the committed text, and a log behind them.

A recurrent layer folds its text into one state, out of which no token can be taken again. So the
state of a slot stays at text that is committed. A forward computes from it and logs what each layer
saw of each token, as few numbers; the next forward first applies the accepted part of the log, in
the order of the tokens, which is the order of plain decoding: its bits are the same. A tree node's
state is that of the text and its ancestors' entries.

States are never changed once they are made. So forks share them, those at the ends of blocks are
kept for texts that begin alike, and a forward that fails has changed nothing.

Shape legend: L recurrent layers, S numbers of a layer's state, T tokens, W numbers of a log entry.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foredraft.cache.base import KVShape, check_keep
from foredraft.cache.blocks import BLOCK
from foredraft.cache.index import NamedBlock
from foredraft.cache.kv import KVCache
from foredraft.cache.memory import CacheMemory
from foredraft.cache.slots import Slot

MOST_LOGGED = 16
"""Of more pending tokens the state behind all but the last is made at once: their log would be
large."""
_SHARE = 4
"""States at the ends of blocks take at most this fraction (1 / value) of a cache's memory."""
_MOST_SPARE = 4
"""State buffers that are kept for the next forward."""


@dataclass(frozen=True)
class StateShape:
    """The numbers of recurrent layers, all float32.

    Attributes:
        num_layers: L.
        state_size: S.
        entry_size: W.
    """

    num_layers: int
    state_size: int
    entry_size: int

    @property
    def state_bytes(self) -> int:
        """Of all layers' state behind one text."""
        return 4 * self.num_layers * self.state_size

    @property
    def entry_bytes(self) -> int:
        """Of all layers' log of one token."""
        return 4 * self.num_layers * self.entry_size

    @property
    def row_bytes(self) -> int:
        """Of a row in a step: the state that it goes on from, the next one, and the log."""
        return 2 * self.state_bytes + MOST_LOGGED * self.entry_bytes


@dataclass(frozen=True, eq=False)
class State:
    """All layers' state [L, S] behind the first ``position`` tokens of a text; never changed."""

    position: int
    values_LS: Tensor


@dataclass(frozen=True, eq=False)
class Recurrence:
    """Recurrent layers' memory of one slot; replaced as a whole.

    Attributes:
        state: behind committed tokens.
        log_LTW: of the committed tokens behind that.
        written_LTW: of the tokens that the last forwards read and that are not committed.
        first_written: position of the first of those.
        ahead: the state to go on from where a long chunk is committed.
        passed: states at ends of blocks, for when these are committed.
    """

    state: State
    log_LTW: Tensor
    written_LTW: Tensor
    first_written: int = 0
    ahead: State | None = None
    passed: tuple[State, ...] = ()


@dataclass(frozen=True, eq=False)
class RowStates:
    """One row's part of a forward through recurrent layers.

    Its elements are the tokens of ``old_LTW`` and then those of the row.

    Attributes:
        slot: of the row.
        state: behind which the elements come.
        old_LTW: log of tokens behind ``state`` that were read before.
        parents: for each token of the row the element before it; -1: ``state``.
        saves: states to be made, each behind the element with the number before it, ascending.
        first_logged: the first token of the row whose log is wanted.
        new_LTW: to be filled with the log of the tokens from there on.
    """

    slot: int
    state: State
    old_LTW: Tensor
    parents: list[int]
    saves: list[State]
    first_logged: int
    new_LTW: Tensor
    done: Recurrence

    @property
    def num_old(self) -> int:
        return self.old_LTW.shape[1]

    @property
    def num_elements(self) -> int:
        return self.num_old + len(self.parents)

    def num_before(self, save: State) -> int:
        """Elements in front of a state that is to be made."""
        return save.position - self.state.position


class _Buffers:
    """Memory of states that are gone, for new ones. It knows no state, so a cache can be freed.

    Attributes:
        spare: buffers that are free.
        num_held: states that are not gone.
    """

    def __init__(self) -> None:
        self.spare: list[Tensor] = []
        self.num_held = 0

    def state(self, position: int, like: Tensor) -> State:
        """A state that is still to be written."""
        values_LS = self.spare.pop() if self.spare else torch.empty_like(like)
        state = State(position, values_LS)
        self.num_held += 1
        weakref.finalize(state, self._take_back, values_LS).atexit = False
        return state

    def _take_back(self, values_LS: Tensor) -> None:
        self.num_held -= 1
        if len(self.spare) < _MOST_SPARE:
            self.spare.append(values_LS)


class StateCache(KVCache):
    """A `KVCache` with the states of recurrent layers.

    A text is only found up to the end of a block that has a state, and `truncate` goes back to
    one where the log does not reach.

    Args:
        states: of the recurrent layers; others: see `KVCache`.
    """

    def __init__(
        self,
        shape: KVShape,
        states: StateShape,
        dtype: torch.dtype,
        device: torch.device | str,
        max_length: int,
        memory: CacheMemory | int | None = None,
        block_size: int = BLOCK,
    ) -> None:
        super().__init__(shape, dtype, device, max_length, memory, block_size)
        self.state_shape = states
        # Each entry reserves a share of the memory for states at the ends of blocks.
        self.memory.add(self, shape.bytes_per_token(dtype) // (_SHARE - 1))
        self._begin = State(0, torch.zeros(states.num_layers, states.state_size, device=device))
        self._no_log = torch.empty(states.num_layers, 0, states.entry_size, device=device)
        self._rows: dict[int, Recurrence] = {}
        self._ends: OrderedDict[int, State] = OrderedDict()  # by block, the least used first
        self._wanted: dict[int, int] = {}  # by slot, where others have begun to differ
        self._buffers = _Buffers()

    # ---- forwards

    def open_states(
        self, slot: int, start: int, num_pending: int, parents: Sequence[int]
    ) -> RowStates:
        """The recurrent states and log that a forward of a slot starts from.

        Args:
            start: position of its first token: the slot's length, or more where an earlier
                forward has read the tokens in between.
            num_pending: of its tokens that are text.
            parents: of each of its tree nodes, by number; -1: the last pending token.
        """
        row, length = self._rows[slot], self._slots[slot].length
        state, old_LTW = row.state, row.log_LTW
        num_old = start - state.position
        if start > length:
            between_LTW = row.written_LTW[:, : start - row.first_written]
            old_LTW = torch.cat((old_LTW, between_LTW), 1) if old_LTW.shape[1] else between_LTW
        assert old_LTW.shape[1] == num_old, "the log of a slot and its length differ"
        saves, done = self._saves(slot, row, start, num_pending)
        first_logged = max(0, done.first_written - start)
        num_tokens = num_pending + len(parents)
        shape = self.state_shape
        new_LTW = self._no_log.new_empty(
            shape.num_layers, num_tokens - first_logged, shape.entry_size
        )
        if start > length:
            whole_LTW = torch.cat((between_LTW, new_LTW), 1)
            new_LTW = whole_LTW[:, between_LTW.shape[1] :]
            done = replace(done, written_LTW=whole_LTW)
        else:
            done = replace(done, written_LTW=new_LTW)
        last = num_old + num_pending - 1
        elements = [*range(num_old - 1, last)]
        elements += [last if parent < 0 else last + 1 + parent for parent in parents]
        return RowStates(slot, state, old_LTW, elements, saves, first_logged, new_LTW, done)

    def close_states(self, rows: Sequence[RowStates]) -> None:
        """The forward is done: its states and logs are there."""
        for row in rows:
            self._rows[row.slot] = row.done

    def _saves(
        self, slot: int, row: Recurrence, start: int, num_pending: int
    ) -> tuple[list[State], Recurrence]:
        length, first = self._slots[slot].length, row.state.position
        if start > length:  # of tokens that are never committed
            return [], row
        base, ahead = first, 0
        if length - first > 2 * self.rewinds:
            base = length - self.rewinds
        if num_pending > MOST_LOGGED + self.rewinds:
            ahead = length + num_pending - 1 - self.rewinds
        saves = {end: self._new_state(end) for end in self._ends_between(slot, first, base, ahead)}
        if base > first and base not in saves:
            saves[base] = self._new_state(base)
        if ahead and ahead not in saves:
            saves[ahead] = self._new_state(ahead)
        passed = [saves[end] for end in sorted(saves) if end % self.block_size == 0]
        # States that an earlier forward of a copy saved over the same text.
        passed[:0] = [end for end in row.passed if end.position <= length]
        done = Recurrence(
            saves[base] if base > first else row.state,
            row.log_LTW[:, base - first :],
            self._no_log,
            ahead or length,
            saves.get(ahead) if ahead else None,
            tuple(passed),
        )
        return [saves[end] for end in sorted(saves)], done

    def _ends_between(self, slot: int, first: int, base: int, ahead: int) -> list[int]:
        """Ends of blocks whose states are kept: the last, and where others began to differ."""
        last = max(base, ahead)
        ends = {last // self.block_size * self.block_size, self._wanted.get(slot, 0)}
        return [end for end in ends if first < end <= last]

    def _new_state(self, position: int) -> State:
        return self._buffers.state(position, self._begin.values_LS)

    # ---- slots

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self._buffers.num_held * self.state_shape.state_bytes

    @property
    def states(self) -> StateCache:
        """Itself: what decoders ask for states."""
        return self

    def allocate(self) -> int:
        slot = super().allocate()
        self._rows[slot] = self._at(self._begin)
        return slot

    def keep(self, slot: int, num_pending: int, path: Sequence[int]) -> None:
        state, row = self._slots[slot], self._rows[slot]
        check_keep(num_pending, path, state.written)
        root = state.length + num_pending
        base, log_LTW, first = row.state, row.log_LTW, state.length
        if row.ahead is not None:
            base, log_LTW, first = row.ahead, self._no_log, row.ahead.position
        if root < first:
            raise ValueError(
                f"cannot keep {num_pending} of the tokens that slot {slot} has read: the states "
                f"are those behind {first - state.length}"
            )
        wanted = [*range(first, root), *(root + node for node in path)]
        taken_LTW = _taken(row.written_LTW, [at - row.first_written for at in wanted])
        log_LTW = torch.cat((log_LTW, taken_LTW), 1) if log_LTW.shape[1] else taken_LTW
        super().keep(slot, num_pending, path)
        self._rows[slot] = Recurrence(base, log_LTW, self._no_log, state.length)
        self._keep_ends(state, row.passed)

    def truncate(self, slot: int, length: int) -> int:
        row, size = self._rows[slot], self.block_size
        if length >= row.state.position:
            length = super().truncate(slot, length)
            log_LTW = row.log_LTW[:, : length - row.state.position]
            self._rows[slot] = Recurrence(row.state, log_LTW, self._no_log, length)
            return length
        table, num_full = self._slots[slot].table, length // size
        ends = [self._ends.get(block) for block in table[:num_full]]
        base = next((end for end in reversed(ends) if end is not None), self._begin)
        super().truncate(slot, base.position)
        self._rows[slot] = self._at(base)
        return base.position

    def fork(self, slot: int) -> int:
        number, row = super().fork(slot), self._rows[slot]
        self._rows[number] = Recurrence(
            row.state, row.log_LTW, self._no_log, self._slots[slot].length
        )
        return number

    def share(self, owner: bytes, tokens: Sequence[int]) -> tuple[int, int]:
        _, num_alike = self.pool.index.find(owner, tokens)
        number, length = super().share(owner, tokens)
        self._wanted[number] = num_alike // self.block_size * self.block_size
        if length:
            block = self._slots[number].table[-1]
            self._ends.move_to_end(block)
            self._rows[number] = self._at(self._ends[block])
        return number, length

    def free(self, slot: int) -> None:
        self._slots[slot]  # an unknown slot must not pass silently
        del self._rows[slot]
        self._wanted.pop(slot, None)
        super().free(slot)

    def forget(self) -> None:
        super().forget()
        for block in [*self._ends]:
            if not self.pool.num_users(block):
                del self._ends[block]

    def fill(self, slot: int, num_tokens: int) -> None:
        """See `KVCache.fill`; the state stays what it is."""
        row, end = self._rows[slot], self._slots[slot].length + num_tokens
        ahead = State(end, row.state.values_LS.clone())
        self._rows[slot] = replace(row, written_LTW=self._no_log, first_written=end, ahead=ahead)
        super().fill(slot, num_tokens)

    def check(self) -> None:
        super().check()
        assert self._rows.keys() == set(self._slots), "slots without states"
        for slot, row in self._rows.items():
            held = row.state.position + row.log_LTW.shape[1]
            length = self._slots[slot].length
            assert held == length, f"slot {slot} counts {length} entries and has states for {held}"

    # ---- blocks

    def _found(self, owner: bytes, tokens: Sequence[int]) -> tuple[list[NamedBlock], int]:
        nodes, length = super()._found(owner, tokens)
        count = length // self.block_size
        while count and nodes[count - 1].block not in self._ends:
            count -= 1
        return nodes[:count], count * self.block_size

    def _publish_block(self, state: Slot, place: int, text: Sequence[int]) -> NamedBlock:
        node, block = super()._publish_block(state, place, text), state.table[place]
        if node.block != block and len(text) == len(node.tokens) and block in self._ends:
            self._ends.setdefault(node.block, self._ends.pop(block))
        return node

    def _keep_ends(self, state: Slot, passed: Sequence[State]) -> None:
        for end in passed:
            block = state.table[end.position // self.block_size - 1]
            self._ends[block] = end
            self._ends.move_to_end(block)
        limit = self.memory.num_bytes
        while passed and limit is not None and self._ends:
            if _SHARE * self._buffers.num_held * self.state_shape.state_bytes <= limit:
                break
            self._ends.popitem(last=False)

    def _make_room(self, blocks: Sequence[int]) -> None:
        super()._make_room(blocks)
        for block in blocks:
            self._ends.pop(block, None)

    def _cut_notes(self, state: Slot, place: int) -> None:
        super()._cut_notes(state, place)
        if state.length < (place + 1) * self.block_size:
            self._ends.pop(state.table[place], None)

    def _release(self) -> None:
        super()._release()
        self._ends.clear()
        self._buffers.spare.clear()

    def _at(self, state: State) -> Recurrence:
        return Recurrence(state, self._no_log, self._no_log, state.position)


def _taken(log_LTW: Tensor, tokens: Sequence[int]) -> Tensor:
    first = tokens[0] if tokens else 0
    if list(tokens) == [*range(first, first + len(tokens))]:
        return log_LTW[:, first : first + len(tokens)]
    return log_LTW[:, torch.tensor(tokens, device=log_LTW.device)]
