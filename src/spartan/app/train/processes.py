"""Joins the processes of a run: finds who takes part, what each one takes, and lets them agree, stop and fail together."""

import contextlib
import ctypes
import datetime
import json
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from spartan.app.train.config import Config, RecipeError
from spartan.wording import first_line, raised_in

T = TypeVar("T")

TIMEOUT = "SPARTAN_TIMEOUT"  # seconds to wait for another process, when they meet and ever after
PARENT = "SPARTAN_PARENT"  # the number of the process that a run is not to outlive
_FIRST_ERROR = "spartan/last words"  # where in the store the first process to fail leaves its reason


class Stopped(RuntimeError):
    """Another process of the run failed, and this one with it."""


@dataclass(frozen=True)
class Processes:
    """The processes of this run, and which of them this is. Alone, nothing is sent anywhere.

    Example:
        >>> us = Processes()
        >>> us.alone, us.first, us.decide(lambda: "folder"), us.gather(7)
        (True, True, 'folder', [7])
    """

    rank: int = 0
    world: int = 1
    # its number among those on this machine, which is the number of its device
    local: int = 0
    # torch's group of all of them, where it is not the default one
    group: Any = None

    @property
    def alone(self) -> bool:
        """Whether this is the only process."""
        return self.world == 1

    @property
    def first(self) -> bool:
        """Whether this process prints and writes."""
        return self.rank == 0

    def decide(self, choose: Callable[[], T]) -> T:
        """What the first process chooses, on every process; what it raises, every process raises."""
        if self.alone:
            return choose()
        box: list[Any] = [None, None]
        if self.first:
            try:
                box[0] = choose()
            except Exception as error:
                box[1] = _portable(error)
        dist.broadcast_object_list(box, src=0, group=self.group, device=torch.device("cpu"))
        if box[1] is not None:
            raise box[1]
        return box[0]

    def gather(self, mine: T) -> list[T]:
        """Everyone's, in the order of ranks."""
        if self.alone:
            return [mine]
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, mine, group=self.group)
        return everyone

    def sum_(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if not self.alone:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def mean_(self, tensor: Tensor) -> Tensor:
        """The mean over all processes, in place."""
        return tensor if self.alone else self.sum_(tensor).div_(self.world)

    def copy_(self, tensors: Iterator[Tensor]) -> None:
        """Make every process's tensors those of the first."""
        if not self.alone:
            with torch.no_grad():
                for tensor in tensors:
                    dist.broadcast(tensor, src=0, group=self.group)


class StopSignals:
    """Remembers the first stop signal instead of dying of it; a second one ends the process as usual.

    Not so where a launcher looks after several processes: Ctrl-C reaches each of them from the terminal and once more
    from the launcher, who ends by force those that take too long.
    """

    def __init__(self, launched: bool = False, numbers: Sequence[int] = (signal.SIGTERM, signal.SIGINT)) -> None:
        self._launched, self._numbers = launched, numbers
        self.caught: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                self._before[number] = signal.signal(number, self._catch)
        return self

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self.caught = number
        if not self._launched:
            signal.signal(number, self._before[number])

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def end_with_parent() -> None:
    """Have a run save and end when the process named by SPARTAN_PARENT is gone, killed by force even. On Linux only.

    A run that goes on alone would take its device from the runs that are started next, and keep them out of its folder.
    """
    parent = os.environ.pop(PARENT, "")  # what this process starts is no child of that one
    if not parent or sys.platform != "linux":
        return
    set_signal_of_parents_death = 1
    ctypes.CDLL(None).prctl(set_signal_of_parents_death, signal.SIGTERM)
    if str(os.getppid()) != parent:  # it has died meanwhile
        os.kill(os.getpid(), signal.SIGTERM)


class StopAgreement:
    """Whether any process was asked to stop: told to all, and known to all at the same step.

    The question of one step is answered at the next, so that no step waits for it.
    """

    def __init__(self, us: Processes) -> None:
        self._us = us
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._asked: Any = None

    def ask(self, caught: int | None) -> int | None:
        """The signal that some process had caught when this was last called; alone, the one caught now."""
        if self._us.alone:
            return caught
        answer = self.wait()
        self._flag = torch.tensor([caught or 0], dtype=torch.int32)
        self._asked = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, async_op=True)
        return answer

    def wait(self) -> int | None:
        """The answer to the last question."""
        if self._asked is None:
            return None
        self._asked.wait()
        self._asked = None
        return int(self._flag) or None


# ---------------------------------------------------------------------- who takes what


def micro_batch(config: Config, world: int) -> int:
    """Images per forward pass of one process: `batch_size` is over all of them.

    Example:
        >>> micro_batch(Config(batch_size=128), 4), micro_batch(Config(batch_size=128, micro_batch=8), 4)
        (32, 8)
    """
    if config.batch_size % world:
        raise RecipeError(
            f"batch_size: {config.batch_size} cannot be divided among {world} processes; it counts the images of a step "
            f"over all of them, so it must be a multiple of {world}"
        )
    mine = config.batch_size // world
    micro = min(config.micro_batch or mine, mine)
    if mine % micro:
        raise RecipeError(
            f"micro_batch: {micro} must divide {mine}, the images of one process in a step (batch_size "
            f"{config.batch_size} over {world} processes)"
        )
    return micro


def choose_device(name: str, us: Processes) -> torch.device:
    """The device that a recipe asks for; of several processes on one machine each takes its own."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not us.alone:
        name = f"cuda:{us.local}"
    elif name.startswith("cuda:") and not us.alone:
        raise RecipeError(
            f"device: {name!r} would be shared by {us.world} processes; write cuda, and each takes its own"
        )
    try:
        device = torch.device(name)
        torch.zeros((), device=device)
    except Exception as error:
        count = torch.cuda.device_count()
        more = f"; this machine has {count} GPUs, so at most {count} processes" if us.local >= count > 0 else ""
        raise RecipeError(f"device: {name!r} cannot be used here ({first_line(error)}{more})") from None
    if device.type == "cuda" and not us.alone:
        torch.cuda.set_device(device)
    return device


# ---------------------------------------------------------------------- meeting and parting

_current = Processes()


def current() -> Processes:
    """The processes of this run, as `joined` found them."""
    return _current


@contextlib.contextmanager
def joined() -> Iterator[Processes]:
    """Meet the others, if a launcher such as torchrun started several (WORLD_SIZE, RANK, LOCAL_RANK, MASTER_ADDR)."""
    global _current
    world = _environment_number("WORLD_SIZE", 1)
    if world == 1:
        yield Processes()
        return
    us = Processes(_environment_number("RANK"), world, _environment_number("LOCAL_RANK", 0))
    store = _connect(us)
    _current = us
    try:
        yield us
    except Exception as error:
        first = _common_error(us, store, error)
        if first is error:
            raise
        raise first from error
    finally:
        _current = Processes()
    dist.destroy_process_group()
    # A thread of gloo still holds the last tensors that were exchanged, and wants the interpreter's lock to let them go. If
    # it gets that only when the interpreter ends, the process aborts: so it gets it now.
    time.sleep(0.2)


def _environment_number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    if not text.strip().isdigit():
        given = f"is {text!r}" if text else "is not set"
        raise RecipeError(f"{name}: the environment variable {given}; torchrun sets it to a whole number")
    return int(text)


def timeout_seconds() -> int:
    """Seconds to wait for another process."""
    return _environment_number(TIMEOUT, 600)


def _connect(us: Processes) -> Store:
    """Everyone's connection to everyone; nobody is waited for longer than SPARTAN_TIMEOUT seconds."""
    seconds = timeout_seconds()
    deadline = time.monotonic() + seconds
    where = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
    timeout = datetime.timedelta(seconds=seconds)
    # Small things are agreed upon between the CPUs, whatever the gradients travel on.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        store, rank, world = next(rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        store = PrefixStore(_name_the_meeting(store, us, deadline), store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
        us.sum_(torch.zeros(1))  # connections are made when first used
    except (RuntimeError, ValueError) as error:
        raise Stopped(
            f"process {us.rank} waited for {us.world} processes to meet at {where}, at most {seconds} s ({TIMEOUT}), and "
            f"they did not all come: {first_line(error)}"
        ) from error
    return store


def _name_the_meeting(store: Store, us: Processes, deadline: float) -> str:
    """A name for this meeting that every process, living now, knows.

    After a restart torchrun hands out the same store again, full of addresses of the dead. So every process writes a
    word of its own under `hello`, over that of its predecessor; the first answers under that word, which nobody has
    used before, with a word for all; and it waits until everyone says that they have it.
    """
    mine, missing = uuid.uuid4().hex, set(range(1, us.world))
    if not us.first:
        store.set(f"hello/{us.rank}", mine)
    while time.monotonic() < deadline:
        if us.first:
            missing = {rank for rank in missing if not store.check([f"here/{mine}/{rank}"])}
            if not missing:
                return mine
            for rank in missing:
                if store.check([f"hello/{rank}"]):
                    store.set(f"welcome/{store.get(f'hello/{rank}').decode()}", mine)
        elif store.check([f"welcome/{mine}"]):
            ours = store.get(f"welcome/{mine}").decode()
            store.set(f"here/{ours}/{us.rank}", "")
            return ours
        time.sleep(0.01)
    raise Stopped(f"{us.world - len(missing)} of {us.world} are here" if us.first else "process 0 did not answer")


def _common_error(us: Processes, store: Store, error: Exception) -> Exception:
    """The error that every process ends with: that of the first to fail, who leaves it for the others to find.

    torchrun keeps the store in a process of its own. Without it the store ends with process 0, and those who come too
    late know only that somebody is gone.
    """
    lost = _is_lost_connection(error)
    with contextlib.suppress(RuntimeError):  # the store may be gone, too
        if store.check([_FIRST_ERROR]):
            mistake, text = json.loads(store.get(_FIRST_ERROR))
            return (RecipeError if mistake else Stopped)(text)
        if not lost:
            store.set(_FIRST_ERROR, json.dumps([isinstance(error, ValueError), str(_portable(error))]))
    if not lost:
        return error
    return Stopped(
        f"one of the {us.world} processes ended or fell silent without a word; process {us.rank} ends too: "
        f"{first_line(error)}"
    )


def _is_lost_connection(error: Exception) -> bool:
    """Whether the error says no more than that another process is gone."""
    if not isinstance(error, RuntimeError):
        return False
    # Backward passes raise from no module of Python's; what gloo and NCCL say there names them, or the connection.
    named = any(words in str(error).lower() for words in ("gloo", "nccl", "pair closure", "by peer"))
    return named or raised_in(error).startswith(("torch.distributed.", "torch.nn.parallel.distributed"))


def _portable(error: Exception) -> Exception:
    """The error as the others can raise it: of its kind, as far as an exit code can tell."""
    return (RecipeError if isinstance(error, ValueError) else Stopped)(str(error) or type(error).__name__)
