"""Part of `benchmarks.gpu`: the tests that need a card, one after the other in this process."""

from __future__ import annotations

import gc
import sys

import pytest
import torch

from benchmarks.gpu_run import Run

_FILES = (
    *("test_exact_gpu", "test_triton", "test_triton_packed", "test_cuda", "test_head_chain"),
    "test_device_draws",
)
_MOST_RESERVED = 8 << 30


def tests(run: Run) -> None:
    """How many tests passed, and the end of each failure."""
    files = [f"tests/models/{name}.py" for name in _FILES]
    outcomes = _Outcomes(run)
    code = pytest.main(["-p", "no:cacheprovider", "-m", "not slow", *files], plugins=[outcomes])
    run.found["code"] = int(code)


class _Outcomes:
    """Notes each test when it is over, so that a run that is cut off leaves what it has."""

    def __init__(self, run: Run) -> None:
        self._run = run
        run.found.update(passed=0, skipped=0, failed={}, slowest_s={}, complete=False)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = self._run.found
        if report.failed:
            found["failed"][report.nodeid] = str(report.longrepr)[-600:]
        elif report.skipped:
            found["skipped"] += 1
        elif report.when == "call":
            found["passed"] += 1
        if report.duration > 5.0:
            found["slowest_s"][f"{report.nodeid} {report.when}"] = round(report.duration, 1)

    def pytest_runtest_logfinish(self) -> None:
        if torch.cuda.is_available() and torch.cuda.memory_reserved() > _MOST_RESERVED:
            gc.collect()  # models of tests before
            torch.cuda.empty_cache()
        self._run.save()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        if self._run.is_over:
            item.session.shouldstop = "the time is over"

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._run.found["complete"] = not session.shouldstop
        sys.stdout.flush()
