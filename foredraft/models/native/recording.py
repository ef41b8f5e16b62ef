"""Work on fixed buffers, recorded once as a CUDA graph and replayed without launch costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

_WARM_UPS = 2
"""Libraries allocate and choose kernels in their first calls, which may not be recorded."""

Result = TypeVar("Result")


class Recorder:
    """Records work as CUDA graphs that share one memory pool; elsewhere work is done again.

    The pool holds what a graph needs while it runs, so the largest graph sets its size, not their
    number. Whatever work returns may lie there: it is good until any graph of the recorder runs.

    Args:
        device: where the work runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._pool: Any = None

    def wait(self) -> None:
        """Until nothing that was queued runs a recording: before any of them is dropped."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def start_over(self) -> None:
        """All recordings are dropped: a pool that nothing uses any more cannot be used again."""
        self._pool = None

    def record(self, work: Callable[[], Result]) -> Callable[[], Result]:
        """What does ``work`` again when called, on the buffers it used now.

        Args:
            work: the same kernels each time, on memory that outlives the recording; it may run
                several times. It must ask the device for no value.
        """
        if self._device.type != "cuda":
            return work
        with (
            torch.cuda.device(self._device),
            torch.no_grad(),
            # Masked attention has these two; the choice must not fall otherwise from run to run.
            sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]),
        ):
            return self._capture(work)

    def _capture(self, work: Callable[[], Result]) -> Callable[[], Result]:
        if self._stream is None:  # one for all: graphs that share a pool must share it too
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                work()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            result = work()

        def replay() -> Result:
            graph.replay()
            return result

        return replay
