"""From names to directories, and a cache that is whole or made anew."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foredraft.core.errors import ConfigError, ModelLoadError
from foredraft.models.files import packaged
from foredraft.models.files.manifest import MANIFEST_NAME, find_damage, sums_of
from foredraft.models.files.packaged import MODELS, SMOLLM2
from foredraft.models.files.progress import SilentProgress
from foredraft.models.files.store import _Conversion, _make, resolve_model
from foredraft.system.paths import cache_root
from tests.models.progress import RecordedProgress

NAME = SMOLLM2.name
CONTENT = b"the weights"
SMALL = replace(
    SMOLLM2,
    num_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    packages=(replace(SMOLLM2.packages[0], num_bytes=len(CONTENT)),),
)


class FakeConverter:
    """Stands in for the real model, which is large."""

    def __init__(self) -> None:
        self.conversions = 0

    def obtain(self, package: Any, scratch: Path, progress: Any) -> Path:
        scratch.mkdir(exist_ok=True)
        (scratch / "part").write_bytes(CONTENT)
        return scratch / "part"

    def convert(self, files: Any, into: Path, progress: Any) -> None:
        self.conversions += 1
        progress.advance(0.5)
        (into / "config.json").write_text("{}")
        (into / "model.safetensors").write_bytes(bytes(1000))


@pytest.fixture
def converter(cache: Path, monkeypatch: pytest.MonkeyPatch) -> FakeConverter:
    fake = FakeConverter()
    monkeypatch.setattr(packaged, "obtain", fake.obtain)
    monkeypatch.setitem(MODELS, NAME, replace(SMALL, finish=fake.convert))
    return fake


def left_in(cache: Path) -> list[str]:
    """Names of files in the folder of models that are no locks."""
    files = (path for path in (cache / "models").rglob("*") if path.is_file())
    return [path.name for path in files if path.suffix != ".lock"]


# ---------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("name", [NAME, NAME.upper(), "SmolLM2_135M-instruct"])
def test_built_in_names_ignore_case_and_hyphens(
    converter: FakeConverter, cache: Path, name: str
) -> None:
    assert resolve_model(name) == cache / "models" / NAME


@pytest.mark.parametrize("spelling", [str, Path])
def test_a_directory_is_itself(tmp_path: Path, spelling: Any) -> None:
    assert resolve_model(spelling(tmp_path)) == tmp_path


def test_a_relative_directory_is_not_taken_for_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/model") == Path("org/model")


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="is a file; name the directory"):
        resolve_model(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("name", ["smollm2-135m", "smolm2-135m-instruct", "SMOLLM2"])
def test_an_unknown_name_gets_the_nearest(name: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown model '{name}'; did you mean '{NAME}'"):
        resolve_model(name)


def test_a_revision_belongs_to_a_hub_id(tmp_path: Path) -> None:
    for name in (NAME, str(tmp_path)):
        with pytest.raises(ConfigError, match="revision 'v1' was given"):
            resolve_model(name, revision="v1")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *(
            (name, "no such directory: .*(nowhere|a/b/c)")
            for name in ("./nowhere", "../nowhere/x", "~/nowhere", "/nowhere/x", "a/b/c")
        ),
        ("~nobody-of-that-name", "no such directory: .*nobody"),
        *((name, "local directory or a hub id") for name in ("", "zzz", "two words", "\n")),
        ("a" * 300, "unknown model"),
        ("a" * 100_000, r"'a{40}'… \(100000 bytes\) can be no path and no hub id: it is too long"),
        ("org/na\0me", "has a zero byte"),
        ("org/\ud800", "is no valid Unicode text"),
    ],
)
def test_a_name_that_can_be_none_is_refused_with_a_reason(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        resolve_model(name)
    str(refused.value).encode()  # it can be printed


@pytest.mark.parametrize(
    ("environment", "root"),
    [
        ({"FOREDRAFT_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, Path("/a")),
        ({"FOREDRAFT_CACHE": "~/a"}, Path.home() / "a"),
        ({"FOREDRAFT_CACHE": "", "XDG_CACHE_HOME": "/b"}, Path("/b/foredraft")),
        ({}, Path.home() / ".cache" / "foredraft"),
    ],
)
def test_cache_root(environment: dict[str, str], root: Path) -> None:
    assert cache_root(environment) == root


# ---------------------------------------------------------------------------------------- cache


def test_made_once_and_nothing_else_is_left(converter: FakeConverter, cache: Path) -> None:
    progress = RecordedProgress()
    directory = resolve_model(NAME, progress=progress)
    assert resolve_model(NAME) == directory
    assert converter.conversions == 1
    assert progress.fractions == [0.5]
    visible = [path.name for path in directory.parent.iterdir() if path.suffix != ".lock"]
    assert visible == [NAME]


DAMAGES = {
    "a truncated file": lambda d: os.truncate(d / "model.safetensors", 999),
    "another byte": lambda d: (d / "model.safetensors").write_bytes(bytes(999) + b"x"),
    "an edited file": lambda d: (d / "config.json").write_text("[]"),
    "a lost file": lambda d: (d / "model.safetensors").unlink(),
    "a directory for a file": lambda d: ((d / "config.json").unlink(), (d / "config.json").mkdir()),
    "no manifest": lambda d: (d / MANIFEST_NAME).unlink(),
    "half a manifest": lambda d: os.truncate(d / MANIFEST_NAME, 30),
    "another manifest": lambda d: (d / MANIFEST_NAME).write_text("[1]"),
    "a manifest without sizes": lambda d: (d / MANIFEST_NAME).write_text(
        json.dumps({"recipe": SMOLLM2.recipe, "files": {"config.json": None}})
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_said_once_and_made_anew(
    converter: FakeConverter, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    directory = resolve_model(NAME)
    DAMAGES[damage](directory)
    with caplog.at_level(logging.WARNING, logger="foredraft"):
        assert resolve_model(NAME) == directory
        assert resolve_model(NAME) == directory
    assert converter.conversions == 2
    assert find_damage(directory, SMOLLM2.recipe) is None
    assert [record.name for record in caplog.records] == ["foredraft"]
    assert "is made anew" in caplog.text


@pytest.mark.parametrize("num_bytes", [1, 1 << 16, (1 << 17) + 1, (1 << 18) + 12_345])
def test_sums_see_every_byte_and_its_place(num_bytes: int) -> None:
    whole = bytearray(bytes(range(1, 252)) * (num_bytes // 251 + 1))[:num_bytes]
    sums = sums_of(whole)
    for place in {0, num_bytes // 2, num_bytes - 1}:
        whole[place] ^= 1
        assert sums_of(whole) != sums
        whole[place] ^= 1
    assert sums_of(whole) == sums
    if num_bytes > 1 << 17:
        assert sums_of(whole[1 << 16 : 1 << 17] + whole[: 1 << 16] + whole[1 << 17 :]) != sums


def test_a_cache_of_an_older_converter_is_made_anew(
    converter: FakeConverter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    resolve_model(NAME)
    monkeypatch.setitem(MODELS, NAME, replace(MODELS[NAME], recipe="converter of tomorrow"))
    resolve_model(NAME)
    assert converter.conversions == 2
    assert "another version of foredraft wrote it" in caplog.text


def test_a_failure_leaves_nothing_and_the_next_try_succeeds(
    converter: FakeConverter, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(files: Any, into: Path, progress: Any) -> None:
        (into / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setitem(MODELS, NAME, replace(SMALL, finish=fails))
        with pytest.raises(KeyboardInterrupt):
            resolve_model(NAME)
    assert left_in(cache) == [SMOLLM2.file], "the download is kept for the next try"
    assert (resolve_model(NAME) / "model.safetensors").exists()


def test_what_a_killed_process_left_is_swept_up(converter: FakeConverter, cache: Path) -> None:
    left_behind = cache / "models" / f".{NAME}.partial-abc"
    left_behind.mkdir(parents=True)
    (left_behind / "half").write_bytes(b"x")
    resolve_model(NAME)
    assert not left_behind.exists()


def test_a_cache_that_cannot_be_written_names_the_way_out(
    converter: FakeConverter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match="set FOREDRAFT_CACHE"):
        resolve_model(NAME)


def test_a_disk_that_fills_up_is_said_and_nothing_is_left(
    converter: FakeConverter, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fills_up(files: Any, into: Path, progress: Any) -> None:
        (into / "model.safetensors").write_bytes(bytes(1000))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setitem(MODELS, NAME, replace(SMALL, finish=fills_up))
    with pytest.raises(ModelLoadError) as refused:
        resolve_model(NAME)
    for part in (str(cache / "models"), "No space left", "FOREDRAFT_CACHE"):
        assert part in str(refused.value)
    assert left_in(cache) == [SMOLLM2.file]


def test_a_second_caller_waits_and_uses_what_the_first_made(
    converter: FakeConverter, monkeypatch: pytest.MonkeyPatch
) -> None:
    second_waits = threading.Event()

    def slow_convert(files: Any, into: Path, progress: Any) -> None:
        second.start()
        assert second_waits.wait(60)
        FakeConverter.convert(converter, files, into, progress)

    class Waiting(SilentProgress):
        def stage(self, text: str) -> None:
            assert text.startswith("waiting for another process")
            second_waits.set()

    found: list[Path] = []
    second = threading.Thread(target=lambda: found.append(resolve_model(NAME, progress=Waiting())))
    monkeypatch.setitem(MODELS, NAME, replace(SMALL, finish=slow_convert))
    directory = resolve_model(NAME)
    second.join(60)
    assert found == [directory]
    assert converter.conversions == 1


# ------------------------------------------------------------------------------------ real model


@pytest.mark.real_model
@pytest.mark.parametrize("name", [NAME])
def test_the_built_in_model_resolves_to_a_checkpoint_that_passes(name: str) -> None:
    from foredraft.models.files.safety import Checkpoint

    assert Checkpoint(resolve_model(name)).num_parameters == 134_515_008


def test_descriptions_of_files_that_are_gone_go_once_they_are_old(tmp_path: Path) -> None:
    """A file may lie on a disk that is not there today."""
    file = tmp_path / "there.gguf"
    file.touch()
    sources = {"old": tmp_path / "gone", "new": tmp_path / "gone", "there": file}
    for name, source in sources.items():
        (tmp_path / f"gguf-{name}").mkdir()
        (tmp_path / f"gguf-{name}" / "model-00001.gguf").symlink_to(source)
        if name != "new":
            os.utime(tmp_path / f"gguf-{name}", (0, 0))
    made = _Conversion("gguf-made", "recipe", lambda into, *_: (into / "config.json").touch())
    _make(tmp_path / "gguf-made", made, SilentProgress())
    assert {each.name for each in tmp_path.glob("gguf-*")} == {
        "gguf-new",
        "gguf-there",
        "gguf-made",
    }
