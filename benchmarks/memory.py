"""Peak memory of target and cache, measured in a process of its own, against the prediction."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.course import loading
from benchmarks.random_files import random_file
from foredraft.bench.report import Report, check_outputs
from foredraft.cli import options as o
from foredraft.core.errors import ForedraftError
from foredraft.core.params import SamplingParams
from foredraft.load import ModelPlan, plan_models
from foredraft.options import LoadOptions

_CHILD = "from benchmarks.memory import report_peak; report_peak()"


@dataclass(frozen=True)
class MemoryFigure:
    """Bytes above an otherwise equal process that has loaded no model.

    Attributes:
        predicted: weights, cache and work memory, as `doctor` says.
        measured: at the peak of loading and generating.
        steady: at the end.
        largest_tensor: of the model's files.
        file_bytes: of its weights in them.
        load_s: seconds that loading took.
    """

    predicted: int
    measured: int
    steady: int
    largest_tensor: int
    file_bytes: int
    load_s: float

    @property
    def row(self) -> dict[str, Any]:
        """Of a table."""
        return {
            "predicted_mb": self.predicted / 1e6,
            "peak_mb": self.measured / 1e6,
            "largest_tensor_mb": self.largest_tensor / 1e6,
            "peak_over_predicted_and_tensor": self.measured
            / (self.predicted + self.largest_tensor),
            "steady_mb": self.steady / 1e6,
            "steady_over_predicted": self.steady / self.predicted,
            "load_s": self.load_s,
            "file_mb_per_s": self.file_bytes / 1e6 / self.load_s,
        }

    @property
    def line(self) -> str:
        row = self.row
        return (
            f"predicted {row['predicted_mb']:.1f} MB; peak {row['peak_mb']:.1f} MB "
            f"({row['peak_over_predicted_and_tensor']:.3f}x of that with the largest tensor), in "
            f"the end {row['steady_mb']:.1f} MB ({row['steady_over_predicted']:.3f}x), loaded in "
            f"{self.load_s:.1f} s ({row['file_mb_per_s']:.0f} MB/s of the file)"
        )


def measure_memory(options: LoadOptions, plan: ModelPlan, tokens: int) -> MemoryFigure:
    """Load the target in a new process, fill ``tokens`` of its cache, and read the peak.

    Raises:
        ForedraftError: the process failed.
    """
    form = plan.weights if plan.weights == "file" else options.weights
    # A GGUF file is named itself: of the built-in model's it decides what becomes of it.
    named = options.model if plan.formats else str(plan.directory)
    asked = json.dumps({"model": named, "tokens": tokens, "dtype": plan.dtype,
                        "weights": form, "device": plan.device,
                        "threads": options.threads})  # fmt: skip
    child = subprocess.run([sys.executable, "-c", _CHILD, asked], capture_output=True, text=True)
    if child.returncode != 0:
        last = child.stderr.strip().splitlines()[-1:]
        raise ForedraftError(f"the measuring process failed: {' '.join(last)}")
    tensors = plan.checkpoint.tensors.values() if plan.checkpoint else ()
    sizes = [tensor.num_bytes for tensor in tensors]
    return MemoryFigure(
        predicted=plan.memory_bytes(tokens),
        largest_tensor=max(sizes, default=0),
        file_bytes=sum(sizes),
        **json.loads(child.stdout),
    )


def report_peak() -> None:
    """The measuring process: writes what loading and generating added at their peak, in bytes."""
    asked: dict[str, Any] = json.loads(sys.argv[1])
    tokens = asked.pop("tokens")
    _warm_up()
    before = _resident("VmRSS")
    from foredraft.llm import LLM
    from foredraft.load import load_target, plan_models

    options = replace(LoadOptions(), **asked, drafter="none", max_batch_size=1)
    plan, _ = plan_models(options)
    started = time.perf_counter()
    llm = LLM(load_target(plan), None, options, plan=plan)
    load_s = time.perf_counter() - started
    prompt = [index % 100 + 5 for index in range(tokens - 16)]
    llm.generate(prompt, SamplingParams(max_tokens=16))
    found = {
        "measured": _peak(asked["device"]) - before,
        "steady": _resident("VmRSS") - before,
        "load_s": load_s,
    }
    sys.stdout.write(json.dumps(found))


def _warm_up() -> None:
    """Load the libraries and start their threads, so that they do not count as the model's."""
    import torch
    from safetensors import safe_open  # noqa: F401

    import foredraft.llm
    import foredraft.models.native.cpu  # noqa: F401
    from foredraft.kernels.build import LIBRARIES, KernelUnavailable, load_library

    with suppress(KernelUnavailable):
        for name in LIBRARIES:
            load_library(name)
    torch.randn(256, 256) @ torch.randn(256, 256)


def _peak(device: str) -> int:
    import torch

    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated() + _resident("VmRSS")
    return _resident("VmHWM")


def _resident(field: str) -> int:
    """A memory figure of this process in bytes, from Linux."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ForedraftError(f"/proc/self/status has no {field}: memory is measured on Linux only")


@o.with_options
def memory(
    load: Annotated[LoadOptions, loading()],
    tokens: Annotated[int, typer.Option(min=1, help="Length of the text in the cache.")] = 1024,
    shape: Annotated[
        str | None, typer.Option(help="A made-up model of this shape in place of --model.")
    ] = None,
    kind: Annotated[
        str,
        typer.Option(
            help="What its file is, several with commas: safetensors, or a format of GGUF files; "
            "behind a colon the form of --weights."
        ),
    ] = "safetensors",
    output: o.Output = None,
) -> None:
    """Peak memory of target and cache in a new process, beside what `doctor` predicts.

    Twice: as the model's files are read for the first time, and as what was kept of them is.
    """
    check_outputs(output)
    rows, lines = list[dict[str, Any]](), list[str]()
    for each in o.names(kind) if shape else [""]:
        file, _, form = each.partition(":")
        asked = replace(load, weights=form or load.weights)
        with random_file(asked, shape, file) if shape else nullcontext(asked) as options:
            plan, _ = plan_models(options)
            for start in ("first", "second"):
                figure = measure_memory(options, plan, tokens)
                name = {"model": shape or plan.name, "file": file or "its own", "start": start}
                rows.append(name | {"numbers": plan.number_format} | figure.row)
                lines.append(
                    f"{', '.join(rows[-1][key] for key in (*name, 'numbers'))}: {figure.line}"
                )
    Report(facts={"tokens": tokens, "figures": rows}, lines=lines).give(output)
