"""Fixtures of the models' tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from foredraft.cache import memory


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session", autouse=True)
def _small_caches_on_cards() -> Iterator[None]:
    """The default is half of the card's free memory, and tests hold several models at once."""
    with pytest.MonkeyPatch.context() as patch:
        if torch.cuda.is_available():
            patch.setattr(memory, "default_memory", lambda *_: 256 << 20)
        yield
