"""Peak memory of target and cache, measured in a process of its own, against the prediction."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from foredraft.bench.report import Report, check_outputs
from foredraft.cli import options as o
from foredraft.core.errors import ForedraftError
from foredraft.core.params import SamplingParams
from foredraft.load import ModelPlan
from foredraft.options import LoadOptions

_CHILD = "from benchmarks.memory import report_peak; report_peak()"


@dataclass(frozen=True)
class MemoryFigure:
    """Bytes above an otherwise equal process that has loaded no model."""

    predicted: int
    measured: int

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted


def measure_memory(options: LoadOptions, plan: ModelPlan, tokens: int) -> MemoryFigure:
    """Load the target in a new process, fill ``tokens`` of its cache, and read the peak.

    Raises:
        ForedraftError: the process failed.
    """
    asked = json.dumps({"model": str(plan.directory), "tokens": tokens, "dtype": plan.dtype,
                        "weights": options.weights, "device": plan.device,
                        "threads": options.threads})  # fmt: skip
    child = subprocess.run([sys.executable, "-c", _CHILD, asked], capture_output=True, text=True)
    if child.returncode != 0:
        last = child.stderr.strip().splitlines()[-1:]
        raise ForedraftError(f"the measuring process failed: {' '.join(last)}")
    return MemoryFigure(plan.weight_bytes + plan.cache_bytes(tokens), json.loads(child.stdout))


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
    llm = LLM(load_target(plan), None, options, plan=plan)
    prompt = [index % 100 + 5 for index in range(tokens - 16)]
    llm.generate(prompt, SamplingParams(max_tokens=16))
    sys.stdout.write(str(_peak(asked["device"]) - before))


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
    json_file: o.JsonFile = None,
) -> None:
    """Peak memory of target and cache in a new process, beside what `doctor` predicts."""
    from foredraft.load import plan_models

    check_outputs(json_file)
    plan, _ = plan_models(load)
    figure = measure_memory(load, plan, tokens)
    line = (
        f"{plan.name}, {plan.number_format}, {tokens} tokens: predicted "
        f"{figure.predicted / 1e6:.1f} MB, measured {figure.measured / 1e6:.1f} MB "
        f"({figure.ratio:.2f}x)"
    )
    facts = vars(figure) | {"ratio": figure.ratio, "tokens": tokens}
    Report(facts=facts, lines=[line]).give(json_file)
