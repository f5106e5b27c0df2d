"""What a method keeps per unit, in one form for every machine.

A fused group has one tensor over all its targets where another has one per target, so that a state saved on an
accelerator would not load on a CPU. Saved is the latter form: `mask0`, `mask1`, … with units in row-major order.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from spartan.groups import Group
from spartan.masters import gather, lay_out
from spartan.sharding import as_dtensor, is_dtensor, local, place


def by_target(group: Group, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The group's tensors as they are saved: those of one entry per unit (their name ends in 0) one per target."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        i = unit_tensor(group, name)
        if i is not None and group.places and is_dtensor(group.targets[i].parameter):
            found[name] = on_grid(group, i, tensor)
    if group.fused:
        for name, tensor in tensors.items():
            if name.endswith("0") and tensor.shape == (group.units[0],):
                pieces = lay_out(group.targets, tensor)
                found |= {f"{name[:-1]}{i}": piece.reshape(-1).clone() for i, piece in enumerate(pieces)}
    return found


def unit_tensor(group: Group, name: str) -> int | None:
    """The number of the tensor whose units a name stands for: the digits at its end."""
    digits = name[len(name.rstrip("0123456789")) :]
    return int(digits) if digits and int(digits) < len(group.targets) else None


def on_grid(group: Group, i: int, tensor: Tensor) -> Tensor:
    """One entry per unit as a matrix of units, sharded as the target is: what processes can hand on to others."""
    parameter = group.targets[i].parameter
    where = group.places[i] if group.places else place(group.pattern, parameter)
    assert where is not None
    matrix = tensor.detach().reshape(where.rows.numel(), where.columns.numel())
    return as_dtensor(parameter, matrix, where.whole) if is_dtensor(parameter) else matrix


def off_grid(group: Group, i: int, tensor: Tensor) -> Tensor:
    """What this process holds of it, flat; also of a whole vector."""
    if is_dtensor(tensor):
        return local(tensor).reshape(-1)
    return (group.places[i].cut_out(tensor.reshape(-1)) if group.places else tensor).reshape(-1)


def for_group(group: Group, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Saved tensors as the group has them: on the device of its targets, copied."""
    device = group.targets[0].parameter.device
    found = {}
    for name, tensor in tensors.items():
        i = unit_tensor(group, name)
        if i is not None and not group.fused and (group.places or tensor.ndim > 1):
            tensor = off_grid(group, i, tensor)
        found[name] = tensor.to(device, copy=True)
    if group.fused:
        for stem in [name[:-1] for name in tensors if name.endswith("0")]:
            names = [f"{stem}{i}" for i in range(len(group.targets))]
            pieces = [found[name] for name in names if name in found]
            if [piece.numel() for piece in pieces] == [target.numel for target in group.targets]:
                found = {name: tensor for name, tensor in found.items() if name not in names}
                shaped = [piece.reshape(target.shape) for piece, target in zip(pieces, group.targets, strict=True)]
                found[names[0]] = gather(group.targets, shaped)
    return found
