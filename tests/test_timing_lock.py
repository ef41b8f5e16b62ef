"""Training pauses while another process measures, and only then."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from foredraft.system.timing_lock import Heed, lock_path, measuring

pytest.importorskip("fcntl")


def test_where_it_is(tmp_path: Path) -> None:
    assert lock_path({"FOREDRAFT_CACHE": str(tmp_path)}) == tmp_path / "timing.lock"
    assert lock_path({"FOREDRAFT_TIMING_LOCK": "/x/y"}) == Path("/x/y")


def test_work_stands_still_while_somebody_measures(tmp_path: Path) -> None:
    path, said = tmp_path / "lock", list[str]()
    steps: list[float] = []
    ends = threading.Event()

    def work() -> None:
        with Heed(path) as pause:
            while not ends.is_set():
                pause()
                steps.append(time.monotonic())
                time.sleep(0.002)

    crowd = [threading.Thread(target=work) for _ in range(3)]
    for thread in crowd:
        thread.start()
    try:
        while len(steps) < 10:
            time.sleep(0.001)
        with measuring(said.append, path):
            began = len(steps)
            time.sleep(0.1)
            assert len(steps) <= began + 3  # steps that had begun
        while len(steps) <= began + 3:
            time.sleep(0.001)  # the test's timeout ends it if they never go on
    finally:
        ends.set()
        for thread in crowd:
            thread.join()
    assert all("waiting" in text for text in said)


def test_nobody_waits_where_nobody_measures(tmp_path: Path) -> None:
    with Heed(tmp_path / "lock") as pause:
        assert max(pause() for _ in range(5)) < 1.0
    said: list[str] = []
    with measuring(said.append, tmp_path / "lock"):
        pass
    assert not said


def test_a_folder_that_cannot_be_written_is_no_obstacle() -> None:
    with Heed(Path("/proc/none/lock")) as pause:
        pause()
    with measuring(lambda text: None, Path("/proc/none/lock")):
        pass
