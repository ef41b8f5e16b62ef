"""Peers whose forward is timed beside ours, where they are installed."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from foredraft.bench.contenders import transformers_model
from foredraft.bench.step import Size, text
from foredraft.bench.timers import Stopwatch
from foredraft.core.errors import ConfigError
from foredraft.machine import package_version


class TransformersStepper:
    """A transformers model in eager mode with a dynamic cache, one row."""

    name = "transformers"

    def __init__(self, directory: Path, dtype: torch.dtype, device: str, context: int) -> None:
        from transformers import DynamicCache

        self._model = transformers_model(directory, dtype, device)
        self._device = device
        self._cache = DynamicCache(config=self._model.config)
        self._run(text(context))

    def fits(self, size: Size) -> bool:
        return size.rows == 1

    def step(self, size: Size) -> dict[str, float]:
        watch = Stopwatch()
        with watch:
            self._run(text(size.tokens))
        self._cache.crop(-size.tokens)
        return {"total": watch.seconds}

    @torch.inference_mode()
    def _run(self, tokens: list[int]) -> None:
        ids = torch.tensor([tokens], device=self._device)
        self._model(ids, past_key_values=self._cache, use_cache=True)


class LlamaCppStepper:
    """llama.cpp through llama-cpp-python, on the same weights, one row.

    Args:
        quantisation: "bf16", "q8_0" or "q4_0"; the GGUF file is made here from the checkpoint.

    Raises:
        ConfigError: llama-cpp-python is not installed.
    """

    def __init__(self, directory: Path, quantisation: str, context: int, threads: int) -> None:
        if package_version("llama-cpp-python") is None:
            raise ConfigError(
                "llama.cpp is not installed: pip install llama-cpp-python (it compiles for some "
                "minutes and needs a C++ compiler)"
            )
        from llama_cpp import Llama

        from foredraft.bench.gguf import write_gguf

        self.name = f"llama.cpp {quantisation}"
        self._context = context
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"model-{quantisation}.gguf"
            write_gguf(directory, path, quantisation)
            self._llama = Llama(
                str(path), n_ctx=context + 64, n_threads=threads, n_threads_batch=threads,
                n_batch=512, logits_all=True, verbose=False, use_mmap=False,
            )  # fmt: skip
        self._llama.eval(text(context))

    def fits(self, size: Size) -> bool:
        return size.rows == 1

    def step(self, size: Size) -> dict[str, float]:
        self._llama.n_tokens = self._context  # eval drops what its cache holds beyond
        watch = Stopwatch()
        with watch:
            self._llama.eval(text(size.tokens))
        return {"total": watch.seconds}
