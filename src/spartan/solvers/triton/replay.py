"""Records sequences of launches once and replays them: starting a kernel from Python takes longer than many a kernel."""

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch


class Replay:
    """Runs a sequence of launches as a CUDA graph from its second time on.

    A sequence must read and write the same addresses every time, and must not allocate.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = {}

    def __call__(self, key: Hashable, launch: Callable[[], None]) -> None:
        """Run the sequence that this key stands for."""
        if self.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            launch()
        elif key not in self._graphs:
            launch()  # this compiles the kernels, which a capture must not
            self._graphs[key] = None
        else:
            graph = self._graphs[key]
            if graph is None:
                graph = self._graphs[key] = self._capture(launch)
            graph.replay()

    def _capture(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream), _nothing_collected():
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                launch()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        return graph


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Without Python's garbage collector: a graph that it destroys during a capture spoils it."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
