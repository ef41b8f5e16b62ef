"""An adapter for early exit: what the target's first layers say, made readable for output rows.

Kangaroo, F. Liu et al., arXiv 2404.18911. The middle layers of a model that was not trained for it
speak another language than its head; one small layer in between learns to translate. It reads the
very states that the first layers have when they draft, so that drafting is just as in training.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from foredraft.core.errors import CapabilityError, ConfigError
from foredraft.core.proposal import Proposal
from foredraft.core.traits import DrafterTraits
from foredraft.core.tree import TokenTree
from foredraft.drafters.base import Drafter, DraftRow, Observation
from foredraft.drafters.heads.base import LARGEST_SIZE, CausalHead, HeadOption, HeadSource
from foredraft.drafters.heads.layers import head_weights
from foredraft.drafters.heads.rows import OutputRows
from foredraft.drafters.model.chain import ChainDrafter
from foredraft.drafters.model.draft_model import DraftModelDrafter
from foredraft.drafters.model.staged import MOST_GUESSES, Fit
from foredraft.drafters.spec import DrafterContext, DrafterSpec
from foredraft.drafters.trained import trained_head
from foredraft.models.base import (
    Computed,
    HeadRow,
    LayeredTarget,
    ModelShape,
    ScoreRow,
    ShallowTarget,
    Target,
    offered,
)


class AdapterModule(CausalHead):
    """See the module docstring.

    Args:
        exit_layer: how many of the target's first layers it stands on.
    """

    kind = "early_exit"

    OPTIONS: ClassVar = {
        "exit_layer": HeadOption(
            "how many of the target's first layers it stands on (2)",
            lambda shape: min(2, shape.num_hidden_layers - 1),
            most=LARGEST_SIZE,
        ),
        "num_layers": HeadOption("layers of its own (1)", 1),
    }

    def __init__(
        self, shape: ModelShape, num_rows: int | None, exit_layer: int, num_layers: int
    ) -> None:
        if exit_layer >= shape.num_hidden_layers:
            raise ConfigError(
                f"exit_layer is {exit_layer}; the target has {shape.num_hidden_layers} layers, so "
                f"it must be 1 to {shape.num_hidden_layers - 1}"
            )
        more = {"num_rows": num_rows, "exit_layer": exit_layer}
        super().__init__(shape, (exit_layer - 1,), num_layers, **more)
        self.exit_layer = exit_layer

    def take_layers(self, source: HeadSource) -> None:
        self.take_from(source, range(-self.num_layers, 0))

    def inputs(self, embeddings: Tensor, taps: Mapping[int, Tensor]) -> Tensor:
        return taps[self.exit_layer - 1].to(self.output.dtype)


_MOST_PENDING = 256
"""A row with more unread tokens than this is not drafted for: its prompt is read first."""

_SUBLAYERS = re.compile(r"([am]?)(\d+)(?:-(\d+))?")


class SharedCachePredictor:
    """The target's first layers, on the target's own cache.

    The cache entries that it leaves behind are not committed. What else can be reused of a draft
    is handed out with it, and forgotten.

    Args:
        target: the target.
        shallow: its first layers.
    """

    def __init__(self, target: LayeredTarget, shallow: ShallowTarget) -> None:
        self._cache, self._max_context = target.cache, target.max_context
        self._shallow = shallow
        self._computed: dict[int, Computed] = {}

    def begin(self, row: DraftRow) -> None:
        pass

    def has_room(self, row: DraftRow) -> bool:
        num_pending = len(row.tokens) - self._cache.length(row.slot)
        return num_pending <= _MOST_PENDING and len(row.tokens) + row.budget <= self._max_context

    def next_logits(
        self, rows: Sequence[DraftRow], drafts: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        logits, computed = self._shallow.score_last(self._reads(rows, drafts))
        self._computed |= {row.request_id: c for row, c in zip(rows, computed, strict=True)}
        return logits

    def next_states(
        self, rows: Sequence[DraftRow], drafts: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """What the layers make of the last token of each row and its draft so far; [E]."""
        states, computed = self._shallow.read_last(self._reads(rows, drafts))
        self._computed |= {row.request_id: c for row, c in zip(rows, computed, strict=True)}
        return states

    def _reads(self, rows: Sequence[DraftRow], drafts: Sequence[Sequence[int]]) -> list[ScoreRow]:
        # Popped: after a failure nothing is left to go on from.
        return [
            ScoreRow(
                row.slot,
                row.tokens[self._cache.length(row.slot) :],
                TokenTree.chain(draft),
                computed=self._computed.pop(row.request_id, None),
            )
            for row, draft in zip(rows, drafts, strict=True)
        ]

    def take_computed(self, request_id: int) -> Computed | None:
        """What the last draft of a request has computed of it."""
        return self._computed.pop(request_id, None)

    def end(self, request_id: int) -> None:
        self._computed.pop(request_id, None)


class SharedCacheDrafter(ChainDrafter):
    """Drafts on the target's own cache; verification goes on from what drafting computed."""

    def __init__(
        self,
        predictor: SharedCachePredictor,
        min_confidence: float = 0.0,
        round_share: float | None = None,
    ) -> None:
        super().__init__(predictor, min_confidence, round_share)
        self._shared = predictor

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        proposals = super().propose(rows)
        computed = [self._shared.take_computed(row.request_id) for row in rows]
        pairs = zip(proposals, computed, strict=True)
        return [replace(draft, computed=done) if done else draft for draft, done in pairs]


class AdaptedPredictor(SharedCachePredictor):
    """The target's first layers, then an adapter.

    Args:
        module: the trained adapter.
        target: its target; it has the capabilities ``parts`` and ``cache_layers``.
    """

    def __init__(self, module: AdapterModule, target: LayeredTarget) -> None:
        super().__init__(target, target.shallow(module.exit_layer))
        weights = head_weights(module.layers, module.norm, module.output, module.shape)
        self._runner = offered(target.capabilities.cache_layers).head_runner(weights)
        self._rows = OutputRows(module.output_ids_R, target.vocab_size)
        self._tap = module.exit_layer - 1
        self._slots: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self.layers = self._runner.layers

    def begin(self, row: DraftRow) -> None:
        self._slots[row.request_id] = row.slot

    def observe(self, observations: Sequence[Observation]) -> None:
        reads, states = list[HeadRow](), list[Tensor]()
        for seen in observations:
            slot, num_read = self._slots[seen.request_id], seen.end - seen.start
            # Where a cached beginning has no entries of the adapter, they begin later.
            start = self.layers.next_start(slot, seen.start, num_read)
            if start < seen.end:
                reads.append(HeadRow(slot, start, seen.end - start))
                states.append(seen.hidden(self._tap)[start - seen.start :])
                self._ends[seen.request_id] = seen.end
        if reads:
            self._runner.run(reads, torch.cat(states))

    def has_room(self, row: DraftRow) -> bool:
        return self._ends.get(row.request_id) == len(row.tokens) - 1 and super().has_room(row)

    def next_logits(
        self, rows: Sequence[DraftRow], drafts: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        states = self.next_states(rows, drafts)
        reads = [
            HeadRow(row.slot, len(row.tokens) - 1, 1, TokenTree.chain(draft), len(draft))
            for row, draft in zip(rows, drafts, strict=True)
        ]
        _, logits_NR = self._runner.run(reads, torch.stack(states))
        return [self._rows.spread(logits_R) for logits_R in logits_NR]

    def end(self, request_id: int) -> None:
        super().end(request_id)
        self._slots.pop(request_id, None)
        self._ends.pop(request_id, None)


class AdaptedDrafter(SharedCacheDrafter):
    """Drafts chains with the target's first layers and an adapter.

    Args:
        module: the trained adapter.
        target: its target.
        min_confidence: see `foredraft.drafters.model.chain.ChainDraft`.
    """

    def __init__(
        self, module: AdapterModule, target: LayeredTarget, min_confidence: float = 0.0
    ) -> None:
        self._adapted = AdaptedPredictor(module, target)
        share = (module.exit_layer + module.num_layers) / target.num_layers
        super().__init__(self._adapted, min_confidence, share)
        self.taps, self.layers = module.taps, (self._adapted.layers,)
        self.traits = DrafterTraits(skips_gaps=True, round_share=share)

    def observe(self, observations: Sequence[Observation]) -> None:
        self._adapted.observe(observations)


def parse_skip(skip: object, num_layers: int) -> tuple[frozenset[int], frozenset[int]]:
    """Layers without attention and layers without MLP, from text such as ``"a4-6,m5,9"``.

    Args:
        skip: parts separated by commas: ``a`` for attention, ``m`` for MLP, neither for the whole
            layer, and a layer number from 0 or a range with both ends.

    Raises:
        ConfigError: it cannot be read, names a layer that does not exist, or leaves no layer.
    """
    left_out: dict[str, set[int]] = {"a": set(), "m": set()}
    for part in str(skip).replace(" ", "").split(","):
        found = _SUBLAYERS.fullmatch(part)
        if not found:
            raise ConfigError(f"skip is {skip!r}; write it like 'a4-6,m5,9': {part!r} is no part")
        first, last = int(found[2]), int(found[3] or found[2])
        if not first <= last < num_layers:
            raise ConfigError(f"skip part {part!r}: the target has layers 0 to {num_layers - 1}")
        for kind in found[1] or "am":
            left_out[kind] |= set(range(first, last + 1))
    if len(left_out["a"] & left_out["m"]) == num_layers:
        raise ConfigError(f"skip {skip!r} leaves no layer to draft with")
    return frozenset(left_out["a"]), frozenset(left_out["m"])


def _check_exit_layer(exit_layer: object, num_layers: int) -> int:
    if type(exit_layer) is not int or not 1 <= exit_layer < num_layers:
        raise ConfigError(
            f"exit_layer is {exit_layer!r}; the target has {num_layers} layers, so it must be a "
            f"whole number from 1 to {num_layers - 1}"
        )
    return exit_layer


def _drafter(target: LayeredTarget, exit_layer: Any, skip: Any, min_confidence: float) -> Drafter:
    if skip is not None:
        if exit_layer is not None:
            raise ConfigError("exit_layer and skip are two ways to draft; give one of them")
        no_attention, no_mlp = parse_skip(skip, target.num_layers)
        share = 1 - len(no_attention & no_mlp) / target.num_layers
        return _of_view(target.sublayer_view(no_attention, no_mlp), share, min_confidence)
    if exit_layer is None:
        exit_layer = max(1, target.num_layers // 4)
    exit_layer = _check_exit_layer(exit_layer, target.num_layers)
    shared = SharedCachePredictor(target, target.shallow(exit_layer))
    return SharedCacheDrafter(shared, min_confidence, exit_layer / target.num_layers)


def _of_view(view: Target, share: float, min_confidence: float) -> DraftModelDrafter:
    """A draft model whose forward takes this share of a plain step."""
    fit = Fit(0.5, 0.5, (share,) * (MOST_GUESSES + 1))
    return DraftModelDrafter(view, fit, min_confidence=min_confidence)


def _build_adapted(
    context: DrafterContext, target: LayeredTarget, min_confidence: float
) -> AdaptedDrafter:
    for name in ("exit_layer", "skip"):
        if name in context.options:
            raise ConfigError(f"adapter and {name} are two ways to draft; give one of them")
    for name in ("parts", "cache_layers"):
        if not getattr(target.capabilities, name):
            raise CapabilityError(
                f"an adapter needs a target with {name}, which {type(target).__name__} does not "
                "offer"
            )
    return AdaptedDrafter(trained_head(context, AdapterModule, "adapter"), target, min_confidence)


def _build(context: DrafterContext) -> Drafter:
    options = dict(context.options)
    min_confidence = options.pop("min_confidence", 0.0)
    if isinstance(min_confidence, bool) or not isinstance(min_confidence, int | float):
        raise ConfigError(f"min_confidence is {min_confidence!r}; it must be a number")
    if not 0.0 <= min_confidence <= 1.0:
        raise ConfigError(f"min_confidence is {min_confidence}; it must be between 0 and 1")
    target = offered(context.target.capabilities.layer_views)
    if "adapter" in options:
        return _build_adapted(context, target, min_confidence)
    return _drafter(target, options.get("exit_layer"), options.get("skip"), min_confidence)


DRAFTER = DrafterSpec(
    build=_build,
    summary="the target's own first layers, or some of its sublayers, draft a chain",
    options={
        "exit_layer": "how many of the first layers draft (a quarter of them)",
        "skip": "sublayers to leave out instead, such as a4-6,m5,9",
        "adapter": "directory of a trained adapter, which knows its exit layer",
        "min_confidence": "end the draft where the likeliest token has less than this (0)",
    },
    num_draft_tokens=4,
    needs=("layer_views",),
    head=AdapterModule,
)


__all__ = ["DRAFTER", "SharedCacheDrafter", "parse_skip"]
