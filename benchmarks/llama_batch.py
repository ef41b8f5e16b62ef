"""llama.cpp as a server would use it: many sequences in one batch, by its low-level interface.

It takes part in the turns of `foredraft.bench.load`: the same prompts, the same number of
requests in flight, greedy, from the same weights. Prompts are read in batches of their own, as many
tokens at once as the context's batch holds; then each decode is one token of every sequence.
numpy's argmax picks the likeliest token; it is at least as fast as llama.cpp's samplers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.llama_cpp import open_llama
from foredraft.bench.load import Finished, Load, Served, ServedStep

BATCH = 512
"""Most tokens of a decode."""


@dataclass
class _Sequence:
    """A request in flight."""

    number: int
    place: int
    prompt: list[int]
    found: list[int]
    started_s: float
    first_s: float = 0.0


class LlamaContext:
    """A context of llama.cpp that holds several sequences, and a batch to fill.

    Args:
        owner: a ``Llama``, whose model it shares.
        rows: most sequences.
        tokens: of a sequence, at most.
        threads: of both kinds of its work.

    Attributes:
        api: llama.cpp's functions.
    """

    def __init__(self, owner: Any, rows: int, tokens: int, threads: int) -> None:
        from llama_cpp import llama_cpp as api

        self.api = api
        params = owner.context_params
        params.n_ctx = rows * tokens
        params.n_batch = params.n_ubatch = BATCH
        params.n_seq_max = rows
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        self._vocab = owner.n_vocab()
        self.handle = api.llama_init_from_model(owner.model, params)
        if not self.handle:
            raise RuntimeError(f"llama.cpp makes no context of {params.n_ctx} tokens")
        self._batch = api.llama_batch_init(BATCH, 0, 1)

    def run(self, tokens: Iterable[tuple[int, int, int, bool]]) -> None:
        """Decode (token, position, sequence, whether its logits are wanted)."""
        batch, count = self._batch, 0
        for i, (token, position, place, wanted) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = place, wanted
            count = i + 1
        batch.n_tokens = count
        if outcome := self.api.llama_decode(self.handle, batch):
            raise RuntimeError(f"llama.cpp refuses a batch of {count} tokens ({outcome})")

    def read(self, prompt: Sequence[int], place: int) -> int:
        """Decode a prompt; the index of its last token's logits."""
        last = len(prompt) - 1
        for first in range(0, len(prompt), BATCH):
            chunk = range(first, min(first + BATCH, len(prompt)))
            self.run((prompt[at], at, place, at == last) for at in chunk)
        return last % BATCH

    def likeliest(self, index: int) -> int:
        """The token of the greatest logit."""
        logits = self.api.llama_get_logits_ith(self.handle, index)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab,)).argmax())

    def clear(self, place: int | None = None) -> None:
        """Forget a sequence, or all."""
        memory = self.api.llama_get_memory(self.handle)
        if place is None:
            self.api.llama_memory_clear(memory, True)
        else:
            self.api.llama_memory_seq_rm(memory, place, -1, -1)


class LlamaBatchServer:
    """See the module docstring and `foredraft.bench.load.Server`.

    Args:
        directory: our checkpoint.
        quantisation: of the GGUF file that is made of it.
        max_rows: most requests in flight.
        threads: of both kinds of its work.
        max_tokens: most tokens of a prompt and its reply.
    """

    def __init__(
        self, directory: Path, quantisation: str, max_rows: int, threads: int, max_tokens: int
    ) -> None:
        self.name = f"llama.cpp {quantisation}"
        self._owner = open_llama(str(directory), quantisation, 64, threads)
        self._context = LlamaContext(self._owner, max_rows, max_tokens, threads)
        self.served = Served()

    def begin(self, load: Load) -> None:
        self.served, self._load = Served(), load
        self._waiting = deque(enumerate(load.prompts))
        self._running: list[_Sequence] = []
        self._free = [*range(load.concurrency)]
        self._context.clear()

    def turn(self, seconds: float) -> bool:
        until = self.served.seconds + seconds
        while self.served.seconds < until and (self._running or self._waiting):
            began = time.perf_counter()
            read = self._admit()
            committed = len(self._running)
            if not read:
                self._decode_all()
            wall_s = time.perf_counter() - began
            self.served.seconds += wall_s
            wall_ms = 1e3 * wall_s
            self.served.steps.append(
                ServedStep(wall_ms, 0.0, wall_ms, committed, 0, committed, not read)
            )
            self._finish()
        return bool(self._running or self._waiting)

    def _admit(self) -> bool:
        """Read the prompt of one more request; whether there was one and room for it."""
        if not self._waiting or len(self._running) >= self._load.concurrency:
            return False
        number, prompt = self._waiting.popleft()
        new = _Sequence(number, self._free.pop(), [*prompt], [], self.served.seconds)
        new.found.append(self._context.likeliest(self._context.read(prompt, new.place)))
        self._running.append(new)
        return True

    def _decode_all(self) -> None:
        self._context.run(
            (seq.found[-1], len(seq.prompt) + len(seq.found) - 1, seq.place, True)
            for seq in self._running
        )
        for i, seq in enumerate(self._running):
            seq.found.append(self._context.likeliest(i))

    def _finish(self) -> None:
        for seq in [*self._running]:
            seq.first_s = seq.first_s or self.served.seconds - seq.started_s
            if len(seq.found) < self._load.params.max_tokens:
                continue
            taken = self.served.seconds - seq.started_s
            done = Finished(seq.number, tuple(seq.found), seq.first_s, taken)
            self.served.finished.append(done)
            self._running.remove(seq)
            self._free.append(seq.place)
            self._context.clear(seq.place)
