"""The target's own layers in few bits draft a chain, on the target's own cache.

A copy in 4 bits reads a third of what a bfloat16 target reads, and says nearly the same: it drafts
token by token, the target verifies all of them in one forward, and the text is the target's
(ML-SpecQD, arXiv 2503.13565; QSpec, arXiv 2410.11305). With the noise that the target draws with,
the copy agrees nearly as often at temperature 1 as at 0. It needs no training, reads no
prompt, and joins and leaves any reply at any place.

Earlier matches in the text, or a table of the target's text, draft for the copy in turn: a forward
of two or three tokens takes the copy hardly longer than a forward of one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from foredraft.cache.base import NO_MEMORY
from foredraft.core.choices import DrawKey
from foredraft.core.errors import CapabilityError, NonFiniteScoresError
from foredraft.core.tree import TokenTree
from foredraft.drafters.base import DraftRow
from foredraft.drafters.model.chain import ChainDraft
from foredraft.drafters.model.staged import GUESSED, MOST_GUESSES, Fit, StagedDrafter, text_guesser
from foredraft.drafters.spec import DrafterContext, DrafterSpec, TextCodec
from foredraft.drafters.text.table import NgramTable, found_table
from foredraft.kernels.build import describe_instructions
from foredraft.models.base import (
    LowBitCopy,
    LowBitTarget,
    ScoreRow,
    Scores,
    Target,
    read,
)
from foredraft.models.files.kept import recipe_of, this_week
from foredraft.system.machine import cpu_name

_log = logging.getLogger("foredraft")
_PROMPTS = (
    "There are many ways to describe a town by the sea. The first one is",
    "Question: What made the railway change the way people lived in the 19th century?\nAnswer:",
    'def most_common(words: list[str]) -> str:\n    """The word that comes up most often."""\n',
    "A bakery sells 12 loaves an hour at 3 dollars each. In a week of six days it",
)
"""Prompts on which a copy's acceptance is measured: texts of several kinds, some are easy."""
_SEED = 2503_13565
_NUM_MEASURED = 32
"""Tokens behind each prompt and at each temperature."""
_MOST_SECONDS = 8.0
"""At each temperature, beyond the first prompt."""
_NUM_TIMED = 16
_NUM_VERIFIED = 8
"""Tokens of a forward that verifies, as it is timed."""
_STRIDE = 977
_AGREED = 0.95
_PAYS, _MOST_MEASURED = 1.05, 3
_USUAL_FIT = Fit(0.9, 0.85, (0.4, 0.45, 0.5, 0.55))


class SelfDrafter(StagedDrafter):
    """See the module docstring.

    Args:
        target: whose cache the copy drafts on.
        table: of the target's earlier text; None: the text's own matches alone draft for the copy.
    """

    def __init__(
        self, target: LowBitTarget, copy: LowBitCopy, fit: Fit, table: NgramTable | None = None
    ) -> None:
        super().__init__(fit, text_guesser(table), target.vocab_size)
        self._copy, self._cache, self._max_context = copy, target.cache, target.max_context
        self._first_lengths: dict[int, int] = {}

    def begin(self, row: DraftRow) -> None:
        super().begin(row)
        self._first_lengths[row.request_id] = len(row.tokens)

    def end(self, request_id: int) -> None:
        self._first_lengths.pop(request_id, None)
        super().end(request_id)

    def _has_room(self, row: DraftRow) -> bool:
        num_tokens = len(row.tokens)
        if num_tokens + row.budget > self._max_context:
            return False
        # The copy reads no prompt. Also where the cache holds nearly all of it, the first step
        # drafts nothing: else a drawn text would depend on what is in the cache.
        is_first = num_tokens == self._first_lengths[row.request_id]
        return not is_first and self._cache.length(row.slot) == num_tokens - 1

    def _next_read(self, chain: ChainDraft, guess: TokenTree) -> ScoreRow:
        last = chain.tokens[-1] if chain.tokens else chain.row.tokens[-1]
        return ScoreRow(chain.row.slot, (last,), guess, draw=chain.draw_key)

    def _score(self, chains: Sequence[ChainDraft], reads: Sequence[ScoreRow]) -> Scores:
        starts = [len(chain.row.tokens) - 1 + len(chain.tokens) for chain in chains]
        return self._copy.score(reads, starts)


def measured_fit(target: LowBitTarget, copy: LowBitCopy, prompts: Sequence[Sequence[int]]) -> Fit:
    """Let the target write a little and the copy guess each token; kept for a week.

    Where it does not pay by what an earlier process has measured, perhaps beside a busy neighbour,
    it is measured again, and the best of three processes counts. Where the context or the cache's
    memory is too small for that, a guess.

    Args:
        prompts: what the target goes on from: all of them, if the copy errs behind the first.
    """

    was_measured = False

    def measure() -> Tensor:
        nonlocal was_measured
        was_measured = True
        # Apart: a drafter may be built while an engine runs on the target's own cache.
        other = target.apart(num_tokens)
        greedy, times = _agreement(other, copy.on(other), prompts, 0.0)
        sampled, more_times = _agreement(other, copy.on(other), prompts, 1.0)
        best = [min(each) for each in zip(*times, *more_times, strict=True)]
        target_ms, verify_ms, *copy_ms = best
        node_share = max(0.0, verify_ms / target_ms - 1) / (_NUM_VERIFIED - 1)
        return torch.tensor([greedy, sampled, node_share, *(each / target_ms for each in copy_ms)])

    num_tokens = max(map(len, prompts)) + _NUM_MEASURED + _NUM_VERIFIED
    if num_tokens > target.max_context:
        return _USUAL_FIT
    here = (cpu_name(), torch.get_num_threads(), describe_instructions())
    recipe = recipe_of(copy.identity, str(prompts), *here, this_week())
    fits = list[Fit]()
    try:
        for number in range(_MOST_MEASURED):
            kept = target.parts.kept(f"self-draft-fit-{copy.bits}-{number}", recipe, measure)
            greedy, sampled, node_share, *shares = kept.tolist()
            fits.append(Fit(greedy, sampled, tuple(shares), node_share))
            if was_measured or fits[-1].speedup >= _PAYS:
                break
    except NO_MEMORY as error:
        _log.info("how well a copy drafts is not measured: %s", error)
        return _USUAL_FIT
    return max(fits, key=lambda fit: fit.speedup)


def _agreement(
    target: Target, copy: LowBitCopy, prompts: Sequence[Sequence[int]], temperature: float
) -> tuple[float, list[tuple[float, ...]]]:
    """The share of tokens that copy and target agree on, and seconds of their forwards.

    First those of the target, with one token and with many, then those of the copy with one
    token, two and so on.
    """
    scale = 1.0 / temperature if temperature else 0.0
    times = list[tuple[float, ...]]()
    agreed = list[bool]()
    started = time.perf_counter()
    for prompt in prompts:
        agreed += _agreed(target, copy, prompt, scale, times)
        if all(agreed) or time.perf_counter() - started > _MOST_SECONDS:
            break  # no error, or a large model: what is known so far must do
    return (sum(agreed) + 1) / (len(agreed) + 2), times


def _agreed(
    target: Target,
    copy: LowBitCopy,
    prompt: Sequence[int],
    scale: float,
    times: list[tuple[float, ...]],
) -> Iterator[bool]:
    """Whether copy and target agree on each token behind a prompt; the first ones are timed."""
    cache, last = target.cache, prompt[-1]
    slot = cache.allocate()
    try:
        if prompt[:-1]:
            read(target, slot, prompt[:-1])
        for position in range(_NUM_MEASURED):
            row = ScoreRow(slot, (last,), draw=DrawKey(_SEED, position, scale))
            if len(times) < _NUM_TIMED:
                times.append(_times(target, copy, row))
            guess = _drawn(copy.score([row], [cache.length(slot)]))
            last = _drawn(target.score([row]))
            cache.keep(slot, 1, ())
            yield guess == last
    finally:
        cache.free(slot)


def _times(target: Target, copy: LowBitCopy, row: ScoreRow) -> tuple[float, ...]:
    """Seconds of forwards that go on from a row, as `_agreement` has them; nothing is kept."""
    (last,), start = row.pending, target.cache.length(row.slot)
    # Unlike tokens: of a mixture they touch more experts than like ones do.
    unlike = [(last + _STRIDE * i) % target.vocab_size for i in range(1, _NUM_VERIFIED)]
    laps = [time.perf_counter()]
    for num_guesses in range(MOST_GUESSES, -1, -1):
        tree = TokenTree.chain(unlike[:num_guesses])
        copy.score([replace(row, tree=tree)], [start])
        laps.append(time.perf_counter())
    for nodes in (unlike, []):
        target.score([replace(row, tree=TokenTree.chain(nodes))])
        laps.append(time.perf_counter())
    return tuple(end - begin for begin, end in pairwise(laps))[::-1]


def _drawn(scores: Scores) -> int:
    """The token after the last one of a single row."""
    (law,) = scores.drawn or (None,)
    if law is None or law.drawn is None:
        raise NonFiniteScoresError("the target's logits are not finite")
    return law.drawn


def copy_figures(
    target: LowBitTarget, tokenizer: TextCodec | None, name: str
) -> list[dict[str, Any]]:
    """How well the copies of a target draft, the one with the fewest bits first.

    Args:
        name: what the copies are called beside their bits.
    """
    found = []
    for bits in target.low_bits:
        copy = target.low_bit_copy(bits)
        fit = measured_fit(target, copy, _prompts(tokenizer))
        figures = {"name": f"{bits} bits, {name}", "bits": bits, "megabytes": copy.num_bytes / 1e6}
        rates = {"share": fit.token_share(GUESSED), "speedup": fit.speedup}
        found.append(figures | asdict(fit) | rates)
    return found


def _prompts(tokenizer: TextCodec | None) -> list[list[int]]:
    return [*map(tokenizer.encode, _PROMPTS)] if tokenizer else [[0], [1], [2], [3]]


def _best_copy(
    target: LowBitTarget, low_bits: Sequence[int], prompts: Sequence[Sequence[int]]
) -> tuple[LowBitCopy, Fit]:
    """The copy that drafts fastest here: more bits agree more often, and take longer."""
    best: tuple[LowBitCopy, Fit] | None = None
    for bits in low_bits:
        copy = target.low_bit_copy(bits)
        fit = measured_fit(target, copy, prompts)
        if best is None or fit.speedup > best[1].speedup:
            best = copy, fit
        if fit.greedy >= _AGREED:  # a larger copy cannot make up for its time
            break
    assert best is not None  # a target with the capability has one
    return best


def low_bit_target(target: Target) -> LowBitTarget:
    """The target itself, where copies of it can draft.

    Raises:
        CapabilityError: none can.
    """
    if target.capabilities.low_bit is None:
        raise CapabilityError(f"self_draft needs {DRAFTER.needs_in_words}")
    return target.capabilities.low_bit


def _build(context: DrafterContext) -> SelfDrafter:
    target, prompts = low_bit_target(context.target), _prompts(context.tokenizer)
    asked = context.options.get("bits")
    copy, fit = _best_copy(target, target.low_bits if asked is None else (asked,), prompts)
    return SelfDrafter(target, copy, fit, found_table(context, "table"))


DRAFTER = DrafterSpec(
    build=_build,
    summary="the target's own layers in few bits draft a chain, on the target's own cache",
    options={
        "bits": "of a weight of the copy: 4 or 8 (what is fastest here)",
        "table": "directory of a table that drafts for the copy (the one that comes with the model,"
        " if any)",
    },
    num_draft_tokens=8,
    needs=("low_bit", "parts"),
    needs_in_words="a target in our own kernels on CPU, with weights of more than 4 bits",
)
