"""The command line on several real processes, forked from this one so that nothing is imported anew."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch

from spartan.files import read

ROOT = Path(__file__).parent.parent.parent

# What a run imports on its way.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for _name in (
        *("sklearn.datasets", "sklearn.model_selection", "torch.utils.tensorboard", "torch._dynamo"),
        *("spartan.app.cli", "spartan.app.train.loop", "spartan.app.train.small_images", "spartan.app.report.page"),
    ):
        importlib.import_module(_name)


def free_port() -> int:
    with socket.socket() as here:
        here.bind(("127.0.0.1", 0))
        return here.getsockname()[1]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return read(run / "model.safetensors")


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


class Launched:
    """`spartan …` on so many processes; what each prints goes to files of its own."""

    def __init__(self, folder: Path, world: int, *arguments: object, ranks: range | None = None, **variables: str):
        self.folder, self.world = folder, world
        folder.mkdir(parents=True, exist_ok=True)
        port = str(free_port())
        shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **variables}
        self.pids: dict[int, int] = {}
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in ranks or range(world):
            pid = os.fork()
            if pid == 0:
                self._be(rank, shared, [str(a) for a in arguments])
            self.pids[rank] = pid

    def _be(self, rank: int, shared: dict[str, str], arguments: list[str]) -> None:
        code: object = 1
        try:
            os.setpgid(0, 0)
            os.chdir(self.folder)
            os.environ.update(shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            for number, stream in ((1, "out"), (2, "err")):
                os.dup2(os.open(f"{stream}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            sys.stdout, sys.stderr = (os.fdopen(os.dup(n), "w", buffering=1) for n in (1, 2))
            sys.argv = ["spartan", *arguments]
            sys.path.insert(0, str(ROOT))
            torch.set_num_threads(1)
            from spartan.app.cli import main

            main()
            code = 0
        except SystemExit as stop:
            code = stop.code
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 0 if code is None else 1)

    def out(self, rank: int) -> str:
        return (self.folder / f"out.{rank}").read_text()

    def err(self, rank: int) -> str:
        return (self.folder / f"err.{rank}").read_text()

    def wait(self, seconds: float = 60) -> list[int]:
        """The exit codes; a process that hangs fails the test."""
        codes: dict[int, int] = {}

        def over() -> bool:
            for rank, pid in self.pids.items():
                if rank not in codes:
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        codes[rank] = os.waitstatus_to_exitcode(status)
            return len(codes) == len(self.pids)

        wait_for(over, seconds)
        self.pids = {}
        return [codes[rank] for rank in sorted(codes)]

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def launch(folder: Path, world: int, *arguments: object) -> Launched:
    """Run to the end, which must be a good one."""
    with Launched(folder, world, *arguments) as processes:
        codes = processes.wait()
        assert codes == [0] * world, [processes.err(rank) for rank in range(world)]
    return processes
