"""Reads weights that lie in shards on several processes (DTensors, by FSDP2 or tensor parallelism), and sums over these.

Every process works on its own shard. Nothing is ever gathered: what crosses the wire is a few sums, a few counts, a
flag.
"""

import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

PLAIN = (Tensor, nn.Parameter)
# The DDP that each model has been wrapped in: frameworks often hand on the model, and keep its wrapper to themselves.
_AROUND: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[DistributedDataParallel]]" = weakref.WeakKeyDictionary()


def is_dtensor(tensor: object) -> bool:
    """Whether this is a DTensor. Importing their module takes long, and where nobody has, there is none."""
    if type(tensor) in PLAIN:  # asked a hundred times a step
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The shard that this process holds, in the same memory; the tensor itself where it is whole."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def version(tensor: Tensor) -> int:
    """A number that grows when the values change: through the DTensor, or behind its back in the shard."""
    return tensor._version + (local(tensor)._version if is_dtensor(tensor) else 0)


def like(parameter: Tensor, shard: Tensor) -> Tensor:
    """A shard as a DTensor that lies over the processes as the parameter does; the shard itself for a plain one."""
    if not is_dtensor(parameter):
        return shard
    return as_dtensor(parameter, shard, tuple(parameter.shape))


def as_dtensor(parameter: Any, shard: Tensor, shape: Sequence[int]) -> Tensor:
    """A shard of something of that whole shape, sharded along the dimensions that the parameter is."""
    from torch.distributed.tensor import DTensor

    stride, n = [], 1
    for side in reversed(shape):
        stride.append(n)
        n *= side
    return DTensor.from_local(
        shard, parameter.device_mesh, parameter.placements, run_check=False, shape=torch.Size(shape),
        stride=tuple(reversed(stride)),
    )  # fmt: skip


def own_part(parameter: Any, tensor: Tensor) -> Tensor:
    """This process's part of a tensor of the parameter's shape: of a DTensor, or of a whole one."""
    if is_dtensor(tensor):
        return local(same_placement(parameter, tensor))
    for dim, index in enumerate(held(parameter)):
        if index.numel() != tensor.shape[dim]:
            tensor = tensor.index_select(dim, index.to(tensor.device))
    return tensor


def same_placement(parameter: Any, grad: Tensor) -> Tensor:
    """The gradient with the parameter's placements; a parallel layer may leave partial sums."""
    if is_dtensor(grad) and grad.placements != parameter.placements:  # type: ignore[attr-defined]
        return grad.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    return grad


def sharded_dims(parameter: Any) -> list[tuple[int, int]]:
    """(mesh dimension, tensor dimension) of every sharding of a parameter, in the order in which they cut.

    FSDP2 over tensor parallelism marks its own with a split factor: it cuts what the latter has cut before.
    """
    if not is_dtensor(parameter):
        return []
    plain: list[tuple[int, int]] = []
    late: list[tuple[int, int]] = []
    for d, placement in enumerate(parameter.placements):
        if placement.is_partial():
            raise ValueError("a weight that is a partial sum cannot be ranked; redistribute it to Shard or Replicate")
        if hasattr(placement, "dim"):
            (late if hasattr(placement, "split_factor") else plain).append((d, placement.dim % parameter.ndim))
    return plain + late


def held(parameter: Any) -> list[Tensor]:
    """Along each dimension, which indices of the whole weight this process holds."""
    found = [torch.arange(n) for n in parameter.shape]
    for d, dim in sharded_dims(parameter):
        mesh = parameter.device_mesh
        coordinate = mesh.get_coordinate()
        pieces = found[dim].chunk(mesh.size(d))
        mine = coordinate[d] if coordinate is not None else len(pieces)
        found[dim] = pieces[mine] if mine < len(pieces) else found[dim][:0]
    return found


def is_compiled(module: nn.Module) -> bool:
    """Whether this is what torch.compile puts around a module. As with DTensors, importing its class takes long."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def _wrapped(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    """torch calls this whenever a module gets another; DDP keeps its model under the name `module`."""
    if name != "module" or submodule is None or not isinstance(module, DistributedDataParallel):
        return
    _AROUND[submodule] = weakref.ref(module)
    while is_compiled(submodule):
        submodule = submodule._orig_mod  # type: ignore[assignment]
        _AROUND[submodule] = weakref.ref(module)


register_module_module_registration_hook(_wrapped)


def replicas(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP around a model, possibly compiled; None where there is none, or one process only.

    A model that stands inside a DDP is taken for it: whoever wrapped it trains it there.
    """
    while is_compiled(model):
        model = model._orig_mod  # type: ignore[assignment]
    if not isinstance(model, DistributedDataParallel):
        around = _AROUND.get(model) if _AROUND else None  # asked twice a step, and mostly there is no DDP at all
        found = None if around is None else around()
        if found is None:
            return None
        model = found
    return model if dist.get_world_size(model.process_group) > 1 else None


def fsdp_modules(model: nn.Module) -> list[Any]:
    """The modules whose weights FSDP2 makes whole for a forward pass."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


class Ranks:
    """The processes that hold the shards of some tensors between them; one process alone has no groups.

    Args:
        groups: torch's process groups, one per dimension of the device mesh along which any of the tensors is sharded
            over several processes.
        counts: for each tensor, whether this process counts it: of several processes with the same shard, one does.

    Example:
        >>> alone = Ranks([], [True])
        >>> alone.sum(torch.tensor([1.0, 2.0])), alone.sent
        (tensor([1., 2.]), 0)
    """

    def __init__(self, groups: Sequence[Any], counts: Sequence[bool]) -> None:
        self.groups, self.counts = list(groups), list(counts)
        self.sent = 0  # bytes of everything reduced so far

    @classmethod
    def of(cls, parameters: Sequence[Tensor]) -> "Ranks":
        """Those that hold the shards of these weights."""
        groups: dict[tuple[int, ...], Any] = {}
        over: list[set[tuple[int, ...]]] = []
        for parameter in parameters:
            mine = set()
            for d, _ in sharded_dims(parameter):
                group = parameter.device_mesh.get_group(d)  # type: ignore[attr-defined]
                key = tuple(dist.get_process_group_ranks(group))
                if len(key) > 1:  # one process holds all of it
                    groups.setdefault(key, group)
                    mine.add(key)
            over.append(mine)
        # A weight that is whole along a dimension of the mesh is counted by the first process there.
        counts = [all(key in mine or dist.get_rank() == min(key) for key in groups) for mine in over]
        return cls(list(groups.values()), counts)

    @property
    def alone(self) -> bool:
        """Whether every weight is whole on each process."""
        return not self.groups

    def counted(self, x: Tensor) -> Tensor:
        """One entry per tensor, zero for those that another process counts."""
        return x if self.alone else torch.where(torch.tensor(self.counts, device=x.device), x, torch.zeros_like(x))

    def sum(self, x: Tensor) -> Tensor:
        """Σ over the processes, in place; the same on all of them."""
        return self._reduce(x, "SUM")

    def largest(self, x: Tensor) -> Tensor:
        """The largest over the processes, entry by entry, in place."""
        return self._reduce(x, "MAX")

    def smallest(self, x: Tensor) -> Tensor:
        """The smallest over the processes, entry by entry, in place."""
        return self._reduce(x, "MIN")

    def _reduce(self, x: Tensor, how: str) -> Tensor:
        self.sent += x.numel() * x.element_size() * len(self.groups)
        for group in self.groups:
            try:
                dist.all_reduce(x, getattr(dist.ReduceOp, how), group=group)
            except RuntimeError as error:
                raise RuntimeError(_lost(dist.get_world_size(group), error)) from error
        return x


def _lost(size: int, error: RuntimeError) -> str:
    """What a failed reduction means to a user."""
    return (
        f"the sparsifier waited for {size} processes that share its weights, and not all of them came: a worker died, "
        "fell behind by more than the time-out of torch.distributed.init_process_group(timeout=…), or left out a call "
        "that every process must make (Sparsifier(), optimizer.step(), sparsifier.backward(), state_dict()). "
        f"torch says: {error}"
    )


def broadcast_from_first(numbers: Sequence[float], group: Any, device: torch.device) -> list[float]:
    """The numbers of a group's first process on all of them; None is the group of every process."""
    told = torch.tensor(list(numbers), dtype=torch.float64, device=device)
    try:
        dist.broadcast(told, 0 if group is None else dist.get_global_rank(group, 0), group=group)
    except RuntimeError as error:
        raise RuntimeError(_lost(dist.get_world_size(group), error)) from error
    return told.tolist()


def check_same(settings: Mapping[str, Any], model: nn.Module) -> None:
    """Refuse settings that differ between the processes that train a model together, on all of them.

    Under DDP these are its replicas; where weights lie in shards, those of their mesh.
    """
    if not (dist.is_available() and dist.is_initialized() and isinstance(model, nn.Module)):
        return
    ddp = replicas(model)
    shard: Any = next((p for p in model.parameters() if is_dtensor(p)), None)
    groups = [] if ddp is None else [ddp.process_group]
    groups += [] if shard is None else [shard.device_mesh.get_group(d) for d in range(shard.device_mesh.ndim)]
    mine = {key: repr(value) for key, value in settings.items()}
    for group in groups:
        if (size := dist.get_world_size(group)) == 1:
            continue
        everyone: list[Any] = [None] * size
        try:
            dist.all_gather_object(everyone, mine, group=group)
        except RuntimeError as error:
            raise RuntimeError(_lost(size, error)) from error
        ranks = dist.get_process_group_ranks(group)
        for rank, its in zip(ranks, everyone, strict=True):
            for key, value in everyone[0].items():
                if its[key] != value:
                    raise ValueError(
                        f"{key}={value} in process {ranks[0]} and {key}={its[key]} in process {rank}, which train one "
                        "model: build the sparsifier with the same arguments in every process"
                    )


def alike(numbers: Sequence[float], group: Any) -> bool:
    """Whether every process of a group has these numbers; the same answer on all."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(everyone, list(numbers), group=group)
    except RuntimeError as error:
        raise RuntimeError(_lost(len(everyone), error)) from error
    return all(its == everyone[0] for its in everyone)


def same_on_all(number: int, device: torch.device) -> int:
    """Process 0's number, below 2⁵³, on every process of the job; the number itself where there is one process only."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return number
    if dist.get_backend() == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    elif dist.get_backend() == "gloo":
        device = torch.device("cpu")
    return int(broadcast_from_first([number], None, device)[0])
