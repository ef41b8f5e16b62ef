"""What steps cost on a GPU, and whether their bits depend on company: `make gpu`.

Made-up weights of well-known shapes; timings read nothing else. Results are written after each
size, so that a run that is cut off leaves what it has. Four calls, the most valuable first, fit a
quarter of an hour of a card together.

    python -m benchmarks.gpu --out gpu-1.json --call 1
    python -m benchmarks.gpu --out gpu.json --parts floor,steps,bits --minutes 4
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_run import Results, Run
from benchmarks.gpu_tests import tests
from benchmarks.gpu_texts import draws, rounds, scripted, texts
from benchmarks.one_kernel.step import CompiledStep, Phase, Step, StepDecoder
from benchmarks.random_model import random_config, random_weights
from foredraft.core.tree import TokenTree
from foredraft.engine.scheduler import MAX_STEP_TOKENS
from foredraft.models.base import ScoreRow
from foredraft.models.native.cuda import PagedDecoder, exact_decoder
from foredraft.models.native.model import DecoderFactory, EagerDecoder
from foredraft.models.native.quant import (
    CENTRED4,
    INT4,
    INT8,
    NESTED4,
    NESTED6,
)
from foredraft.models.native.target import NativeTarget

_DECODERS: dict[str, DecoderFactory] = {
    "paged": PagedDecoder,
    "exact": exact_decoder,
    "step": StepDecoder,
    "torch": EagerDecoder,
}
_MODELS = {"135m": "smollm2-135m", "1b": "llama-1b", "8b": "llama-8b"}
_CONTEXTS = (256, 2048, 8000)
_TOKENS = (1, 2, 4, 8, 16, 32)
_DRAFTERS = "none,suffix,hidden_head,self_draft,auto"
_CALLS = {
    "1": ("exact,product_bits", 3.0),
    "2": ("tests", 3.0),
    "3": ("floor,draws,steps", 2.5),
    "4": ("rounds,drafters,bits,profile", 2.0),
}
"""Parts and minutes, beside which a card's start and four of Python take some three."""


def main() -> None:
    asked = _arguments()
    device = torch.device(asked.device)
    results: Results = {"command": asked.label, "torch": torch.__version__, "parts": {}}
    if device.type == "cuda":
        results["card"] = torch.cuda.get_device_name(device)
    deadline = time.monotonic() + 60 * asked.minutes
    with torch.no_grad():
        for name in asked.parts.split(","):
            started, found = time.monotonic(), results["parts"].setdefault(name, {})

            def save() -> None:
                written = Path(f"{asked.out}.part")
                written.write_text(json.dumps(results, indent=1))
                written.replace(asked.out)

            try:
                _PARTS[name](Run(asked, device, found, deadline, save))
            except Exception as error:
                found["error"] = f"{type(error).__name__}: {error}"[:2000]
                import traceback

                traceback.print_exc()
            found["seconds"] = round(time.monotonic() - started, 1)
            save()
            _empty(device)
            _say(f"== {name}: {found['seconds']} s")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--call", choices=_CALLS, default="1", help="names parts and minutes")
    parser.add_argument("--parts", help="instead of those of the call")
    parser.add_argument("--models", default="135m,1b,8b")
    parser.add_argument("--contexts", default=",".join(map(str, _CONTEXTS)))
    parser.add_argument("--tokens", default=",".join(map(str, _TOKENS)))
    parser.add_argument("--minutes", type=float, help="no part begins a size later")
    parser.add_argument("--length", type=int, default=128, help="tokens of a text")
    parser.add_argument("--shard", default="0/1")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--label", default="make gpu")
    parser.add_argument("--checkpoint", default="smollm2-135m-instruct", help="of texts")
    parser.add_argument("--prompts", default="specbench.jsonl", help="of texts")
    parser.add_argument("--drafters", default=_DRAFTERS, help="of texts")
    parser.add_argument("--temperatures", default="0.0,1.0", help="of texts")
    parser.add_argument("--ids", default="", help="file of texts, {temperature} in its name")
    parser.add_argument("--head-rounds", default="rounds.json", help="see benchmarks.head_rounds")
    parser.add_argument("--weights", default="auto", help="of texts, see LoadOptions")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--trace", action="store_true", help="of packed_steps, by kernel")
    parser.add_argument("--forms", default=",".join(_FORMS), help="of weights in few bits")
    asked = parser.parse_args()
    parts, minutes = _CALLS[asked.call]
    asked.parts, asked.minutes = asked.parts or parts, asked.minutes or minutes
    return asked


# ------------------------------------------------------------------------------------------ floors


def floor(run: Run) -> None:
    """Bytes a second of a large copy and of a large read, and what a node of a graph costs."""
    size = 1 << (30 if run.device.type == "cuda" else 20)
    source = torch.empty(size, dtype=torch.bfloat16, device=run.device).normal_()
    target = torch.empty_like(source)
    seconds = _seconds(lambda: target.copy_(source), run.device, run.asked.rounds)
    run.found["copy_tb_s"] = 4 * size / seconds / 1e12
    _say(f"copy {run.found['copy_tb_s']:.2f} TB/s")
    seconds = _seconds(source.sum, run.device, run.asked.rounds)
    run.found["read_tb_s"] = 2 * size / seconds / 1e12
    _say(f"read {run.found['read_tb_s']:.2f} TB/s")
    one = torch.zeros(16, device=run.device)
    for count in (50, 150, 300):
        replay = _recorded(lambda n=count: [one.add_(1.0) for _ in range(n)], run.device)  # type: ignore[misc]
        seconds = _seconds(replay, run.device, run.asked.rounds)
        run.found[f"graph_of_{count}_us_a_node"] = 1e6 * seconds / count
        _say(f"graph of {count}: {1e6 * seconds / count:.2f} us a node")
    run.save()


# ------------------------------------------------------------------------------------------- steps


def steps(run: Run) -> None:
    """Milliseconds of a step by shape, context and tokens; of the device, of the host, of both."""
    for model in run.asked.models.split(","):
        target = new_target(model, run.device)
        weights = target.weights
        read = weights.num_bytes
        if weights.head_VE is not weights.embedding_VE:
            read -= weights.embedding_VE.numel() * weights.dtype.itemsize  # type: ignore[union-attr]
        rows = run.found.setdefault(model, {"read_bytes": read, "steps": []})
        for context in map(int, run.asked.contexts.split(",")):
            slot = _filled(target, context)
            for tokens in map(int, run.asked.tokens.split(",")):
                if run.is_over:
                    return
                for branches in (False, True) if tokens > 2 else (False,):
                    step = _step(target, slot, tokens, run.asked, branches)
                    row = {"context": context, "tokens": tokens, "branches": branches, **step}
                    rows["steps"].append(row)
                    _say(model, row)
            target.cache.free(slot)
            run.save()
        del target
        _empty(run.device)


def _step(
    target: NativeTarget,
    slot: int,
    tokens: int,
    asked: argparse.Namespace,
    branches: bool = False,
) -> Results:
    """With ``branches`` each second token is a sibling of the one before it."""
    device = target.weights.device
    tree = TokenTree.chain([7 + i for i in range(tokens - 1)])
    if branches:
        tree = TokenTree(
            tree.tokens, tuple(2 * (i // 2) - 2 if i > 1 else -1 for i in range(tokens - 1))
        )
    row = ScoreRow(slot, [5], tree)
    target.score([row])[0].logits_NV.argmax(-1).tolist()
    both, host = [], []
    for _ in range(asked.rounds):
        _wait(device)
        begun = time.perf_counter()
        scores = target.score([row])
        issued = time.perf_counter()
        scores[0].logits_NV.argmax(-1).tolist()
        both.append(time.perf_counter() - begun)
        host.append(issued - begun)
    step = {"step_ms": 1e3 * statistics.median(both), "host_ms": 1e3 * statistics.median(host)}
    graphs = getattr(target.decoder, "_graphs", None)
    if graphs:
        replay = next(reversed(graphs.values())).replay
        step["device_ms"] = 1e3 * _seconds(replay, device, asked.rounds)
    return {name: round(value, 4) for name, value in step.items()}


# -------------------------------------------------------------------------------------------- bits


def bits(run: Run) -> None:
    """Whether the logits of a text are the same, token by token and in chains of 2 to 16."""
    for model in run.asked.models.split(","):
        target = new_target(model, run.device)
        text = torch.randint(5, 1000, (49,), generator=torch.Generator().manual_seed(1)).tolist()
        for context in (250, 2040):
            alone = _chained(target, context, text, 1)
            equal = {}
            for size in range(2, 17):
                if run.is_over:
                    return
                together = _chained(target, context, text, size)
                equal[size] = int((alone == together).all(-1).sum())
            run.found.setdefault(model, {})[context] = {"rows": len(alone), "equal": equal}
            _say(model, context, run.found[model][context])
            run.save()
        del target
        _empty(run.device)


def _chained(target: NativeTarget, context: int, text: list[int], size: int) -> Tensor:
    """Logits [tokens, V] behind each token, scored in chains of ``size``."""
    slot, found = _filled(target, context), []
    for first in range(0, len(text) - 1, size):
        part = text[first : min(first + size, len(text) - 1)]
        row = ScoreRow(slot, part[:1], TokenTree.chain(part[1:]))
        found.append(target.score([row])[0].logits_NV.cpu())
        target.cache.keep(slot, 1, range(len(part) - 1))
    target.cache.free(slot)
    return torch.cat(found)


# ------------------------------------------------------------------------------------------- exact

_PROMPTS = (64, 512, 2048)
_CUTS = ((600,), (64,) * 9 + (24,), (256, 300, 44), (570, *(1,) * 30), (300, *(7,) * 42, 6))


def exact(run: Run) -> None:
    """Milliseconds of prompts and steps with exact bits and without, and whether bits are equal.

    Exact bits can be the default where prompts and steps cost no more.
    """
    for model in run.asked.models.split(","):
        rows = run.found.setdefault(model, {})
        for name in ("exact", "paged"):
            target = new_target(model, run.device, _DECODERS[name])
            found = rows.setdefault(name, {"prompt_ms": {}, "steps": []})
            for length in _PROMPTS:
                if run.is_over:
                    return
                found["prompt_ms"][length] = _prompt_ms(target, length, run)
                run.save()
            for context in (256, 2048):
                slot = _filled(target, context)
                for tokens in (1, 5, 16):
                    step = _step(target, slot, tokens, run.asked)
                    found["steps"].append({"context": context, "tokens": tokens, **step})
                target.cache.free(slot)
                run.save()
            if name == "exact":
                read = [_last_logits(target, cut) for cut in _CUTS]
                found["equal_bits"] = [bool((read[0] == other).all()) for other in read]
                run.save()
            _say(model, name, found)
            del target
            _empty(run.device)


def _prompt_ms(target: NativeTarget, length: int, run: Run) -> float:
    """The median of whole prompts, read as the engine does, until the next token is there."""
    times, cut = [], [min(MAX_STEP_TOKENS, length)] * max(1, length // MAX_STEP_TOKENS)
    for _ in range(2 + run.asked.rounds // 2):
        _wait(run.device)
        begun = time.perf_counter()
        _last_logits(target, cut).argmax().item()
        times.append(1e3 * (time.perf_counter() - begun))
    return round(statistics.median(times[2:]), 4)


def _last_logits(target: NativeTarget, cut: Sequence[int]) -> Tensor:
    """Logits [V] behind a text that is read in these pieces."""
    slot, start = target.cache.allocate(), 0
    for size in cut:
        tokens = [5 + 37 * i % 900 for i in range(start, start + size)]
        start += size
        row = ScoreRow(slot, tokens, wants_logits=start == sum(cut))
        logits_NV = target.score([row])[0].logits_NV
        target.cache.keep(slot, size, ())
    target.cache.free(slot)
    return logits_NV[-1]


# ----------------------------------------------------------------------------------------- profile


def profile(run: Run) -> None:
    """Microseconds of a step by kernel."""
    for model in run.asked.models.split(","):
        target = new_target(model, run.device)
        _trace(target, model, run.device, run.found)
        run.save()
        if run.is_over:
            return
        del target
        _empty(run.device)


def _trace(target: NativeTarget, label: str, device: torch.device, found: Results) -> None:
    slot = _filled(target, 2048)
    for tokens in (1, 16):
        row = ScoreRow(slot, [5], TokenTree.chain([7 + i for i in range(tokens - 1)]))
        target.score([row])
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as trace:
            for _ in range(3):
                target.score([row])
            _wait(device)
        attribute = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
        kernels = sorted(trace.key_averages(), key=lambda k: -getattr(k, attribute))[:14]
        found[f"{label}_{tokens}"] = [
            {
                "name": k.key[:90],
                "us": round(getattr(k, attribute) / 3, 1),
                "count": k.count / 3,
            }
            for k in kernels
        ]
        _say(label, tokens)
        for kernel in found[f"{label}_{tokens}"]:
            _say("  ", kernel["us"], kernel["count"], kernel["name"][:70])


# ------------------------------------------------------------------------------------------ phases


def phases(run: Run) -> None:
    """Cycles of the one kernel of a step, by kind of phase: reading inputs, working, waiting."""
    kept, uses_words, compiled = list[int](), [True], list[CompiledStep]()
    trace = torch.zeros(1 << 20, dtype=torch.int64, device=run.device)

    def launch(step: Step) -> None:
        step.trace = trace.data_ptr()
        step.word_limit *= uses_words[0]
        kept[:] = [step.num_phases]
        compiled[0](step)

    blocks = torch.cuda.get_device_properties(run.device).multi_processor_count
    for model in run.asked.models.split(","):
        compiled[:] = [CompiledStep(run.device, random_config(_MODELS.get(model, model)))]
        for uses_words[0] in (True, False):
            target = new_target(model, run.device, lambda c, w: StepDecoder(c, w, launch))
            for context in map(int, run.asked.contexts.split(",")):
                slot = _filled(target, context)
                for tokens in (1, 16):
                    if run.is_over:
                        return
                    row = ScoreRow(slot, [5], TokenTree.chain([7 + i for i in range(tokens - 1)]))
                    trace.zero_()
                    for _ in range(3):
                        target.score([row])
                    _wait(run.device)
                    stamps = trace[: blocks * kept[0] * 3].view(blocks, kept[0], 3).cpu()
                    name = f"{model} {context} {tokens} {'words' if uses_words[0] else 'barriers'}"
                    rows = run.found.setdefault(name, _by_kind(stamps))
                    _say(name)
                    for kind, row_ in rows.items():
                        _say("  ", kind, row_)
                target.cache.free(slot)
                run.save()
            del target
            _empty(run.device)


def _by_kind(stamps_BP3: Tensor) -> dict[str, dict[str, list[int]]]:
    """Least, median and most cycles, of all layers but the first and last; the head's alone."""
    begun, read, done = stamps_BP3.clone().unbind(-1)
    for i in (done[0] == 0).nonzero().flatten().tolist():  # joined at once
        begun[:, i] = done[:, i] = begun[:, i + 1]
    waits = torch.cat((begun[:, 1:] - done[:, :-1], torch.zeros_like(begun[:, :1])), 1)
    count, found = stamps_BP3.shape[1] - 1, {}
    names = ("qkv", "attention", "join", "output", "gate_up", "down")

    def spread(x: Tensor) -> list[int]:
        x = x.flatten()[x.flatten() > 0].float()
        return [int(x.quantile(q)) for q in (0.0, 0.5, 1.0)] if len(x) else []

    for i, name in enumerate(names):
        at = slice(6 + i, count - 6, 6)
        begins = waits[:, at]
        found[name] = {
            "inputs": spread((read - begun)[:, at]) if name not in ("attention", "join") else [],
            "all": spread((done - begun)[:, at]),
            "wait": spread(begins),
        }
    found["head"] = {"inputs": spread((read - begun)[:, -1]), "all": spread((done - begun)[:, -1])}
    found["step"] = {"all": spread(done[:, -1] - begun[:, 0])}
    return found


# ---------------------------------------------------------------------------------------- products

_TILES = [
    {"TILE_M": m, "TILE_K": k, "num_stages": stages, "num_warps": warps}
    for m, k, stages, warps in (
        *((16, 64, 8, 4), (16, 128, 6, 4), (16, 256, 4, 4), (16, 512, 3, 8), (16, 256, 6, 4)),
        *((32, 64, 8, 4), (32, 128, 6, 4), (32, 256, 3, 4), (32, 256, 4, 8), (32, 128, 4, 8)),
        *((64, 64, 6, 4), (64, 64, 8, 4), (64, 128, 5, 8)),
    )
]


def _run_product(x: Tensor, weight: Tensor, kind: str, tile: dict[str, int] | None) -> Tensor:
    from foredraft.models.native.triton_ops import Norm, linear

    if kind == "library":
        return torch.nn.functional.linear(x, weight)
    if kind == "residual":
        residual = x.new_zeros((len(x), len(weight)))
        return linear(x, weight, residual_NM=residual, tiles=tile)
    dtype = torch.float32 if kind == "head" else None
    activation = "silu" if kind == "gated" else None
    norm = Norm(weight[0], 1e-5)
    return linear(x, weight, norm=norm, activation=activation, dtype=dtype, tiles=tile)


def _product_shapes(model: str) -> dict[str, tuple[int, int, str]]:
    config = random_config(_MODELS.get(model, model))
    hidden, inner = config.hidden_size, config.intermediate_size
    query = config.num_attention_heads * config.head_dim
    key_value = 2 * config.num_key_value_heads * config.head_dim
    return {
        "qkv": (query + key_value, hidden, "norm"),
        "output": (hidden, query, "residual"),
        "gate_up": (2 * inner, hidden, "gated"),
        "down": (hidden, inner, "residual"),
        "head": (config.vocab_size, hidden, "head"),
    }


def compile_all(run: Run) -> None:
    """Compile what `products` and `attention` time; ``--shard 2/12`` is a part of it."""
    shard, count = map(int, run.asked.shard.split("/"))
    products_ = [
        (shape, tile)
        for model in run.asked.models.split(",")
        for shape in _product_shapes(model).values()
        for tile in _TILES
    ]
    for (outputs, inputs, kind), tile in products_[shard::count]:
        weight = torch.ones(outputs, inputs, device=run.device, dtype=torch.bfloat16)
        x = torch.ones(2, inputs, device=run.device, dtype=torch.bfloat16)
        try:
            _run_product(x, weight, kind, tile)
        except Exception as error:
            _say(kind, tile, str(error)[:80])
    for model in run.asked.models.split(","):
        for size in _sizes()[shard::count]:
            try:
                _attention_work(model, 256, 2, size, run.device)()
            except Exception as error:
                _say(size, str(error)[:80])


def products(run: Run) -> None:
    """Microseconds of each product of a layer, tile by tile, beside those of the library."""
    for model in run.asked.models.split(","):
        for name, (outputs, inputs, kind) in _product_shapes(model).items():
            if run.is_over:
                return
            copies = max(1, min(16, (200 << 20) // (2 * outputs * inputs)))
            weights = [
                torch.empty(outputs, inputs, device=run.device, dtype=torch.bfloat16).normal_(
                    0, 0.02
                )
                for _ in range(copies)
            ]
            times: dict[str, list[float]] = {}
            for tile in (None, *_TILES):
                label = "library" if tile is None else "x".join(map(str, tile.values()))
                for tokens in (1, 16):
                    x = torch.randn(tokens, inputs, device=run.device, dtype=torch.bfloat16)
                    how = "library" if tile is None else kind

                    def work(
                        x: Tensor = x,
                        how: str = how,
                        tile: dict[str, int] | None = tile,
                        weights: list[Tensor] = weights,
                    ) -> None:
                        for weight in weights:
                            _run_product(x, weight, how, tile)

                    times.setdefault(label, []).append(_microseconds(work, run.device, copies))
            best = sorted((t for t in times.items() if min(t[1]) > 0), key=lambda t: sum(t[1]))
            gb = 2 * outputs * inputs / 1e9
            run.found.setdefault(model, {})[name] = {"gigabytes": gb, "us": times}
            _say(model, name, f"{gb:.4f} GB", "library", times["library"], best[:4])
            run.save()


def product_bits(run: Run) -> None:
    """Rows of random numbers whose products are the same alone and among 2 to 64."""
    for model in run.asked.models.split(","):
        for name, (outputs, inputs, kind) in _product_shapes(model).items():
            weight = torch.empty(outputs, inputs, device=run.device, dtype=torch.bfloat16)
            weight.normal_(0, 0.02)
            for how in (kind, "library"):
                rows = equal = 0
                for size in (*range(2, 17), 17, 32, 64):  # from 17 on a tile has 32 tokens
                    for _ in range(run.asked.rounds // 4):
                        x = torch.randn(size, inputs, device=run.device, dtype=torch.bfloat16)
                        together = _run_product(x, weight, how, None)
                        alone = [_run_product(row[None], weight, how, None) for row in x]
                        rows += size
                        equal += int((together == torch.cat(alone)).all(-1).sum())
                run.found.setdefault(model, {})[f"{name} {how}"] = {"rows": rows, "equal": equal}
                _say(model, name, how, equal, "of", rows)
                if run.is_over:
                    return
            run.save()


def step_bits(run: Run) -> None:
    """As `product_bits`, of the products in the one kernel of a step: 135 rows of each batch."""
    launch = CompiledStep(run.device, None)
    for model in run.asked.models.split(","):
        for name, (outputs, inputs, kind) in _product_shapes(model).items():
            weight = torch.empty(outputs, inputs, device=run.device, dtype=torch.bfloat16)
            product = _StepProduct(weight.normal_(0, 0.02), kind, launch)
            rows = equal = 0
            for _ in range(run.asked.rounds):
                product.x.normal_()
                alone = torch.cat([product.run(i, 1) for i in range(16)])
                for size in range(2, 17):
                    rows += size
                    equal += int((product.run(0, size) == alone[:size]).all(-1).sum())
            run.found.setdefault(model, {})[name] = {"rows": rows, "equal": equal}
            _say(model, name, equal, "of", rows)
            run.save()
            if run.is_over:
                return


class _StepProduct:
    """A step of one product of 16 rows."""

    def __init__(self, weight: Tensor, kind: str, launch: Any) -> None:
        self._launch = launch
        outputs = len(weight) // (2 if kind == "gated" else 1)
        flags = {"norm": 1, "gated": 3, "head": 9, "residual": 0}[kind]
        self.x = torch.empty(16, weight.shape[1], device=weight.device, dtype=weight.dtype)
        dtype = torch.float32 if kind == "head" else weight.dtype
        self._out = torch.zeros(16, outputs, device=weight.device, dtype=dtype)
        self._residual = torch.randn(16, outputs, device=weight.device).to(weight.dtype)
        self._zeros = torch.zeros(512, device=weight.device, dtype=torch.int64)
        self._lengths = torch.ones(16, 16, device=weight.device, dtype=torch.int64).tril()
        self._weight, self._is_added = weight, kind == "residual"
        self._phase = Phase(
            *(0, flags, weight.data_ptr(), 0, weight.data_ptr() if flags & 1 else 0),
            outputs=outputs,
            inputs=weight.shape[1],
            number=1,
        )

    def run(self, first: int, count: int) -> Tensor:
        """Of these rows of x alone."""
        self._phase.x, self._phase.out = self.x[first].data_ptr(), self._out[first].data_ptr()
        if self._is_added:
            self._phase.residual = self._residual[first].data_ptr()
        numbers = torch.frombuffer(bytearray(bytes(self._phase)), dtype=torch.int64)
        phases, zeros = numbers.to(self.x.device), self._zeros.data_ptr()
        step = Step(
            phases=phases.data_ptr(),
            lengths=self._lengths[count - 1].data_ptr(),
            **dict.fromkeys(("blocks", "offsets", "starts", "paths", "table", "counters"), zeros),
            num_phases=1,
            **dict.fromkeys(("num_query", "num_kv", "is_chain", "num_stretches"), 1),
            **dict.fromkeys(("head", "block", "rotated"), 64),
            row_tokens=16,
            most_inputs=self.x.shape[1],
            shared_bytes=227 << 10,
            eps=1e-5,
            residual_scale=1.0,
        )
        self._launch(step)
        return self._out[first : first + count].clone()


# --------------------------------------------------------------------------------------- attention


def _sizes() -> list[Any]:
    from foredraft.models.native.triton_ops import AttentionSizes

    return [
        AttentionSizes(*numbers)
        for numbers in (
            *((64, 128, 128, 4, 1), (64, 128, 128, 4, 2), (64, 128, 128, 8, 1), (64, 64, 64, 4, 1)),
            *((64, 128, 256, 4, 1), (64, 64, 128, 4, 2), (64, 128, 256, 8, 2), (16, 64, 128, 4, 2)),
        )
    ]


def _attention_work(
    model: str, context: int, tokens: int, size: Any, device: torch.device
) -> Callable[[], Tensor]:
    from foredraft.models.native.triton_ops import attend

    config = random_config(_MODELS.get(model, model))
    blocks, rows = -(-(context + tokens) // 64), -(-tokens // 16)
    shape = (blocks + 1, 8, config.num_key_value_heads, 64, config.head_dim)
    store = [torch.empty(shape, device=device, dtype=torch.bfloat16).normal_() for _ in range(2)]
    own = torch.arange(tokens // rows, device=device)
    arguments = (
        torch.arange(blocks, device=device).repeat(rows, 1),
        (context + 1 + own).repeat(rows),
        torch.tensor([context] * rows, device=device),
        own.repeat(tokens, 1),
    )
    heads = config.num_attention_heads
    query = torch.empty(tokens, heads, config.head_dim, device=device, dtype=torch.bfloat16)
    query.normal_()

    def work() -> Tensor:
        for layer in range(8):
            found = attend(
                *(query, (store[0], store[1]), layer, *arguments),
                context=context + tokens,
                is_chain=True,
                scale=config.head_dim**-0.5,
                sizes=size,
            )
        return found

    return work


def attention(run: Run) -> None:
    """Microseconds of a layer's attention, by sizes."""
    for model in run.asked.models.split(","):
        for context in (250, 2040, 8000):
            times: dict[str, list[float]] = {}
            for size in _sizes():
                if run.is_over:
                    return
                for tokens in (1, 16):
                    work = _attention_work(model, context, tokens, size, run.device)
                    label = "x".join(map(str, size))
                    times.setdefault(label, []).append(_microseconds(work, run.device, 8))
            run.found.setdefault(model, {})[context] = times
            best = sorted((t for t in times.items() if min(t[1]) > 0), key=lambda t: sum(t[1]))
            _say(model, context, best)
            run.save()


def _microseconds(work: Callable[[], object], device: torch.device, count: int) -> float:
    """Of one of ``count``, in a graph; -1 where it cannot run."""
    try:
        return round(1e6 * _seconds(_recorded(work, device), device, 5) / count, 2)
    except Exception as error:
        _say(type(error).__name__, str(error)[:80])
        return -1.0


# ------------------------------------------------------------------------------ weights in few bits

_FORMS = {
    "int4": INT4,
    "q4_k": NESTED4,
    "q6_k": NESTED6,
    "int8": INT8,
    "q4_0": CENTRED4,
}
_PACKED_TILES = [
    {"TILE_M": m, "num_warps": warps, "STAGES": stages}
    for m, warps, stages in ((64, 2, 2), (64, 2, 3), (32, 2, 3))
]


def _packed_matrix(rows: int, columns: int, form: str, device: torch.device) -> Any:
    """Any numbers, laid out for the card."""
    from foredraft.models.native.triton_packed import CardMatrix

    card = CardMatrix.empty(_FORMS[form], rows, columns, device)
    card.packed_GCN.random_(-32768, 32768)
    scales = card.scales.view(torch.float16)
    scales.uniform_(1e-3, 2e-3)
    if card.minima is not None:
        card.minima.copy_(-7.5 * 1.5e-3 * torch.ones_like(card.minima))
    return card


def _packed_work(
    matrices: list[Any], x: Tensor, kind: str, tiles: dict[str, int] | None
) -> Callable[[], None]:
    from foredraft.models.native.triton_packed import num_groups, prepared, product

    _, sums = prepared(x, None, num_groups(matrices[0]))
    is_added = kind in ("norm", "residual")
    residual = x.new_zeros((len(x), matrices[0].shape[0]))

    def work() -> None:
        for matrix in matrices:
            product(
                *(x, matrix),
                sums=sums,
                residual_NM=residual if is_added else None,
                activation="silu" if kind == "gated" else None,
                dtype=torch.float32 if kind == "head" else None,
                tiles=tiles,
            )

    return work


def packed_compile(run: Run) -> None:
    """Compile what `packed_products` times; ``--shard 2/12`` is a part of it."""
    shard, count = map(int, run.asked.shard.split("/"))
    wanted = [
        (form, kind, tiles, splits, tokens)
        for tiles in _PACKED_TILES
        for form in run.asked.forms.split(",")
        for kind, splits in (("gated", 1), ("gated", 2), ("residual", 2), ("head", 1))
        for tokens in (1, 16)
    ]
    for form, kind, tiles, splits, tokens in wanted[shard::count]:
        x = torch.ones(tokens, 4096, device=run.device, dtype=torch.bfloat16)
        try:
            matrix = _packed_matrix(1024, 4096, form, run.device)
            _packed_work([matrix], x, kind, {**tiles, "SPLITS": splits})()
        except Exception as error:
            _say(form, kind, tiles, str(error)[:200])


def packed_products(run: Run) -> None:
    """Microseconds of each product of a layer by form and tile; 1 and 16 tokens."""
    for model in run.asked.models.split(","):
        for name, (outputs, inputs, kind) in _product_shapes(model).items():
            for form in run.asked.forms.split(","):
                if run.is_over:
                    return
                first = _packed_matrix(outputs, inputs, form, run.device)
                num_bytes = sum(x.nbytes for x in first.tensors())
                more = max(0, min(15, (160 << 20) // num_bytes))
                matrices = [first] + [
                    _packed_matrix(outputs, inputs, form, run.device) for _ in range(more)
                ]
                times: dict[str, list[float]] = {}
                for tiles in _PACKED_TILES:
                    for splits in {"gated": (1, 2, 4), "head": (1,)}.get(kind, (2, 4, 8)):
                        label = "x".join(map(str, (*tiles.values(), splits)))
                        for tokens in (1, 16):
                            x = torch.randn(tokens, inputs, device=run.device, dtype=torch.bfloat16)
                            work = _packed_work(matrices, x, kind, {**tiles, "SPLITS": splits})
                            taken = _microseconds(work, run.device, len(matrices))
                            times.setdefault(label, []).append(taken)
                if form == "int4":
                    times["torch"] = [
                        _microseconds(*_torch_int4(outputs, inputs, tokens, run.device))
                        for tokens in (1, 16)
                    ]
                best = sorted((t for t in times.items() if min(t[1]) > 0), key=lambda t: sum(t[1]))
                row = {"gigabytes": num_bytes / 1e9, "us": times}
                run.found.setdefault(model, {}).setdefault(name, {})[form] = row
                floor_us = num_bytes / 4.2e6
                _say(model, name, form, f"{num_bytes / 1e6:.1f} MB, floor {floor_us:.1f}", best[:3])
                run.save()


def _torch_int4(
    outputs: int, inputs: int, tokens: int, device: torch.device
) -> tuple[Callable[[], None], torch.device, int]:
    """The product in 4 bits that torch has itself, of several matrices, for `_microseconds`."""
    x = torch.randn(tokens, inputs, device=device, dtype=torch.bfloat16)
    count = max(1, min(16, (160 << 20) // (outputs * inputs // 2)))
    packed = [
        torch._convert_weight_to_int4pack(
            torch.randint(0, 256, (outputs, inputs // 2), device=device, dtype=torch.uint8), 8
        )
        for _ in range(count)
    ]
    scales = torch.rand(inputs // 32, outputs, 2, device=device, dtype=torch.bfloat16)

    def work() -> None:
        for one in packed:
            torch._weight_int4pack_mm(x, one, 32, scales)

    return work, device, count


def _packed_target(model: str, form: str, device: torch.device) -> NativeTarget:
    """Made-up weights in few bits, a head of 8 bits."""
    config = random_config(_MODELS.get(model, model))
    outline = replace(config, num_hidden_layers=1, experts=None, vocab_size=64)
    like = random_weights(outline, torch.bfloat16, device)
    experts = config.experts.count if config.experts else 1
    hidden, inner = config.hidden_size, config.intermediate_size
    query = config.num_attention_heads * config.head_dim
    layer = like.layers[0]
    layers = [
        replace(
            layer,
            qkv_weight=_packed_matrix(len(layer.qkv_weight), hidden, form, device),  # type: ignore[arg-type]
            output_weight=_packed_matrix(hidden, query, form, device),
            gate_up_weight=_packed_matrix(experts * 2 * inner, hidden, form, device),
            down_weight=_packed_matrix(experts * hidden, inner, form, device),
            router_XE=(
                torch.randn(experts, hidden, device=device, dtype=torch.bfloat16) * 0.05
                if config.experts
                else None
            ),
        )
        for _ in range(config.num_hidden_layers)
    ]
    embedding = torch.empty(config.vocab_size, hidden, device=device, dtype=torch.bfloat16)
    weights = replace(
        like,
        embedding_VE=embedding.normal_(0.0, 0.02),
        layers=tuple(layers),
        head_VE=_packed_matrix(config.vocab_size, hidden, "int8", device),
    )
    memory = 8300 * config.kv_shape.bytes_per_token(torch.bfloat16) * 2
    return NativeTarget(config, weights, PagedDecoder, 8192, memory)


def packed_steps(run: Run) -> None:
    """Milliseconds of steps with weights in few bits, and the bytes that they read."""
    for model in run.asked.models.split(","):
        for form in run.asked.forms.split(","):
            if run.is_over:
                return
            target = _packed_target(model, form, run.device)
            weights = target.weights
            matrices = [weights.head_VE]
            for layer in weights.layers:
                matrices += [layer.qkv_weight, layer.output_weight]  # type: ignore[list-item]
                matrices += [layer.gate_up_weight, layer.down_weight]  # type: ignore[list-item]
            read = sum(x.nbytes for m in matrices for x in m.tensors())  # type: ignore[union-attr]
            rows = run.found.setdefault(model, {}).setdefault(
                form, {"read_bytes": read, "steps": []}
            )
            for context in map(int, run.asked.contexts.split(",")):
                slot = _filled(target, context)
                for tokens in map(int, run.asked.tokens.split(",")):
                    step = _step(target, slot, tokens, run.asked)
                    row = {"context": context, "tokens": tokens, **step}
                    rows["steps"].append(row)
                    _say(model, form, f"floor {read / 4.2e9:.3f} ms", row)
                    run.save()
                target.cache.free(slot)
            if run.asked.trace:
                _trace(target, f"{model}_{form}", run.device, run.found)
                run.save()
            del target
            _empty(run.device)


# ---------------------------------------------------------------------------------------- drafters


def drafters(run: Run) -> None:
    """Tokens a second of whole requests, with drafts and without, and whether texts are equal.

    Greedy texts of made-up weights soon repeat themselves, so acceptance says nothing of real ones.
    """
    from foredraft.core.params import SamplingParams
    from foredraft.llm import LLM
    from foredraft.options import LoadOptions

    for model in run.asked.models.split(","):
        target = new_target(model, run.device)
        prompt = torch.randint(5, 250, (200,), generator=torch.Generator().manual_seed(2)).tolist()
        for temperature in (0.0, 0.7):
            params = SamplingParams(max_tokens=run.asked.length, temperature=temperature, seed=5)
            texts, rates = {}, {}
            for name in ("none", "ngram", "suffix"):
                if run.is_over:
                    return
                llm = LLM(target, None, LoadOptions(drafter=name))
                llm.generate(prompt, params)
                _wait(run.device)
                begun = time.perf_counter()
                result = llm.generate(prompt, params)[0]
                rates[name] = round(len(result.token_ids) / (time.perf_counter() - begun), 1)
                texts[name] = result.token_ids
            equal = all(text == texts["none"] for text in texts.values())
            row = {"tokens_a_second": rates, "texts_equal": equal}
            run.found.setdefault(model, {})[f"temperature {temperature}"] = row
            _say(model, temperature, row)
            run.save()
        del target, llm
        _empty(run.device)


# ----------------------------------------------------------------------------------------- helpers


def _say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def new_target(
    model: str, device: torch.device, decoder: DecoderFactory | None = None
) -> NativeTarget:
    config = random_config(_MODELS.get(model, model))
    dtype = torch.bfloat16
    weights = random_weights(config, dtype, device)
    decoder = decoder or _DECODERS[os.environ.get("FOREDRAFT_GPU_DECODER", "paged")]
    memory = 8300 * config.kv_shape.bytes_per_token(dtype) * 2
    return NativeTarget(config, weights, decoder, 8192, memory)


def _filled(target: NativeTarget, context: int) -> int:
    """A slot with so many entries of random numbers."""
    slot, cache = target.cache.allocate(), target.cache
    cache.fill(slot, context - 1)
    store = cache.store
    generator = torch.Generator(store.device).manual_seed(3)
    for block in cache.table(slot):
        for part in (store.keys, store.values):
            part[block].normal_(0.0, 0.5, generator=generator)
    cache.reserve(slot, 64)
    return slot


def _recorded(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    if device.type != "cuda":
        return work
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph.replay


def _seconds(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Median of a few runs; on a GPU by its own clock, several runs in each."""
    work()
    _wait(device)
    found = []
    for _ in range(rounds):
        if device.type != "cuda":
            begun = time.perf_counter()
            work()
            found.append(time.perf_counter() - begun)
            continue
        begin, end = (torch.cuda.Event(True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(3):
            work()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 3e3)
    return statistics.median(found)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _empty(device: torch.device) -> None:
    gc.collect()  # a decoder and its recordings hold each other, and the weights
    if device.type == "cuda":
        torch.cuda.empty_cache()


_PARTS = {
    "exact": exact,
    "tests": tests,
    "floor": floor,
    "steps": steps,
    "bits": bits,
    "profile": profile,
    "phases": phases,
    "products": products,
    "compile": compile_all,
    "product_bits": product_bits,
    "step_bits": step_bits,
    "attention": attention,
    "drafters": drafters,
    "packed_compile": packed_compile,
    "packed_products": packed_products,
    "packed_steps": packed_steps,
    "draws": draws,
    "rounds": rounds,
    "scripted": scripted,
    "texts": texts,
}

if __name__ == "__main__":
    main()
