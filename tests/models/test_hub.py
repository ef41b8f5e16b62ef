"""Models of the hub: what is fetched, what is never fetched, and what is said when it fails."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from foredraft.core.errors import ConfigError, ModelLoadError
from foredraft.kernels.build import directories
from foredraft.models.files import hub, outline
from foredraft.models.files.gguf import GgufFile
from foredraft.models.files.local import draft_models_for
from foredraft.models.files.safety import Checkpoint
from foredraft.models.files.store import resolve_model
from tests.models.checkpoints import NATIVE_CONFIGS, save_checkpoint
from tests.models.gguf_files import Typed, metadata_of, shape_of, tensors_of, write_gguf
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


def offer(monkeypatch: pytest.MonkeyPatch, *files: str, size: int = 1000) -> None:
    """A repository of these files."""
    siblings = [SimpleNamespace(rfilename=file, size=size) for file in files]
    info = SimpleNamespace(siblings=siblings)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: info)


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
    offer(monkeypatch, "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"neither \*\.safetensors weights nor GGUF"):
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
        "full": (
            OSError(errno.ENOSPC, "No space left on device"),
            ModelLoadError,
            "No space left.*the space in HF_HOME",
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


# ------------------------------------------------------------------------------------- GGUF files

FILES = (
    *("README.md", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-m-f16.gguf"),
    *("Q6_K/m-Q6_K-00001-of-00002.gguf", "Q6_K/m-Q6_K-00002-of-00002.gguf"),
)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (None, ["m-Q4_K_M.gguf"]),
        ("q8_0", ["m-Q8_0.gguf"]),
        ("Q6_K", ["Q6_K/m-Q6_K-00001-of-00002.gguf", "Q6_K/m-Q6_K-00002-of-00002.gguf"]),
    ],
)
def test_the_file_of_a_form(form: str | None, expected: list[str]) -> None:
    files = sorted(file for file in FILES if "m-Q" in file)
    assert hub._chosen("org/m", files, form) == expected


def test_forms_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, *FILES)
    with pytest.raises(ConfigError, match=r"'Q5_K_M'; there are: m-Q6_K, m-Q4_K_M, m-Q8_0\. Name"):
        resolve_model("hf.co/org/m:Q5_K_M")


def test_a_file_that_does_not_fit_is_not_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_hub(monkeypatch, AssertionError("it is downloaded"))
    offer(monkeypatch, "m-Q4_K_M.gguf", size=5 * 10**13)
    with pytest.raises(ConfigError, match=r"m-Q4_K_M\.gguf.* takes 50000\.0 GB"):
        resolve_model("org/m:Q4_K_M")
    assert not calls


class StandIn(BaseHTTPRequestHandler):
    """The hub's HTTP, as far as its client asks: lists, sizes, tags, ranges, and refusals."""

    files: ClassVar[dict[str, bytes]] = {}
    asked: ClassVar[list[str]] = []
    cuts: ClassVar[list[int]] = []
    """Bytes after which the next downloads break off."""
    sent: ClassVar[list[int]] = []
    """Bytes of each download."""
    status: ClassVar[int] = 200
    """Of everything, if another one."""
    heeds_ranges: ClassVar[bool] = True

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        ranges = self.headers.get("Range", "") if self.heeds_ranges else ""
        self.asked.append(f"{self.command} {path} {ranges}".strip())
        name = path.partition("/resolve/")[2].partition("/")[2]
        if self.status != 200:
            self._send(
                self.status, b"", error="GatedRepo" if self.status == 401 else "RepoNotFound"
            )
        elif "/tree/" in path:
            found = [{"type": "file", "path": n, "size": len(c)} for n, c in self.files.items()]
            entries = [each | {"oid": "b" * 40} for each in found]
            self._send(200, json.dumps(entries).encode(), "application/json")
        elif path.startswith("/api/models/org/m"):
            siblings = [{"rfilename": n, "size": len(c)} for n, c in self.files.items()]
            answer = {"id": "org/m", "sha": "a" * 40, "siblings": siblings, "private": False}
            self._send(200, json.dumps(answer).encode(), "application/json")
        elif name in self.files:
            first, _, last = ranges.removeprefix("bytes=").partition("-")
            start, content = int(first or 0), self.files[name]
            wanted = content[start : int(last) + 1 if last else None]
            self._send(206 if ranges else 200, wanted, total=len(content), start=start)
        else:
            self._send(404, b"", error="RepoNotFound" if "/gone/" in path else "EntryNotFound")

    def _send(
        self,
        status: int,
        content: bytes,
        kind: str = "",
        total: int = 0,
        start: int = 0,
        error: str = "",
    ) -> None:
        tag = hashlib.sha256(self.path.encode()).hexdigest()
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(len(content)), "ETag": f'"{tag}"'}
        headers |= {"X-Repo-Commit": "a" * 40, "Accept-Ranges": "bytes", "X-Error-Code": error}
        if status == 206:
            headers["Content-Range"] = f"bytes {start}-{start + len(content) - 1}/{total}"
        for header, value in headers.items():
            if value:
                self.send_header(header, value)
        self.end_headers()
        if self.command == "GET":
            cut = self.cuts.pop() if self.cuts and total else len(content)
            self.wfile.write(content[:cut])
            self.sent.append(len(content[:cut]) if total else 0)
            self.close_connection = cut < len(content)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a process whose hub is a stand-in with a small GGUF model."""
    config = shape_of()
    write_gguf(tmp_path / "m-Q8_0.gguf", metadata_of(config), tensors_of(config, "Q8_0")[0])
    StandIn.files = {
        "m-Q8_0.gguf": (tmp_path / "m-Q8_0.gguf").read_bytes(),
        "m-BF16.gguf": b"not this one",
        "README.md": b"",
    }
    StandIn.asked.clear()
    StandIn.sent.clear()
    StandIn.status, StandIn.heeds_ranges = 200, True
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    own = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernels").symlink_to(directories()[0])  # compiled already
    yield os.environ | own | {"FOREDRAFT_CACHE": str(tmp_path / "cache"), "NO_PROXY": "*"}
    server.shutdown()
    server.server_close()


def resolved(environment: dict[str, str], name: str) -> str:
    code = f"from foredraft.models.files.store import resolve_model as r; print(r({name!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def test_a_gguf_model_from_a_stand_in_hub(stand_in: dict[str, str]) -> None:
    StandIn.cuts = [1000]
    found = resolved(stand_in, "https://hf.co/org/m:Q8_0")
    assert Path(found, "tokenizer.json").exists(), found
    downloads = [line for line in StandIn.asked if line.startswith("GET /org/m/resolve/")]
    assert all("m-Q8_0.gguf" in line for line in downloads), StandIn.asked
    # The client goes on in pieces of 10 MB; of a smaller file it asks for all of it again.
    assert len([line for line in downloads if "Range" not in line]) == 2, downloads
    num_asked = len(downloads)
    assert resolved(stand_in, "org/m:q8_0") == found
    assert resolved(stand_in | {"HF_HUB_OFFLINE": "1"}, "org/m:Q8_0") == found
    again = [line for line in StandIn.asked if line.startswith("GET /org/m/resolve/")]
    assert len(again) == num_asked


# --------------------------------------------------------------------- before the weights are here


def told(environment: dict[str, str], *arguments: str) -> dict[str, Any]:
    """The JSON of `foredraft models ...`, or the last line of its error."""
    code = "from foredraft.cli.main import main; main()"
    command = [sys.executable, "-c", code, "models", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode or "--json" not in arguments:
        return {"said": done.stdout + done.stderr}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def of_large_vocabulary(folder: Path) -> bytes:
    """A file whose weights are more than the header, and more than is asked for at once."""
    config = shape_of(num_hidden_layers=8)
    tensors = tensors_of(config, "BF16")[0]
    write_gguf(folder / "large.gguf", metadata_of(config), tensors)
    return (folder / "large.gguf").read_bytes()


def test_a_gguf_model_is_described_by_its_header(stand_in: dict[str, str], tmp_path: Path) -> None:
    content = of_large_vocabulary(tmp_path)
    StandIn.files["m-BF16.gguf"] = content
    about = told(stand_in, "show", "org/m:BF16", "--context", "100", "--json")
    assert (about["family"], about["layers"], about["context"]) == ("llama", 8, 100), about
    assert about["download_bytes"] > 0.9 * len(content)
    assert about["weight_bytes"] < about["memory_bytes"]
    assert about["fits"]
    assert about["most_tokens_per_s"] > 1
    assert sum(StandIn.sent) <= 1 << 20 < len(content)
    assert not list((tmp_path / "hf").rglob("*.gguf"))
    assert "is here" in told(stand_in, "pull", "org/m:BF16")["said"]
    again = told(stand_in, "show", "org/m:BF16", "--context", "100", "--json")
    same = ("weight_bytes", "memory_bytes", "parameters", "formats", "max_context")
    assert [again[key] for key in same] == [about[key] for key in same]
    assert again["download_bytes"] == 0
    assert "deleted" in told(stand_in, "rm", "org/m", "--yes")["said"]
    assert not list((tmp_path / "hf").rglob("*.gguf"))


@pytest.mark.slow
def test_a_split_file_and_one_of_safetensors(stand_in: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    save_checkpoint(folder, NATIVE_CONFIGS["llama"]())
    StandIn.files = {path.name: path.read_bytes() for path in folder.iterdir()}
    about = told(stand_in, "show", "org/m", "--json")
    assert about.get("family") == "llama", about
    assert about["download_bytes"] > 0
    StandIn.files = {}
    config = shape_of()
    tensors = tensors_of(config, "Q8_0")[0]
    for number, part in enumerate((tensors[:5], tensors[5:])):
        said = metadata_of(config) if number == 0 else {}
        said |= {"split.no": Typed(2, number), "split.count": Typed(2, 2)}
        name = f"m-Q8_0-0000{number + 1}-of-00002.gguf"
        StandIn.files[name] = write_gguf(tmp_path / name, said, part).read_bytes()
    about = told(stand_in, "show", "org/m:Q8_0", "--json")
    assert about.get("formats") == ["Q8_0"], about
    assert about["download_bytes"] > 0


def test_a_mirror_without_ranges_is_asked_for_no_more_than_the_header(
    stand_in: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{stand_in['HF_ENDPOINT']}/org/m/resolve/main/m-Q8_0.gguf"
    monkeypatch.setattr("huggingface_hub.hf_hub_url", lambda *_, **__: url)
    content = StandIn.files["m-Q8_0.gguf"] = StandIn.files["m-Q8_0.gguf"] + bytes(1 << 26)
    StandIn.heeds_ranges = False
    tracemalloc.start()
    found = outline._read_range("org/m", None, "m-Q8_0.gguf", 7, 100)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == content[7:100]
    assert most < len(content) / 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "message"), [(401, "is gated: accept its terms"), (404, "the hub has no model")]
)
def test_what_the_hub_refuses_is_said_before_a_download(
    stand_in: dict[str, str], status: int, message: str
) -> None:
    StandIn.status = status
    assert message in told(stand_in, "show", "org/m:Q8_0")["said"]


def test_a_header_comes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = of_large_vocabulary(tmp_path)
    asked: list[tuple[int, int]] = []

    def read_range(name: str, revision: str | None, file: str, start: int, end: int) -> bytes:
        asked.append((start, end))
        return content[start:end]

    monkeypatch.setattr(outline, "_FIRST_BYTES", 100)
    monkeypatch.setattr(outline, "_read_range", read_range)
    path = tmp_path / "outline.gguf"
    outline._write_header("org/m", None, "m.gguf", len(content), path)
    assert asked[0] == (0, 100)
    assert max(end for _, end in asked) < len(content) / 4
    assert path.stat().st_size == len(content)
    assert path.stat().st_blocks * 512 < len(content) / 2
    whole, found = GgufFile(tmp_path / "large.gguf"), GgufFile(path)
    assert found.tensors == whole.tensors


def test_a_smaller_model_with_the_same_tokenizer_is_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    small, large = (shape_of(num_hidden_layers=layers) for layers in (2, 8))
    for name, config in (("small", small), ("large", large)):
        write_gguf(tmp_path / f"{name}.gguf", metadata_of(config), tensors_of(config, "Q8_0")[0])
    directories = [resolve_model(tmp_path / f"{name}.gguf") for name in ("small", "large")]
    found = draft_models_for(Checkpoint(directories[1]))
    assert [name for name, _ in found] == [str(tmp_path / "small.gguf")]
    assert draft_models_for(Checkpoint(directories[0])) == []
