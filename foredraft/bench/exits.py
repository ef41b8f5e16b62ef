"""Choose layers of a target for early exit: agreement measured on text, cost by the clock.

Greedy decoding follows the target's most likely tokens, so on a text that the target wrote the
steps of early exit can be replayed from two lists: the target's token at each position, and the
token of some of its layers there. Only the times have to be measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from foredraft.bench.report import Report, Table
from foredraft.bench.timing import Stopwatch
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import NO_PROPOSAL, Proposal
from foredraft.core.tree import TokenTree
from foredraft.drafters import build_drafter
from foredraft.drafters.base import Drafter, DraftRow
from foredraft.drafters.spec import DrafterContext
from foredraft.models.base import LayeredTarget, ScoreRow, Target, offered, read

_CHUNK = 64
_REQUEST = 0

Advance = Callable[[str], None]
Options = Mapping[str, Any]
"""Options of the early_exit drafter."""


@dataclass(frozen=True)
class Passage:
    """A text for evaluation: its tokens, and the first predicted one."""

    tokens: Sequence[int]
    first: int = 1

    @property
    def num_predicted(self) -> int:
        return len(self.tokens) - self.first


@dataclass(frozen=True)
class ExitFigure:
    """Result of one exit at its best number of draft tokens.

    Attributes:
        options: of the drafter.
        agreement: share of positions where it and the target hold the same token likeliest.
        num_draft_tokens: the number that gives the most tokens per second.
        committed_per_step: tokens, in greedy decoding of the passages.
        draft_ms: median time of drafting that many tokens.
        verify_ms: median time of the forward that verifies them.
        speedup: tokens per second over those of plain decoding.
    """

    options: Options
    agreement: float
    num_draft_tokens: int
    committed_per_step: float
    draft_ms: float
    verify_ms: float
    speedup: float

    @property
    def tokens_per_s(self) -> float:
        return 1e3 * self.committed_per_step / (self.draft_ms + self.verify_ms)

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "tokens_per_s": self.tokens_per_s}


def exit_report(figures: Sequence[ExitFigure], advice: str) -> Report:
    """Candidates as a table, with a sentence below."""
    columns = {"drafts with": "{layers}", "agree": "{agreement:.1%}",
               "drafted": "{num_draft_tokens:d}", "per step": "{committed_per_step:.2f}",
               "draft ms": "{draft_ms:.2f}", "verify ms": "{verify_ms:.2f}",
               "tok/s": "{tokens_per_s:.1f}", "speed-up": "{speedup:.2f}x"}  # fmt: skip
    rows = [each.as_dict() | {"layers": describe(each.options)} for each in figures]
    return Report([Table("candidates", rows, columns)], lines=[advice])


def first_layer_exits(num_layers: int, at_most: int = 8) -> list[Options]:
    """Exits after a few of the first layers, spread over three quarters of them."""
    last = max(1, num_layers * 3 // 4)
    count = min(at_most, last)
    layers = {max(1, round(last * (i + 1) / count)) for i in range(count)}
    return [{"exit_layer": layer} for layer in sorted(layers)]


def measure_exits(
    target: LayeredTarget,
    passages: Sequence[Passage],
    exits: Sequence[Options],
    lengths: Sequence[int],
    repeats: int,
    advance: Advance,
) -> list[ExitFigure]:
    """Judge every exit by the passages and the clock, all interleaved with plain decoding.

    Args:
        lengths: numbers of draft tokens to try.
        repeats: how often to time each; the median counts.
    """
    right = [likeliest(target, passage) for passage in passages]
    trials = [_Trial(target, options) for options in exits]
    for trial in trials:
        trial.matches = _matches(trial.model(), passages, right)
        advance(describe(trial.options))
    with _Position(target, passages[0].tokens) as position:
        plain = _Times()
        for _ in range(repeats + 1):  # the first round warms up and is dropped
            plain.verify.append(position.verify(NO_PROPOSAL))
            for trial in trials:
                trial.time(position, lengths)
                advance(f"timing {describe(trial.options)}")
    return [trial.best(lengths, plain.median_verify) for trial in trials]


def likeliest(model: Target, passage: Passage) -> list[int]:
    """The model's most likely token at each predicted position of a passage."""
    slot, found = model.cache.allocate(), list[int]()
    pending: Sequence[int] = passage.tokens[passage.first - 1 : passage.first]
    try:
        read(model, slot, passage.tokens[: passage.first - 1])
        for start in range(passage.first, len(passage.tokens), _CHUNK):
            chunk = passage.tokens[start : start + _CHUNK]
            tree = TokenTree.chain(chunk[:-1])
            (scores,) = model.score([ScoreRow(slot, pending, tree)])
            found += scores.logits_NV.argmax(-1).tolist()
            model.cache.keep(slot, len(pending), range(len(tree)))
            pending = chunk[-1:]
    finally:
        model.cache.free(slot)
    return found


def committed_per_step(matches: Sequence[Sequence[bool]], num_draft_tokens: int) -> float:
    """Tokens a step of greedy decoding, replayed: a right run of drafts, and the target's own."""
    tokens = steps = 0
    for passage in matches:
        position = 0
        while position < len(passage):
            drafts = passage[position : position + num_draft_tokens]
            accepted = drafts.index(False) if False in drafts else len(drafts)
            position += accepted + 1
            steps += 1
        tokens += position  # the last step may run past the end, as it would in a longer text
    return tokens / max(steps, 1)


def describe(options: Options) -> str:
    count = options["exit_layer"]
    return "first layer" if count == 1 else f"first {count} layers"


@dataclass
class _Times:
    """Seconds, one entry a round."""

    draft: list[float] = field(default_factory=list)
    verify: list[float] = field(default_factory=list)

    @property
    def median_draft(self) -> float:
        return median(self.draft[1:])

    @property
    def median_verify(self) -> float:
        return median(self.verify[1:])


class _Position:
    """A place in a text where drafting and verifying are timed again and again."""

    def __init__(self, target: Target, tokens: Sequence[int]) -> None:
        self._target, self._tokens = target, tuple(tokens)

    def __enter__(self) -> _Position:
        cache = self._target.cache
        self._slot = cache.allocate()
        read(self._target, self._slot, self._tokens[:-1])
        return self

    def __exit__(self, *exception: object) -> None:
        self._target.cache.free(self._slot)

    def draft(self, drafter: Drafter, length: int) -> tuple[Proposal, float]:
        """A draft, and the seconds it took."""
        row = DraftRow.of(_REQUEST, self._tokens, SamplingParams(), length, slot=self._slot)
        watch = Stopwatch()
        with watch:
            (proposal,) = drafter.propose([row])
        return proposal, watch.seconds

    def verify(self, proposal: Proposal) -> float:
        """Seconds of the forward over the last token and a draft."""
        watch = Stopwatch()
        with watch:
            last = self._tokens[-1:]
            self._target.score(
                [ScoreRow(self._slot, last, proposal.tree, computed=proposal.computed)]
            )
        return watch.seconds

    @property
    def tokens(self) -> Sequence[int]:
        return self._tokens


class _Trial:
    """One way to exit under measurement."""

    def __init__(self, target: LayeredTarget, options: Options) -> None:
        self.options, self._target = options, target
        self.matches: list[list[bool]] = []
        self._drafter = build_drafter("early_exit", DrafterContext(target, options=options))
        self._times: dict[int, _Times] = {}

    def model(self) -> Target:
        """The same layers as a model of their own, to read whole passages with."""
        return self._target.layer_view(range(self.options["exit_layer"]))

    def time(self, position: _Position, lengths: Sequence[int]) -> None:
        """One round."""
        self._drafter.begin(DraftRow.of(_REQUEST, position.tokens))
        position.draft(self._drafter, 1)  # a cache of its own reads the text now
        for length in lengths:
            times = self._times.setdefault(length, _Times())
            proposal, seconds = position.draft(self._drafter, length)
            times.draft.append(seconds)
            times.verify.append(position.verify(proposal))
        self._drafter.end(_REQUEST)

    def best(self, lengths: Sequence[int], plain_s: float) -> ExitFigure:
        return max((self._figure(n, plain_s) for n in lengths), key=lambda f: f.tokens_per_s)

    def _figure(self, length: int, plain_s: float) -> ExitFigure:
        times, committed = self._times[length], committed_per_step(self.matches, length)
        step_s = times.median_draft + times.median_verify
        return ExitFigure(
            options=self.options,
            agreement=_share(self.matches),
            num_draft_tokens=length,
            committed_per_step=committed,
            draft_ms=1e3 * times.median_draft,
            verify_ms=1e3 * times.median_verify,
            speedup=committed * plain_s / step_s,
        )


def layered(target: Target) -> LayeredTarget:
    """The target, if early exit can draft with it.

    Raises:
        CapabilityError: its layers cannot be had one by one.
    """
    build_drafter("early_exit", DrafterContext(target))
    return offered(target.capabilities.layer_views)


def _matches(
    model: Target, passages: Sequence[Passage], right: Sequence[Sequence[int]]
) -> list[list[bool]]:
    return [
        [mine == theirs for mine, theirs in zip(likeliest(model, passage), tokens, strict=True)]
        for passage, tokens in zip(passages, right, strict=True)
    ]


def _share(matches: Sequence[Sequence[bool]]) -> float:
    flat = [match for passage in matches for match in passage]
    return sum(flat) / max(len(flat), 1)


def split_passages(tokens: Sequence[int], length: int = 512) -> Iterator[Passage]:
    """A long text in pieces; each is read on its own, after its first few tokens."""
    for start in range(0, len(tokens), length):
        piece = tokens[start : start + length]
        if len(piece) > 16:
            yield Passage(piece, 8)
