"""A native checkpoint as a `Target`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor

from foredraft.cache.blocks import in_blocks
from foredraft.cache.memory import CacheMemory
from foredraft.core import draws
from foredraft.core.choices import DrawKey
from foredraft.core.errors import CapabilityError, ConfigError
from foredraft.models.base import (
    Capabilities,
    HeadWeights,
    Join,
    OwnLayers,
    ScoreRow,
    Scores,
    check_taps,
)
from foredraft.models.files.kept import NOTHING_KEPT, KeptFiles, recipe_of
from foredraft.models.files.progress import Progress
from foredraft.models.files.safety import Checkpoint
from foredraft.models.native.config import DecoderConfig, read_config
from foredraft.models.native.copy import (
    COPY_BITS,
    NativeLowBitCopy,
    copied,
    screen_of,
    tuned,
)
from foredraft.models.native.cuda import (
    TILE,
    PagedDecoder,
    RecordedDraws,
    enter_device,
    has_triton,
    usual_contexts,
)
from foredraft.models.native.draft_layers import (
    NativeHeadRunner,
    NativeParts,
    head_config,
    native_join,
)
from foredraft.models.native.model import DecoderFactory, EagerDecoder, scored
from foredraft.models.native.mtp import Layout, layout_of, own_config, read_own_layers
from foredraft.models.native.plan import ForwardPlan, announce, plan_forward
from foredraft.models.native.quant import tensor_of
from foredraft.models.native.weights import Bits, DecoderWeights, fit, load_weights


class NativeTarget:
    """See `foredraft.models.base.Target`.

    Args:
        config: the model's shape.
        weights: its weights.
        new_decoder: makes what runs them; the eager reference by default.
        max_context: most tokens a row may hold; the model's own limit when None.
        cache_memory: what the cache may take, in bytes, or shared with other caches (see
            `KVCache`). Views of some layers share it.
        kept: what is kept of the model between processes.
        checkpoint: what the weights were read from; None: they are made up, or a part of others.
        cache_dtype: of keys and values, torch.int8 for the fused decoder; None: as the weights.
        bits: form in which they were read.

    Attributes:
        unasked_draw: key of draws from rows that have none; None: nothing is drawn from them.
    """

    unasked_draw: DrawKey | None = None
    most_drafted = TILE - 1

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        new_decoder: DecoderFactory = EagerDecoder,
        max_context: int | None = None,
        cache_memory: CacheMemory | int | None = None,
        kept: KeptFiles = NOTHING_KEPT,
        checkpoint: Checkpoint | None = None,
        cache_dtype: torch.dtype | None = None,
        bits: Bits = None,
    ) -> None:
        enter_device(weights.device)
        self._checkpoint, self._bits = checkpoint, bits
        self.config, self.weights = config, weights
        self.kept = kept
        self.decoder = new_decoder(config, weights)
        self.new_decoder = new_decoder
        self.vocab_size = config.vocab_size
        self.max_context = min(max_context or config.max_context, config.max_context)
        self.cache = config.new_cache(
            cache_dtype or weights.dtype, weights.device, self.max_context, cache_memory
        )
        draws = has_triton(weights.device)
        self._draws = RecordedDraws(weights.device) if draws else None
        self._head_runners = WeakSet[NativeHeadRunner]()
        self._copies = WeakValueDictionary[int, NativeLowBitCopy]()

    @classmethod
    def load(
        cls,
        source: Path | Checkpoint,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        new_decoder: DecoderFactory = EagerDecoder,
        max_context: int | None = None,
        bits: Bits = None,
        cache_memory: CacheMemory | int | None = None,
        kept: KeptFiles | None = None,
        progress: Progress | None = None,
        cache_dtype: torch.dtype | None = None,
        activation_bits: int = 16,
        num_ids: Callable[[int], int] | None = None,
    ) -> NativeTarget:
        """Load a checkpoint; with ``bits``, weights are quantised (see `load_weights`).

        Args:
            source: the checkpoint; a directory is checked first.
            kept: what is kept of it between processes; None: what `KeptFiles.of` finds, on CPU.
            progress: shows the share of the weights that is laid out.
            cache_dtype: see `NativeTarget`.
            activation_bits: see `DecoderWeights`.
            num_ids: how many of so many output rows are tokens; None: all (see `DecoderConfig`).

        Raises:
            ModelLoadError: the checkpoint is incomplete, damaged or of another kind.
        """
        checkpoint = Checkpoint.of(source)
        config, _ = fit(checkpoint, read_config(checkpoint.directory, max_context))
        if kept is None:
            on_cpu = torch.device(device).type == "cpu"
            kept = KeptFiles.of(checkpoint) if on_cpu else NOTHING_KEPT
        weights = load_weights(checkpoint, config, dtype, device, bits, kept, progress)
        weights = replace(weights, activation_bits=activation_bits)
        if num_ids is not None:
            config = replace(config, num_ids=num_ids(config.vocab_size))
        return cls(
            *(config, weights, new_decoder, max_context, cache_memory, kept, checkpoint),
            cache_dtype=cache_dtype,
            bits=bits,
        )

    @property
    def capabilities(self) -> Capabilities:
        # Made anew each time: an object that holds the target would outlive it.
        return Capabilities(
            tree_attention=True,
            taps=range(self.config.num_hidden_layers),
            parts=self.parts,
            # The first ones may all be recurrent, and a cache has entries of some.
            first_layers=self if self.config.recurrent is None else None,
            apart=self,
            cache_layers=self,
            low_bit=self if self.low_bits else None,
            recorded=self if isinstance(self.decoder, PagedDecoder) else None,
        )

    def score(self, rows: Sequence[ScoreRow], taps: Sequence[int] = ()) -> Scores:
        check_taps(taps, range(self.num_layers))
        enter_device(self.weights.device)
        plan = plan_forward(rows, [self.cache.length(row.slot) for row in rows])
        announce(plan, self.cache)
        scores = self._scored(rows, plan, taps)
        return scores if self._draws is None else replace(scores, draw=self._draws.draw)

    def _scored(self, rows: Sequence[ScoreRow], plan: ForwardPlan, taps: Sequence[int]) -> Scores:
        # Of a tree few nodes will be looked at, and nearly all of a chain.
        wanted = [
            (logits_row, key.ahead(depth))
            for row, asked in zip(rows, plan.row_wanted, strict=True)
            if (key := row.draw or self.unasked_draw) is not None
            for depth, logits_row in enumerate(asked if row.tree.is_chain else asked[:1])
        ]
        return scored(self.decoder, plan, self.cache, wanted, taps)

    def record(self, taps: Sequence[int]) -> None:
        assert isinstance(self.decoder, PagedDecoder)
        contexts = usual_contexts(self.cache.store.block_size, self.max_context)
        slot = self.cache.allocate()
        try:
            self.cache.reserve(slot, 1)  # recordings hold the address of the memory this takes
            self.decoder.record(self.cache, taps, contexts)
            for runner in self._head_runners:
                if runner.chain is not None:
                    runner.chain.record(contexts)
            if self._draws is not None:
                self._draws.record(self.vocab_size)
        finally:
            self.cache.free(slot)
        draws.library()  # compiled where it is new: nodes of a tree are drawn on the host

    @property
    def parts(self) -> NativeParts:
        return NativeParts(self.config, self.weights, self.decoder.logits, self.kept)

    def head_runner(self, weights: HeadWeights) -> NativeHeadRunner:
        layers = self.cache.add_layers(head_config(weights).kv_shape, self.weights.dtype)
        fused = self.decoder.is_fused
        runner = NativeHeadRunner.of_head(weights, layers, self.weights.dtype, fused)
        # Another set, as steps may be recorded meanwhile.
        self._head_runners = WeakSet((*self._head_runners, runner))
        return runner

    @property
    def _own_layout(self) -> Layout | None:
        tensors = self._checkpoint.tensors if self._checkpoint else {}
        return layout_of(tensors, self.num_layers)

    @property
    def has_own_layers(self) -> bool:
        return self._own_layout is not None

    def own_layers(self) -> OwnLayers:
        layout, checkpoint = self._own_layout, self._checkpoint
        if layout is None or checkpoint is None:
            raise CapabilityError("the model brings no layers that predict further tokens")
        config = own_config(self.config)
        layers = self.cache.add_layers(config.kv_shape, self.weights.dtype)
        where = self.weights, self._bits, layers, self.decoder.is_fused
        return read_own_layers(layout, checkpoint, config, *where)

    def join(self, weight_EK: Tensor, table_VE: Tensor | None, eps: float) -> Join:
        return native_join(weight_EK, table_VE, eps, self.weights.dtype, self.decoder.is_fused)

    @property
    def low_bits(self) -> tuple[int, ...]:
        # A drafter on a copy needs draws inside the forward, which only compiled code makes.
        return self._fewer_bits if self.decoder.is_fused else ()

    @property
    def _fewer_bits(self) -> tuple[int, ...]:
        return tuple(bits for bits in COPY_BITS if bits < self.weights.bits)

    def low_bit_copy(self, bits: int) -> NativeLowBitCopy:
        if bits not in self._fewer_bits:
            raise ConfigError(
                f"bits is {bits!r}; this target has weights of {self.weights.bits} bits, so "
                f"a copy that drafts for it may have {' or '.join(map(str, self._fewer_bits))}"
            )
        if (copy := self._copies.get(bits)) is not None:
            return copy
        weights = copied(self.config, self.weights, bits, self.kept, self._checkpoint)
        return self._copy_of(bits, weights)

    def _copy_of(self, bits: int, weights: DecoderWeights) -> NativeLowBitCopy:
        own = self.weights
        weights = replace(
            weights,
            embedding_VE=own.embedding_VE,
            states_dtype=own.dtype,
            activation_bits=own.activation_bits,
            screen_VE=screen_of(weights.head_VE, self.kept, "copy-screen"),
        )
        copy = NativeLowBitCopy(self.config, weights, self.new_decoder, self.cache)
        self._copies[bits] = copy
        return copy

    @property
    def identity(self) -> str:
        weights = self.weights
        last = tensor_of(weights.last_matrix)
        kind = weights.screen_VE is not None, weights.activation_bits
        return recipe_of(self.config, weights.bits, last, *kind)

    def apart(self, num_tokens: int) -> NativeTarget:
        dtype = self.cache.store.dtype
        memory = in_blocks(num_tokens) * self.config.kv_shape.bytes_per_token(dtype)
        return type(self)(
            *(self.config, self.weights, self.new_decoder, num_tokens, memory), cache_dtype=dtype
        )

    def tune_copy(
        self, texts: Sequence[Sequence[int]], advance: Callable[[str], None]
    ) -> NativeLowBitCopy:
        weights = tuned(self.config, self.weights, texts, advance, self.kept)
        return self._copy_of(4, weights)

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    def first_layers(self, count: int) -> NativeTarget:
        weights = replace(self.weights, layers=self.weights.layers[:count])
        config = replace(self.config, num_hidden_layers=count, kinds=self.config.kinds[:count])
        return type(self)(
            *(config, weights, self.new_decoder, self.max_context, self.cache.memory),
            cache_dtype=self.cache.store.dtype,
        )
