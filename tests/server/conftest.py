"""A server over a model of tables, in this process and on a port."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from foredraft.core.cost import CostModel
from foredraft.llm import LLM
from foredraft.models.table import TableModel
from foredraft.models.text.tokenizer import Tokenizer
from foredraft.options import LoadOptions
from foredraft.server.app import create_app
from foredraft.server.context import ServerContext
from foredraft.server.run import GracefulServer, bind, new_server
from foredraft.server.settings import ServerSettings
from tests.models.checkpoints import VOCAB_SIZE, save_tokenizer

TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools, called as <tool_call>{...}</tool_call>:"
    "{% for tool in tools %} {{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}{% for call in message.tool_calls or [] %}<tool_call>"
    "{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass
class Running:
    """A server that runs."""

    url: str
    context: ServerContext
    server: GracefulServer
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20, **options)

    def connect(self) -> socket.socket:
        """A connection for bytes that no client would send."""
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=10)

    def is_idle(self) -> bool:
        stats = self.context.engine.stats()
        return not (stats.running or stats.waiting or self.context.num_live)


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("server") / "tiny"
    save_tokenizer(directory, TOOL_TEMPLATE)
    return directory


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running(load: Callable[..., LLM], **settings: Any) -> Iterator[Running]:
    """A server on a free port, on a thread of its own, until it is left."""
    loaded = threading.Event()
    quick = {"port": 0, "drain_timeout": 1.0, "ping_interval": 0.2}
    chosen = ServerSettings(**quick | settings)
    app = create_app(load, chosen, lambda _: loaded.set())
    server, listening = new_server(app), bind(chosen)
    loop = (server.config.get_loop_factory() or asyncio.new_event_loop)()  # as it is when served

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(server.serve([listening]))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert loaded.wait(20)
    try:
        url = chosen.address(listening.getsockname()[1])
        yield Running(url, app.state.context, server, loop, thread)
    finally:
        if thread.is_alive():
            loop.call_soon_threadsafe(server.end)
            thread.join(20)
        assert not thread.is_alive()


def loading(target: TableModel, tokenizer: Tokenizer | Path, **options: Any) -> Callable[..., LLM]:
    """Loads this model, with other options if the caller names some."""

    def load(trace: Any, cost: CostModel | None = None, **others: Any) -> LLM:
        own = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer(tokenizer)
        made = target
        if type(target) is TableModel:  # each server has a cache of its own
            made = TableModel(target.vocab_size, target.probs, target.max_context)
        return LLM(made, own, LoadOptions(**options | others), cost=cost, trace=trace)

    return load


@pytest.fixture(scope="session")
def load(tokenizer_directory: Path) -> Callable[..., LLM]:
    """Loads a model of random tables with a drafter that copies."""

    target = TableModel.random(VOCAB_SIZE, seed=5, order=1, sharpness=6.0)
    return loading(target, tokenizer_directory, drafter="suffix", max_batch_size=4)


@pytest.fixture(scope="session")
def shared(load: Callable[..., LLM]) -> Iterator[Running]:
    with running(load, served_model_names=("tiny", "other")) as server:
        yield server


@pytest.fixture
def measured(load: Callable[..., LLM]) -> Iterator[httpx.Client]:
    """A client of a model whose steps were timed: its controller keeps a ledger."""
    cost = CostModel(((1, 1.0), (8, 1.1)))
    with running(partial(load, cost=cost)) as server, server.client() as client:
        yield client


@pytest.fixture
def client(shared: Running) -> Iterator[httpx.Client]:
    with shared.client() as client:
        yield client
