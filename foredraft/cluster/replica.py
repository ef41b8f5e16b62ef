"""The engine's process, and the description of its model for gates."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

from foredraft.async_llm import AsyncLLM
from foredraft.core.errors import EngineStoppedError, ForedraftError
from foredraft.core.params import SamplingParams
from foredraft.engine.request import Event, ReplySoFar
from foredraft.llm import LLM
from foredraft.models.text.tokenizer import Tokenizer
from foredraft.system.ray_paths import close_port

Item = Event | ForedraftError | None
"""Items of an engine's stream: None when it has accepted a reply, then events or an error."""
_STUCK = 60.0
"""Seconds of a step that no model takes."""


@dataclass(frozen=True)
class AskedReply:
    """One reply, as a gate asks for it.

    Attributes:
        params: with the seed of this very reply.
        priority: requests of higher numbers go first.
        so_far: tokens that another engine has committed; none for a new reply.
    """

    prompt: list[int]
    params: SamplingParams
    tenant: str | None
    priority: int
    so_far: ReplySoFar


@dataclass(frozen=True)
class RemoteModel:
    """The engines' model as a gate sees it, which does not have its files: a `ServedModel`.

    Attributes:
        name, max_context, max_prompt, vocab_size, drafter_name, sampling_defaults, tokenizer: see
            `ServedModel`.
        tokenizer_files: of the tokenizer, by name.
    """

    name: str | None
    max_context: int
    max_prompt: int
    vocab_size: int
    drafter_name: str
    sampling_defaults: Mapping[str, float] | None
    tokenizer_files: Mapping[str, bytes]

    @classmethod
    def of(cls, llm: LLM) -> RemoteModel:
        files = llm.tokenizer.files if llm.tokenizer else {}
        sizes = llm.max_context, llm.max_prompt, llm.vocab_size
        return cls(llm.name, *sizes, llm.drafter_name, llm.sampling_defaults, files)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        if not self.tokenizer_files:
            return None
        with TemporaryDirectory(prefix="foredraft-") as directory:
            for name, content in self.tokenizer_files.items():
                Path(directory, name).write_bytes(content)
            return Tokenizer(Path(directory))


class EngineReplica:
    """One engine. Ray Serve keeps each in a process of its own, and calls these methods.

    Args:
        max_waiting: most replies that wait beside those in the batch.
        give_back_after: see `AsyncLLM`.
    """

    def __init__(
        self, load: Callable[[], LLM], max_waiting: int, give_back_after: float | None = None
    ) -> None:
        close_port()
        self._engine = AsyncLLM(load(), max_waiting=max_waiting, give_back_after=give_back_after)

    def describe(self) -> RemoteModel:
        """The model's description for gates."""
        return RemoteModel.of(self._engine.llm)

    async def open(self, asked: AskedReply) -> AsyncIterator[Item]:
        """Run a reply: an item when it is accepted, and one a step.

        Errors are items as well, so that they arrive as they are. The reply is aborted within one
        step when the gate leaves. An engine that has stopped ends its process: Ray tells all gates
        at once, which would ask it again until three health checks have failed.
        """
        try:
            stream = await self._engine.open(
                asked.prompt,
                asked.params,
                tenant=asked.tenant,
                priority=asked.priority,
                so_far=asked.so_far,
            )
            async with stream:
                yield None
                async for event in stream:
                    yield event
        except ForedraftError as error:
            if not self._engine.is_healthy:
                os._exit(1)
            yield error

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Ray Serve: how full batch or cache are, whichever is fuller; 1: full."""
        stats = self._engine.stats()
        rows = (stats.running + stats.waiting) / self._engine.llm.engine.max_batch_size
        cache = stats.cache_tokens / max(1, stats.cache_tokens + stats.cache_free_tokens)
        return {"load": max(rows, cache)}

    def check_health(self) -> None:
        """Called by Ray Serve, which replaces a replica that raises three times in a row.

        Raises:
            EngineStoppedError: the engine's thread has failed, or stands still in a step.
        """
        if self._engine.worker.step_seconds > max(_STUCK, 4 * self._engine.worker.longest_step):
            raise EngineStoppedError("the engine stands still in a step")
        if not self._engine.is_healthy:
            raise EngineStoppedError("the engine has stopped; the replica's log says why")

    async def __del__(self) -> None:
        """Called when no reply is under way any more."""
        await self._engine.aclose()
