"""`foredraft doctor`: how it will run here, before anything heavy is loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from foredraft.cache.memory import default_memory
from foredraft.cli import config
from foredraft.cli import options as o
from foredraft.cli.display import megabytes
from foredraft.options import LoadOptions
from foredraft.system.extras import EXTRAS, install_command

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
    else:
        _show(Console(highlight=False), report)


def examine(options: LoadOptions, tokens: int) -> dict[str, Any]:
    """The resolved plan as plain data.

    Args:
        options: the requested options.
        tokens: length of the text that memory is predicted for.
    """
    import torch

    from foredraft.drafters import drafter_spec
    from foredraft.load import plan_models, resolve_drafter
    from foredraft.models.files.kept import kept_models
    from foredraft.system.machine import describe_machine, package_version

    resolve_drafter(options)  # reports errors before anything is downloaded
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    budget = options.num_draft_tokens
    with o.progress() as progress:
        plan, draft_plan = plan_models(options, progress, with_weights=False)
    name = resolve_drafter(options, target=plan)
    spec = drafter_spec(name)
    plans = {"target": plan} | ({"draft model": draft_plan} if draft_plan else {})
    return {
        "machine": describe_machine(),
        "settings": str(file) if (file := config.path()) and file.is_file() else None,
        "drafter": name,
        "num_draft_tokens": spec.num_draft_tokens if budget is None else budget,
        "drafter_summary": spec.summary,
        "tokens": tokens,
        "optional": [
            {"package": package, "for": purpose, "install": install_command(extra)}
            for package, (extra, purpose) in EXTRAS.items()
            if package_version(package) is None
        ],
        "models": {role: _model_report(plan, options, tokens) for role, plan in plans.items()},
        "kept": [
            {"folder": str(each.folder), "model": each.model and str(each.model)}
            | {"bytes": each.num_bytes, "is_gone": each.is_gone}
            for each in kept_models()
        ],
    }


def _model_report(plan: ModelPlan, options: LoadOptions, tokens: int) -> dict[str, Any]:
    length = min(tokens, plan.max_context)
    return {
        "name": plan.name,
        "directory": str(plan.directory),
        "family": plan.checkpoint.config.get("model_type") if plan.checkpoint else None,
        "formats": list(plan.formats),
        "is_gguf": plan.checkpoint is not None and plan.checkpoint.is_gguf,
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
        "weight_bytes": plan.weight_bytes,
        "read_bytes": plan.read_bytes,
        "most_tokens_per_s": most_tokens_per_s(plan),
        "in_4_bits": _in_4_bits(plan, options),
        "cache_bytes": plan.cache_bytes(length),
        "state_bytes": plan.state_bytes,
        "cache_limit_bytes": plan.cache_memory or default_memory(plan.device, plan.to_come_bytes),
        "work_bytes": plan.work_bytes,
        "total_bytes": plan.memory_bytes(length),
        "notes": list(plan.notes),
        "remarks": [*plan.remarks, *(() if options.draft_model else draft_offers(plan))],
    }


def _of_replies(plan: ModelPlan, options: LoadOptions) -> dict[str, Any]:
    """The form of its thoughts and tool calls, and the sampling defaults of its makers."""
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


def most_tokens_per_s(plan: ModelPlan) -> float | None:
    """Upper bound of one request without drafts: each token reads the weights once. None: unknown
    for a GPU."""
    from foredraft.system.machine import memory_bytes_per_s

    return memory_bytes_per_s() / plan.read_bytes if plan.device == "cpu" else None


def draft_offers(plan: ModelPlan) -> list[str]:
    """The smallest model that is here and could draft for this one, in a sentence."""
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


def _show(console: Console, report: dict[str, Any]) -> None:
    machine = report["machine"]
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column()
    table.add_row("machine", f"{machine['cpu']}, {machine['threads']} threads")
    used = machine["instructions"] or "no kernels of ours"
    if machine["instructions_unused"]:
        used += f" (the CPU also has {', '.join(machine['instructions_unused'])})"
    table.add_row("instructions", used)
    table.add_row("kernels from", machine["kernels_from"] or "nowhere: torch decodes")
    table.add_row("accelerator", machine["gpu"] or "none")
    table.add_row("versions", ", ".join(f"{k} {v}" for k, v in machine["versions"].items()))
    table.add_row("settings", report["settings"] or f"none in {config.path()}")
    table.add_row(
        "drafter",
        f"{report['drafter']} ({report['drafter_summary']}), "
        f"up to {report['num_draft_tokens']} draft tokens a step",
    )
    for role, model in report["models"].items():
        table.add_row("", "")
        for label, value in _model_lines(model, report["tokens"]):
            table.add_row(f"{role}: {label}" if label == "name" else label, value)
    table.add_row("", "")
    for each in report["kept"]:  # files that may be deleted: they are made again when needed
        whose = f", for {each['model']}" if each["model"] else ""
        gone = ", which is gone" if each["is_gone"] else ""
        table.add_row("kept", f"{megabytes(each['bytes'])} in {each['folder']}{whose}{gone}")
    console.print(table, soft_wrap=True)
    notes = [note for model in report["models"].values() for note in model["notes"]]
    console.print()
    for model in report["models"].values():
        for remark in model["remarks"]:
            console.print(remark, markup=False, soft_wrap=True)
    for note in notes:
        console.print(f"missing: {note}", style="yellow", markup=False)
    for each in report["optional"]:
        line = f"not installed: {each['package']}, for {each['for']}: {each['install']}"
        console.print(line, markup=False, soft_wrap=True)
    if not notes:
        left = "nothing that generating or serving needs is missing"
        console.print(left if report["optional"] else "nothing is missing", style="green")


def _model_lines(model: dict[str, Any], tokens: int) -> list[tuple[str, str]]:
    formats, most, smaller = model["formats"], model["most_tokens_per_s"], model["in_4_bits"]
    of = f", {'GGUF ' * model['is_gguf']}in {' and '.join(formats)}" if formats else ""
    speed = "measured when it is loaded"
    if most is not None:
        speed = f"at most {most:.0f} tokens/s a request without drafts (memory bandwidth)"
    self_draft = "no smaller copy of these weights can draft here"
    if smaller is not None:
        copy = megabytes(smaller["read_bytes"])
        self_draft = f"a copy in 4 bits takes {copy} more; auto loads it where it pays"
    states = f"{megabytes(model['state_bytes'])} for each text, with their log"
    return [
        ("name", model["name"]),
        ("directory", model["directory"]),
        ("family", f"{model['family']}{of}"),
        ("runs on", f"{model['device']}, {model['number_format']}"),
        ("kernels", f"{model['kernels']} ({model['backend']})"),
        ("exactness", "bit for bit" if model["exact"] else "up to near-ties of two tokens"),
        ("tool calls", model["tool_format"] or "none: its chat template has no place for tools"),
        ("thoughts", "read apart" if model["thinks"] else "none"),
        ("sampling", _sampling(model)),
        ("context", f"{model['max_context']} tokens"),
        ("weights", megabytes(model["weight_bytes"])),
        ("a step", _step(model)),
        ("speed", speed),
        ("self-draft", self_draft),
        (
            "KV cache",
            f"{megabytes(model['cache_bytes'])} at {tokens} tokens, {model['cache_dtype']}",
        ),
        *([("states", states)] if model["state_bytes"] else []),
        ("cache limit", f"{megabytes(model['cache_limit_bytes'])}, of prompts that are kept too"),
        ("work memory", f"{megabytes(model['work_bytes'])} for the longest step"),
        ("memory", f"{megabytes(model['total_bytes'])} for all of these"),
    ]


def _sampling(model: dict[str, Any]) -> str:
    named = [f"{name} {value:g}" for name, value in model["sampling_defaults"].items()]
    said = f"the model's own: {', '.join(named)}" if named else "greedy unless a request says more"
    left_out = model["not_honoured"]
    return f"{said}; left out: {', '.join(left_out)}" if left_out else said


def _step(model: dict[str, Any]) -> str:
    """Cost of a step of few tokens: the bytes of weights that it reads."""
    reads, in_4_bits = f"reads {megabytes(model['read_bytes'])} of them", model["in_4_bits"]
    if in_4_bits is None:
        return reads
    with_4 = f"with --weights int4 {megabytes(in_4_bits['read_bytes'])}"
    quality = (
        "the very weights that the model comes in" if in_4_bits["as_it_comes"] else "less precise"
    )
    return f"{reads}; {with_4}, {quality}"
