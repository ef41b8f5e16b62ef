"""Kernels of all GPUs that they are for, compiled without one: they fit registers and memory.

Triton compiles for a named card. Programs take no more shared memory than it has, and `pytest -s`
prints their registers and what they spill.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from benchmarks.random_model import random_config, random_weights
from foredraft.cache.kv import KVCache
from foredraft.models.native.config import DecoderConfig
from foredraft.models.native.cuda import Bucket, GridInputs, PagedDecoder
from foredraft.models.native.quant import CENTRED4, INT4, INT8, NESTED4, NESTED6, Form, Stack
from foredraft.models.native.weights import DecoderWeights

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from foredraft.models.native import device_draws, triton_ops, triton_packed  # noqa: E402

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB that a program may have, by compute capability."""
MOST_SPILLED = 640
"""Bytes of a thread: more are a sign of tiles that do not fit."""
STEPS = [
    *product(("smollm2-135m", "llama-8b", "qwen3-30b-a3b"), (None, NESTED4)),
    *product(("llama-8b",), (INT4, CENTRED4, NESTED6, INT8)),
]
META = torch.device("meta")


class Compiled(NamedTuple):
    """A program: bytes of shared memory and of a thread's stack, and registers."""

    name: str
    shared: int
    registers: int
    stack: int


class Card:
    """A driver of a card that is not there, each of which is a device of its own."""

    def __init__(self, capability: int) -> None:
        self._capability = capability
        limits = {"max_shared_mem": SHARED[capability] << 10}
        self.utils = SimpleNamespace(get_device_properties=lambda _: limits)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, _: int) -> int:
        return 0


@pytest.fixture(params=SHARED, ids="sm_{}".format)
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    found: int = request.param
    monkeypatch.setattr(triton.runtime.driver, "_active", Card(found))
    return found


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Compiled]:
    """Whatever is launched from now on: it is compiled, and not run."""
    found: dict[str, Compiled] = {}
    run = JITFunction.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in found:
            found[kernel.hash] = measured(kernel, tmp_path / "kernel.cubin")
        return kernel

    monkeypatch.setattr(JITFunction, "run", compiled)
    return found


def measured(kernel: Any, path: Path) -> Compiled:
    """As the machine code has it."""
    path.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    told = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True)
    numbers = dict(re.findall(r"(REG|STACK):(\d+)", told.stdout))
    spilled, registers = int(numbers["STACK"]), int(numbers["REG"])
    return Compiled(kernel.name, kernel.metadata.shared, registers, spilled)


def check(programs: dict[str, Compiled], capability: int) -> None:
    assert programs
    for each in sorted(programs.values()):
        print(f"sm_{capability} {each}")  # noqa: T201
        assert each.shared <= SHARED[capability] << 10, each
        assert each.registers <= 255, each
    assert max(each.stack for each in programs.values()) <= MOST_SPILLED


def run_step(config: DecoderConfig, weights: DecoderWeights, tokens: int, is_chain: bool) -> None:
    decoder = PagedDecoder(config, weights)
    cache = KVCache(config.kv_shape, weights.dtype, META, 512)
    bucket = Bucket(1, tokens, 1024, (0,), is_chain)
    count = (8 + tokens) * tokens + 1024 // cache.store.block_size
    inputs = GridInputs.of(torch.zeros(count, dtype=torch.int64, device=META), bucket)
    logits_NV = torch.empty(tokens, config.vocab_size, device=META)
    assert decoder._run(inputs, bucket, cache, logits_NV).keys() == {0}


def in_form(weights: DecoderWeights, form: Form | None) -> DecoderWeights:
    if form is None:
        return weights

    def moved(_: str, matrix: Stack, num_parts: int) -> triton_packed.CardMatrix:
        return triton_packed.CardMatrix.empty(form, *matrix.shape, META)

    layers = tuple(layer.with_matrices(moved) for layer in weights.layers)
    return replace(weights, layers=layers, head_VE=moved("", weights.head_VE, 1))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form"), STEPS, ids=lambda x: getattr(x, "name", x))
def test_steps_fit_each_card(
    name: str, form: Form | None, capability: int, programs: dict[str, Compiled]
) -> None:
    config = replace(random_config(name), num_hidden_layers=1)
    weights = in_form(random_weights(config, torch.bfloat16, META), form)
    for tokens, is_chain in ((8, True), (16, True), (16, False), (32, True)):
        run_step(config, weights, tokens, is_chain)
    check(programs, capability)


@pytest.mark.slow
def test_large_heads_fit_each_card(capability: int, programs: dict[str, Compiled]) -> None:
    config = replace(random_config("llama-8b"), num_hidden_layers=1, hidden_size=2048)
    for size, cap in ((80, None), (256, 50.0)):
        ropes = tuple(replace(rope, size=size) for rope in config.ropes)
        sized = replace(config, head_dim=size, ropes=ropes, attention_cap=cap)
        run_step(sized, random_weights(sized, torch.bfloat16, META), 16, True)
    check(programs, capability)


@pytest.mark.slow
def test_draws_fit_each_card(capability: int, programs: dict[str, Compiled]) -> None:
    for vocab, has_cuts in product((49_152, 151_936), (False, True)):
        logits_NV = torch.empty(4, vocab, device=META)
        numbers, names_V = (
            torch.empty(count, dtype=torch.int64, device=META) for count in (24, vocab)
        )
        sums_NV = torch.empty(4, vocab, dtype=torch.float64, device=META)
        device_draws.drawn(logits_NV, numbers, has_cuts)
        device_draws.drafted(logits_NV, numbers, names_V, sums_NV, has_cuts)
        device_draws.listed(sums_NV, names_V, 16)
    check(programs, capability)


SHAPES = [*product((576, 2048, 4096, 14336, 1 << 15, 151_936), (576, 2048, 14336))]


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("gated", [False, True])
def test_tiles_are_chosen_by_the_cards_memory(itemsize: int, gated: bool) -> None:
    """Of Hopper they are the ones that were timed, and others have no other outputs."""
    for outputs, inputs in SHAPES:
        large = triton_ops._large_tiles(outputs, inputs, gated, itemsize > 2)
        for capability, kib in SHARED.items():
            found = triton_ops._tiles(outputs, inputs, gated, itemsize, kib << 10)
            assert triton_ops._shared_bytes(found, gated, itemsize) <= kib << 10
            assert (found["TILE_M"], found["num_warps"]) == (large["TILE_M"], large["num_warps"])
            assert found["TILE_K"] >= 64
            assert found["num_stages"] >= 2
            assert capability // 10 not in (9, 10) or found == large


def test_stretches_of_attention_are_the_same_on_each_card() -> None:
    for head_dim, itemsize in product((64, 80, 128, 256), (2, 4)):
        found = {
            capability: triton_ops._attention_sizes(
                head_dim, itemsize, triton_ops.Card(kib << 10, capability)
            )
            for capability, kib in SHARED.items()
        }
        assert len({sizes.stretch for sizes in found.values()}) == 1
        assert (
            found[90]
            == found[100]
            == (triton_ops.AttentionSizes() if head_dim == 64 else triton_ops._LARGE)
        )
        assert found[86] == found[89] == found[120]
