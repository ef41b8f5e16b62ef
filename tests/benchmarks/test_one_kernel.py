"""The kernel of a step computes what the eager decoder does, and company changes no bit.

It runs on a CPU, its threads one after another (`step_emulated.h`); on a GPU where there is one.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.one_kernel.step import (
    SOURCE,
    CompiledStep,
    Launch,
    Step,
    StepDecoder,
    why_not_step,
)
from foredraft.core.tree import EMPTY_TREE, TokenTree
from foredraft.models.base import ScoreRow
from foredraft.models.native.target import NativeTarget
from tests.models.checkpoints import NATIVE_CONFIGS, made, save_checkpoint, text
from tests.models.test_parity import TREE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HERE = Path(__file__).parent
TOLERANCE = 0.05
"""Of a norm: both round to bfloat16, at other places."""
LaunchBy = Callable[[int], Launch]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def launch_by(tmp_path_factory: pytest.TempPathFactory) -> LaunchBy:
    """A launch by so many blocks."""
    if DEVICE == "cuda":
        return lambda blocks: CompiledStep(torch.device(DEVICE), None, blocks=blocks)
    compiler = shutil.which("g++") or pytest.skip("no g++")
    path = tmp_path_factory.mktemp("step") / "step.so"
    flags = ("-std=c++17", "-O1", "-U_FORTIFY_SOURCE", "-ffp-contract=off", "-Wno-unknown-pragmas")
    sizes = ("-DSTEP_EMULATED", "-DCHUNK=128", "-DSEGMENT=64")
    command = [compiler, *flags, *sizes, f"-I{HERE}", "-shared", "-fPIC", "-x", "c++"]
    subprocess.run([*command, SOURCE, "-o", path], check=True)
    library = ctypes.CDLL(str(path))

    def emulated(blocks: int) -> Launch:
        def launch(step: Step) -> None:
            if blocks == 1:  # sums are joined in a phase, and results wait for the barrier
                step.join_limit = step.word_limit = 0
            assert library.run_emulated(ctypes.byref(step), blocks) == 0

        return launch

    return emulated


@pytest.fixture(
    scope="module",
    params=["llama", "llama-bias", "qwen2", "qwen3", "mistral-window", "phi3", "granite"],
)
def checkpoint(request: pytest.FixtureRequest) -> Path:
    return made(request.param)


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def _target(checkpoint: Path, launch: Launch) -> NativeTarget:
    def decoder(config, weights):  # type: ignore[no-untyped-def]
        assert why_not_step(config, weights) is None
        return StepDecoder(config, weights, launch)

    return NativeTarget.load(checkpoint, torch.bfloat16, DEVICE, new_decoder=decoder)


def test_steps_equal_the_eager_decoder(checkpoint: Path, launch_by: LaunchBy) -> None:
    eager = NativeTarget.load(checkpoint, torch.bfloat16, DEVICE)
    ours = _target(checkpoint, launch_by(3))
    for length in (20, 150):
        for target in (eager, ours):
            slot = target.cache.allocate()
            target.score([ScoreRow(slot, text(length))])
            target.cache.keep(slot, length, ())
        for tree in (EMPTY_TREE, TokenTree.chain((5, 6, 7)), TokenTree.chain(range(5, 19)), TREE):
            row = ScoreRow(slot, [11], tree)
            expected, actual = (t.score([row], taps=(1,))[0] for t in (eager, ours))
            assert _distance(actual.logits_NV, expected.logits_NV) < TOLERANCE
            assert _distance(actual.taps[1].float(), expected.taps[1].float()) < TOLERANCE
            for target in (eager, ours):
                target.cache.keep(slot, 1, tree.paths[-1][:2] if len(tree) else ())


def test_neither_company_nor_blocks_change_a_bit(checkpoint: Path, launch_by: LaunchBy) -> None:
    """Chains and a tree's paths against the same tokens one by one, by 1 block and by several."""
    tokens = text(16, seed=3)
    one, some = _target(checkpoint, launch_by(1)), _target(checkpoint, launch_by(5))
    for target in (one, some):
        slot = target.cache.allocate()
        target.score([ScoreRow(slot, text(125))])
        target.cache.keep(slot, 125, ())

    def alone(some_tokens: list[int]) -> torch.Tensor:
        found = []
        for token in some_tokens:
            found.append(one.score([ScoreRow(slot, [token])])[0].logits_NV)
            one.cache.keep(slot, 1, ())
        one.cache.truncate(slot, 125)
        return torch.cat(found)

    expected = alone(tokens)
    for size in (2, 7, 8, 9, 16):
        row = ScoreRow(slot, tokens[:1], TokenTree.chain(tokens[1:size]))
        assert torch.equal(some.score([row])[0].logits_NV, expected[:size]), size
    scored = some.score([ScoreRow(slot, [5], TREE)])[0].logits_NV
    for node, path in enumerate(TREE.paths):
        along = alone([5, *(TREE.tokens[i] for i in path)])
        assert torch.equal(scored[node + 1], along[-1]), node


@pytest.mark.parametrize(
    ("family", "dtype", "reason"),
    [
        ("llama", torch.float32, "weights of torch.float32"),
        ("gemma2", torch.bfloat16, "norms behind a product"),
        ("mixtral", torch.bfloat16, "mixtures of experts"),
        ("lfm2", torch.bfloat16, "recurrent layers"),
        ("mistral", torch.bfloat16, None),
    ],
)
def test_other_models_are_named(
    family: str, dtype: torch.dtype, reason: str | None, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, NATIVE_CONFIGS[family]())
    target = NativeTarget.load(tmp_path, dtype)
    assert why_not_step(target.config, target.weights) == reason
