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

COPY_BITS = (4, 8)
"""The fewest first."""
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


def copied(
    config: DecoderConfig,
    weights: DecoderWeights,
    bits: int,
    kept: KeptFiles,
    checkpoint: Checkpoint | None,
) -> DecoderWeights:
    """A model quantised to few bits.

    Weights that the checkpoint holds in that many bits stay as they are. Others are rounded, or
    come from an earlier `tuned`.

    Args:
        kept: where copies are kept between processes.
        checkpoint: of the model; None: its weights are made up.

    Raises:
        ModelLoadError: there is no memory for it.
    """
    _check_memory(config, weights, bits)
    name, recipe = f"copy-{bits}", _recipe(config, weights)
    for each in (f"{name}-tuned", name):
        if (tensors := kept.tensors(each, recipe)) is not None:
            return weights.with_tensors(tensors)
    if checkpoint is None:
        found = rounded(weights, bits)
    else:
        table_VW = weights.inputs_VW
        found = load_weights(checkpoint, config, weights.dtype, bits=bits, inputs_VW=table_VW)
    kept.keep(name, recipe, packed_tensors(found))
    return found


def tuned(
    config: DecoderConfig,
    weights: DecoderWeights,
    texts: Sequence[Sequence[int]],
    advance: Callable[[str], None],
    kept: KeptFiles,
) -> DecoderWeights:
    """A better copy in 4 bits, which is kept; see `foredraft.models.native.gptq`."""
    from foredraft.models.native.gptq import compensated

    what = "a mixture of experts" if config.experts else "a model with latent attention"
    if config.experts or config.latent:
        raise ConfigError(
            f"a copy of {what} is not tuned yet; self_draft takes one that is rounded to nearest"
        )
    _check_memory(config, weights, 4)
    found = compensated(config, weights, texts, advance)
    kept.keep("copy-4-tuned", _recipe(config, weights), packed_tensors(found))
    return found


def _recipe(config: DecoderConfig, weights: DecoderWeights) -> str:
    return recipe_of(sys.modules[load_weights.__module__], quant, config, weights.dtype)


def _check_memory(config: DecoderConfig, weights: DecoderWeights, bits: int) -> None:
    _, num_bytes = weight_bytes(config, weights.dtype.itemsize, bits)
    available = available_memory()
    if num_bytes > available:
        raise ModelLoadError(
            f"a copy of the target in {bits} bits takes {num_bytes / 1e9:.1f} GB, and "
            f"{available / 1e9:.1f} GB of memory are available; use another drafter, or free "
            "memory"
        )


def packed_tensors(weights: DecoderWeights) -> dict[str, Tensor]:
    """The tensors that a copy has of its own; it shares embeddings, norms and biases."""
    return {
        name: tensor
        for name, tensor in weights.tensors().items()
        if tensor.dtype == torch.uint8 and not name.startswith(("embedding", "inputs"))
    }
