"""From `LoadOptions` to loaded models: name, directory, checkpoint, plan, target.

A `ModelPlan` says how a checkpoint will run on this machine. It is made, and can be printed
(`foredraft doctor`), before any weights are read: a mistake in the name of the draft model does not
cost the loading of the target.
"""

from __future__ import annotations

import filecmp
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from foredraft.auto import OWN, chosen_drafter
from foredraft.cache.blocks import in_blocks
from foredraft.cache.memory import CacheMemory, check_fits, checked_memory
from foredraft.core.cost import CostModel
from foredraft.core.errors import CapabilityError, ConfigError, VocabularyMismatchError
from foredraft.drafters import check_draft_model, check_options, drafter_key, drafter_spec
from foredraft.drafters.trained import shipped_head, shipped_head_of_files
from foredraft.engine.scheduler import MAX_STEP_TOKENS
from foredraft.kernels.build import LIBRARIES, KernelUnavailable, load_library
from foredraft.kernels.interface import FORM_PACKED, FORM_PLAIN, FORM_TILED
from foredraft.models.base import Target
from foredraft.models.files.kept import NOTHING_KEPT, KeptFiles, recipe_of
from foredraft.models.files.outline import is_outline
from foredraft.models.files.progress import Progress
from foredraft.models.files.safety import Checkpoint
from foredraft.models.files.store import resolve_model
from foredraft.models.native.config import DecoderConfig, read_config, why_not_native
from foredraft.models.native.cpu import FusedDecoder, has_tiles, work_bytes
from foredraft.models.native.cuda import (
    ExactDecoder,
    LargeTileDecoder,
    PagedDecoder,
    exact_decoder,
    why_not_paged,
)
from foredraft.models.native.draft_model import NativeDraftModel
from foredraft.models.native.model import DecoderFactory, EagerDecoder, probe
from foredraft.models.native.mtp import has_own_layers
from foredraft.models.native.quant import FORMS
from foredraft.models.native.target import NativeTarget
from foredraft.models.native.weights import (
    AS_STORED,
    Bits,
    count_weights,
    fit,
    formats_of,
    rounded_as_stored,
    stored_weight_bytes,
    weight_bytes,
    why_not_as_stored,
)
from foredraft.models.text.tokenizer import Tokenizer
from foredraft.models.timing import kept_cost, measure_cost
from foredraft.options import LoadOptions
from foredraft.system.cgroups import available_cpus
from foredraft.system.devices import resolve_device
from foredraft.system.extras import needs_extra
from foredraft.system.machine import cpu_name, give_memory_back

if TYPE_CHECKING:
    from foredraft.models.hf.target import HFTarget

_BITS: dict[str, Bits] = {"int8": 8, "int4": 4, AS_STORED: AS_STORED}
_TILES = 16


@dataclass(frozen=True)
class ModelPlan:
    """How one checkpoint will run.

    Attributes:
        checkpoint: what is loaded; None for weights that are made up.
        decoder: "fused", "graphed", "fixed-shape", "eager" or "transformers".
        dtype: of activations.
        cache_dtype: of keys and values: "int8", or the same as ``dtype``.
        weights: the form of the linear layers and the head: "int8", "int4" (a head of 8 bits),
            "file" (as the files of a quantised model have them), or the same as ``dtype``.
        activation_bits: of what weights in few bits are multiplied with.
        tiles: whether bfloat16 weights are multiplied on tiles (AMX), for which they are laid out
            anew.
        weight_bytes: weights in memory.
        read_bytes: weights that a forward reads: all but an embedding table of its own.
        num_parameters: weights that each token is multiplied with.
        cache_bytes_per_token: keys and values of one token, in bytes.
        state_bytes: of recurrent layers, a row's states and its log of a step's tokens.
        work_bytes: what a forward of the most tokens works in; 0: not known.
        notes: what is missing for a faster plan, and how to get it.
        cache_memory: bytes that the cache may take; None: a share of the memory there is.
        formats: of the matrices of a quantised model, the one of most weights first.
        encoder: whether it is an encoder-decoder, whose prompt is its source.
    """

    name: str
    checkpoint: Checkpoint | None
    backend: str
    decoder: str
    device: str
    dtype: str
    cache_dtype: str
    weights: str
    weight_bytes: int
    read_bytes: int
    num_parameters: int
    cache_bytes_per_token: int
    max_context: int
    activation_bits: int = 16
    tiles: bool = False
    notes: tuple[str, ...] = ()
    cache_memory: int | None = None
    formats: tuple[str, ...] = ()
    encoder: bool = False
    work_bytes: int = 0
    state_bytes: int = 0

    @property
    def directory(self) -> Path:
        """Where the checkpoint lies; an empty path for weights that are made up."""
        return self.checkpoint.directory if self.checkpoint else Path()

    @property
    def is_exact(self) -> bool:
        """Whether bits are independent of what is scored together."""
        return self.decoder in ("fused", "fixed-shape")

    @property
    def weight_bits(self) -> Bits:
        """Of the linear layers, "file": as it has them; None: as `dtype` has them."""
        return _BITS.get(self.weights)

    @property
    def packed_bits(self) -> Bits:
        """The layout of the matrices (`foredraft.models.native.quant`); None: as they come."""
        return _TILES if self.tiles else self.weight_bits

    @property
    def number_format(self) -> str:
        """For people: what the numbers are."""
        others = ", int8 activations" if self.activation_bits == 8 else ""
        others += "" if self.cache_dtype == self.dtype else f", {self.cache_dtype} cache"
        if self.tiles:
            return f"{self.dtype} on tiles{others}"
        if self.weights == AS_STORED:
            formats = " and ".join(self.formats)
            return f"{self.dtype}, {formats} weights as the file has them{others}"
        weights = "" if self.weights == self.dtype else f", {self.weights} weights"
        return f"{self.dtype}{weights}{others}"

    @cached_property
    def kept(self) -> KeptFiles:
        """The model's derived cache on disk; nothing if it does not run on CPU."""
        if self.checkpoint is None or self.device != "cpu":
            return NOTHING_KEPT
        return KeptFiles.of(self.checkpoint)

    @property
    def to_come_bytes(self) -> int:
        """Memory that loading takes beside the cache."""
        return self.weight_bytes + self.work_bytes

    def cache_bytes(self, num_tokens: int) -> int:
        """Keys and values of one row of ``num_tokens``, as the cache allocates them."""
        return self.cache_bytes_per_token * in_blocks(num_tokens)

    @property
    def download_bytes(self) -> int:
        """Weights that are not here yet."""
        is_here = self.checkpoint is None or not is_outline(self.directory)
        return 0 if is_here or self.checkpoint is None else self.checkpoint.num_bytes

    @property
    def remarks(self) -> tuple[str, ...]:
        """Notes for `foredraft doctor`, such as that the weights are not downloaded."""
        if not self.download_bytes:
            return ()
        size = f"{self.download_bytes / 1e9:.2f} GB"
        got = f"`foredraft models pull {self.name}` gets them"
        return (f"its weights are not here ({size}); {got}",)

    def memory_bytes(self, num_tokens: int) -> int:
        """Of weights, one row of ``num_tokens``, and work."""
        cached = self.cache_bytes(num_tokens) + self.state_bytes
        return self.weight_bytes + cached + self.work_bytes


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to score.

    Attributes:
        tokenizer: None: prompts are token ids; of a draft model: it shares the target's.
        plan: how it runs; None when built from parts.
    """

    target: Target
    tokenizer: Tokenizer | None = None
    plan: ModelPlan | None = None


def load_models(
    asked: LoadOptions, progress: Progress | None = None
) -> tuple[LoadedModel, LoadedModel | None]:
    """The target, and the draft model if one is named.

    Args:
        asked: names and options; its number of threads is set for the whole process.
        progress: shows downloads and conversions.

    Raises:
        ConfigError: an unknown name, or options that do not go together.
        ModelLoadError: a checkpoint that cannot be loaded safely and completely.
        VocabularyMismatchError: target and draft model do not share a vocabulary.
    """
    spec = drafter_spec(resolve_drafter(asked))  # a mistyped one should not cost a download
    most_threads = asked.threads or min(torch.get_num_threads(), available_cpus())
    if most_threads != torch.get_num_threads():
        torch.set_num_threads(most_threads)
    plan, draft_plan = plan_models(asked, progress)
    _check_memory(plan, draft_plan)
    tokenizer = Tokenizer(plan.directory)
    if draft_plan is None:
        target = load_target(plan, asked.threads, progress=progress, num_ids=tokenizer.num_ids)
        return LoadedModel(target, tokenizer, plan), None
    draft_tokenizer = tokenizer
    if not _have_one_tokenizer(plan, draft_plan):
        draft_tokenizer = Tokenizer(draft_plan.directory)
    is_shared = spec.draft_model != "any vocabulary"
    if is_shared:
        _check_same_vocabulary(plan, tokenizer, draft_plan, draft_tokenizer)
    to_come = plan.to_come_bytes + draft_plan.to_come_bytes
    memory = CacheMemory.of(plan.cache_memory, plan.device, to_come)  # for both
    target = load_target(plan, asked.threads, memory, progress, tokenizer.num_ids)
    num_rows = tokenizer.num_ids(target.vocab_size) if is_shared else None
    draft = load_draft_model(draft_plan, num_rows, asked.threads, memory, progress)
    return LoadedModel(target, tokenizer, plan), LoadedModel(draft, draft_tokenizer, draft_plan)


def _check_memory(plan: ModelPlan, draft_plan: ModelPlan | None) -> None:
    """Refuse what the machine cannot hold. A GPU says so itself."""
    if plan.device == "cpu":
        plans = [plan, draft_plan] if draft_plan else [plan]
        name = " and ".join(each.name for each in plans)
        weights = sum(each.weight_bytes for each in plans)
        check_fits(name, weights, sum(each.work_bytes for each in plans), plan.cache_memory)


def _have_one_tokenizer(plan: ModelPlan, draft_plan: ModelPlan) -> bool:
    """Whether both directories hold the same vocabulary, byte for byte: it is then read once."""
    ours, theirs = (each.directory / "tokenizer.json" for each in (plan, draft_plan))
    return ours.is_file() and theirs.is_file() and filecmp.cmp(ours, theirs, shallow=False)


def plan_models(
    asked: LoadOptions, progress: Progress | None = None, with_weights: bool = True
) -> tuple[ModelPlan, ModelPlan | None]:
    """How target and draft model will run here. They are downloaded if need be, and not loaded.

    Args:
        with_weights: whether those of a model of the hub are downloaded; a plan without them cannot
            be loaded.

    Raises:
        ConfigError: no such model or device, or options that do not go together.
        CapabilityError: ``exact`` was asked for and cannot be kept.
        ModelLoadError: a checkpoint that cannot be loaded safely and completely.
    """
    device = resolve_device(asked.device)
    plan = _plan(asked.model, asked, device, progress, with_weights)
    if asked.draft_model is None:
        return plan, None
    return plan, _plan_draft_model(asked, device, progress, with_weights)


def _plan_draft_model(
    asked: LoadOptions, device: str, progress: Progress | None, with_weights: bool = True
) -> ModelPlan:
    """In 4 bits, which no text depends on, where our own kernel runs them."""
    assert asked.draft_model is not None
    weights = asked.weights if asked.draft_weights == "auto" else asked.draft_weights
    dtype = "bfloat16" if asked.draft_weights == "bf16" else asked.dtype
    as_draft = replace(asked, weights=weights, dtype=dtype, activations="auto", revision=None)
    as_draft = replace(as_draft, exact=False, cache_memory=None)
    plan = _plan(asked.draft_model, as_draft, device, progress, with_weights)
    if asked.draft_weights == "auto" and plan.decoder == "fused":
        as_draft = replace(as_draft, weights="int4")
        plan = _plan(asked.draft_model, as_draft, device, progress, with_weights)
    if plan.weights == "int4":
        plan = replace(plan, activation_bits=8)
    return plan


def _plan(
    name: str,
    options: LoadOptions,
    device: str,
    progress: Progress | None,
    with_weights: bool = True,
) -> ModelPlan:
    directory = resolve_model(
        name, revision=options.revision, with_weights=with_weights, progress=progress
    )
    return plan_model(name, Checkpoint(directory), options, device)


def _check_same_vocabulary(
    plan: ModelPlan, tokenizer: Tokenizer, draft_plan: ModelPlan, draft_tokenizer: Tokenizer
) -> None:
    if tokenizer.fingerprint != draft_tokenizer.fingerprint:
        raise VocabularyMismatchError(
            f"target {plan.name!r} has a vocabulary of {tokenizer.vocab_size} tokens "
            f"(fingerprint {tokenizer.fingerprint}) and draft model {draft_plan.name!r} one of "
            f"{draft_tokenizer.vocab_size} (fingerprint {draft_tokenizer.fingerprint}): the same "
            "id means different text. Use a draft model of the same family, or the drafter "
            "'cross-tokenizer'"
        )


def load_target(
    plan: ModelPlan,
    threads: int | None = None,
    memory: CacheMemory | None = None,
    progress: Progress | None = None,
    num_ids: Callable[[int], int] | None = None,
) -> Target:
    """Load the weights of a resolved plan.

    Args:
        threads: of each forward, where our own kernel runs it; None: as many as are fastest.
        memory: what its cache shares with those of other models; None: the plan says how much.
        progress: shows the share of the weights that is laid out, if none was kept.
        num_ids: how many of so many output rows are tokens of its tokenizer: no others are drawn;
            None: all.

    Raises:
        ModelLoadError: the checkpoint is incomplete or damaged.
    """
    if plan.checkpoint is None:
        raise ConfigError(f"{plan.name!r} has no checkpoint to load; its weights are made up")
    dtype = getattr(torch, plan.dtype)
    memory = memory or CacheMemory.of(plan.cache_memory, plan.device, plan.to_come_bytes)
    if plan.backend == "hf":
        return _hf_class(plan.encoder).load(
            plan.checkpoint, dtype, plan.device, plan.max_context, memory, num_ids
        )
    decoder = native_decoder(plan.decoder, threads)
    target = NativeTarget.load(
        *(plan.checkpoint, dtype, plan.device, decoder, plan.max_context),
        bits=plan.packed_bits,
        cache_memory=memory,
        kept=plan.kept,
        progress=progress,
        cache_dtype=getattr(torch, plan.cache_dtype),
        activation_bits=plan.activation_bits,
        num_ids=num_ids,
    )
    if plan.decoder == "fixed-shape":
        prove_bits(target)
    give_memory_back()
    return target


def prove_bits(target: NativeTarget) -> None:
    """`probe` a target; a GPU whose tiles of 16 and of 32 tokens have other bits takes 32 alone.

    Raises:
        CapabilityError: bits depend on company all the same.
    """
    try:
        probe(target)
    except CapabilityError:
        if not isinstance(target.decoder, ExactDecoder):
            raise
        target.new_decoder = LargeTileDecoder  # of all that is made of this target, too
        target.decoder = LargeTileDecoder(target.config, target.weights)
        probe(target)


def load_draft_model(
    plan: ModelPlan,
    num_rows: int | None = None,
    threads: int | None = None,
    memory: CacheMemory | None = None,
    progress: Progress | None = None,
) -> Target:
    """Load a model that drafts: `load_target`, and where that is native what makes drafts faster.

    Args:
        num_rows: of its head: how many tokens it shares with its target, from the first on; None:
            all of them.
    """
    loaded = load_target(plan, threads, memory, progress)
    return NativeDraftModel.of(loaded, num_rows) if isinstance(loaded, NativeTarget) else loaded


def _hf_class(encoder: bool) -> type[HFTarget]:
    from foredraft.models.hf.encoder_decoder import EncoderDecoderTarget
    from foredraft.models.hf.target import HFTarget

    return EncoderDecoderTarget if encoder else HFTarget


def forward_cost(plan: ModelPlan, target: Target, options: LoadOptions) -> CostModel:
    """The cost of a loaded target's forward here: measured, or kept from an earlier process."""
    if plan.checkpoint is None or plan.device != "cpu":
        return measure_cost(target, options.max_batch_size)
    kernel = load_library()._name if plan.decoder == "fused" else torch.__version__
    recipe = recipe_of(
        *(cpu_name(), available_cpus(), torch.get_num_threads(), options.threads),
        *(kernel, plan.decoder, plan.number_format),
    )
    return kept_cost(plan.kept, recipe, target, options.max_batch_size)


def native_decoder(name: str, threads: int | None = None) -> DecoderFactory:
    """The factory of a native plan's `ModelPlan.decoder`; ``threads``: see `load_target`."""
    decoders: dict[str, DecoderFactory] = {
        "fused": partial(FusedDecoder, num_threads=threads) if threads else FusedDecoder,
        "graphed": PagedDecoder,
        "eager": EagerDecoder,
        "fixed-shape": exact_decoder,
    }
    return decoders[name]


def _is_on_cpu(target: Target | ModelPlan | None) -> bool:
    if isinstance(target, ModelPlan):
        return target.device == "cpu"
    parts = None if target is None else target.capabilities.parts
    return parts is not None and parts.device.type == "cpu"


def _has_encoder(target: Target | ModelPlan) -> bool:
    if isinstance(target, ModelPlan):
        return target.encoder
    return target.capabilities.encoder is not None


def _comes_with(kind: str, target: Target | ModelPlan | None) -> bool:
    """Whether a head of this kind comes with the package for the target, or with the model."""
    if target is None:
        return False
    if not isinstance(target, ModelPlan):
        if kind == OWN:
            layers = target.capabilities.cache_layers
            return layers is not None and layers.has_own_layers
        return shipped_head(kind, target) is not None
    files = target.checkpoint if target.backend == "native" else None
    if files is not None and kind == OWN:
        return has_own_layers(files)
    return files is not None and shipped_head_of_files(kind, files) is not None


def resolve_drafter(
    options: LoadOptions,
    has_draft_model: bool | None = None,
    target: Target | ModelPlan | None = None,
) -> str:
    """The registered name behind ``options.drafter``; "auto" is the best that is there.

    Args:
        has_draft_model: None goes by whether ``options`` names one.
        target: itself or its plan, which tell whether a trained head comes with the package; None:
            nothing is known yet.

    Raises:
        ConfigError: no such drafter or option of it, no draft model where one is needed, or one
            where none is used.
    """
    if has_draft_model is None:
        has_draft_model = options.draft_model is not None
    name = drafter_key(options.drafter)
    if name == "auto":
        has_encoder = target is not None and _has_encoder(target)
        may_be_head = bool(options.drafter_options) or not _is_on_cpu(target)
        comes_with = partial(_comes_with, target=target)
        name = chosen_drafter(has_draft_model, has_encoder, may_be_head, comes_with)
    spec = drafter_spec(name)
    check_draft_model(name, has_draft_model)
    if has_draft_model and spec.draft_model == "none":
        raise ConfigError(
            f"drafter {name!r} uses no draft model, but "
            f"{options.draft_model or 'one'!r} was given; use drafter 'draft_model'"
        )
    check_options(name, options.drafter_options, options.drafter)
    return name


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
    reason = None
    if options.backend == "auto":
        path = checkpoint.directory / "config.json"
        reason = why_not_native(checkpoint.config, path)
    if options.backend == "native" or (options.backend == "auto" and reason is None):
        config, _ = fit(checkpoint, read_config(checkpoint.directory, options.max_context))
        return plan_native(name, checkpoint, config, options, device)
    if checkpoint.is_gguf:
        hint = f", and it does not run this model: {reason}" if reason else "; leave backend out"
        raise ConfigError(f"{name!r} is a GGUF file, which our own decoder alone reads{hint}")
    if options.exact:
        raise CapabilityError(
            f"exact=True needs the native decoder, and {name!r} runs through transformers, "
            "whose bits depend on what is scored together; leave exact out (the distribution "
            "is the target's either way)"
        )
    lost = "slower, and without int8, int4, self_draft and exact=True"
    notes = () if reason is None else (f"{reason}; it runs through transformers: {lost}",)
    return _plan_hf(name, checkpoint, options, device, notes)


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
    kernel_problem = _kernel_problem() if device == "cpu" else "the fused kernel runs on CPU"
    problem = kernel_problem if device == "cpu" else why_not_paged(config, torch.device(device))
    few_bits_problem = "exact=True" if options.exact and device != "cpu" else problem
    _refuse_few_bits(options, few_bits_problem, kernel_problem)
    dtype = _asked_dtype(options)
    if dtype == "auto":
        dtype = "bfloat16" if device != "cpu" or _bf16_is_fast(kernel_problem) else "float32"
    cache_dtype = dtype if options.cache_dtype == "auto" else options.cache_dtype
    weights, not_kept = _native_weights(checkpoint, config, options, dtype, few_bits_problem)
    formats = tuple(formats_of(checkpoint)) if checkpoint and checkpoint.is_quantised else ()
    activation_bits = _activation_bits(options, weights, formats)
    tiles = kernel_problem is None and weights == "bfloat16" and config.fits_tiles and has_tiles()
    bits = _TILES if tiles else _BITS.get(weights)
    size = getattr(torch, dtype).itemsize
    if checkpoint is not None and bits == AS_STORED:
        in_memory, read = stored_weight_bytes(checkpoint, config, size)
    else:
        in_memory, read = weight_bytes(config, size, bits)
    return ModelPlan(
        name=name,
        checkpoint=checkpoint,
        backend="native",
        decoder=_native_decoder(device, problem, options.exact),
        device=device,
        dtype=dtype,
        cache_dtype=cache_dtype,
        weights=weights,
        weight_bytes=in_memory,
        read_bytes=read,
        num_parameters=count_weights(config).read,
        cache_bytes_per_token=config.kv_shape.bytes_per_token(getattr(torch, cache_dtype)),
        max_context=min(options.max_context or config.max_context, config.max_context),
        cache_memory=checked_memory("cache_memory", options.cache_memory),
        activation_bits=16 if kernel_problem else activation_bits,
        tiles=tiles,
        notes=(
            *_native_notes(config, device, problem),
            *not_kept,
            *_too_long(options, config.max_context),
        ),
        formats=formats,
        work_bytes=0 if kernel_problem else _work_bytes(config, options, dtype, bits),
        state_bytes=config.row_states.row_bytes if config.row_states else 0,
    )


def _native_weights(
    checkpoint: Checkpoint | None,
    config: DecoderConfig,
    options: LoadOptions,
    dtype: str,
    few_bits_problem: str | None,
) -> tuple[str, tuple[str, ...]]:
    """`ModelPlan.weights`, and a note where they cannot be those of the GGUF file."""
    weights = options.weights if options.weights in _BITS else dtype
    free = few_bits_problem is None and options.weights == options.dtype == "auto"
    is_quantised = checkpoint is not None and checkpoint.is_quantised
    if options.weights != AS_STORED and not (is_quantised and free):
        return weights, ()
    problem: str | None = (
        "it means the formats of a quantised model, and its weights are plain floats"
    )
    if checkpoint is not None and checkpoint.is_quantised:
        problem = why_not_as_stored(checkpoint, config)
        if problem is None:
            rounded = rounded_as_stored(checkpoint, config)
            return AS_STORED, () if rounded is None else (rounded,)
    if options.weights == AS_STORED:
        raise ConfigError(f"weights 'file' cannot be had: {problem}; leave weights out")
    return weights, (f"the file's own formats are not kept: {problem}",)


def _activation_bits(options: LoadOptions, weights: str, formats: Sequence[str]) -> int:
    """Of "auto": 8 where most weights are in a K-quant, for those stay nearer to float32 than
    llama.cpp's products of them (docs/decisions/0002-cpu-kernel.md).
    """
    forms = [FORMS.get(name) for name in formats] if weights == AS_STORED else []
    if options.activations == "auto":
        most = forms[0] if forms else None
        return 8 if most and most.takes_eight and most.steps else 16
    if options.activations == "int16":
        return 16
    if weights != "int4" and not any(form and form.takes_eight for form in forms):
        raise ConfigError(
            f"activations 'int8' are for weights in 4 bits, and these are {weights}; give weights "
            "'int4' too, or leave activations out"
        )
    return 8


def _too_long(options: LoadOptions, limit: int) -> Iterator[str]:
    """A note where more context is asked for than the model has."""
    if (options.max_context or 0) > limit:
        yield f"max_context is {options.max_context}, and the model takes {limit}: {limit} it is"


def _native_notes(config: DecoderConfig, device: str, problem: str | None) -> Iterator[str]:
    """`ModelPlan.notes` on speed and on the context; ``problem``: of our own kernels."""
    if problem:
        kernel = "fused CPU kernel" if device == "cpu" else "GPU kernels"
        yield f"no {kernel}, so torch runs its steps, slower: {problem}"
    if config.max_context < (longest := config.ropes[0].context):
        yield f"its rotary factors are those of short texts; max_context={longest} asks for more"


def _work_bytes(config: DecoderConfig, options: LoadOptions, dtype: str, bits: Bits) -> int:
    """Of the largest step that reads one text."""
    longest = min(options.max_context or config.max_context, config.max_context)
    num_tokens = min(options.max_step_tokens or MAX_STEP_TOKENS, longest)
    forms: dict[Bits, int] = {None: FORM_PLAIN, _TILES: FORM_TILED}
    return work_bytes(config, dtype == "bfloat16", forms.get(bits, FORM_PACKED), num_tokens)


def _refuse_few_bits(
    options: LoadOptions, few_bits_problem: str | None, kernel_problem: str | None
) -> None:
    """Refuse weights, cache or activations in few bits where they would not be faster.

    Raises:
        ConfigError: the options ask for them, and a problem is given.
    """
    if few_bits_problem and options.weights in _BITS:
        raise ConfigError(
            f"weights {options.weights!r} are there where they are faster: on CPU with the fused "
            f"kernel, and on GPUs with our own kernels ({few_bits_problem}); leave weights out"
        )
    for name in ("cache_dtype", "activations"):
        if kernel_problem and getattr(options, name) == "int8":
            raise ConfigError(
                f"{name} 'int8' is there on CPU with the fused kernel ({kernel_problem}); leave "
                f"{name} out"
            )


def _asked_dtype(options: LoadOptions) -> str:
    return "bfloat16" if options.weights == "bf16" else options.dtype


def _native_decoder(device: str, problem: str | None, exact: bool) -> str:
    """The fastest decoder that runs on ``device`` and keeps bits where that is asked for."""
    if device == "cpu" and not problem:
        return "fused"
    if exact:
        return "fixed-shape"
    return "eager" if problem else "graphed"


def _kernel_problem() -> str | None:
    """Why the CPU kernels cannot run here, or None. Compiles them on first use.

    All of them: the decoder, draws and heads. A compilation later would delay a token.
    """
    try:
        for name in LIBRARIES:
            load_library(name)
    except KernelUnavailable as reason:
        return str(reason)
    return None


def _bf16_is_fast(kernel_problem: str | None) -> bool:
    """Whether several bfloat16 tokens cost about as much as one.

    Without the fused kernel that takes a CPU with bfloat16 instructions: stock torch needs seven
    times as long for 8 rows as for 1 on others.
    """
    return kernel_problem is None or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _plan_hf(
    name: str, checkpoint: Checkpoint, options: LoadOptions, device: str, notes: tuple[str, ...]
) -> ModelPlan:
    try:
        import foredraft.models.hf.target  # noqa: F401 - it must be there to load the model later
        from foredraft.models.hf.sizes import context_limit, kv_shape, read_config
    except ImportError as problem:
        what = f"{name!r} runs through transformers, which needs"
        raise needs_extra(what, "hf", problem) from None
    reason = f"{name!r} runs through transformers"
    _refuse_few_bits(options, reason, reason)
    config = read_config(checkpoint)
    dtype = _asked_dtype(options)
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    kind: torch.dtype = getattr(torch, dtype)
    limit = context_limit(config.get_text_config(decoder=True))
    num_bytes = checkpoint.num_parameters * kind.itemsize
    return ModelPlan(
        name=name,
        checkpoint=checkpoint,
        backend="hf",
        decoder="transformers",
        device=device,
        dtype=dtype,
        cache_dtype=dtype,
        weights=dtype,
        weight_bytes=num_bytes,
        read_bytes=num_bytes,
        num_parameters=checkpoint.num_parameters,
        cache_bytes_per_token=kv_shape(config).bytes_per_token(kind),
        max_context=min(options.max_context or limit, limit),
        cache_memory=checked_memory("cache_memory", options.cache_memory),
        notes=(*notes, *_too_long(options, limit)),
        encoder=config.is_encoder_decoder,
    )
