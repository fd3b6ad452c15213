"""One step of work captured in a CUDA graph: the host launches it whole, not kernel by kernel."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import torch

Result = TypeVar("Result")
_WARM_UPS = 2  # compile kernels, connect communicators, let libraries choose and allocate


class CapturedStep(Generic[Result]):
    """`run` captured once; each call replays it over the same memory and returns the same result.

    `run` reads and writes tensors that stay where they are. It is run a few times before the capture, so
    these runs must leave no trace; the capture itself executes nothing. Collectives in it are captured
    too: all their ranks capture together, and the graph must be gone before its process groups are.
    pool: memory that graphs share which are never replayed at once (torch.cuda.graph_pool_handle).
    stream: what the warm-ups and the capture run on; None: a new one.
    """

    def __init__(
        self, run: Callable[[], Result], device: torch.device, pool: tuple[int, int] | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> None:  # fmt: skip
        with torch.cuda.device(device):
            stream = torch.cuda.Stream() if stream is None else stream
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    run()
            torch.cuda.current_stream().wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            # Of this thread only: NCCL's watchdog may query events in its own meanwhile. The stream is
            # named because torch's default one for captures stays on the first device that used it.
            with (
                _without_collection(),
                torch.cuda.graph(
                    self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"
                ),
            ):
                self._result = run()

    @property
    def result(self) -> Result:
        """What each call returns; before the first one its memory says nothing."""
        return self._result

    def __call__(self) -> Result:
        self._graph.replay()
        return self._result


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Python's cyclic collector waits: a graph that it destroyed in a capture would make the capture fail."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
