"""Extras: without one, a line names the missing package and the command that installs it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from foredraft.core.errors import ConfigError
from foredraft.load import load_models
from foredraft.options import LoadOptions
from tests.models.checkpoints import NATIVE_CONFIGS, save_checkpoint


def uninstall(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Importing it, or what rests on it, is an error, as where it is not installed."""
    for name in list(sys.modules):
        if name.partition(".")[0] == package:
            monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    for name in ("foredraft.models.hf.target", "foredraft.models.hf.cache"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_a_native_model_needs_no_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, NATIVE_CONFIGS["llama-tied"]())
    uninstall(monkeypatch, "transformers")
    uninstall(monkeypatch, "huggingface_hub")
    assert load_models(LoadOptions(str(tmp_path)))[0].plan.backend == "native"


def test_a_model_of_transformers_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, NATIVE_CONFIGS["llama-tied"]())
    uninstall(monkeypatch, "transformers")
    with pytest.raises(ConfigError, match="runs through transformers, which needs") as caught:
        load_models(LoadOptions(str(tmp_path), backend="hf"))
    assert str(caught.value).endswith("pip install 'foredraft[hf]'")


def test_custom_generate_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    uninstall(monkeypatch, "transformers")
    monkeypatch.delitem(sys.modules, "foredraft.hf_generate", raising=False)
    with pytest.raises(ConfigError, match=r"custom_generate needs .*'foredraft\[hf\]'"):
        importlib.import_module("foredraft.hf_generate")
