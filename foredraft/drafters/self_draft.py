"""The target's own layers in few bits draft a chain, on the target's own cache.

A copy in 4 bits reads a third of what a bfloat16 target reads, and says nearly the same: it drafts
token by token, the target verifies all of them in one forward, and the text is the target's
(ML-SpecQD, arXiv 2503.13565; QSpec, arXiv 2410.11305). With the noise that the target draws with,
the copy agrees nearly as often at temperature 1 as at 0. It needs no training, reads no
prompt, and joins and leaves any reply at any place.

What is known of the text without a forward (earlier matches, a table of the target's text) drafts
for the copy in turn: a forward of two or three tokens takes the copy hardly longer than one of one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from statistics import mean
from typing import Any, cast

import torch
from torch import Tensor

from foredraft.cache.base import NO_MEMORY
from foredraft.core.choices import DrawnChoices, SharedChoices
from foredraft.core.cost import (
    USUAL_PRICES,
    Prices,
    chain_speedup,
    interpolated,
    price_of,
    relative,
)
from foredraft.core.draws import DrawKey
from foredraft.core.errors import CapabilityError, NonFiniteScoresError
from foredraft.core.noise import gumbel_argmax
from foredraft.core.proposal import NOT_READY, Proposal
from foredraft.core.traits import DrafterTraits
from foredraft.core.tree import TokenTree
from foredraft.drafters.base import BaseDrafter, DraftRow, Observation
from foredraft.drafters.chain import ChainDraft
from foredraft.drafters.per_request import GuidedDrafter
from foredraft.drafters.spec import DrafterContext, DrafterSpec, TextCodec
from foredraft.drafters.table import NgramTable, found_table, new_text
from foredraft.kernels.build import describe_instructions
from foredraft.models.base import (
    Capabilities,
    LowBitCopy,
    LowBitTarget,
    ScoreRow,
    Scores,
    Target,
    read,
)
from foredraft.models.files.kept import recipe_of
from foredraft.system.machine import cpu_name

_log = logging.getLogger("foredraft")
_PROMPTS = (
    "There are many ways to describe a town by the sea. The first one is",
    "Question: What made the railway change the way people lived in the 19th century?\nAnswer:",
    'def most_common(words: list[str]) -> str:\n    """The word that comes up most often."""\n',
    "A bakery sells 12 loaves an hour at 3 dollars each. In a week of six days it",
)
"""What the target goes on from while a copy guesses: texts of several kinds, some are easy."""
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
_MOST_GUESSES = 3
"""In a forward of the copy."""
_GUESSED = 0.5
"""How often a guess is right, roughly."""
_PAYS, _MOST_MEASURED, _WEEK_SECONDS = 1.05, 3, 7 * 24 * 3600


@dataclass(frozen=True)
class Fit:
    """How well a copy drafts for its target on this machine.

    Attributes:
        greedy: the chance that the target takes its token at temperature 0.
        sampled: likewise at temperature 1, with the same noise.
        shares: time of a forward of the copy with one token, two and so on, in forwards of the
            target with one.
        node_share: what a node adds to a forward of the target, likewise.
    """

    greedy: float
    sampled: float
    shares: tuple[float, ...]
    node_share: float = USUAL_PRICES[1] - USUAL_PRICES[0]

    def token_share(self, guessed: float) -> float:
        """Time of a drafted token, in plain steps, with guesses right by this chance."""
        tokens = accumulate(guessed**depth for depth in range(len(self.shares)))
        return min(share / count for share, count in zip(self.shares, tokens, strict=True))

    def guess_prices(self, num_rows: int) -> Prices:
        """Of a row's guesses in a forward of the copy for so many rows that guess as much."""
        times, most = tuple(enumerate(self.shares, start=1)), num_rows * (_MOST_GUESSES + 1)
        return relative([interpolated(times, n) for n in range(num_rows, most + 1, num_rows)])

    @property
    def speedup(self) -> float:
        """Roughly, over plain decoding: the mean of both temperatures."""
        share, prices = self.token_share(_GUESSED), (1.0, 1.0 + self.node_share)
        chances = (self.greedy, self.sampled)
        return mean(chain_speedup(chance, share, prices) for chance in chances)


_USUAL_FIT = Fit(0.9, 0.85, (0.4, 0.45, 0.5, 0.55))


class SelfDrafter(BaseDrafter):
    """See the module docstring. All rows that still draft share each forward of the copy.

    Args:
        target: whose cache the copy drafts on.
        copy: of its layers.
        fit: how well it drafts.
        table: of the target's earlier text; None: the text's own matches alone draft for the copy.
    """

    def __init__(
        self, target: LowBitTarget, copy: LowBitCopy, fit: Fit, table: NgramTable | None = None
    ) -> None:
        chances = (fit.greedy, fit.sampled)
        self.traits = DrafterTraits(
            promise=chances, round_share=fit.token_share(_GUESSED), spare=_MOST_GUESSES
        )
        self._copy, self._fit = copy, fit
        self._guesser = GuidedDrafter(partial(new_text, table=table), tree=False)
        self._cache, self._max_context = target.cache, target.max_context
        self._first_lengths: dict[int, int] = {}

    def begin(self, row: DraftRow) -> None:
        self._guesser.begin(row)
        self._first_lengths[row.request_id] = len(row.tokens)

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        chains = {row.request_id: ChainDraft(row) for row in rows if self._has_room(row)}
        alike = list(chains.values())
        while alike:
            prices = self._fit.guess_prices(len(alike))
            self._extend(alike, [self._guess(chain, prices) for chain in alike])
            alike = [chain for chain in alike if chain.num_left]
        return [
            self._built(chains[row.request_id]) if row.request_id in chains else NOT_READY
            for row in rows
        ]

    def observe(self, observations: Sequence[Observation]) -> None:
        self._guesser.observe(observations)

    def end(self, request_id: int) -> None:
        self._first_lengths.pop(request_id, None)
        self._guesser.end(request_id)

    def _guess(self, chain: ChainDraft, prices: Prices) -> TokenTree:
        """What the copy may say behind its next token, which a forward yields in any case."""
        row = chain.row.chosen(min(chain.num_left - 1, _MOST_GUESSES))
        return self._guesser.propose_after(replace(row, prices=prices), chain.tokens).tree

    def _built(self, chain: ChainDraft) -> Proposal:
        """The chain, and guesses behind it where they are worth what their nodes cost."""
        row, proposal = chain.row, chain.build()
        if not row.spare or not chain.goes_on or row.params.coupling == "drawn":
            return proposal
        prices = _spare_prices(row.prices, len(chain.tokens), self._fit.token_share(_GUESSED))
        row = replace(row, budget=row.spare, prices=prices)
        guess = self._guesser.propose_after(row, chain.tokens).tree
        if not guess.tokens:
            return proposal
        return Proposal.chosen(proposal.tree.hang(guess, len(chain.tokens) - 1))

    def _has_room(self, row: DraftRow) -> bool:
        num_tokens = len(row.tokens)
        if not row.budget or num_tokens + row.budget > self._max_context:
            return False
        # The copy reads no prompt. Also where the cache holds nearly all of it, the first step
        # drafts nothing: else a drawn text would depend on what is in the cache.
        is_first = num_tokens == self._first_lengths[row.request_id]
        return not is_first and self._cache.length(row.slot) == num_tokens - 1

    def _extend(self, chains: Sequence[ChainDraft], guesses: Sequence[TokenTree]) -> None:
        """A forward of the copy: each chain grows by a token, and by as many as were guessed."""
        reads, starts = zip(*map(_next_read, chains, guesses), strict=True)
        scores = self._copy.score(reads, starts)
        for chain, guess, span in zip(chains, guesses, scores.heads, strict=True):
            chain.follow(guess, partial(self._take, chain, scores, span))

    def _take(self, chain: ChainDraft, scores: Scores, span: range, ahead: int) -> int | None:
        """Add the token after the first of the chain's own that was read, or after one behind it.

        A law of scaled logits alone was drawn from already.
        """
        row, place = chain.row, span[ahead]
        if scores.draws is not None and chain.draw_key is not None:
            draw = scores.draws[place]
            return chain.take(None if draw is None else draw.token)
        logits_V = scores.logits_NV[place]
        if row.rules.filters_only and not isinstance(row.choices, DrawnChoices):
            return chain.take(_filtered_draw(row, row.choices, logits_V, chain.tokens))
        return chain.extend(logits_V)


def _filtered_draw(
    row: DraftRow, choices: SharedChoices, logits_V: Tensor, drafted: Sequence[int]
) -> int | None:
    """What the target draws by these logits, as `SharedChoices.best` has it."""
    try:
        law = row.rules.law(logits_V, row.tokens, drafted)
    except NonFiniteScoresError:
        return None
    key = choices.draw_key(len(drafted), law.scale or 0.0)
    if law.scale is None or key is None:
        return law.token
    return gumbel_argmax(law.given_V, key.seed, key.position, law.scale, law.cut)


def _spare_prices(prices: Prices, num_drafted: int, token_share: float) -> Prices:
    """Of further nodes, for what a step with so many drafted tokens takes and commits."""
    before = price_of(prices, num_drafted)
    each = (before + num_drafted * token_share) / (1 + num_drafted)
    rises = (price_of(prices, num_drafted + n) - before for n in range(_MOST_GUESSES + 1))
    return relative([each + rise for rise in rises])


def _next_read(chain: ChainDraft, guess: TokenTree) -> tuple[ScoreRow, int]:
    """What the copy is to read for the chain's next tokens, and at which place."""
    row = chain.row
    last = chain.tokens[-1] if chain.tokens else row.tokens[-1]
    start = len(row.tokens) - 1 + len(chain.tokens)
    return ScoreRow(row.slot, (last,), guess, draw=chain.draw_key), start


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
    recipe = recipe_of(copy.identity, str(prompts), *here, int(time.time() // _WEEK_SECONDS))
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
    for num_guesses in range(_MOST_GUESSES, -1, -1):
        tree = TokenTree.chain(unlike[:num_guesses])
        copy.score([replace(row, tree=tree)], [start])
        laps.append(time.perf_counter())
    for nodes in (unlike, []):
        target.score([replace(row, tree=TokenTree.chain(nodes))])
        laps.append(time.perf_counter())
    return tuple(end - begin for begin, end in pairwise(laps))[::-1]


def _drawn(scores: Scores) -> int:
    """The token after the last one of a single row."""
    (draw,) = scores.draws or (None,)
    if draw is None:
        raise NonFiniteScoresError("the target's logits are not finite")
    return draw.token


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
        rates = {"share": fit.token_share(_GUESSED), "speedup": fit.speedup}
        found.append(figures | asdict(fit) | rates)
    return found


def _prompts(tokenizer: TextCodec | None) -> list[list[int]]:
    return [*map(tokenizer.encode, _PROMPTS)] if tokenizer else [[0], [1], [2], [3]]


def _best_copy(target: LowBitTarget, prompts: Sequence[Sequence[int]]) -> tuple[LowBitCopy, Fit]:
    """The copy that drafts fastest here: more bits agree more often, and take longer."""
    best: tuple[LowBitCopy, Fit] | None = None
    for bits in target.low_bits:
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
    if not target.capabilities.low_bit:
        raise CapabilityError(f"self_draft needs {DRAFTER.needs_in_words}")
    return cast(LowBitTarget, target)


def _build(context: DrafterContext) -> SelfDrafter:
    target, prompts = low_bit_target(context.target), _prompts(context.tokenizer)
    bits = context.options.get("bits")
    if bits is None:
        copy, fit = _best_copy(target, prompts)
    else:
        copy = target.low_bit_copy(bits)
        fit = measured_fit(target, copy, prompts)
    table = found_table(context, "table")
    return SelfDrafter(target, copy, fit, table)


DRAFTER = DrafterSpec(
    build=_build,
    summary="the target's own layers in few bits draft a chain, on the target's own cache",
    options={
        "bits": "of a weight of the copy: 4 or 8 (what is fastest here)",
        "table": "directory of a table that drafts for the copy (the one that comes with the model,"
        " if any)",
    },
    num_draft_tokens=8,
    needs=Capabilities(low_bit=True, parts=True),
    needs_in_words="a target in our own kernels on CPU, with weights of more than 4 bits",
)
