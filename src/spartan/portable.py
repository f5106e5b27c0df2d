"""What a method keeps per unit, in one form for every machine.

A fused group has one tensor over all its targets where another has one per target, so that a state saved on an
accelerator would not load on a CPU. Saved is the latter form: `mask0`, `mask1`, … with units in row-major order.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from spartan.groups import Group
from spartan.masters import gather, lay_out


def by_target(group: Group, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The group's tensors as they are saved: those of one entry per unit (their name ends in 0) one per target."""
    found = dict(tensors)
    if group.fused:
        for name, tensor in tensors.items():
            if name.endswith("0") and tensor.shape == (group.units[0],):
                pieces = lay_out(group.targets, tensor)
                found |= {f"{name[:-1]}{i}": piece.reshape(-1).clone() for i, piece in enumerate(pieces)}
    return found


def for_group(group: Group, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Saved tensors as the group has them: on the device of its targets, copied."""
    device = group.targets[0].parameter.device
    found = {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}
    if group.fused:
        for stem in [name[:-1] for name in tensors if name.endswith("0")]:
            names = [f"{stem}{i}" for i in range(len(group.targets))]
            pieces = [found[name] for name in names if name in found]
            if [piece.numel() for piece in pieces] == [target.numel for target in group.targets]:
                found = {name: tensor for name, tensor in found.items() if name not in names}
                shaped = [piece.reshape(target.shape) for piece, target in zip(pieces, group.targets, strict=True)]
                found[names[0]] = gather(group.targets, shaped)
    return found
