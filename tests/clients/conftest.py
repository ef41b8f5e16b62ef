"""A server for real clients: a small model, which they cannot tell from a large one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from foredraft.models.table import TableModel
from tests.clients.openai_exceptions import MODELS
from tests.models.checkpoints import VOCAB_SIZE
from tests.server.conftest import Running, loading, running, tokenizer_directory  # noqa: F401

NAMES = ("tiny", *MODELS)


@pytest.fixture(scope="session")
def server(tokenizer_directory: Path) -> Iterator[Running]:  # noqa: F811
    target = TableModel.random(VOCAB_SIZE, seed=5, order=1, sharpness=6.0)
    target.max_context = 1024
    load = loading(target, tokenizer_directory, drafter="suffix", max_batch_size=8)
    with running(load, served_model_names=NAMES) as server:
        yield server
