"""The server's interface to an engine, which may be in another process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from foredraft.core.params import SamplingParams
from foredraft.engine.request import Event
from foredraft.engine.stats import EngineStats
from foredraft.models.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from foredraft.server.context import ServerContext


class ServedModel(Protocol):
    """Static information on a model.

    Attributes:
        name: None where it was built from parts.
        tokenizer: None where prompts are token ids.
        max_context: tokens of a text.
        max_prompt: tokens of a prompt.
        vocab_size: ids are below it.
        drafter_name: the drafter in use.
        sampling_defaults: see `foredraft.llm.LLM`.
    """

    @property
    def name(self) -> str | None: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def max_context(self) -> int: ...
    @property
    def max_prompt(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def drafter_name(self) -> str: ...
    @property
    def sampling_defaults(self) -> Mapping[str, float] | None: ...


class ServedReplies(Protocol):
    """The events of replies as they come: see `foredraft.async_llm.EventStream`."""

    @property
    def request_ids(self) -> Sequence[int]: ...
    def __aiter__(self) -> AsyncIterator[Event]: ...
    async def __anext__(self) -> Event: ...
    async def cut(self) -> None: ...
    async def aclose(self) -> None: ...


class ServedEngine(Protocol):
    """Runs requests: `foredraft.async_llm.AsyncLLM`, which see, or a client of engines elsewhere.

    Attributes:
        is_healthy: whether it takes requests.
        is_alive: whether it will take requests without a restart of the process.
    """

    @property
    def llm(self) -> ServedModel: ...
    @property
    def is_healthy(self) -> bool: ...
    @property
    def is_alive(self) -> bool: ...
    def stats(self) -> EngineStats: ...
    async def aclose(self, *, drain: bool = True) -> None: ...

    async def open_all(
        self,
        asked: Sequence[tuple[Sequence[int], SamplingParams]],
        *,
        tenant: str | None = None,
        priority: int = 0,
        session: str | None = None,
    ) -> ServedReplies:
        """Submit several requests, or none of them; raises as `AsyncLLM.open`.

        Args:
            asked: prompts, each with its parameters.
            session: with several engines, requests of one session go to one engine, whose cache
                they share.
        """


LoadEngine = Callable[["ServerContext"], ServedEngine]
"""Brings the engine of a server up, on a thread of its own. It may add to the server's metrics."""
