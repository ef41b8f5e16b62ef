"""Fixtures of all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

# Before torch is imported. Programs that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["FOREDRAFT_CONFIG"] = ""  # the user's own settings do not count

gc.disable()  # a third of what importing all tests and their packages takes; see below

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

THREADS = torch.get_num_threads()

# One profile: a machine with busy neighbours finds no other faults than a quiet one.
settings.register_profile("foredraft", deadline=None)
settings.load_profile("foredraft")


@pytest.fixture(scope="session", autouse=True)
def _compiled_kernels() -> Iterator[None]:
    """A test that keeps its models elsewhere does not compile the kernels anew."""
    from foredraft.kernels import build

    places = build.directories()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "directories", lambda: places)
        yield


@pytest.fixture(scope="session", autouse=True)
def _described_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Conversions of the tests' own GGUF files end with the session; packaged models are shared."""
    from foredraft.models.files import store

    folder = tmp_path_factory.mktemp("described")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "_of_gguf", _made_in(folder, store._of_gguf))
        yield


def _made_in(folder: Path, plan: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """The conversion of a test's file, made there unless the test has a cache of its own."""

    def planned(path: Path) -> Any:
        conversion = plan(path)
        is_ours = path.resolve().is_relative_to(folder.parent)
        if not is_ours or os.environ.get("FOREDRAFT_CACHE"):
            return conversion
        return replace(conversion, name=f"{folder / conversion.name}")

    return planned


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The event loop of tests that are coroutines."""
    return "asyncio"


def pytest_collection_finish() -> None:
    """The garbage collector need not walk through what lives as long as the tests."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_runtest_teardown() -> None:
    """A test that sets the number of threads sets it for itself alone.

    Two threads in each of two processes wait for one another on two cores: tests after it would
    take ten times as long.
    """
    torch.set_num_threads(THREADS)
