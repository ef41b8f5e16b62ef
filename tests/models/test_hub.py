"""Models of the hub: what is fetched, what is never fetched, and what is said when it fails."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from foredraft.core.errors import ConfigError, ModelLoadError
from foredraft.models.files.store import resolve_model
from tests.models.progress import RecordedProgress


def fake_hub(monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []

    def snapshot_download(name: str, **options: Any) -> str:
        calls.append({"name": name, **options})
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return calls


def bare(kind: type[Exception]) -> Exception:
    """An error of the hub's client without the http response that it wants to be built from."""
    return kind.__new__(kind, "busy")


def test_a_hub_id_is_fetched_without_code_or_pickles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub.utils import filter_repo_objects

    (tmp_path / "model.safetensors").write_bytes(b"")
    calls = fake_hub(monkeypatch, tmp_path)
    assert resolve_model("org/model", revision="v1") == tmp_path
    (call,) = calls
    assert (call["name"], call["revision"]) == ("org/model", "v1")
    offered = ["config.json", "tokenizer.json", "merges.txt", "chat_template.jinja"]
    offered += ["model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    unwanted = ["pytorch_model.bin", "a.pt", "modeling_own.py", "original/x.safetensors", "a.gguf"]
    unwanted += ["consolidated.safetensors", "onnx/config.json", "README.md", "training_args.bin"]
    patterns = {key: call[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects(offered + unwanted, **patterns)) == offered


def test_bytes_of_a_download_are_reported_and_nothing_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    calls = fake_hub(monkeypatch, tmp_path)
    progress = RecordedProgress()
    resolve_model("org/model", progress=progress)
    bar_class = calls[0]["tqdm_class"]
    with bar_class(total=100, unit="B", mininterval=0, miniters=1) as bar:
        bar.update(25)
        bar.update(75)
    with bar_class(range(3), desc="files") as files:
        assert list(files) == [0, 1, 2]
    assert progress.stages == ["fetching org/model from the Hugging Face hub"]
    assert progress.fractions[0] == 0.0
    assert 0.25 in progress.fractions
    assert progress.fractions[-1] == 1.0
    assert capsys.readouterr() == ("", "")


def test_a_hub_model_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub(monkeypatch, tmp_path)
    with pytest.raises(ModelLoadError, match=r"'org/model' has no \*\.safetensors weights"):
        resolve_model("org/model")


def hub_errors() -> dict[str, tuple[Any, type[Exception], str]]:
    from huggingface_hub import errors

    return {
        "gated": (bare(errors.GatedRepoError), ModelLoadError, "accept its terms"),
        "missing": (
            bare(errors.RepositoryNotFoundError),
            ConfigError,
            "the hub has no model 'org/model'.*no such directory",
        ),
        "revision": (
            bare(errors.RevisionNotFoundError),
            ConfigError,
            "'org/model' has no revision 'main'",
        ),
        "invalid": (errors.HFValidationError("x--y"), ConfigError, "not a valid hub id"),
        "down": (bare(errors.HfHubHTTPError), ModelLoadError, "Check the network"),
        "full": (
            OSError(errno.ENOSPC, "No space left on device"),
            ModelLoadError,
            "No space left.*set HF_HOME",
        ),
        "no network": (ConnectionError("refused"), ModelLoadError, "ConnectionError: refused"),
    }


@pytest.mark.parametrize("case", hub_errors())
def test_what_goes_wrong_at_the_hub_is_explained(
    monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    error, kind, message = hub_errors()[case]
    fake_hub(monkeypatch, error)
    with pytest.raises(kind, match=message) as caught:
        resolve_model("org/model", revision="main")
    assert caught.value.__cause__ is error


def test_offline_and_not_in_the_hub_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match=r"HF_HUB_OFFLINE.*`hf download no-such-org/x`"):
        resolve_model("no-such-org/x")
