"""Compiling the fused kernel: once, whole, and with a reason when it cannot be."""

from __future__ import annotations

import os
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from foredraft.kernels import build as build_module
from foredraft.kernels.build import (
    SWITCH,
    KernelUnavailable,
    build_in_cache,
    find_compiler,
    load_library,
)
from foredraft.kernels.instructions import available, choose


class FakeCompiler:
    """A shell script in a compiler's place; it notes each compilation."""

    def __init__(self, directory: Path, body: str = 'echo compiled > "$output"') -> None:
        directory.mkdir()
        self.path, self._log = directory / "fake-c++", directory / "log"
        self._log.touch()
        self.path.write_text(
            "#!/bin/sh\n"
            '[ "$1" = --version ] && { echo "fake 1.0"; exit 0; }\n'
            f'echo "$@" >> {self._log}\n'
            'while [ $# -gt 0 ]; do [ "$1" = -o ] && output=$2; shift; done\n'
            f"{body}\n"
        )
        self.path.chmod(0o755)

    @property
    def command(self) -> list[str]:
        return [str(self.path)]

    @property
    def num_compilations(self) -> int:
        return len(self._log.read_text().splitlines())


def build(command: list[str], cache: Path, sources: Path, name: str = "decoder") -> Path:
    """For the plainest instruction set, which every machine has."""
    return build_module.build(command, cache, name, available()[-1], sources)


@pytest.fixture
def compiler(tmp_path: Path) -> FakeCompiler:
    return FakeCompiler(tmp_path / "bin")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    directory = tmp_path / "sources"
    directory.mkdir()
    (directory / "decoder.cpp").write_text("int answer;\n")
    (directory / "simd.h").write_text("// vectors\n")
    return directory


def test_a_library_is_compiled_once(
    compiler: FakeCompiler, sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = build(compiler.command, tmp_path / "cache", sources)
    assert "compiling the kernel 'decoder'" in caplog.text
    caplog.clear()
    assert first.read_text() == "compiled\n"
    assert build(compiler.command, tmp_path / "cache", sources) == first
    assert compiler.num_compilations == 1


def test_builds_at_the_same_time_compile_once(sources: Path, tmp_path: Path) -> None:
    slow = FakeCompiler(tmp_path / "bin", 'sleep 0.2; echo compiled > "$output"')
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(build, slow.command, tmp_path / "cache", sources) for _ in range(4)]
        assert len({job.result() for job in jobs}) == 1
    assert slow.num_compilations == 1


@pytest.mark.parametrize("changed", ["decoder.cpp", "simd.h"])
def test_a_changed_source_is_compiled_anew(
    changed: str, compiler: FakeCompiler, sources: Path, tmp_path: Path
) -> None:
    first = build(compiler.command, tmp_path / "cache", sources)
    (sources / changed).write_text("// other\n")
    assert build(compiler.command, tmp_path / "cache", sources) != first
    assert compiler.num_compilations == 2


def test_libraries_that_no_version_has_used_for_long_go(
    compiler: FakeCompiler, sources: Path, tmp_path: Path
) -> None:
    """Another version's that is used stays, however old it is."""
    cache = tmp_path / "cache"
    build(compiler.command, cache, sources)
    texts = "int one;", "int two;", "int three;"
    libraries = []
    for text in texts:
        (sources / "decoder.cpp").write_text(text)
        libraries.append(build(compiler.command, cache, sources))
    (cache / "mine.so").touch()
    for each in (*libraries, cache / "mine.so"):
        os.utime(each, (0, 0))
    (sources / "decoder.cpp").write_text(texts[1])
    assert build(compiler.command, cache, sources) == libraries[1]
    assert all(each.exists() for each in libraries), "only a new one makes room"
    (sources / "decoder.cpp").write_text("int four;")
    newest = build(compiler.command, cache, sources)
    assert [each.exists() for each in (*libraries, newest)] == [False, True, False, True]
    assert len([*cache.glob("*.so")]) == 4


def test_this_version_keeps_its_libraries_with_old_times(
    compiler: FakeCompiler, sources: Path, tmp_path: Path
) -> None:
    """A restored cache has the times of its files: each run would compile all of them anew."""
    cache = tmp_path / "cache"
    (sources / "heads.cpp").write_text("int heads;")
    heads = build(compiler.command, cache, sources, "heads")
    os.utime(heads, (0, 0))
    build(compiler.command, cache, sources)
    assert build(compiler.command, cache, sources, "heads") == heads
    assert compiler.num_compilations == 2


def test_a_failing_compiler_is_quoted_and_leaves_nothing(sources: Path, tmp_path: Path) -> None:
    body = 'echo half > "$output"; printf "In file:\\nx.h:1: error: no such thing\\n" >&2; exit 1'
    failing, cache = FakeCompiler(tmp_path / "bin", body), tmp_path / "cache"
    with pytest.raises(KernelUnavailable) as caught:
        build(failing.command, cache, sources)
    assert str(caught.value).endswith("fake-c++ failed: x.h:1: error: no such thing")
    assert [path.name for path in cache.iterdir()] == ["building.lock"]


def test_a_compiler_that_does_not_know_the_best_instructions_is_given_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    best, *_, plainest = available()
    if best.flags == plainest.flags:
        pytest.skip("this CPU has one instruction set")
    old, real = tmp_path / "old-c++", find_compiler({"PATH": os.environ["PATH"]})[0]
    old.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *{best.flags[-1]}*) echo "error: unrecognized option" >&2; exit 1;; esac\n'
        f'exec {real} "$@"\n'
    )
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    monkeypatch.delenv(SWITCH, raising=False)
    build_module._load.cache_clear()
    chosen, _ = build_module._load_best("noise", (best, plainest))
    assert chosen == plainest
    assert f"{plainest.name} instead of {best.name}" in caplog.text, "it is slower: that is said"
    with pytest.raises(KernelUnavailable, match="unrecognized option"):
        load_library("noise", best.name)
    build_module._load.cache_clear()
    build_module._load_best.cache_clear()


def test_what_cannot_be_compiled_or_loaded_is_a_reason(
    compiler: FakeCompiler, sources: Path, tmp_path: Path
) -> None:
    broken, taken = tmp_path / "c++", tmp_path / "taken"
    broken.write_bytes(b"\x7fELF")
    broken.chmod(0o755)
    taken.write_text("a file where the directory should be")
    with pytest.raises(KernelUnavailable, match=r"c\+\+ cannot be run"):
        build([str(broken)], tmp_path / "cache", sources)
    with pytest.raises(KernelUnavailable, match="cannot write the kernel into"):
        build(compiler.command, taken, sources)
    directories = [taken, tmp_path / "own"]  # where the cache cannot be used
    library = build_in_cache(compiler.command, directories, "decoder", available()[-1])
    assert library.parent == tmp_path / "own"
    with pytest.raises(KernelUnavailable, match=f"delete {library} to build it anew"):
        build_module._loaded(library)


@pytest.mark.parametrize("damage", [b"comp", b"\0" * 9, b""], ids=["cut", "zeros", "empty"])
def test_a_damaged_library_is_built_anew(
    damage: bytes, compiler: FakeCompiler, sources: Path, tmp_path: Path
) -> None:
    library = build(compiler.command, tmp_path / "cache", sources)
    library.write_bytes(damage)
    left = tmp_path / "cache" / "building-x2k1"  # of a build that was killed
    left.mkdir()
    assert build(compiler.command, tmp_path / "cache", sources).read_text() == "compiled\n"
    assert compiler.num_compilations == 2
    assert len(list((tmp_path / "cache").glob("*.so"))) == 1
    assert not left.exists()


def test_a_library_is_on_the_disk_before_it_has_its_name(
    compiler: FakeCompiler, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def flushed(descriptor: int) -> None:
        is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        events.append("directory" if is_directory else "file")
        fsync(descriptor)

    def renamed(source: Path, target: Path) -> None:
        events.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", renamed)
    build(compiler.command, tmp_path / "cache", sources)
    assert events == ["file", "rename", "directory"]


@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_a_library_that_others_can_write_is_not_run(
    mode: int, compiler: FakeCompiler, sources: Path, tmp_path: Path
) -> None:
    build(compiler.command, tmp_path / "cache", sources).chmod(mode)
    again = build(compiler.command, tmp_path / "cache", sources)
    assert compiler.num_compilations == 2
    assert stat.S_IMODE(again.stat().st_mode) == 0o700


def test_a_cache_of_ours_is_closed_to_others(
    compiler: FakeCompiler, sources: Path, tmp_path: Path
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    build(compiler.command, tmp_path / "cache", sources)
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o755


def test_a_cache_of_another_user_is_not_used(
    compiler: FakeCompiler, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "_is_trusted", lambda user: False)
    with pytest.raises(KernelUnavailable, match=r"belongs to another user .* FOREDRAFT_CACHE"):
        build(compiler.command, tmp_path / "cache", sources)
    assert compiler.num_compilations == 0


def test_the_system_and_the_user_are_trusted() -> None:
    assert build_module._is_trusted(0)
    assert build_module._is_trusted(os.geteuid())
    assert not build_module._is_trusted(os.geteuid() + 1)


def test_instruction_sets_have_libraries_of_their_own(
    compiler: FakeCompiler, sources: Path, tmp_path: Path
) -> None:
    libraries = {
        build_module.build(compiler.command, tmp_path / "cache", "decoder", one, sources)
        for one in available()
    }
    assert len(libraries) == len(available()) == compiler.num_compilations


def test_the_compiler_is_the_first_on_the_path(tmp_path: Path) -> None:
    for name in ("clang++", "c++"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    assert find_compiler({"PATH": str(tmp_path)}) == [str(tmp_path / "c++")]


def test_cxx_comes_first_and_may_have_arguments(compiler: FakeCompiler) -> None:
    environment = {"PATH": "/usr/bin", "CXX": f"{compiler.path} -m64"}
    assert find_compiler(environment) == [str(compiler.path), "-m64"]
    for named, reason in (("no-such-c++", "is not there"), ("g++ 'x", "cannot be read")):
        with pytest.raises(KernelUnavailable, match=rf"CXX is .*, which {reason}"):
            find_compiler({"PATH": "/usr/bin", "CXX": named})


@pytest.mark.parametrize(
    ("manager", "command"), [("none", r"apt install g\+\+"), ("dnf", r"dnf install gcc-c\+\+")]
)
def test_without_a_compiler_the_reason_names_the_command_that_installs_one(
    manager: str, command: str, tmp_path: Path
) -> None:
    (tmp_path / manager).write_text("#!/bin/sh\n")
    (tmp_path / manager).chmod(0o755)
    with pytest.raises(KernelUnavailable, match=rf"no C\+\+ compiler found.*: (sudo )?{command}$"):
        find_compiler({"PATH": str(tmp_path)})


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "off")
    with pytest.raises(KernelUnavailable, match="switched off by FOREDRAFT_KERNELS=off"):
        load_library()


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="no compiler")
def test_the_real_sources_compile_here() -> None:
    library = load_library()
    assert library.foredraft_forward
    assert library.foredraft_workspace_size
    assert load_library(instructions=choose().name) is library
