"""Drafting step by step with layers that the target runs for a head.

Entries for the text are made as it is read, each of a token and the one that follows it; a tree
grows behind them, the head's own states standing in for the target's.

Shape legend: T tokens, E hidden size, R output rows, N scored nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor

from foredraft.cache.layers import StoredLayers
from foredraft.core.choices import DrawKey, DrawnChoices
from foredraft.core.proposal import NOT_READY, Proposal
from foredraft.core.record import RowStep
from foredraft.core.sampling import scale_of
from foredraft.core.traits import DrafterTraits
from foredraft.core.tree import ROOT
from foredraft.drafters.base import BaseDrafter, Drafter, DraftRow
from foredraft.drafters.growth import GROWTH_OPTIONS, Growth, GrowthLimits, growth_limits
from foredraft.drafters.guide import Guide
from foredraft.drafters.heads.base import HeadModule
from foredraft.drafters.heads.published import is_checkpoint
from foredraft.drafters.heads.rows import OutputRows, scored_choices
from foredraft.drafters.spec import DrafterContext, DrafterSpec
from foredraft.drafters.trained import HEAD_OPTION, named_folder, trained_head
from foredraft.drafters.worth import Worth
from foredraft.models.base import (
    ChainRow,
    HeadChain,
    HeadRow,
    HeadRunner,
    HeadTarget,
    ScoredTokens,
    offered,
)

_MOST_WAITING = 32
"""The head processes committed tokens lazily: in one run right before it drafts, or as soon as this
many have accumulated. A request that it follows without drafting therefore costs almost nothing,
and it can start to draft at any moment."""


class StepRunner:
    """A head's layers, which the target runs, and the inputs of the first one.

    Args:
        of_text: layer inputs [T, E] from the target's states, [T, E] of each layer that the head
            taps, and the token after each.
        of_own: layer inputs [N, E] from the states [N, E] of the parents of drafted tokens, and
            these tokens.
        attends: whether the layers read entries of the text; else each token is run alone.

    Attributes:
        layers: cache layers with the entries of the text; empty for heads without attention.
    """

    def __init__(
        self,
        runner: HeadRunner,
        of_text: Callable[[Sequence[Tensor], Sequence[int]], Tensor],
        of_own: Callable[[Tensor, Sequence[int]], Tensor],
        attends: bool = True,
    ) -> None:
        self._runner, self._of_text, self._of_own = runner, of_text, of_own
        self.layers: Sequence[StoredLayers] = (runner.layers,) if attends else ()

    @torch.no_grad()
    def text_inputs(self, following: Sequence[int], taps: Sequence[Tensor]) -> Tensor:
        """Layer inputs [T, E] for tokens that the target has read, from the token after each."""
        return self._of_text(taps, following)

    @torch.no_grad()
    def own_inputs(self, tokens: Sequence[int], states_NE: Tensor) -> Tensor:
        """Layer inputs [N, E] for drafted tokens and the states of their parents."""
        return self._of_own(states_NE, tokens)

    def run(self, rows: Sequence[HeadRow], inputs_TE: Tensor) -> tuple[Tensor, Tensor]:
        """See `foredraft.models.base.HeadRunner.run`."""
        if not self.layers:  # nothing attends, so it does not matter where the tokens stand
            rows = [HeadRow(r.slot, 0, r.num_wanted, num_wanted=r.num_wanted) for r in rows]
        return self._runner.run(rows, inputs_TE)

    def new_chain(self, ids_R: Tensor, num_taps: int) -> HeadChain | None:
        """Rounds of this head on the device alone; None where there are none.

        Args:
            ids_R: the token of each output row.
        """
        return self._runner.new_chain(self, ids_R, num_taps)


class StepHead(Protocol):
    """A head that drafts step by step; but for `runner` see `HeadModule`."""

    taps: tuple[int, ...]
    output_ids_R: Tensor | None
    promise: tuple[float, float] | None

    def runner(self, target: HeadTarget) -> StepRunner:
        """Its layers where its target runs them."""


@dataclass
class _Request:
    """State of a request: the head's output after its last token.

    Attributes:
        slot: in the target's cache.
        end: number of the text's entries in the head's layers.
        state_E: the head's own state at the last of them.
        logits_R: its logits for the next token.
        waiting: tokens that the target has read and the head has not, in order.
        last: the last token that the target has read, for rounds that begin with it again.
    """

    slot: int
    end: int = 0
    state_E: Tensor | None = None
    logits_R: Tensor | None = None
    waiting: list[_Read] = field(default_factory=list)
    last: _Read | None = None

    @property
    def is_behind(self) -> bool:
        """Whether a round on the device has left neither state nor logits."""
        return self.last is not None and self.logits_R is None

    @property
    def unread(self) -> _Read:
        """The waiting tokens; without any, the last token again."""
        if self.waiting or self.last is None:
            return _joined(self.waiting)
        return self.last

    @property
    def num_waiting(self) -> int:
        return sum(len(read.following) for read in self.waiting)

    def next_start(self, position: int, num_tokens: int, layers: Sequence[StoredLayers]) -> int:
        """The first of ``num_tokens`` positions from ``position`` on that the head reads next."""
        if self.waiting:
            return position
        return max(each.next_start(self.slot, position, num_tokens) for each in layers)


@dataclass(frozen=True)
class _Read:
    """Tokens that the target has read.

    Attributes:
        start: the position of the first.
        following: the token after each.
        taps: the target's hidden states of them, [T, E] for each tapped layer.
    """

    start: int
    following: Sequence[int]
    taps: Sequence[Tensor]

    def end_only(self) -> _Read:
        """The last of the tokens."""
        skipped = len(self.following) - 1
        taps = [_apart(tap_TE[-1:]) if skipped else tap_TE for tap_TE in self.taps]
        return _Read(self.start + skipped, self.following[-1:], taps)


def _apart(x_TE: Tensor) -> Tensor:
    """The tensor with little memory behind it: a copy, unless its storage on a GPU is small.

    There no other code holds a step's tensors, and the launch of a copy costs more than the copy.
    """
    most = 2 * _MOST_WAITING * x_TE.shape[1] * x_TE.itemsize
    return x_TE if x_TE.is_cuda and x_TE.untyped_storage().nbytes() <= most else x_TE.clone()


class StepDrafter(BaseDrafter):
    """See the module docstring."""

    def __init__(
        self, head: StepHead, target: HeadTarget, limits: GrowthLimits | None = None
    ) -> None:
        self._runner = head.runner(target)
        self._rows = OutputRows(head.output_ids_R, target.vocab_size)
        self._chain = self._runner.new_chain(self._rows.ids_R, len(head.taps))
        self._limits = limits or GrowthLimits()
        if not target.capabilities.tree_attention:
            self._limits = replace(self._limits, width=1, branching=1)
        self.taps, self.layers = head.taps, self._runner.layers
        self.traits = DrafterTraits(promise=head.promise, skips_gaps=True)
        self._requests: dict[int, _Request] = {}

    def begin(self, row: DraftRow) -> None:
        self._requests[row.request_id] = _Request(row.slot)

    def end(self, request_id: int) -> None:
        request = self._requests.pop(request_id)
        if request.waiting and self.layers:  # what they hold serves others that begin alike
            self._catch_up([request])

    def observe(self, observations: Sequence[RowStep]) -> None:
        for seen in observations:
            request = self._requests[seen.request_id]
            if (read := self._read(seen)).following:
                self._wait(request, read)
        self._catch_up(
            request for seen in observations
            if (request := self._requests[seen.request_id]).num_waiting >= _MOST_WAITING
            or (seen.num_read > 1 and seen.committed)  # a prompt: other replies may begin with it
        )  # fmt: skip

    def _wait(self, request: _Request, read: _Read) -> None:
        if not self.layers:  # it keeps no entries: where the text ends is all it needs
            request.waiting.clear()
        elif len(read.following) < _MOST_WAITING:  # else it is read before the step is over
            read = replace(read, taps=[*map(_apart, read.taps)])
        request.waiting.append(read)
        if self._chain:
            request.last = read.end_only()

    def _catch_up(self, requests: Iterable[_Request]) -> None:
        """Process the waiting tokens of all requests in one run."""
        behind = [request for request in requests if request.waiting or request.is_behind]
        if not behind:
            return
        reads = [request.unread for request in behind]
        inputs = [self._runner.text_inputs(read.following, read.taps) for read in reads]
        rows = [
            HeadRow(request.slot, read.start, len(read.following))
            for request, read in zip(behind, reads, strict=True)
        ]
        inputs_TE = inputs[0] if len(inputs) == 1 else torch.cat(inputs)
        states_TE, logits_NR = self._runner.run(rows, inputs_TE)
        last = -1
        for i, (request, read) in enumerate(zip(behind, reads, strict=True)):
            last += len(read.following)
            request.end = read.start + len(read.following)
            request.state_E, request.logits_R = states_TE[last], logits_NR[i]
            request.waiting.clear()

    def _read(self, seen: RowStep) -> _Read:
        """Tokens of a step that the head has to run: the last alone if it keeps no entries."""
        if any(tap not in seen.taps for tap in self.taps):  # a step that was not to draft
            return _Read(seen.context, (), ())
        following = seen.tokens[seen.context + 1 : seen.end + 1]
        skipped = max(0, len(following) - 1)
        if self.layers:  # where a cached beginning has no entries, those of the text begin later
            request = self._requests[seen.request_id]
            first = request.next_start(seen.context, len(following), self.layers)
            skipped = min(first - seen.context, len(following))
        taps = [tap_TE[skipped : len(following)] for tap_TE in seen.hidden_of(self.taps)]
        return _Read(seen.context + skipped, following[skipped:], taps)

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        done = self._chained([row for row in rows if row.budget and self._may_chain(row)])
        others = [row for row in rows if row.budget and row.request_id not in done]
        self._catch_up(self._requests[row.request_id] for row in others)
        ready = [row for row in others if self._is_ready(row)]
        drawn = [row for row in ready if isinstance(row.choices, DrawnChoices)]
        done |= {row.request_id: self._drawn(row) for row in drawn}
        done |= self._grown([row for row in ready if row.request_id not in done])
        return [done.get(row.request_id, NOT_READY) for row in rows]

    def guide(self, request_id: int) -> Guide | None:
        """The guide that grows a request's tree together with the head; None by default."""
        return None

    def _is_ready(self, row: DraftRow) -> bool:
        request = self._requests[row.request_id]
        return request.logits_R is not None and request.end == len(row.tokens) - 1

    def _may_chain(self, row: DraftRow) -> bool:
        """Whether a round on the device can draft for a row."""
        request = self._requests[row.request_id]
        if self._chain is None or isinstance(row.choices, DrawnChoices) or request.last is None:
            return False
        is_next = request.last.start + 1 == len(row.tokens) - 1
        can_run = self._chain.can_run(request.slot, request.unread.start)
        return row.rules.filters_only and is_next and can_run

    def _chained(self, rows: Sequence[DraftRow]) -> dict[int, Proposal]:
        """Chains with their siblings, each round of the head on the device alone."""
        if not rows or self._chain is None:
            return {}
        requests = [self._requests[row.request_id] for row in rows]
        self._catch_up(each for each in requests if each.num_waiting > self._chain.most_read)
        chains = [_chain_row(*pair) for pair in zip(rows, requests, strict=True)]
        num_steps = max(map(self._num_steps, rows))
        done = {}
        found = self._chain.run(chains, num_steps)
        for row, request, chain, levels in zip(rows, requests, chains, found, strict=True):
            request.end = chain.start + len(chain.following)
            request.state_E = request.logits_R = None
            request.waiting.clear()
            growth = Growth(row, self._limits, self.guide(row.request_id))
            self._hang_levels(growth, levels[: self._limits.max_depth])
            done[row.request_id] = growth.build()
        return done

    def _num_steps(self, row: DraftRow) -> int:
        """Steps of a round on the device, where no chance is seen before it is over: so many as the
        head's promise lets pay. Even numbers, so that few rounds are recorded."""
        most = min(self._limits.max_depth, row.budget + row.budget % 2)
        if self.traits.promise is not None:
            greedy, sampled = self.traits.promise
            chance = greedy + (sampled - greedy) * min(1.0, row.params.temperature)
            worth = Worth((1.0, 1.0 + self._limits.round_cost))
            paying = worth.best_num_nodes([chance**step for step in range(1, most + 1)], 0)
            most = min(most, paying + paying % 2)
        return max(2, most)

    def _hang_levels(self, growth: Growth, levels: Sequence[ScoredTokens]) -> None:
        """Hang the candidates of each position below the likeliest of the one before."""
        node, row = ROOT, growth.row
        for level in levels:
            choices = scored_choices(row, level, growth.num_below(node), growth.copied(node))
            first = growth.hang(node, choices)
            followed = level.scored[0][0] if level.scored else None
            places = [i for i, choice in enumerate(choices) if choice.token == followed]
            if not places or followed in row.stop_ids:
                return
            node = first + places[0]

    def _grown(self, rows: Sequence[DraftRow]) -> dict[int, Proposal]:
        """Chosen trees, all rows sharing each run of the head."""
        growths = list[_Tree]()
        for row in rows:
            growth = Growth(row, self._limits, self.guide(row.request_id))
            growths.append(_Tree(self._requests[row.request_id], growth))
        for tree in growths:
            assert tree.request.logits_R is not None
            tree.hang([ROOT], tree.request.logits_R[None], self._rows)
        while active := [(tree, nodes) for tree in growths if (nodes := tree.growth.next_round())]:
            self._score(active)
        return {tree.growth.row.request_id: tree.growth.build() for tree in growths}

    def _score(self, active: Sequence[tuple[_Tree, list[int]]]) -> None:
        """One run of the head over some nodes of each row."""
        tokens = [tree.growth.drafted(node)[-1] for tree, nodes in active for node in nodes]
        parents = [tree.parent_states(nodes) for tree, nodes in active]
        parents_NE = parents[0] if len(parents) == 1 else torch.cat(parents)
        rows = [tree.head_row(len(nodes)) for tree, nodes in active]
        states_NE, logits_NR = self._runner.run(rows, self._runner.own_inputs(tokens, parents_NE))
        first = 0
        for tree, nodes in active:
            mine = slice(first, first := first + len(nodes))
            tree.keep(states_NE[mine])
            tree.hang(nodes, logits_NR[mine], self._rows)

    def _drawn(self, row: DraftRow) -> Proposal:
        """A chain, each token drawn from the head's own distribution."""
        request, draft = self._requests[row.request_id], row.draft()
        assert request.logits_R is not None
        assert request.state_E is not None
        logits_R, state_E, node = request.logits_R, request.state_E, ROOT
        length = min(row.budget, self._limits.max_depth)
        for depth in range(1, length + 1):
            found = draft.extend(node, self._rows.spread(logits_R))
            if not found or depth == length:
                break
            node = found[0]
            inputs_NE = self._runner.own_inputs(draft.tokens[-1:], state_E[None])
            chain = HeadRow(request.slot, request.end - 1, 1, draft.tree, depth)
            states_NE, logits_NR = self._runner.run([chain], inputs_NE)
            state_E, logits_R = states_NE[0], logits_NR[0]
        return draft.build()


def _chain_row(row: DraftRow, request: _Request) -> ChainRow:
    """A row's part of a round, with the noise of its own choices."""
    read = request.unread
    assert not isinstance(row.choices, DrawnChoices)
    key = row.choices.draw_key(0, scale_of(row.params))
    assert key is not None
    own = DrawKey.of(row.params, key.seed, key.position) if key.scale else key
    return ChainRow(request.slot, read.start, read.following, read.taps, own)


def _joined(reads: Sequence[_Read]) -> _Read:
    """One of reads that follow each other."""
    if len(reads) == 1:
        return reads[0]
    following = [token for read in reads for token in read.following]
    taps = [torch.cat(parts) for parts in zip(*(read.taps for read in reads), strict=True)]
    return _Read(reads[0].start, following, taps)


class _Tree:
    """A row's growing tree with the head's states: at the text's end, then at each scored node."""

    def __init__(self, request: _Request, growth: Growth) -> None:
        assert request.state_E is not None
        self.request, self.growth = request, growth
        self._states_SE = request.state_E.new_empty(1 + growth.row.budget, len(request.state_E))
        self._states_SE[0] = request.state_E

    def parent_states(self, nodes: Sequence[int]) -> Tensor:
        """[N, E]."""
        growth = self.growth
        return self._states_SE[[1 + growth.place(growth.parent(node)) for node in nodes]]

    def keep(self, states_NE: Tensor) -> None:
        """Keep the states of the nodes scored last."""
        end = 1 + len(self.growth.scored)
        self._states_SE[end - len(states_NE) : end] = states_NE

    def head_row(self, num_new: int) -> HeadRow:
        # The text's last entry stands before the tree, known like the nodes scored before.
        tree = self.growth.scored
        known = 1 + len(tree) - num_new
        return HeadRow(self.request.slot, self.request.end - 1, 1, tree, known, num_new)

    def hang(self, nodes: Sequence[int], logits_NR: Tensor, rows: OutputRows) -> None:
        growth = self.growth
        drafted = [*map(growth.drafted, nodes)]
        copied = [growth.copied(node) for node in nodes] if growth.guide else ()
        count = max(map(growth.num_below, nodes))
        found = rows.choices(growth.row, logits_NR, drafted, count, copied)
        for node, choices in zip(nodes, found, strict=True):
            growth.hang(node, choices)


def stepwise_drafter(
    head: type[HeadModule],
    *,
    summary: str,
    num_draft_tokens: int,
    read: Callable[[Path, HeadTarget], StepHead] | None = None,
    own: Callable[[HeadTarget], StepHead] | None = None,
) -> DrafterSpec:
    """The spec of a drafter that grows trees with a trained head.

    Args:
        head: the kind of head, a `StepHead`.
        summary, num_draft_tokens: see `DrafterSpec`.
        read: reads a head from a published checkpoint; None: only heads that foredraft saved.
        own: the head of a model that brings one; None: this kind comes with no model.
    """

    def build(context: DrafterContext) -> Drafter:
        limits, target = growth_limits(context), offered(context.target.capabilities.cache_layers)
        directory = named_folder(context, head.kind, "head")
        if read is not None and directory is not None and is_checkpoint(directory):
            return StepDrafter(read(directory, target), target, limits)
        if own is not None and directory is None and target.has_own_layers:
            return StepDrafter(own(target), target, limits)
        return StepDrafter(cast(StepHead, trained_head(context, head)), target, limits)

    return DrafterSpec(
        build=build,
        summary=summary,
        options={**HEAD_OPTION, **GROWTH_OPTIONS},
        num_draft_tokens=num_draft_tokens,
        needs=("parts", "cache_layers"),
        trained=head.kind,
        head=head,
        is_models_own=own is not None,
    )
