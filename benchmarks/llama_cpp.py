"""llama.cpp through llama-cpp-python, on the same weights: a peer where it is installed."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Collection, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contenders import ContenderRun
from benchmarks.forwards import Size, text
from benchmarks.timing import Stopwatch
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.models.files.store import resolve_model
from foredraft.system.machine import package_version


def open_llama(model: str, quantisation: str, context: int, threads: int, **options: Any) -> Any:
    """A model as a ``Llama``, read into memory from a GGUF file, which is made here if need be.

    Args:
        model: a GGUF file, a checkpoint's directory, or one of `random_model.shapes`.
        quantisation: one of `gguf.QUANTISATIONS`, of all matrices where the file is made here.
        context: most tokens.
        options: further ones of ``Llama``.

    Raises:
        ConfigError: llama-cpp-python is not installed.
    """
    if package_version("llama-cpp-python") is None:
        raise ConfigError(
            "llama.cpp is not installed: pip install llama-cpp-python (it compiles for some "
            "minutes and needs a C++ compiler)"
        )
    from llama_cpp import Llama

    from benchmarks.gguf import write_gguf
    from benchmarks.random_files import write_random
    from benchmarks.random_model import shapes

    with tempfile.TemporaryDirectory() as folder:
        if model.endswith(".gguf"):
            path = Path(model)
        elif model in shapes():
            path = write_random(Path(folder), model, quantisation)
        else:
            path = Path(folder) / f"model-{quantisation}.gguf"
            write_gguf(Path(model), path, quantisation)
        return Llama(
            str(path), n_ctx=context, n_threads=threads, n_threads_batch=threads, n_batch=512,
            verbose=False, use_mmap=False, **options,
        )  # fmt: skip


def gguf_of(model: str) -> str:
    """The GGUF file that a name of ours stands for, fetched if it is not there.

    Raises:
        ConfigError: its weights are in no GGUF file.
    """
    found = sorted(resolve_model(model).glob("*.gguf"))
    if len(found) != 1:
        raise ConfigError(f"{model} is no single GGUF file, which other engines read")
    return str(found[0].resolve())


class LlamaCppStepper:
    """Forwards of llama.cpp with the logits of every token, one row. See `step.TimedStepper`.

    Args:
        context: tokens before a forward.
        most_tokens: of a forward.
    """

    def __init__(
        self, model: str, quantisation: str, context: int, most_tokens: int, threads: int
    ) -> None:
        self.name = f"llama.cpp {quantisation}"
        self._context = context
        length = context + most_tokens
        self._llama = open_llama(model, quantisation, length, threads, logits_all=True)
        self._llama.eval(text(context))

    def fits(self, size: Size) -> bool:
        return size.rows == 1

    def step(self, size: Size) -> dict[str, float]:
        self._llama.n_tokens = self._context  # eval drops what its cache holds beyond
        watch = Stopwatch()
        with watch:
            self._llama.eval(text(size.tokens))
        return {"total": watch.seconds}


class LlamaDrafts:
    """Greedy drafts of a small model, which keeps what it has read: a ``draft_model`` of ``Llama``.

    Args:
        draft: a ``Llama``.
        num_tokens: of a draft.
    """

    def __init__(self, draft: Any, num_tokens: int) -> None:
        self._draft, self._num_tokens = draft, num_tokens

    def __call__(self, input_ids: Any, **_: Any) -> Any:
        room = self._draft.n_ctx() - len(input_ids) - 1
        tokens = self._draft.generate(input_ids.tolist(), temp=0.0)
        return np.array([*islice(tokens, max(0, min(self._num_tokens, room)))], dtype=np.intc)


class LlamaCppContender:
    """Greedy generation of llama.cpp. See `contenders.Contender`.

    Args:
        max_context: most tokens of prompt and reply.
        stop_ids: tokens that end the reply.
        lookup: with its prompt lookup, which drafts 10 tokens.
        quantisation: of its weights; see `open_llama`.
        draft_model: a GGUF file that drafts, in llama-cpp-python's loop; None: there is none.
        draft_tokens: of its drafts.
    """

    def __init__(
        self,
        model: str,
        max_context: int,
        threads: int,
        stop_ids: Collection[int],
        lookup: bool = False,
        quantisation: str = "bf16",
        draft_model: str | None = None,
        draft_tokens: int = 0,
    ) -> None:
        self.name = f"llama.cpp {quantisation}" + (" ngram" if lookup else "")
        self._stop_ids = frozenset(stop_ids)
        options: dict[str, Any] = {}
        if draft_model:
            drafts = LlamaDrafts(open_llama(draft_model, "", max_context, threads), draft_tokens)
            options = {"draft_model": drafts, "logits_all": True}
        if lookup:
            from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

            options = {"draft_model": LlamaPromptLookupDecoding(), "logits_all": True}
        self._llama = open_llama(model, quantisation, max_context, threads, **options)

    def run(self, prompt_ids: Sequence[int], params: SamplingParams) -> ContenderRun:
        self._llama.reset()
        self._llama.n_tokens = 0
        found: list[int] = []
        started, first_s = time.perf_counter(), 0.0
        for token in self._llama.generate(list(prompt_ids), temp=0.0, repeat_penalty=1.0):
            found.append(token)
            first_s = first_s or time.perf_counter() - started
            if token in self._stop_ids or len(found) == params.max_tokens:
                break
        return ContenderRun(tuple(found), first_s, time.perf_counter() - started, 1)
