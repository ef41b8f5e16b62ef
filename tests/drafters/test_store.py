"""Folders of heads that are forged, damaged, of older names or not named at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft.core.errors import ConfigError, ModelLoadError
from foredraft.drafters import build_drafter
from foredraft.drafters.heads.base import HeadModule
from foredraft.drafters.heads.hidden_head import HiddenHeadModule
from foredraft.drafters.registry import head_class, head_kinds
from foredraft.drafters.spec import DrafterContext
from foredraft.drafters.trained import identify, read_head, read_info
from foredraft.models.native.target import NativeTarget
from foredraft.train.heads.base import start_head
from foredraft.train.heads.saving import save_head
from tests.drafters.heads import OUTPUT_IDS, random_text, text_batch, tiny_source, tiny_target

MEASURED = {"greedy": [0.5, 0.4], "sampled": [0.3, 0.2], "committed_greedy": 1.7, "covered": None}


@pytest.fixture(scope="module")
def target() -> NativeTarget:
    return tiny_target()


@pytest.fixture
def new_head(target: NativeTarget, tmp_path: Path) -> Callable[[type[HeadModule]], Path]:
    def save(kind: type[HeadModule]) -> Path:
        module = start_head(kind, tiny_source(target), OUTPUT_IDS, {})
        text = text_batch(target, [random_text(8)], module.taps)
        info = {"target": identify(target), "provenance": {}, "measured": MEASURED}
        save_head(tmp_path / "head", module, info, text, 2, "A head that nobody trained.")
        return tmp_path / "head"

    return save


@pytest.fixture
def head(new_head: Callable[[type[HeadModule]], Path]) -> Path:
    return new_head(HiddenHeadModule)


def change(directory: Path, part: str | None, name: str, value: object) -> None:
    path = directory / "head.json"
    content = json.loads(path.read_text())
    (content if part is None else content[part])[name] = value
    path.write_text(json.dumps(content))


def load(directory: Path | str, target: NativeTarget, name: str = "hidden_head") -> None:
    build_drafter(name, DrafterContext(target, options={"head": str(directory)}))


def is_plain(error: BaseException) -> bool:
    """Whether a message shows nothing of Python's."""
    internal = ("Error(", "NoneType", "object has", "argument", "<class", "Traceback")
    return not [word for word in internal if word in str(error)]


def test_it_loads_as_it_was_saved(head: Path, target: NativeTarget) -> None:
    load(head, target)
    assert read_info(head).promise == (0.5, 0.3)


FORGED = [
    *(("shape", "vocab_size", value) for value in (60000, 0, -1, "x", 1.5, None, True, 10**12)),
    *(("shape", "hidden_size", value) for value in (60000, 2**24, 0, "x")),
    *(("shape", "num_hidden_layers", value) for value in (4, 2**24, 0)),
    *(("shape", "num_attention_heads", value) for value in (2**24, 0, -3)),
    *(("shape", name, value) for name in ("rms_norm_eps", "rope_theta") for value in ("x", 0, -1)),
    *(("config", "num_rows", value) for value in (0, -1, 2**24, "x", 1.5, [3], True)),
    *(("config", "taps", value) for value in ("x", [99], [-1], [], None, [[1]], {})),
    ("config", "unheard_of", 1),
    *(("measured", "greedy", value) for value in ("x", [1.5], [-0.1], ["x"], 0.5, [None])),
    ("measured", "committed_greedy", "x"),
    ("measured", "covered", True),
    *((None, name, 3) for name in ("kind", "config", "shape", "target", "measured")),
    *((None, name, {}) for name in ("config", "shape")),
    (None, "format", 99),
    (None, "weights_sha256", "0" * 64),
    ("target", "fingerprint", 3),
]


@pytest.mark.parametrize(("part", "name", "value"), FORGED)
def test_a_forged_description_is_refused(
    head: Path, target: NativeTarget, part: str | None, name: str, value: object
) -> None:
    change(head, part, name, value)
    with pytest.raises(ModelLoadError, match=r"head\.json|weights\.safetensors") as raised:
        load(head, target)
    assert is_plain(raised.value), raised.value


@pytest.mark.parametrize(("kind", "option"), [("medusa", "num_blocks"), ("mtp", "returns")])
def test_a_head_of_an_older_version_is_to_be_trained_again(
    new_head: Callable[[type[HeadModule]], Path], target: NativeTarget, kind: str, option: str
) -> None:
    head = new_head(head_class(kind))
    change(head, "config", option, 1)
    with pytest.raises(ModelLoadError, match=f"{option}.*train it again"):
        load(head, target, kind)


def test_sizes_are_compared_before_memory_is_asked_for(head: Path) -> None:
    devices = []

    class Watched(HiddenHeadModule):
        def __init__(self, *args: Any, **options: Any) -> None:
            devices.append(torch.empty(0).device.type)
            super().__init__(*args, **options)

    loaded = read_head(head, Watched, read_info(head))
    assert devices == ["meta"]
    assert {tensor.device.type for tensor in loaded.state_dict().values()} == {"cpu"}
    assert {tensor.dtype for tensor in loaded.parameters()} == {torch.float32}


@pytest.mark.parametrize("kind", head_kinds())
def test_every_kind_refuses_what_its_options_do_not_take(kind: str, target: NativeTarget) -> None:
    module, source = head_class(kind), tiny_source(target)
    for name in module.OPTIONS:
        for value in ("x", -1, 10**9, [99], None, 1.5):
            with pytest.raises(ConfigError, match=name) as raised:
                start_head(module, source, OUTPUT_IDS, {name: value})
            assert is_plain(raised.value), raised.value
    with pytest.raises(ConfigError, match="nonsense"):
        start_head(module, source, OUTPUT_IDS, {"nonsense": 1})


@pytest.fixture
def beside_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current directory looks like a model's."""
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 30}')
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("beside_a_checkpoint")
@pytest.mark.parametrize("name", ["eagle", "mtp", "hidden_head", "dspark", "table"])
def test_the_current_directory_is_never_read(name: str, target: NativeTarget) -> None:
    with pytest.raises(ConfigError, match=r"needs a (trained head|table).*option head"):
        build_drafter(name, DrafterContext(target))
    for empty in ("", " "):
        with pytest.raises(ConfigError, match=f"option head of drafter '{name}' is empty"):
            load(empty, target, name)
