"""Kernels of all GPUs that they are for, compiled without one: they fit registers and memory.

Triton compiles for a named card. Programs take no more shared memory than it has, and `pytest -s`
prints their registers and what they spill. A token's sums have one order, in tiles of any size.
"""

from __future__ import annotations

import json
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
PRODUCTS = "_linear_kernel", "_product_kernel"


class Compiled(NamedTuple):
    """A program.

    Attributes:
        shared: bytes of shared memory.
        registers: of a thread.
        stack: bytes of a thread.
        products: instructions of products, each of which adds to the one before it.
        operands: inputs of a product, their dtype, how many lie together in a thread, and the
            version of the matrix units: version 2 has one warp add up all inputs of an output.
        sums: of each sum of floats its length, and how registers, lanes and warps share it.
        fuses: whether products and sums may be fused, and whether pairs are computed together.
    """

    name: str
    shared: int
    registers: int
    stack: int
    products: tuple[str, ...]
    operands: tuple[tuple[str, ...], ...]
    sums: tuple[tuple[str, ...], ...]
    fuses: tuple[bool, bool]


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
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Compiled]:
    """Whatever is launched from now on: it is compiled, and not run."""
    found, programs = list[Compiled](), dict[str, Compiled]()
    run = JITFunction.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in programs:
            programs[kernel.hash] = measured(kernel, tmp_path / "kernel.cubin")
        found.append(programs[kernel.hash])
        return kernel

    monkeypatch.setattr(JITFunction, "run", compiled)
    return found


def measured(kernel: Any, path: Path) -> Compiled:
    """As the machine code has it, and the code that it was made of."""
    path.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    told = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True)
    numbers = dict(re.findall(r"(REG|STACK):(\d+)", told.stdout))
    spilled, registers = int(numbers["STACK"]), int(numbers["REG"])
    tiles, code = kernel.asm["ttgir"], kernel.asm["ptx"]
    layouts = dict(re.findall(r"^(#\w+) = (#ttg.*)$", tiles, re.MULTILINE))
    products = {*re.findall(r"\b(?:mma\.sync|wgmma\.mma|tcgen05\.mma)\S*", code)}
    fuses = bool(re.search(r"\bmul\.f32", code)), ".f32x2" in code
    return Compiled(
        *(kernel.name, kernel.metadata.shared, registers, spilled, tuple(sorted(products))),
        *(operands_of(tiles, layouts), sums_of(tiles, layouts), fuses),
    )


def operands_of(tiles: str, layouts: dict[str, str]) -> tuple[tuple[str, ...], ...]:
    found = set()
    pattern = r"tt\.dot .*?: tensor<\d+x(\d+)x(\w+), #ttg.dot_op<{.*?parent = (#\w+)(.*?)}>>"
    for inputs, dtype, parent, width in re.findall(pattern, tiles):
        (version,) = re.findall(r"versionMajor = (\d)|blocked", layouts[parent])
        found.add((inputs, dtype, width, version))
    return tuple(sorted(found))


def sums_of(tiles: str, layouts: dict[str, str]) -> tuple[tuple[str, ...], ...]:
    found = []
    pattern = r'"tt\.reduce"\(%\w+\) <\{axis = (\d).*?\}\) : \(tensor<([\dx]+)xf32, (.*?)>\) ->'
    for axis, shape, name in re.findall(pattern, tiles, re.DOTALL):
        place, layout = int(axis), layouts.get(name, name)
        found.append((shape.split("x")[place], *along(layout, place)))
    return tuple(found)


def along(layout: str, axis: int) -> list[str]:
    """The part of a layout that deals out this axis."""
    if "blocked" in layout:
        dealt = re.findall(r"(?:sizePerThread|threadsPerWarp|warpsPerCTA) = \[(.*?)\]", layout)
        return [numbers.split(", ")[axis] for numbers in dealt]
    if "linear" not in layout:
        return [layout]
    strides = re.findall(r"(?:register|lane|warp) = (\[.*?\])(?=, \w+ =|\})", layout)
    return [str([one[axis] for one in json.loads(each) if one[axis]]) for each in strides]


def check(launched: list[Compiled], capability: int) -> None:
    assert launched
    for each in sorted({*launched}):
        print(f"sm_{capability} {each[:4]}")  # noqa: T201
        assert each.shared <= SHARED[capability] << 10, each
        assert each.registers <= 255, each
        if (
            each.name in PRODUCTS or each.name == "_attend_kernel"
        ):  # rows would differ by their place
            assert not all(each.fuses), each
    assert max(each.stack for each in launched) <= MOST_SPILLED


def order(launched: list[Compiled]) -> list[tuple[object, ...]]:
    """What decides in which order the programs add up."""
    return [(each.name, each.products, each.operands, each.sums) for each in launched]


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
    name: str, form: Form | None, capability: int, launched: list[Compiled]
) -> None:
    config = replace(random_config(name), num_hidden_layers=1)
    if config.experts:  # 64 are dealt out in another way in a tile of eight tokens
        config = replace(config, experts=replace(config.experts, count=64))
    weights = in_form(random_weights(config, torch.bfloat16, META), form)
    orders = list[list[tuple[object, ...]]]()
    for tokens, is_chain in ((8, True), (16, True), (16, False), (32, True), (256, True)):
        launched.clear()
        run_step(config, weights, tokens, is_chain)
        check(launched, capability)
        orders.append(order(launched))
    for other in orders:
        assert other == orders[0]
    products = {each.products for each in launched if each.name in PRODUCTS}
    assert products == {("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",)}


@pytest.mark.slow
def test_large_heads_fit_each_card(capability: int, launched: list[Compiled]) -> None:
    config = replace(random_config("llama-8b"), num_hidden_layers=1, hidden_size=2048)
    for size, cap in ((80, None), (256, 50.0)):
        ropes = tuple(replace(rope, size=size) for rope in config.ropes)
        sized = replace(config, head_dim=size, ropes=ropes, attention_cap=cap)
        run_step(sized, random_weights(sized, torch.bfloat16, META), 16, True)
    check(launched, capability)


@pytest.mark.slow
def test_draws_fit_each_card(capability: int, launched: list[Compiled]) -> None:
    for vocab, has_cuts in product((49_152, 151_936), (False, True)):
        logits_NV = torch.empty(4, vocab, device=META)
        numbers, names_V = (
            torch.empty(count, dtype=torch.int64, device=META) for count in (24, vocab)
        )
        sums_NV = torch.empty(4, vocab, dtype=torch.float64, device=META)
        device_draws.drawn(logits_NV, numbers, has_cuts)
        device_draws.drafted(logits_NV, numbers, names_V, sums_NV, has_cuts)
        device_draws.listed(sums_NV, names_V, 16)
    check(launched, capability)


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
