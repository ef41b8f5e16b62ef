"""The wheel of `make wheel`: installed where no compiler is, it runs on kernels it brought."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from foredraft import LLM, SamplingParams
from foredraft.kernels.build import (
    LIBRARIES,
    SHIPPED,
    SWITCH,
    KernelUnavailable,
    find_compiler,
    shipped_prefix,
)
from foredraft.kernels.instructions import INSTRUCTION_SETS, choose
from tests.models.checkpoints import NATIVE_CONFIGS, save_checkpoint

ROOT = Path(__file__).resolve().parents[1]
PROMPT = "The ferry left the"
"""For a program and for this process."""


def make_wheel(folder: Path, **environment: str) -> Path:
    """Build it as `make wheel` does, but for the build's packages, which are installed here."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--quiet", "--wheel-dir", str(folder), str(ROOT)],
        env={**os.environ, "HATCH_BUILD_HOOK_ENABLE_CUSTOM": "true", **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """Python of a fresh environment with the wheel, which sees this one's other packages.

    A folder that a ``.pth`` file names is no place for ``.pth`` files: the foredraft that
    is installed here as editable is not found there.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (site_packages / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps"]
    subprocess.run([*command, "--no-index", "--quiet", str(wheel)], check=True)
    return python


_WRITES = """
import json, sys
sys.modules |= dict.fromkeys(['transformers', 'huggingface_hub'])  # as if they were not installed
import foredraft
from foredraft import LLM, SamplingParams
from foredraft.cli.main import main
from foredraft.kernels.build import describe_instructions
llm = LLM.load(sys.argv[1], dtype="float32", drafter="ngram")
[result] = llm.generate([sys.argv[2]], SamplingParams(max_tokens=24, temperature=1, seed=7))
print(json.dumps(describe_instructions() | {"text": result.text, "place": foredraft.__file__}))
sys.argv[1:] = ["demo", "--max-tokens", "16"]
main()
"""


@pytest.fixture(scope="module")
def compiled_here() -> None:
    """Skip where there are no kernels anyway."""
    if not sys.platform.startswith("linux") or os.environ.get(SWITCH) == "off":
        pytest.skip("wheels have kernels on Linux alone")
    try:
        find_compiler(os.environ)
    except KernelUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def python(compiled_here: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with the wheel for this machine."""
    folder = tmp_path_factory.mktemp("wheel")
    return install(make_wheel(folder, FOREDRAFT_WHEEL_HERE="1"), folder / "environment")


def run_without_compiler(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python where the path has nothing but its own environment's programs."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "CXX")}
    return subprocess.run(
        [python, *arguments],
        env=environment | {"PATH": str(python.parent)}, cwd=python.parent,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.real_model
def test_a_wheel_runs_on_its_own_kernels_without_a_compiler(python: Path, tmp_path: Path) -> None:
    """A small model, whose text is compared with this process's, and then `foredraft demo`."""
    save_checkpoint(tmp_path, NATIVE_CONFIGS["llama-tied"]())
    done = run_without_compiler(python, "-c", _WRITES, str(tmp_path), PROMPT)
    assert done.returncode == 0, done.stderr
    written, _, demo = done.stdout.partition("\n")
    found = json.loads(written)
    assert Path(found["place"]).is_relative_to(python.parents[1])
    assert (found["kernels_from"], found["instructions"]) == ("the package", choose().name)
    llm = LLM.load(str(tmp_path), dtype="float32", drafter="none")
    [result] = llm.generate([PROMPT], SamplingParams(max_tokens=24, temperature=1, seed=7))
    assert found["text"] == result.text
    assert "fused kernels" in demo
    assert demo.count("identical: sha256") == 3


def test_a_damaged_kernel_of_a_wheel_is_not_run(python: Path) -> None:
    (library,) = python.parents[1].glob(
        f"lib/python*/site-packages/foredraft/kernels/{SHIPPED}/noise-*.so"
    )
    whole = library.read_bytes()
    library.write_bytes(whole[:-1])
    try:
        code = "from foredraft.kernels.build import load_library; load_library('noise')"
        assert "no C++ compiler found" in run_without_compiler(python, "-c", code).stderr
    finally:
        library.write_bytes(whole)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_wheel_has_every_library_for_every_instruction_set(
    compiled_here: None, tmp_path: Path
) -> None:
    wheel = make_wheel(tmp_path)
    machine = wheel.stem.partition("manylinux_")[2].split("_", 2)[2]
    sets = [one for one in INSTRUCTION_SETS if not one.machines or machine in one.machines]
    named = {
        name.rpartition("-")[0]
        for name in zipfile.ZipFile(wheel).namelist()
        if name.startswith(f"foredraft/kernels/{SHIPPED}/")
    }
    wanted = {shipped_prefix(name, one) for name in LIBRARIES for one in sets}
    assert {Path(name).name for name in named} == wanted
