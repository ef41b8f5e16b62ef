"""The predicted gain of a drafter under a load: recorded drafts, priced by a cost model.

The model of costs is the controller's (`foredraft.core.cost`), and so are the drafters' times
(`foredraft.control.times`). Acceptance is taken from the recording: with fewer nodes a step the
same text takes other steps, which `foredraft.trace.replay` computes. Tokens a step follow from the
controller's acceptance by position at that number of nodes (`foredraft.control.acceptance`).
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from foredraft.bench.record import Recording, Setting
from foredraft.core.cost import CostModel
from foredraft.trace.format import TracedRow
from foredraft.trace.replay import pieces

_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of nodes to weigh."""
_DRAWS, _BAND = 400, (5.0, 95.0)
"""Bootstrap samples over prompts, and the percentiles of the 90 % interval."""
_BEYOND = 4
"""Loads up to this multiple of the largest recorded load are predicted from it."""


@dataclass(frozen=True)
class RowPart:
    """One row's part of a step.

    Attributes:
        context: tokens in the cache before it.
        nodes: drafted.
        committed: committed tokens, or their expected number.
        is_cut: its draft is the remainder of a recorded one; more would have been drafted.
    """

    context: int
    nodes: int
    committed: float
    is_cut: bool = False


@dataclass(frozen=True)
class Outlook:
    """Predicted performance of a setting under a load. Times are in milliseconds.

    Attributes:
        setting: drafter and nodes; with "none" nothing is drafted.
        load: requests at once.
        nodes: drafted by a row in a step, on average.
        committed: tokens a step of a row.
        rates: the share of steps in which the draft held to depth 1, 2, …
        gain: throughput relative to plain decoding.
        low, high: between which 90 % of bootstraps over prompts have it.
        step_ms: of a full batch.
        token_ms: from a request's token to its next, on average.
        first_ms: until the first token of a request that joins the others.
        requests_per_s: that can be served, of replies as long as those recorded.
        holds: share of drafted tokens that are accepted.
        break_even: the acceptance rate at which drafting neither gains nor loses; None: nothing is
            drafted.
        totals: by prompt: tokens, their milliseconds, and those of plain decoding.
    """

    setting: Setting
    load: int
    nodes: float
    committed: float
    rates: tuple[float, ...]
    gain: float
    low: float
    high: float
    step_ms: float
    token_ms: float
    first_ms: float
    requests_per_s: float
    holds: float
    break_even: float | None
    totals: Mapping[int, tuple[float, float, float]]

    @property
    def tokens_per_s(self) -> float:
        """Of all requests together."""
        return 1e3 * self.load / self.token_ms

    def gain_on(self, prompts: Collection[int]) -> float:
        """The gain on some of the prompts, by their numbers."""
        found = [part for number, part in self.totals.items() if number in prompts]
        return sum(plain for _, _, plain in found) / max(sum(ms for _, ms, _ in found), 1e-9)

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        setting = {"drafter": self.setting.name, "flags": self.setting.flags,
                   "num_draft_tokens": self.setting.num_draft_tokens}  # fmt: skip
        left_out = ("setting", "totals")
        figures = {name: value for name, value in vars(self).items() if name not in left_out}
        return setting | figures | {"tokens_per_s": self.tokens_per_s}


@dataclass(frozen=True)
class Costs:
    """Step times on one machine.

    Attributes:
        forward: of the target.
        plain: the recording of plain decoding, for the time beside the forward; None: not recorded.
    """

    forward: CostModel
    plain: Recording | None = None

    def plain_ms(self, contexts: Sequence[int], recording: Recording) -> float:
        """A step of these rows without drafts."""
        plain = self.plain or recording
        forward = self.forward.ms([(1, context) for context in contexts])
        return plain.pace * (forward + plain.step_rest_ms(len(contexts)))


def measured_outlook(recordings: Sequence[Recording], load: int, costs: Costs) -> Outlook:
    """The best number of nodes that was run, with its measured gain.

    The outlook gives the band and the shares of prompts; the gain itself is tokens by time over
    those of plain decoding, where both have full steps that could be timed.
    """

    def measured(recording: Recording) -> Outlook:
        found = outlook(recording, load, costs, recording.most_nodes)
        plain = costs.plain.tokens_per_s if costs.plain else 0.0
        if not plain or not recording.tokens_per_s:
            return found
        gain = recording.tokens_per_s / plain
        off, token_ms = gain / found.gain, 1e3 * load / recording.tokens_per_s
        return replace(
            found, gain=gain, low=off * found.low, high=off * found.high, token_ms=token_ms
        )

    return max(map(measured, recordings), key=lambda each: each.gain)


def best_outlook(recordings: Sequence[Recording], load: int, costs: Costs) -> Outlook:
    """The outlook with the best number of nodes, up to the recorded number.

    Args:
        recordings: of one drafter, by rising most nodes. The first with enough nodes is used.
    """
    found, below = list[Outlook](), 0
    for recording in recordings:
        most = recording.most_nodes
        if most is None:
            return outlook(recording, load, costs, None)
        sizes = {size for size in _SIZES if below < size < most} | {most}
        found += [outlook(recording, load, costs, size) for size in sorted(sizes)]
        below = most
    return max(found, key=lambda each: each.gain)


def outlook(recording: Recording, load: int, costs: Costs, most_nodes: int | None) -> Outlook:
    """The outlook of a drafter with at most ``most_nodes`` nodes under a load.

    Args:
        most_nodes: None: as many as were recorded.
    """
    replies = [list(_pieces(reply, most_nodes)) for reply in recording.replies]
    if most_nodes:
        replies = _completed(replies, most_nodes)
    flat = [(number, piece) for number, reply in enumerate(replies) for piece in reply]
    # By prompt: tokens, their time, and the time of plain decoding.
    totals_P3 = np.zeros((max(recording.prompts) + 1, 3))
    steps_ms = 0.0
    for group, count in _groups(flat, load):
        shares, plain_ms = _shares([piece for _, piece in group], recording, costs)
        steps_ms += sum(shares[:count])
        for (number, piece), ms in zip(group[:count], shares, strict=False):
            plain = piece.committed * plain_ms / load
            totals_P3[recording.prompts[number]] += piece.committed, ms, plain
    tokens, ms, plain = totals_P3.sum(0).tolist()
    parts = [piece for _, piece in flat]
    nodes, committed = _mean([p.nodes for p in parts]), _mean([p.committed for p in parts])
    low, high = _band(totals_P3)
    step_ms, plain_step_ms = load * steps_ms / len(flat), load * plain / tokens
    token_ms, reply = step_ms / committed, tokens / len(replies)
    read_ms = _reading_ms(recording, costs, parts, load)
    most = round(max(piece.committed for piece in parts))
    return Outlook(
        recording.asked_for(most_nodes),
        load,
        nodes,
        committed,
        tuple(_mean([p.committed > depth for p in parts]) for depth in range(1, most)),
        plain / ms,
        low,
        high,
        step_ms,
        token_ms,
        step_ms / 2 + read_ms,  # the step that runs when a request arrives
        1e3 * load / (reply * token_ms + load * max(0.0, read_ms - step_ms)),
        (committed - 1.0) / nodes if nodes else 0.0,
        (step_ms / plain_step_ms - 1.0) / nodes if nodes else None,
        {number: (a, b, c) for number, (a, b, c) in enumerate(totals_P3.tolist())},
    )


def most_load(recordings: Sequence[Sequence[Recording]], costs: Sequence[Costs]) -> int:
    """The most requests at once at which one drafter pays; 0: it never does.

    Args:
        recordings: of the drafter, under each load, ascending; so ``costs``.
    """
    recorded = [each[0].load for each in recordings]
    largest = _BEYOND * max(1, *recorded)

    def pays(load: int) -> bool:
        near = max((i for i, each in enumerate(recorded) if each <= load), default=0)
        return best_outlook(recordings[near], load, costs[near]).gain > 1.0

    tried = sorted({1 << power for power in range(largest.bit_length())} | {*recorded} - {0})
    best, fails = 0, largest + 1
    for load in tried:
        if pays(load):
            best, fails = load, largest + 1
            continue
        fails = min(fails, load)
        if load >= max(recorded):
            break
    while best and fails - best > 1 and fails <= largest:
        middle = (best + fails) // 2
        best, fails = (middle, fails) if pays(middle) else (best, middle)
    return best


def _pieces(reply: Sequence[TracedRow], most_nodes: int | None) -> Iterator[RowPart]:
    """The steps of a reply with at most that many nodes drafted in each."""
    for row in reply:
        drafted = len(row.draft.tokens)
        most = drafted if most_nodes is None else most_nodes
        context = row.position - 1
        for place, (nodes, committed) in enumerate(pieces(row, most)):
            is_cut = place > 0 and nodes < most and drafted >= row.budget
            yield RowPart(context, nodes, committed, is_cut)
            context += committed


def _completed(replies: Sequence[Sequence[RowPart]], most_nodes: int) -> list[list[RowPart]]:
    """The steps; remainders of drafts are extended at the usual acceptance.

    Otherwise drafts would seem short exactly where all of them were accepted.
    """
    whole = [piece for reply in replies for piece in reply if not piece.is_cut]
    held = [0.0] * (most_nodes + 1)  # share accepted at a depth, of drafts that reached it
    for depth in range(1, most_nodes + 1):
        there = [p for p in whole if p.nodes >= depth and p.committed >= depth]
        held[depth] = _mean([p.committed > depth for p in there])

    def completed(piece: RowPart) -> RowPart:
        if not piece.is_cut:
            return piece
        more, chance = 0.0, float(piece.committed > piece.nodes)
        for depth in range(piece.nodes + 1, most_nodes + 1):
            chance *= held[depth]
            more += chance
        return replace(piece, nodes=most_nodes, committed=piece.committed + more)

    return [[*map(completed, reply)] for reply in replies]


def _groups(
    flat: Sequence[tuple[int, RowPart]], load: int
) -> Iterator[tuple[list[tuple[int, RowPart]], int]]:
    """Batches drawn from all steps, and the number of valid rows in the last one."""
    order = [*flat]
    random.Random(0).shuffle(order)
    for start in range(0, len(order), load):
        group = order[start : start + load]
        filled = [*group, *(order[i % len(order)] for i in range(load - len(group)))]
        yield filled, len(group)


def _shares(
    rows: Sequence[RowPart], recording: Recording, costs: Costs
) -> tuple[list[float], float]:
    """Each row's share of a step's time, and the step's time without drafts.

    Rows share alike, but for what drafted nodes add to the forward: by their number.
    """
    load, contexts = len(rows), [row.context for row in rows]
    forward = costs.forward.ms([(1 + row.nodes, row.context) for row in rows])
    bare = costs.forward.ms([(1, context) for context in contexts])
    num_nodes, deepest = sum(row.nodes for row in rows), max(row.nodes for row in rows)
    beside = recording.draft_ms(load, deepest) + recording.step_rest_ms(load)
    node_ms = (forward - bare) / num_nodes if num_nodes else 0.0
    shares = [recording.pace * ((bare + beside) / load + row.nodes * node_ms) for row in rows]
    return shares, costs.plain_ms(contexts, recording)


def _reading_ms(recording: Recording, costs: Costs, parts: Sequence[RowPart], load: int) -> float:
    """A step that reads a prompt while the other rows go on."""
    prompt = round(_mean(recording.prompt_tokens))
    nodes, context = (
        round(_mean([p.nodes for p in parts])),
        round(_mean([p.context for p in parts])),
    )
    others = [(1 + nodes, context)] * (load - 1)
    beside = recording.draft_ms(load, nodes) + recording.step_rest_ms(load)
    return costs.forward.ms([(prompt, prompt // 2), *others]) + beside


def _band(totals_P3: np.ndarray[Any, Any]) -> tuple[float, float]:
    """The interval of the gain, by a bootstrap over prompts."""
    seen_P3 = totals_P3[totals_P3[:, 0] > 0]
    drawn = np.random.default_rng(0).integers(len(seen_P3), size=(_DRAWS, len(seen_P3)))
    sums = seen_P3[drawn].sum(1)
    low, high = np.percentile(sums[:, 2] / sums[:, 1], _BAND)
    return float(low), float(high)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
