"""`foredraft doctor`: how it will run here, before anything heavy is loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cache.memory import available_memory, default_memory
from foredraft.cli import config
from foredraft.cli import options as o
from foredraft.cli.display import RichProgress, say, show_facts
from foredraft.options import LoadOptions
from foredraft.system.extras import EXTRAS, install_command
from foredraft.system.paths import bytes_below, cache_root

if TYPE_CHECKING:
    from foredraft.load import ModelPlan


_SHOWN = ("model", "drafter", "draft_model", "weights", "device", "max_context")
_SMALLER = 0.9
"""A format is suggested only if a step reads less than this share of the bytes."""


@o.with_options
def doctor(
    load: Annotated[LoadOptions, o.model(shown=_SHOWN, samples=True)],
    tokens: Annotated[
        int, typer.Option(min=1, help="Predict memory for this many tokens of prompt and reply.")
    ] = 1024,
    as_json: o.Json = False,
) -> None:
    """Print the resolved plan: device, dtype, kernels, memory, and what is missing."""
    report = examine(load, tokens)
    if as_json:
        typer.echo(json.dumps(report))
        return
    missing, remarks = report.pop("not_installed"), []
    notes = [note for model in report["models"].values() for note in model.pop("notes")]
    for model in report["models"].values():
        remarks += model.pop("remarks")
    show_facts(report)
    for line in remarks:
        say(line)
    for note in notes:
        say(f"missing: {note}", style="yellow")
    for package, how in missing.items():
        say(f"not installed: {package}, for {how}")
    if not notes:
        left = "nothing that generating or serving needs is missing"
        say(left if missing else "nothing is missing", style="green")


def examine(options: LoadOptions, tokens: int) -> dict[str, Any]:
    """The resolved plan as plain data.

    Args:
        tokens: length of the text that memory is predicted for.
    """
    import torch

    from foredraft.drafters import drafter_spec
    from foredraft.load import plan_models, resolve_drafter
    from foredraft.system.machine import describe_machine, package_version

    resolve_drafter(options)  # reports errors before anything is downloaded
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    budget = options.num_draft_tokens
    with RichProgress() as progress:
        plan, draft_plan = plan_models(options, progress, with_weights=False)
    name = resolve_drafter(options, target=plan)
    spec = drafter_spec(name)
    plans = {"target": plan} | ({"draft model": draft_plan} if draft_plan else {})
    return {
        "machine": describe_machine(),
        "settings": str(file) if (file := config.path()) and file.is_file() else None,
        "cache": _cached(),
        "drafter": name,
        "drafter_summary": spec.summary,
        "num_draft_tokens": spec.num_draft_tokens if budget is None else budget,
        "models": {role: model_report(plan, options, tokens) for role, plan in plans.items()},
        "not_installed": {
            package: f"{purpose}: {install_command(extra)}"
            for package, (extra, purpose) in EXTRAS.items()
            if package_version(package) is None
        },
    }


def _cached() -> dict[str, Any]:
    """The folder of cached files, and what each part of it takes."""
    root = cache_root()
    parts = sorted(each for each in root.glob("*") if each.is_dir())
    return {"folder": str(root)} | {f"{each.name}_bytes": bytes_below(each) for each in parts}


def model_report(plan: ModelPlan, options: LoadOptions, tokens: int) -> dict[str, Any]:
    """One model's plan as plain data, its memory with a text of ``tokens``."""
    length = min(tokens, plan.max_context)
    config = plan.checkpoint.config if plan.checkpoint else {}
    fastest = _most_tokens_per_s(plan)
    return {
        "name": plan.name,
        "directory": str(plan.directory),
        "family": config.get("model_type"),
        "formats": list(plan.formats),
        "is_gguf": plan.checkpoint is not None and plan.checkpoint.is_gguf,
        "layers": config.get("num_hidden_layers"),
        "vocabulary": config.get("vocab_size"),
        "parameters": plan.num_parameters,
        "backend": plan.backend,
        "kernels": plan.decoder,
        "device": plan.device,
        "dtype": plan.dtype,
        "cache_dtype": plan.cache_dtype,
        "weights": plan.weights,
        "number_format": plan.number_format,
        "exact": plan.is_exact,
        **_of_replies(plan, options),
        "max_context": plan.max_context,
        "context": length,
        "download_bytes": plan.download_bytes,
        "weight_bytes": plan.weight_bytes,
        "read_bytes": plan.read_bytes,
        "most_tokens_per_s": fastest and round(fastest, 1),
        "in_4_bits": _in_4_bits(plan, options),
        "cache_bytes": plan.cache_bytes(length),
        "state_bytes": plan.state_bytes,
        "cache_limit_bytes": plan.cache_memory or default_memory(plan.device, plan.to_come_bytes),
        "work_bytes": plan.work_bytes,
        "memory_bytes": plan.memory_bytes(length),
        "free_bytes": available_memory(),
        "fits": plan.memory_bytes(length) <= available_memory(),
        "notes": list(plan.notes),
        "remarks": [*plan.remarks, *(() if options.draft_model else _draft_offers(plan))],
    }


def _of_replies(plan: ModelPlan, options: LoadOptions) -> dict[str, Any]:
    from foredraft.models.text.tokenizer import Tokenizer
    from foredraft.server.formats import format_of, takes_tools

    tokenizer = Tokenizer(plan.directory)
    template = tokenizer.tool_template
    form = format_of(template)
    is_asked = options.sampling_defaults == "model"
    return {
        "tool_format": form.name if takes_tools(form, template) else None,
        "thinks": form.thinks(template or ""),
        "sampling_defaults": dict(tokenizer.sampling_defaults) if is_asked else {},
        "not_honoured": tokenizer.not_honoured(plan.encoder),
    }


def _most_tokens_per_s(plan: ModelPlan) -> float | None:
    """Upper bound of one request without drafts: each token reads the weights once.

    None: unknown for a GPU.
    """
    from foredraft.system.machine import memory_bytes_per_s

    return memory_bytes_per_s() / plan.read_bytes if plan.device == "cpu" else None


def _draft_offers(plan: ModelPlan) -> list[str]:
    from foredraft.models.files.local import draft_models_for

    if plan.checkpoint is None or plan.backend != "native":
        return []
    found = draft_models_for(plan.checkpoint)
    return [
        f"{name} is here, with the same tokenizer and {size / plan.num_parameters:.0%} of the "
        f"weights: --draft-model {name} lets it draft"
        for name, size in found[:1]
    ]


def _in_4_bits(plan: ModelPlan, options: LoadOptions) -> dict[str, Any] | None:
    """The effect of ``--weights int4``; None if it is not available."""
    from foredraft.load import plan_model
    from foredraft.models.native.source_blocks import has_blocks

    if plan.decoder != "fused" or plan.weights == "int4" or plan.checkpoint is None:
        return None
    smaller = plan_model(plan.name, plan.checkpoint, replace(options, weights="int4"), plan.device)
    if smaller.read_bytes > _SMALLER * plan.read_bytes:  # a file that comes in 4 bits
        return None
    return {"read_bytes": smaller.read_bytes, "as_it_comes": has_blocks(plan.directory)}
