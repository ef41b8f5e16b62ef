"""Peak memory of target and cache, measured in a process of its own, against the prediction."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from foredraft.bench.report import Report, check_outputs
from foredraft.cli import options as o
from foredraft.core.errors import ForedraftError
from foredraft.core.params import SamplingParams
from foredraft.load import ModelPlan
from foredraft.models.files.safety import StoredTensor
from foredraft.options import LoadOptions

_CHILD = "from benchmarks.memory import report_peak; report_peak()"


@dataclass(frozen=True)
class MemoryFigure:
    """Bytes above an otherwise equal process that has loaded no model.

    Attributes:
        predicted: weights and cache, as `doctor` says.
        measured: at the peak of loading and generating.
        steady: at the end.
        largest_tensor: of the model's files.
        load_s: seconds that loading took.
    """

    predicted: int
    measured: int
    steady: int
    largest_tensor: int
    load_s: float

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted

    @property
    def line(self) -> str:
        return (
            f"predicted {self.predicted / 1e6:.1f} MB, peak {self.measured / 1e6:.1f} MB "
            f"({self.ratio:.2f}x; with the largest tensor "
            f"{self.measured / (self.predicted + self.largest_tensor):.2f}x), in the end "
            f"{self.steady / 1e6:.1f} MB ({self.steady / self.predicted:.2f}x), loaded in "
            f"{self.load_s:.1f} s"
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
    return MemoryFigure(
        predicted=plan.weight_bytes + plan.cache_bytes(tokens),
        largest_tensor=max(map(_num_bytes, tensors), default=0),
        **json.loads(child.stdout),
    )


def _num_bytes(tensor: StoredTensor) -> int:
    """In its file."""
    count = math.prod(tensor.shape)
    if tensor.gguf is not None:
        return count // tensor.gguf.kind.block_weights * tensor.gguf.kind.block_bytes
    return count * {"F64": 8, "F32": 4}.get(tensor.dtype, 2)


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
    import foredraft.models.native.fused  # noqa: F401

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
    load: Annotated[LoadOptions, o.loading()],
    tokens: Annotated[int, typer.Option(min=1, help="Length of the text in the cache.")] = 1024,
    shape: Annotated[
        str | None, typer.Option(help="A made-up model of this shape in place of --model.")
    ] = None,
    kind: Annotated[
        str, typer.Option(help="What its file is: safetensors, or a format of GGUF files.")
    ] = "safetensors",
    json_file: o.JsonFile = None,
) -> None:
    """Peak memory of target and cache in a new process, beside what `doctor` predicts.

    Twice: as the model's files are read for the first time, and as what was kept of them is.
    """
    from benchmarks.random_files import write_random
    from foredraft.load import plan_models

    check_outputs(json_file)
    with tempfile.TemporaryDirectory() as folder:
        if shape is not None:
            load = replace(load, model=str(write_random(Path(folder), shape, kind)))
        plan, _ = plan_models(load)
        figures = [measure_memory(load, plan, tokens) for _ in range(2)]
    name = f"{shape or plan.name}, {plan.number_format}, {tokens} tokens"
    lines = [f"{name}: {figure.line}" for figure in figures]
    facts = {"tokens": tokens, "starts": [asdict(figure) for figure in figures]}
    Report(facts=facts, lines=lines).give(json_file)
