"""From what was asked for to loaded models: name, directory, checkpoint, plan, target.

Everything is found and planned before any weights are read, so that a mistake in the name of the
draft model does not cost the loading of the target.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from foredraft.core.cost import CostModel
from foredraft.core.errors import ConfigError, VocabularyMismatchError
from foredraft.drafters import check_options, drafter_spec, needs_draft_model
from foredraft.drafters.common.shipped import shipped_head, shipped_head_of_files
from foredraft.kernels.build import load_library
from foredraft.kernels.threads import available_cpus
from foredraft.models.base import Target
from foredraft.models.files.kept import KeptFiles, recipe_of
from foredraft.models.files.progress import Progress
from foredraft.models.files.safety import Checkpoint
from foredraft.models.files.store import resolve_model
from foredraft.models.text.tokenizer import Tokenizer
from foredraft.models.timing import kept_cost, measure_cost
from foredraft.options import LoadOptions, ModelPlan, plan_model
from foredraft.system.devices import resolve_device
from foredraft.system.machine import cpu_name

if TYPE_CHECKING:
    from foredraft.models.native.target import DecoderFactory


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to score, with how it came to run so."""

    plan: ModelPlan
    target: Target
    tokenizer: Tokenizer


def load_models(
    asked: LoadOptions, progress: Progress | None = None
) -> tuple[LoadedModel, LoadedModel | None]:
    """The target, and the draft model if one is named.

    Args:
        asked: names and options; its number of threads is set for the whole process.
        progress: told about downloads and conversions.

    Raises:
        ConfigError: an unknown name, or options that do not go together.
        ModelLoadError: a checkpoint that cannot be loaded safely and completely.
        VocabularyMismatchError: target and draft model do not share a vocabulary.
    """
    spec = drafter_spec(resolve_drafter(asked))  # a mistyped one should not cost a download
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    plan, draft_plan = plan_models(asked, progress)
    tokenizer = Tokenizer(plan.directory)
    if draft_plan is None:
        return LoadedModel(plan, load_target(plan, asked.threads), tokenizer), None
    draft_tokenizer = Tokenizer(draft_plan.directory)
    if spec.draft_model != "any vocabulary":
        _check_same_vocabulary(plan, tokenizer, draft_plan, draft_tokenizer)
    return (
        LoadedModel(plan, load_target(plan, asked.threads), tokenizer),
        LoadedModel(draft_plan, load_target(draft_plan, asked.threads), draft_tokenizer),
    )


def plan_models(
    asked: LoadOptions, progress: Progress | None = None
) -> tuple[ModelPlan, ModelPlan | None]:
    """How target and draft model will run here. They are downloaded if need be, and not loaded.

    Raises:
        ConfigError: no such model or device, or options that do not go together.
        CapabilityError: ``exact`` was asked for and cannot be kept.
        ModelLoadError: a checkpoint that cannot be loaded safely and completely.
    """
    device = resolve_device(asked.device)
    plan = _plan(asked.model, asked, device, progress)
    if asked.draft_model is None:
        return plan, None
    as_draft = replace(asked, revision=None, exact=False, cache_memory=None)
    return plan, _plan(asked.draft_model, as_draft, device, progress)


def _plan(name: str, options: LoadOptions, device: str, progress: Progress | None) -> ModelPlan:
    directory = resolve_model(name, revision=options.revision, progress=progress)
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


def load_target(plan: ModelPlan, threads: int | None = None) -> Target:
    """Load the weights of a resolved plan.

    Args:
        threads: of each forward, where our own kernel runs it; None: as many as are fastest.

    Raises:
        ModelLoadError: the checkpoint is incomplete or damaged.
    """
    if plan.checkpoint is None:
        raise ConfigError(f"{plan.name!r} has no checkpoint to load; its weights are made up")
    dtype = getattr(torch, plan.dtype)
    if plan.backend == "hf":
        from foredraft.models.hf.target import HFTarget

        return HFTarget.load(
            plan.checkpoint, dtype, plan.device, plan.max_context, plan.cache_memory
        )
    from foredraft.models.native.fixed_shape import probe
    from foredraft.models.native.target import NativeTarget

    decoder = native_decoder(plan.decoder, threads)
    target = NativeTarget.load(
        *(plan.checkpoint, dtype, plan.device, decoder, plan.max_context),
        bits=plan.packed_bits,
        cache_memory=plan.cache_memory,
    )
    if plan.decoder == "fixed-shape":
        probe(target)
    return target


def forward_cost(plan: ModelPlan, target: Target, options: LoadOptions) -> CostModel:
    """What a forward of a loaded target costs here: measured, or kept from an earlier process."""
    if plan.checkpoint is None or plan.device != "cpu":
        return measure_cost(target, options.max_batch_size)
    kernel = load_library()._name if plan.decoder == "fused" else torch.__version__
    recipe = recipe_of(
        *(cpu_name(), available_cpus(), torch.get_num_threads(), options.threads),
        *(kernel, plan.decoder, plan.number_format),
    )
    return kept_cost(KeptFiles.of(plan.checkpoint), recipe, target, options.max_batch_size)


def native_decoder(name: str, threads: int | None = None) -> DecoderFactory:
    """What makes the `ModelPlan.decoder` of a native plan; ``threads``: see `load_target`."""
    from foredraft.models.native.eager import EagerDecoder
    from foredraft.models.native.fixed_shape import FixedShapeDecoder
    from foredraft.models.native.fused import FusedDecoder
    from foredraft.models.native.graphed import GraphedDecoder

    decoders: dict[str, DecoderFactory] = {
        "fused": partial(FusedDecoder, num_threads=threads) if threads else FusedDecoder,
        "graphed": GraphedDecoder,
        "eager": EagerDecoder,
        "fixed-shape": FixedShapeDecoder,
    }
    return decoders[name]


def _without_draft_model(target: Target | ModelPlan | None) -> str:
    if isinstance(target, ModelPlan):
        files = target.checkpoint if target.backend == "native" else None
        has_head = files is not None and shipped_head_of_files("eagle", files) is not None
    else:
        has_head = target is not None and shipped_head("eagle", target) is not None
    return "blend" if has_head else "suffix"


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
    name = options.drafter
    if name == "auto":
        name = "draft_model" if has_draft_model else _without_draft_model(target)
    spec = drafter_spec(name)
    if spec.lacks_draft_model(has_draft_model, options.drafter_options):
        raise needs_draft_model(name)
    if has_draft_model and spec.draft_model == "none":
        raise ConfigError(
            f"drafter {name!r} uses no draft model, but "
            f"{options.draft_model or 'one'!r} was given; use drafter 'draft-model'"
        )
    check_options(name, options.drafter_options)
    return name.replace("-", "_")
