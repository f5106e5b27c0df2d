"""Puts a model on one process or on many: whole, in copies (DDP), or in shards (FSDP2).

The loop is the same for all three. What differs is here: what is called for a forward pass, when gradients travel,
which tensors are whole, and what a checkpoint consists of.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from spartan import Sparsifier
from spartan.app.train import checkpoint
from spartan.app.train.checkpoint import Plain
from spartan.app.train.config import Config, RecipeError
from spartan.app.train.data import Data
from spartan.app.train.processes import Processes
from spartan.distributed import is_dtensor, local, own_part
from spartan.problem.patterns import read_pattern
from spartan.state.riding import taken_out


def in_shards(config: Config, us: Processes) -> bool:
    """Whether each process holds a part of every weight."""
    return config.parallel == "fsdp2" and not us.alone


def on_meta(build: Callable[[], nn.Module]) -> nn.Module | None:
    """A model without memory for its weights; None where it cannot be had, or two names share a weight."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            model = build()
    except (RuntimeError, NotImplementedError, ValueError, TypeError):  # it looks at values while it is built
        return None
    every = [*model.parameters(), *model.buffers()]
    names = list(model.named_parameters(remove_duplicate=False))
    bare = all(tensor.is_meta for tensor in every) and len(names) == len(list(model.parameters()))
    return model if bare else None


def distribute(
    config: Config,
    model: nn.Module,
    us: Processes,
    backwards: int,
    device: torch.device,
    whole: nn.Module | None = None,
) -> "WholeModel":
    """The model as these processes train it; `parallel` in the recipe says how, where there are several.

    `backwards` is how many of them a step has. A model on the meta device gets its weights from `whole`, which the first
    process has, once it is sharded.
    """
    if us.alone:
        return WholeModel(config, model, us, backwards, device)
    if config.sync_bn and device.type != "cuda":
        raise RecipeError(
            f"sync_bn: torch's SyncBatchNorm needs GPUs, and the model is on {device.type}; set it to false"
        )
    if config.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if not in_shards(config, us):
        return WholeModel(config, model, us, backwards, device)
    found = ShardedModel(config, model, us, backwards, device)
    if any(p.is_meta for p in model.parameters()):
        materialise(found.model, whole, us, device)
    return found


@torch.no_grad()
def materialise(model: nn.Module, whole: nn.Module | None, us: Processes, device: torch.device) -> None:
    """Give a sharded model on the meta device its weights, one after the other: each process its part of the first one's."""
    model.to_empty(device=device)
    theirs = {} if whole is None else dict([*whole.named_parameters(), *whole.named_buffers()])
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        here = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if us.first:
            here.copy_(theirs[name])
        us.copy_(iter([here]))
        local(tensor).copy_(own_part(tensor, here) if is_dtensor(tensor) else here)


class WholeModel:
    """Each process has the whole model; of several, gradients are averaged over all of them: DistributedDataParallel.

    Each normalises its own part of a batch, and the first one's running statistics count, unless `sync_bn` is set.
    """

    def __init__(self, config: Config, model: nn.Module, us: Processes, backwards: int, device: torch.device) -> None:
        self.config, self.us, self.backwards, self.device = config, us, backwards, device
        self.compiled = config.compile and self.device.type == "cuda"
        self.model, self.forward = self._prepare(model)

    def _prepare(self, model: nn.Module) -> tuple[nn.Module, Callable[..., Any]]:
        """The model whose parameters are trained, and what to call in training."""
        if self.config.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if self.us.alone:
            # Small nets on a fast GPU wait for launches, so steps are replayed as CUDA graphs. Those keep gradients in
            # memory that the next backward overwrites (pytorch/pytorch#169545): not where a step has several.
            mode = "reduce-overhead" if self.backwards == 1 else "default"
            return model, torch.compile(model, mode=mode) if self.compiled else model
        self._ddp = DistributedDataParallel(model, [self.device] if self.device.type == "cuda" else None)
        # A CUDA graph cannot hold what is sent in between.
        return model, torch.compile(self._ddp) if self.compiled else self._ddp

    def gradient_sync(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Around each micro-batch: gradients are averaged over processes once a step, with the last one."""
        return contextlib.nullcontext() if last or self.us.alone else self._ddp.no_sync()

    def test_batches(self, data: Data) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's share of the test images."""
        return data.test()

    def gathered_model(self, build: Callable[[], nn.Module]) -> nn.Module | None:
        """On the first process, a plain model with the weights trained; every process must ask. `build` makes one."""
        return self.model if self.us.first else None

    def save(self, out: Path, step: int, plain: Plain, optimizer: Optimizer, sparsifier: Sparsifier) -> None:
        """Write a checkpoint; every process must call it, with the same plain values."""
        if self.us.first:
            # The sparsifier's state rides in the optimizer's, too; one of them is enough.
            trained, riding = taken_out(optimizer.state_dict())
            sparse = sparsifier.state_dict() if riding is None else riding
            checkpoint.save(
                out, step, {**plain, "model": self.model.state_dict(), "sparsifier": sparse, "optimizer": trained}
            )

    def wait(self) -> None:
        """Until everything that is saved is on disk."""

    def load(self, path: Path, state: Mapping[str, Any], optimizer: Optimizer, sparsifier: Sparsifier) -> None:
        """Go on from a checkpoint, whatever number of processes wrote it, and in whichever way."""
        from spartan.state.sharded import load_sharded, load_whole

        if path.is_dir():
            load_sharded(path, self.model, optimizer, sparsifier)
        else:
            load_whole(state, self.model, optimizer, sparsifier)


class ShardedModel(WholeModel):
    """Each process holds a part of every weight, and all of a block's for as long as it runs: FSDP2 (`fully_shard`).

    Every forward pass is work of all processes, so all must run equally many. Batch norm is as with copies. The model may
    be on the meta device, and is then without weights until `materialise`.
    """

    def _prepare(self, model: nn.Module) -> tuple[nn.Module, Callable[..., Any]]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        from spartan.app.train.shards import ShardedCheckpoints

        # Such a layer gives its keys and values beside its output: views, which nobody writes to.
        warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(FSDPGPTLayer\) returned a view")
        # Weights stay as they lie, since FSDP2 takes contiguous ones only; with channels_last, images do not.
        mesh = init_device_mesh(self.device.type, (self.us.world,))
        options = {"mesh": mesh, "mp_policy": precision(self.config, model), "shard_placement_fn": self._placement}
        for block in (parts := blocks(model)):
            if self.compiled:
                # Not `block.compile()`: FSDP2's hooks stay outside of what is compiled.
                block.forward = torch.compile(block.forward)
            fully_shard(block, **options)
        if self.compiled and not parts:
            model.forward = torch.compile(model.forward)
        fully_shard(model, **options)
        self._checkpoints = ShardedCheckpoints(self.us, self.config.checkpoint_async)
        return model, model

    def _placement(self, parameter: nn.Parameter) -> Any:
        """Along the first dimension, unless that cuts the pattern's units and the second one does not."""
        from torch.distributed.tensor import Shard

        shape, world = tuple(parameter.shape), self.us.world
        sides = read_pattern(self.config.pattern).sides(shape) if len(shape) > 1 else None
        if sides is None or -(-shape[0] // world) % sides[0] == 0:
            return Shard(0)
        columns = parameter.numel() // shape[0] // world
        return Shard(1) if shape[1] % world == 0 and columns % sides[1] == 0 else Shard(0)

    def gradient_sync(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Around each micro-batch: gradients are averaged over processes once a step, with the last one."""
        self.model.set_requires_gradient_sync(last)  # type: ignore[operator]
        return contextlib.nullcontext()

    def test_batches(self, data: Data) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's share of the test images; one with fewer batches than others ends with images of no label."""
        batches, on = data.test(), self.device
        for _ in range(data.test_batches):
            yield next(batches, (torch.zeros(1, *data.shape, device=on), torch.zeros(0, dtype=torch.int64, device=on)))

    def gathered_model(self, build: Callable[[], nn.Module]) -> nn.Module | None:
        """On the first process, a plain model with the weights trained; every process must ask. `build` makes one."""
        found = {}
        for name, value in self.model.state_dict().items():  # one at a time: only the first process needs room for all
            value = gathered(value)
            if self.us.first:
                found[name] = value.cpu() if isinstance(value, Tensor) else value
        if not self.us.first:
            return None
        model = build()
        model.load_state_dict(found)
        return model

    def save(self, out: Path, step: int, plain: Plain, optimizer: Optimizer, sparsifier: Sparsifier) -> None:
        """Write a checkpoint in parts; every process must call it, with the same plain values."""
        self.us.copy_(self.model.buffers())  # any process may be the one that writes them
        self._checkpoints.save(out, step, plain, self.model, optimizer, sparsifier)

    def wait(self) -> None:
        """Until everything that is saved is on disk."""
        self._checkpoints.wait()


def gathered(tensor: Tensor) -> Tensor:
    """The whole of what processes may hold in parts; every process must ask."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def blocks(model: nn.Module) -> list[nn.Module]:
    """What FSDP2 makes whole one after the other: residual blocks, transformer layers.

    A block is a member of a list or sequence of modules that is made of layers itself, but no such list. Where two
    share a weight there are none, and the model is one piece.

    Example:
        >>> def block():
        ...     return torch.nn.ModuleDict({"up": torch.nn.Linear(4, 8), "down": torch.nn.Linear(8, 4)})
        >>> body = torch.nn.Sequential(torch.nn.Sequential(block(), block()), block())
        >>> len(blocks(torch.nn.Sequential(torch.nn.Linear(4, 4), body, torch.nn.Linear(4, 2))))
        3
        >>> blocks(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)))
        []
    """
    found = list(_blocks(model))
    inside = {id(module) for block in found for module in block.modules()}
    rest = {p for m in model.modules() if id(m) not in inside for p in m.parameters(recurse=False)}
    pieces = [rest, *(set(block.parameters()) for block in found)]
    return found if sum(map(len, pieces)) == len(set(model.parameters())) else []


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    lists = (nn.Sequential, nn.ModuleList)
    for child in module.children():
        made_of_layers = any(True for inner in child.children() for _ in inner.parameters())
        if type(module) in lists and made_of_layers and type(child) not in lists:
            yield child
        else:
            yield from _blocks(child)


def precision(config: Config, model: nn.Module) -> Any:
    """What FSDP2 sends: with `amp: bf16` weights in 16 bits, gradients always as they are kept.

    Not so with batch norm, whose weights autocast keeps in 32 bits beside its statistics.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if config.amp != "bf16" or any(isinstance(m, _BatchNorm) for m in model.modules()):
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=next(model.parameters()).dtype)
