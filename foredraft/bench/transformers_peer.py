"""The forward of transformers, timed beside ours."""

from __future__ import annotations

from pathlib import Path

import torch

from foredraft.bench.contenders import transformers_model
from foredraft.bench.step import Size, text
from foredraft.bench.timers import Stopwatch


class TransformersStepper:
    """A transformers model in eager mode with a dynamic cache, one row."""

    name = "transformers"

    def __init__(self, directory: str | Path, dtype: str, device: str, context: int) -> None:
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
