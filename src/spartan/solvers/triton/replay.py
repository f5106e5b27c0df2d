"""Records sequences of launches once and replays them: starting a kernel from Python takes longer than many a kernel."""

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Replay:
    """Runs a sequence of launches as a CUDA graph from its second time on.

    A sequence must read and write the same addresses every time, and must not allocate. Between `hold` and `release`
    sequences are only noted, and then run as one: a graph takes about as long to start as its kernels take to run.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._records = device, device.type == "cuda"
        self.noting = 0  # while sequences are only noted: a number of its own each time
        self._times = 0  # that they were
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = {}
        self._held: dict[Hashable, Callable[[], None]] = {}
        self._kept: list[Any] = []

    def __call__(self, key: Hashable, launch: Callable[[], None]) -> None:
        """Run the sequence that this key stands for, or note it."""
        if not self.noting:
            self._run(key, launch)
            return
        if key in self._held:
            self.flush()
        self._held[key] = launch

    def keep(self, tensors: Any) -> None:
        """Have what noted sequences read live until they have run."""
        if self.noting:
            self._kept.append(tensors)

    def hold(self) -> None:
        """From now on only note."""
        self.noting = self._times = self._times + 1

    def flush(self) -> None:
        """Run what was noted: before anything else reads what it writes."""
        if self._held:
            held, self._held = self._held, {}

            def launch_all() -> None:
                for launch in held.values():
                    launch()

            self._run(tuple(held), launch_all)
        self._kept.clear()

    def flush_if(self, name: str) -> None:
        """Run what was noted, if a sequence of this name is among it."""
        for key in self._held:
            if isinstance(key, tuple) and key[0] == name:
                self.flush()
                return

    def release(self) -> None:
        """Run what was noted, and from now on everything at once."""
        self.noting = 0
        self.flush()

    @contextmanager
    def as_one(self) -> Iterator[None]:
        """Inside, sequences are only noted; at its end they are run, unless more is held."""
        held = self.noting
        if not held:
            self.hold()
        try:
            yield
        finally:
            if not held:
                self.release()

    def run(self, key: Hashable, launch: Callable[[], None]) -> None:
        """Run a sequence at once, whatever is held."""
        self._run(key, launch)

    def _run(self, key: Hashable, launch: Callable[[], None]) -> None:
        if not self._records or torch.cuda.is_current_stream_capturing():
            launch()
        elif graph := self._graphs.get(key):
            graph.replay()
        elif key in self._graphs:
            graph = self._graphs[key] = self._capture(launch)
            graph.replay()
        else:
            launch()  # this compiles the kernels, which a capture must not
            self._graphs[key] = None

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
