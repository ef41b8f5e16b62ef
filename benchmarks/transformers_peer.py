"""transformers, timed beside ours: its forward and its ``generate``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import ContenderRun
from benchmarks.forwards import Size, text
from benchmarks.timing import Stopwatch
from foredraft.core.params import SamplingParams


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
        self._model(ids, use_cache=True, cache=self._cache)


class TransformersContender:
    """``generate`` of transformers on the same checkpoint and dtype, greedy.

    Args:
        dtype: its name.
        assistant: "ngram" for its prompt lookup; None for plain decoding.
    """

    def __init__(
        self, directory: str | Path, dtype: str, device: str, assistant: str | None = None
    ) -> None:
        self.name = "transformers" + (f" {assistant}" if assistant else "")
        self._options: dict[str, Any] = {"prompt_lookup_num_tokens": 8} if assistant else {}
        self._model = transformers_model(directory, dtype, device)

    def run(self, prompt_ids: Sequence[int], params: SamplingParams) -> ContenderRun:
        clock = _Clock()
        ids = torch.tensor([list(prompt_ids)], device=self._model.device)
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=params.max_tokens,
            do_sample=False,
            streamer=clock,
            **self._options,
        )
        total_s = time.perf_counter() - clock.started
        generated = tuple(output[0, ids.shape[1] :].tolist())
        return ContenderRun(generated, clock.first_s, total_s, 1)


def transformers_model(directory: str | Path, dtype: str, device: str) -> Any:
    """The checkpoint as transformers loads it, ready to run."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, dtype), use_safetensors=True, trust_remote_code=False
    )
    return model.to(device).eval()


class _Clock:
    """A streamer that notes when the first token came. The first call carries the prompt."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.first_s = 0.0
        self._calls = 0

    def put(self, value: object) -> None:
        self._calls += 1
        if self._calls == 2:
            self.first_s = time.perf_counter() - self.started

    def end(self) -> None:
        pass
