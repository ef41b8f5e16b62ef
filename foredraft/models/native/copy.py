"""A copy of the target's own layers in few bits, which drafts on the target's own cache.

The copy reads the target's cache entries of the committed text as they are. It writes its own
behind them, where the target's forward will write the same tokens anew: no entry of the copy is
ever committed. So a copy has no cache of its own and reads no prompt (QSpec, arXiv 2410.11305).

Of a long text it reads the beginning and the end alone, which hold most of what a token attends to
(StreamingLLM, arXiv 2309.17453; for drafts TriForce, arXiv 2404.11912): with all of it a draft
behind a long text would take as long as a step of the target.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from foredraft.cache.kv import KVCache
from foredraft.cache.memory import available_memory
from foredraft.cache.store import Entries
from foredraft.core.errors import ConfigError, ModelLoadError
from foredraft.models.base import ScoreRow, Scores, Target
from foredraft.models.files.kept import KeptFiles, recipe_of
from foredraft.models.files.safety import Checkpoint
from foredraft.models.native import quant
from foredraft.models.native.config import DecoderConfig
from foredraft.models.native.model import DecoderFactory, draws_behind_all, scored
from foredraft.models.native.plan import announce, plan_forward
from foredraft.models.native.quant import CENTRED4, Matrix, PackedMatrix, tensor_of
from foredraft.models.native.weights import (
    DecoderWeights,
    load_weights,
    rounded,
    weight_bytes,
)

_BITS = (4, 8)
"""Of a copy."""
_TUNED_BITS = 4
_SCREEN_BITS = 4
_LONG, _NEAR = 3072, 1024
"""From how many entries on a text is long, and those at its end that a copy reads at least, beside
the first block."""


class _Shortened:
    """A cache (`foredraft.cache.store.Entries`) whose long slots lack the blocks in between.

    Args:
        cache: the target's.
        starts: of each slot that is read the entries before those that a forward writes.
    """

    def __init__(self, cache: KVCache, starts: Mapping[int, int]) -> None:
        self.store, size = cache.store, cache.block_size
        self.states = getattr(cache, "states", None)
        self.num_left_out: dict[int, int] = {}
        self._tables: dict[int, array[int]] = {}
        for slot, start in starts.items():
            table, num_blocks = cache.table(slot), 0
            if start >= _LONG:
                num_blocks = (start - _NEAR) // size - 1
                table = table[:1] + table[1 + num_blocks :]
            self.num_left_out[slot], self._tables[slot] = num_blocks * size, table

    def table(self, slot: int) -> array[int]:
        return self._tables[slot]


class NativeLowBitCopy:
    """See `foredraft.models.base.LowBitCopy`.

    Args:
        config: the target's.
        weights: the copy's; embeddings, norms and biases are the target's.
        new_decoder: makes what runs them.
        cache: the target's.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        new_decoder: DecoderFactory,
        cache: KVCache,
    ) -> None:
        self._config, self.weights = config, weights
        self._new_decoder, self._cache = new_decoder, cache
        self._decoder = new_decoder(config, weights)
        self.bits = weights.bits
        own = [*packed_tensors(weights).values()]
        if weights.screen_VE is not None:
            own.append(weights.screen_VE.packed_GCN)
        self.num_bytes = sum(tensor.nbytes for tensor in own)
        last = tensor_of(weights.last_matrix)
        kind = weights.screen_VE is not None, weights.activation_bits
        self.identity = recipe_of(self.bits, last, *kind)

    def on(self, target: Target) -> NativeLowBitCopy:
        assert isinstance(target.cache, KVCache)
        return NativeLowBitCopy(self._config, self.weights, self._new_decoder, target.cache)

    def score(self, rows: Sequence[ScoreRow], starts: Sequence[int]) -> Scores:
        plan = plan_forward(rows, starts)
        announce(plan, self._cache)
        cache: Entries = self._cache
        if max(starts) >= _LONG:
            slots = [row.slot for row in rows]
            cache = short = _Shortened(self._cache, dict(zip(slots, starts, strict=True)))
            there = [
                start - short.num_left_out[slot] for slot, start in zip(slots, starts, strict=True)
            ]
            positions, plan = plan.positions, plan_forward(rows, there)
            plan.positions = positions
        return scored(self._decoder, plan, cache, draws_behind_all(rows, plan))


@dataclass
class Copies:
    """Makes copies of a target.

    What the checkpoint holds in as many bits is taken as it is; other weights are rounded, or
    taken as an earlier `tune` has made them.

    Args:
        config, weights, new_decoder, cache: the target's.
        kept: where copies are kept between processes.
        checkpoint: the target's; None: its weights are made up.
    """

    config: DecoderConfig
    weights: DecoderWeights
    new_decoder: DecoderFactory
    cache: KVCache
    kept: KeptFiles
    checkpoint: Checkpoint | None

    def __post_init__(self) -> None:
        self._made: WeakValueDictionary[int, NativeLowBitCopy] = WeakValueDictionary()

    @property
    def bits(self) -> tuple[int, ...]:
        """What copies may have, the fewest first."""
        return tuple(bits for bits in _BITS if bits < self.weights.bits)

    def copy(self, bits: int) -> NativeLowBitCopy:
        """A copy in so many bits, made once for all who ask while somebody holds it.

        Raises:
            ConfigError: there is no such copy.
            ModelLoadError: there is no memory for it.
        """
        if bits not in self.bits:
            raise ConfigError(
                f"bits is {bits!r}; this target has weights of {self.weights.bits} bits, so "
                f"a copy that drafts for it may have {' or '.join(map(str, self.bits))}"
            )
        copy = self._made.get(bits)
        if copy is None:
            copy = self._made[bits] = self._new_copy(bits)
        return copy

    def tune(
        self, texts: Sequence[Sequence[int]], advance: Callable[[str], None]
    ) -> NativeLowBitCopy:
        """Make a better copy in 4 bits, and keep it; see `foredraft.models.native.gptq`."""
        from foredraft.models.native.gptq import compensated

        if self.config.experts:
            raise ConfigError(
                "a copy of a mixture of experts is not tuned yet: a text says little of the "
                "experts that it does not choose; self_draft takes one that is rounded to nearest"
            )
        if self.config.latent:
            raise ConfigError(
                "a copy of a model with latent attention is not tuned yet; self_draft takes one "
                "that is rounded to nearest"
            )
        self._check_memory(_TUNED_BITS)
        weights = compensated(self.config, self.weights, texts, advance)
        self.kept.keep(_name(_TUNED_BITS, True), self._recipe(), packed_tensors(weights))
        copy = self._made[_TUNED_BITS] = self._of(weights)
        return copy

    def _new_copy(self, bits: int) -> NativeLowBitCopy:
        self._check_memory(bits)
        for is_tuned in (True, False):
            tensors = self.kept.tensors(_name(bits, is_tuned), self._recipe())
            if tensors is not None:
                return self._of(self.weights.with_tensors(tensors))
        weights = (
            rounded(self.weights, bits)
            if self.checkpoint is None
            else load_weights(
                *(self.checkpoint, self.config, self.weights.dtype),
                bits=bits,
                inputs_VW=self.weights.inputs_VW,
            )
        )
        self.kept.keep(_name(bits, False), self._recipe(), packed_tensors(weights))
        return self._of(weights)

    def _of(self, weights: DecoderWeights) -> NativeLowBitCopy:
        weights = replace(
            weights,
            embedding_VE=self.weights.embedding_VE,
            states_dtype=self.weights.dtype,
            activation_bits=self.weights.activation_bits,
            screen_VE=screen_of(weights.head_VE, self.kept, "copy-screen"),
        )
        return NativeLowBitCopy(self.config, weights, self.new_decoder, self.cache)

    def _recipe(self) -> str:
        modules = sys.modules[load_weights.__module__], quant
        return recipe_of(*modules, self.config, self.weights.dtype)

    def _check_memory(self, bits: int) -> None:
        _, num_bytes = weight_bytes(self.config, self.weights.dtype.itemsize, bits)
        available = available_memory()
        if num_bytes > available:
            raise ModelLoadError(
                f"a copy of the target in {bits} bits takes {num_bytes / 1e9:.1f} GB, and "
                f"{available / 1e9:.1f} GB of memory are available; use another drafter, or free "
                "memory"
            )


def screen_of(head_VE: Matrix, kept: KeptFiles, name: str) -> PackedMatrix | None:
    """A head in fewer bits, for drafts: one of 8 bits takes a quarter of a small model's forward.

    Args:
        kept: where it is kept between processes, under this name.
    """
    if not isinstance(head_VE, PackedMatrix) or head_VE.bits <= _SCREEN_BITS:
        return None
    rows, inputs = head_VE.shape
    recipe = recipe_of(quant, head_VE.packed_GCN)
    tensors = kept.tensors(name, recipe)
    if tensors is None:
        screen_VE = CENTRED4.of_weight(head_VE.dequantised(torch.float32))
        tensors = {"screen": screen_VE.packed_GCN}
        kept.keep(name, recipe, tensors)
    return PackedMatrix(CENTRED4, tensors["screen"], (rows,), inputs)


def _name(bits: int, is_tuned: bool) -> str:
    return f"copy-{bits}-tuned" if is_tuned else f"copy-{bits}"


def packed_tensors(weights: DecoderWeights) -> dict[str, Tensor]:
    """The tensors that a copy has of its own; it shares embeddings, norms and biases."""
    return {
        name: tensor
        for name, tensor in weights.tensors().items()
        if tensor.dtype == torch.uint8 and not name.startswith(("embedding", "inputs"))
    }
