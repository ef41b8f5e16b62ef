"""What was asked for, and what it resolved to on this machine.

Two types on purpose: the asked-for one is what users write, the resolved one is what runs, and it
can be printed before anything heavy is loaded (`foredraft doctor`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.cache.memory import checked_memory
from foredraft.core.checks import checked_flag, checked_text, shown, whole_number
from foredraft.core.errors import CapabilityError, ConfigError, unknown
from foredraft.kernels.threads import available_cpus

if TYPE_CHECKING:
    from foredraft.models.files.safety import Checkpoint
    from foredraft.models.native.config import DecoderConfig

DTYPES = ("auto", "bfloat16", "float32")
WEIGHTS = ("auto", "bf16", "int8", "int4")
_BITS = {"int8": 8, "int4": 4}
_TILES = 16
DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "native", "hf")
DEFAULT_MODEL = "smollm2-135m-instruct"
_LOWEST = {
    "threads": 1,
    "max_context": 2,
    "max_batch_size": 1,
    "max_step_tokens": 1,
    "num_draft_tokens": 0,
}
"""A context holds a token of the prompt and one of the reply, at least."""
_MAX_NAME = 255
"""Longest name of a file, in characters."""


@dataclass(frozen=True)
class LoadOptions:
    """How to load a target and a drafter.

    Attributes:
        model: a built-in name, a local directory, or a hub id ("org/name").
        drafter: a registered drafter, or "auto": the best that is there.
        draft_model: name or directory of the draft model, for drafters that use one.
        num_draft_tokens: most nodes to draft a step; None takes the drafter's own default.
        drafter_options: the drafter's own options.
        dtype: of activations and cache, and of weights unless ``weights`` says otherwise. "auto"
            takes bfloat16 where it is fast and float32 elsewhere.
        weights: "int8" keeps linear layers and head in half the memory of bfloat16, which makes
            steps faster and the model a little different (`foredraft bench quality` says by how
            much); "int4" keeps the linear layers in a third. A model that comes in 4 bits, as the
            built-in one does, is then used as it comes; others lose more than with int8. Both on
            CPU with the fused kernel only. "bf16" means dtype bfloat16.
        device: "auto" takes CUDA when there is one.
        backend: "auto" takes the native decoder for families it knows, transformers otherwise.
        threads: CPU threads; None leaves torch's choice.
        max_context: most tokens of prompt and reply together; None takes the model's limit.
        max_batch_size: most requests in one step.
        max_step_tokens: most tokens of prompts read in one step, while others decode in it: fewer
            keep the pace of their replies, more read prompts sooner. None takes the engine's 512.
        cache_memory: bytes that the target's cache may take, or a size such as "2GB": keys and
            values of running requests, and of texts that may come again. None: a quarter of the
            machine's memory (of a GPU's, of what is free). None of it is taken before it is needed.
        prefix_caching: keep what was read, as far as there is room: a request that begins as an
            earlier one of the same tenant reads only what is new.
        revision: of a hub id.
        exact: insist that texts are the same bit for bit whatever is scored together. The fused
            kernel always keeps that; elsewhere it costs speed, and load fails where it cannot be
            kept. Without it, a near-tie between two tokens may fall the other way.
        calibrate: time the target's forward at load (some tenths of a second) for drafters that
            weigh how many guesses pay on this machine.
    """

    model: str = DEFAULT_MODEL
    drafter: str = "auto"
    draft_model: str | None = None
    num_draft_tokens: int | None = None
    drafter_options: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "auto"
    weights: str = "auto"
    device: str = "auto"
    backend: str = "auto"
    threads: int | None = None
    max_context: int | None = None
    max_batch_size: int = 8
    max_step_tokens: int | None = None
    cache_memory: int | str | None = None
    prefix_caching: bool = True
    revision: str | None = None
    exact: bool = False
    calibrate: bool = True

    def __post_init__(self) -> None:
        for name, known in (("dtype", DTYPES), ("weights", WEIGHTS), ("backend", BACKENDS)):
            if getattr(self, name) not in known:
                raise unknown(name, str(getattr(self, name)), known)
        if self.weights == "bf16" and self.dtype == "float32":
            raise ConfigError("weights 'bf16' and dtype 'float32' exclude each other; give one")
        object.__setattr__(self, "device", str(self.device))
        self._check_device()
        self._check_names()
        if not isinstance(self.drafter_options, Mapping):
            raise ConfigError(
                f"drafter_options is {self.drafter_options!r}; it must map names to values"
            )
        for name, low in _LOWEST.items():
            value = getattr(self, name)
            if value is not None or name == "max_batch_size":
                object.__setattr__(self, name, _checked_count(name, value, low))
        for name in ("exact", "calibrate", "prefix_caching"):
            object.__setattr__(self, name, checked_flag(name, getattr(self, name)))
        memory = checked_memory("cache_memory", self.cache_memory)
        object.__setattr__(self, "cache_memory", memory)
        if self.threads is not None and self.threads > (cpus := available_cpus()):
            raise ConfigError(
                f"threads is {self.threads}; this machine has {cpus} for us, and more threads "
                "than that only wait for each other"
            )

    def _check_device(self) -> None:
        kind, colon, number = self.device.partition(":")
        if kind not in DEVICES:
            raise unknown("device", self.device, DEVICES, "cuda" if kind == "gpu" else None)
        if colon and not (kind == "cuda" and re.fullmatch("[0-9]{1,4}", number)):
            raise ConfigError(
                f"device is {self.device!r}; a number goes with cuda alone, such as 'cuda:1'"
            )

    def _check_names(self) -> None:
        for name in ("model", "draft_model", "drafter", "revision"):
            value = getattr(self, name)
            if isinstance(value, PathLike):
                value = fspath(value)
                object.__setattr__(self, name, value)
            if value is None and name in ("draft_model", "revision"):
                continue
            if not isinstance(value, str) or not value:
                raise ConfigError(f"{name} is {shown(value)}; it must be a name or a path")
            if "\0" in checked_text(name, value) or max(map(len, value.split("/"))) > _MAX_NAME:
                raise ConfigError(f"{name} is {shown(value)}; no file can have such a name")

    @classmethod
    def of(cls, **options: Any) -> LoadOptions:
        """Build from keyword options; an unknown one is an error naming the nearest."""
        known = {f.name for f in fields(cls)}
        for name in options:
            if name not in known:
                raise unknown("option", name, known)
        return cls(**options)


def _checked_count(name: str, value: object, low: int) -> int:
    count = whole_number(value)
    if count is None or count < low:
        raise ConfigError(f"{name} is {shown(value)}; it must be a whole number, {low} or more")
    return count


@dataclass(frozen=True)
class ModelPlan:
    """How one checkpoint will run.

    Attributes:
        checkpoint: what is loaded; None for weights that are made up.
        decoder: "fused", "graphed", "fixed-shape", "eager" or "transformers".
        dtype: of activations and cache.
        weights: the form of the linear layers and the head: "int8", "int4" (a head of 8 bits), or
            the same as ``dtype``.
        tiles: whether bfloat16 weights are multiplied on tiles (AMX), for which they are laid out
            anew.
        weight_bytes: weights in memory.
        read_bytes: weights that a forward reads: all but an embedding table of its own.
        num_parameters: weights that each token is multiplied with.
        cache_bytes_per_token: keys and values of one token, in bytes.
        notes: what is missing for a faster plan, and how to get it.
        cache_memory: bytes that the cache may take; None: a share of the memory there is.
    """

    name: str
    checkpoint: Checkpoint | None
    backend: str
    decoder: str
    device: str
    dtype: str
    weights: str
    weight_bytes: int
    read_bytes: int
    num_parameters: int
    cache_bytes_per_token: int
    max_context: int
    tiles: bool = False
    notes: tuple[str, ...] = ()
    cache_memory: int | None = None

    @property
    def directory(self) -> Path:
        """Where the checkpoint lies; an empty path for weights that are made up."""
        return self.checkpoint.directory if self.checkpoint else Path()

    @property
    def is_exact(self) -> bool:
        """Whether bits are independent of what is scored together."""
        return self.decoder in ("fused", "fixed-shape")

    @property
    def weight_bits(self) -> int | None:
        """Of the linear layers; None: as `dtype` has them."""
        return _BITS.get(self.weights)

    @property
    def packed_bits(self) -> int | None:
        """The layout of the matrices (`foredraft.models.native.packed`); None: as they come."""
        return _TILES if self.tiles else self.weight_bits

    @property
    def number_format(self) -> str:
        """For people: what the numbers are."""
        if self.tiles:
            return f"{self.dtype} on tiles"
        return self.dtype if self.weights == self.dtype else f"{self.dtype}, {self.weights} weights"

    def cache_bytes(self, num_tokens: int) -> int:
        """Keys and values of one row of ``num_tokens``, as the cache allocates them."""
        from foredraft.cache.blocks import in_blocks

        return self.cache_bytes_per_token * in_blocks(num_tokens)


def plan_model(name: str, checkpoint: Checkpoint, options: LoadOptions, device: str) -> ModelPlan:
    """Resolve how a checkpoint will run. Reads its config and compares sizes, loads no weights.

    Args:
        name: what people call it.
        device: from `foredraft.system.devices.resolve_device`.

    Raises:
        ConfigError: the backend does not fit the model.
        CapabilityError: ``exact`` was asked for and the backend cannot keep it.
        ModelLoadError: the checkpoint does not hold a model that can be run.
    """
    from foredraft.models.native.config import is_native, read_config
    from foredraft.models.native.weights import fit

    native = options.backend == "native" or (
        options.backend == "auto"
        and is_native(checkpoint.config, checkpoint.directory / "config.json")
    )
    if native:
        config, _ = fit(checkpoint, read_config(checkpoint.directory))
        return plan_native(name, checkpoint, config, options, device)
    if options.exact:
        raise CapabilityError(
            f"exact=True needs the native decoder, and {name!r} runs through transformers, "
            "whose bits depend on what is scored together; leave exact out (the distribution "
            "is the target's either way)"
        )
    return _plan_hf(name, checkpoint, options, device)


def plan_native(
    name: str,
    checkpoint: Checkpoint | None,
    config: DecoderConfig,
    options: LoadOptions,
    device: str,
) -> ModelPlan:
    """Resolve how the native decoder will run a model of this shape.

    Args:
        checkpoint: None for weights that are made up.
        device: from `foredraft.system.devices.resolve_device`.

    Raises:
        ConfigError: the device cannot run these weights.
    """
    import torch

    from foredraft.models.native.fused import has_tiles
    from foredraft.models.native.weights import weight_bytes

    kernel_problem = _kernel_problem() if device == "cpu" else "the fused kernel runs on CPU"
    if options.weights in _BITS and kernel_problem:
        raise _no_packed(options.weights, kernel_problem)
    dtype, notes = _asked_dtype(options), []
    if device == "cpu" and kernel_problem:
        notes.append(f"no fused CPU kernel: {kernel_problem}")
    if dtype == "auto":
        dtype = "bfloat16" if device != "cpu" or _bf16_is_fast(kernel_problem) else "float32"
    weights = options.weights if options.weights in _BITS else dtype
    tiles = kernel_problem is None and weights == "bfloat16" and has_tiles()
    bits = _TILES if tiles else _BITS.get(weights)
    in_memory, read = weight_bytes(config, getattr(torch, dtype).itemsize, bits)
    return ModelPlan(
        name=name,
        checkpoint=checkpoint,
        backend="native",
        decoder=_native_decoder(device, kernel_problem, options.exact),
        device=device,
        dtype=dtype,
        weights=weights,
        weight_bytes=in_memory,
        read_bytes=read,
        num_parameters=config.num_matrix_parameters,
        cache_bytes_per_token=config.kv_shape.bytes_per_token(getattr(torch, dtype)),
        max_context=min(options.max_context or config.max_context, config.max_context),
        cache_memory=checked_memory("cache_memory", options.cache_memory),
        tiles=tiles,
        notes=tuple(notes),
    )


def _no_packed(weights: str, reason: str) -> ConfigError:
    return ConfigError(
        f"weights {weights!r} are there where they are faster: on CPU with the fused kernel "
        f"({reason}); leave weights out"
    )


def _asked_dtype(options: LoadOptions) -> str:
    return "bfloat16" if options.weights == "bf16" else options.dtype


def _native_decoder(device: str, kernel_problem: str | None, exact: bool) -> str:
    """The fastest decoder that runs on ``device`` and keeps bits where that is asked for."""
    if kernel_problem is None:
        return "fused"
    if exact:
        return "fixed-shape"
    return "graphed" if device.startswith("cuda") else "eager"


def _kernel_problem() -> str | None:
    """Why the fused CPU kernel cannot run here, or None. Compiles it on first use."""
    from foredraft.kernels.build import KernelUnavailable, load_library

    try:
        load_library()
    except KernelUnavailable as reason:
        return str(reason)
    return None


def _bf16_is_fast(kernel_problem: str | None) -> bool:
    """Whether several bfloat16 tokens cost about as much as one.

    Without the fused kernel that takes a CPU with bfloat16 instructions: stock torch needs seven
    times as long for 8 rows as for 1 on others.
    """
    import torch

    return kernel_problem is None or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _plan_hf(name: str, checkpoint: Checkpoint, options: LoadOptions, device: str) -> ModelPlan:
    import torch

    from foredraft.cache.base import KVShape
    from foredraft.models.hf.sizes import read_sizes

    if options.weights in _BITS:
        raise _no_packed(options.weights, f"{name!r} runs through transformers")
    sizes = read_sizes(checkpoint)
    dtype = _asked_dtype(options)
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    kind: torch.dtype = getattr(torch, dtype)
    heads, limit = sizes.num_attention_heads, sizes.max_position_embeddings
    kv_shape = KVShape(
        sizes.num_hidden_layers,
        sizes.num_key_value_heads or heads,
        sizes.head_dim or sizes.hidden_size // heads,
    )
    num_bytes = checkpoint.num_parameters * kind.itemsize
    return ModelPlan(
        name=name,
        checkpoint=checkpoint,
        backend="hf",
        decoder="transformers",
        device=device,
        dtype=dtype,
        weights=dtype,
        weight_bytes=num_bytes,
        read_bytes=num_bytes,
        num_parameters=checkpoint.num_parameters,
        cache_bytes_per_token=kv_shape.bytes_per_token(kind),
        max_context=min(options.max_context or limit, limit),
        cache_memory=checked_memory("cache_memory", options.cache_memory),
    )
