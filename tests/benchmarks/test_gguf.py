"""Our checkpoints as GGUF files for peers: written whole, in each format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.gguf import QUANTISATIONS, bits_per_weight, write_gguf
from benchmarks.gguf_models import save_tiny
from foredraft.core.errors import ConfigError
from foredraft.models.native.source_blocks import FILE as SOURCE_BLOCKS
from tests.models.checkpoints import NATIVE_CONFIGS, save_checkpoint, save_tokenizer


@pytest.mark.parametrize("quantisation", QUANTISATIONS)
def test_a_file_is_written_and_smaller_formats_are_smaller(
    tmp_path: Path, quantisation: str
) -> None:
    save_tiny(tmp_path / "model", "llama")
    num_weights = (tmp_path / "model" / "model.safetensors").stat().st_size / 4
    path = tmp_path / "model.gguf"
    save_file({"blocks": torch.zeros(1)}, tmp_path / "model" / SOURCE_BLOCKS)  # is no weight
    write_gguf(tmp_path / "model", path, quantisation)
    assert path.read_bytes()[:4] == b"GGUF"
    weights = num_weights * bits_per_weight(quantisation) / 8
    assert weights - 2_000 < path.stat().st_size < weights + 64_000


def test_other_families_and_formats_are_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "model", NATIVE_CONFIGS["mistral"]())
    with pytest.raises(ConfigError, match="mistral checkpoints are not written as GGUF"):
        write_gguf(tmp_path / "model", tmp_path / "out.gguf", "bf16")
    with pytest.raises(ConfigError, match=r"did you mean 'q4_[01]'"):
        write_gguf(tmp_path / "model", tmp_path / "out.gguf", "q4")


def test_a_conversation_becomes_the_same_tokens(tmp_path: Path) -> None:
    """Marks of turns are single tokens for a peer only if the file says that they control."""
    import gguf

    save_checkpoint(tmp_path / "model", NATIVE_CONFIGS["llama-tied"]())
    save_tokenizer(tmp_path / "model", "{{ messages }}")
    write_gguf(tmp_path / "model", tmp_path / "out.gguf", "bf16")
    written = gguf.GGUFReader(tmp_path / "out.gguf")

    def field(name: str) -> Any:
        return written.get_field(name).contents()  # type: ignore[union-attr]

    tokens, kinds = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    controls = {t for t, kind in zip(tokens, kinds, strict=True) if kind == gguf.TokenType.CONTROL}
    assert {"<|im_start|>", "<|im_end|>"} <= controls
    assert "a" not in controls
    assert field("tokenizer.chat_template") == "{{ messages }}"
