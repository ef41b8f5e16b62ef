"""A native checkpoint as a `Target`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from foredraft.cache.kv import KVCache
from foredraft.core.errors import ConfigError
from foredraft.models.base import Capabilities, RowScores, ScoreRow
from foredraft.models.native.config import DecoderConfig, read_config
from foredraft.models.native.eager import EagerDecoder
from foredraft.models.native.plan import ForwardPlan, plan_forward
from foredraft.models.native.shallow import ShallowStates, ShallowView
from foredraft.models.native.weights import DecoderWeights, fit, load_weights
from foredraft.models.safety import Checkpoint

_PREFILL_CHUNK = 512
"""Longer prompts are read in pieces: the memory of a forward stays bounded."""


class Decoder(Protocol):
    """Something that runs a forward plan: the eager reference or a faster equal."""

    @property
    def name(self) -> str: ...

    @property
    def partial(self) -> bool:
        """Whether it heeds `ForwardPlan.layers`; False costs early exit its shared cache."""
        ...

    def forward(
        self, plan: ForwardPlan, cache: KVCache, taps: Sequence[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]: ...


DecoderFactory = Callable[[DecoderConfig, DecoderWeights], Decoder]


class NativeTarget:
    """See `foredraft.models.base.Target`.

    Args:
        config: the model's shape.
        weights: its weights.
        new_decoder: makes what runs them; the eager reference by default.
        max_context: most tokens a row may hold; the model's own limit when None.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        new_decoder: DecoderFactory = EagerDecoder,
        max_context: int | None = None,
    ) -> None:
        self.config, self.weights = config, weights
        self.decoder = new_decoder(config, weights)
        self._new_decoder = new_decoder
        self.vocab_size = config.vocab_size
        self.max_context = min(max_context or config.max_context, config.max_context)
        self.capabilities = Capabilities(
            tree_attention=True, taps=True, layer_views=True, shallow=self.decoder.partial
        )
        self.cache = KVCache(config.kv_shape, weights.dtype, weights.device, self.max_context)
        self._shallow = ShallowStates(self.decoder, self.cache, config.num_hidden_layers)

    @classmethod
    def load(
        cls,
        source: Path | Checkpoint,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        new_decoder: DecoderFactory = EagerDecoder,
        max_context: int | None = None,
        int8: bool = False,
    ) -> NativeTarget:
        """Load a checkpoint; with ``int8``, weights are quantised (see `int8`).

        Args:
            source: the checkpoint; a directory is checked first.

        Raises:
            ModelLoadError: the checkpoint is incomplete, damaged or of another kind.
        """
        checkpoint = Checkpoint.of(source)
        config, _ = fit(checkpoint, read_config(checkpoint.directory))
        weights = load_weights(checkpoint, config, dtype, device, int8)
        return cls(config, weights, new_decoder, max_context)

    # Not inference_mode: its tensors could not be compacted or used in place outside of it.
    @torch.no_grad()
    def score(self, rows: Sequence[ScoreRow], taps: Sequence[int] = ()) -> list[RowScores]:
        for row in rows:
            self.cache.reserve(row.slot, len(row.pending) + len(row.tree))
        chunks = [self._prefill(row, taps) for row in rows]
        plan = plan_forward([done.rest for done in chunks], [done.start for done in chunks])
        plan = self._shallow.resume(plan, taps)  # without what early exit has already computed
        logits_HV, tapped = self.decoder.forward(plan, self.cache, taps)
        return [
            RowScores(
                logits_HV[span.heads.start : span.heads.stop],
                done.joined(
                    {i: x[span.tokens.start : span.tokens.stop] for i, x in tapped.items()}
                ),
            )
            for span, done in zip(plan.rows, chunks, strict=True)
        ]

    def _prefill(self, row: ScoreRow, taps: Sequence[int]) -> _Prefilled:
        """Read all but the last chunk of a long row; what is left fits one forward."""
        start, done = self.cache.length(row.slot), 0
        tapped: dict[int, list[Tensor]] = {i: [] for i in taps}
        while len(row.pending) - done > _PREFILL_CHUNK:
            chunk = ScoreRow(row.slot, row.pending[done : done + _PREFILL_CHUNK])
            plan = plan_forward([chunk], [start + done], want_logits=False)
            _, states = self.decoder.forward(plan, self.cache, taps)
            for i, x in states.items():
                tapped[i].append(x)
            done += _PREFILL_CHUNK
        rest = ScoreRow(row.slot, row.pending[done:], row.tree)
        return _Prefilled(rest, start + done, tapped)

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    def layer_view(self, layers: Sequence[int]) -> NativeTarget:
        """A target of some of the layers, sharing the weights, with a cache of its own.

        Raises:
            ConfigError: a layer does not exist.
        """
        self._check_layers(layers)
        return self._view(self.weights.select_layers(layers))

    def sublayer_view(self, no_attention: Collection[int], no_mlp: Collection[int]) -> NativeTarget:
        """A target without the attention or the MLP of some layers, likewise.

        Raises:
            ConfigError: a layer does not exist.
        """
        self._check_layers([*no_attention, *no_mlp])
        return self._view(self.weights.leave_out(no_attention, no_mlp))

    def shallow(self, exit_layer: int) -> ShallowView:
        """The first ``exit_layer`` layers on this target's own cache.

        Raises:
            ConfigError: there are not that many layers, or the decoder cannot run some only.
        """
        self._check_layers([exit_layer - 1])
        if not self.capabilities.shallow:
            raise ConfigError(f"the {self.decoder.name} decoder cannot run only some layers")
        return ShallowView(self._shallow, self.cache, exit_layer)

    def _check_layers(self, layers: Sequence[int]) -> None:
        for layer in layers:
            if not 0 <= layer < self.num_layers:
                raise ConfigError(f"layer {layer} does not exist; the model has {self.num_layers}")

    def _view(self, weights: DecoderWeights) -> NativeTarget:
        config = replace(self.config, num_hidden_layers=len(weights.layers))
        return NativeTarget(config, weights, self._new_decoder, self.max_context)


@dataclass(frozen=True)
class _Prefilled:
    """A long row after its early chunks: what is left, where it starts, and what they tapped."""

    rest: ScoreRow
    start: int
    taps: dict[int, list[Tensor]]

    def joined(self, last: dict[int, Tensor]) -> dict[int, Tensor]:
        """Tapped states of all chunks; ``last`` are those of the final forward."""
        return {i: torch.cat([*self.taps[i], x]) if self.taps[i] else x for i, x in last.items()}
