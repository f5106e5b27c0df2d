"""A sparsifier's state as plain tensors, numbers and dicts: `torch.load(..., weights_only=True)` reads it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from spartan.groups import Group
from spartan.masters import DenseMaster, FrozenMaster, Master, gather
from spartan.ops.rows import RowDual, RowThreshold
from spartan.ops.select import Threshold
from spartan.ops.soft_topk import Dual
from spartan.portable import by_target, for_group
from spartan.schedules import Moment
from spartan.sharding import is_dtensor, like, own_part

FORMAT = 1


def pack(settings: Mapping[str, Any], at: Moment, groups: Sequence[Group], masters: Sequence[Master]) -> dict[str, Any]:
    """Everything the future of the run depends on, by parameter name."""
    return {
        "format": FORMAT,
        "settings": dict(settings),
        "step": at.step,
        "seed": at.seed,
        "weights": {t.name: state for m in masters for t, state in zip(m.targets, _states(m), strict=True)},
        "groups": [
            {
                "threshold": _plain(g.threshold),
                "dual": _plain(g.dual) if not g.places or not isinstance(g.dual, RowDual) else {"anew": True},
                "tensors": by_target(g, g.tensors),
                "learned": by_target(g, {name: p.detach() for name, p in g.learned.items()}),
            }
            for g in groups
        ],
    }


def _states(master: Master) -> list[dict[str, Any]]:
    """What to save of each target; of one in shards as DTensors, which any number of processes can read."""
    target = master.targets[0]
    if not is_dtensor(target.parameter):
        return master.state()
    if isinstance(master, DenseMaster):
        return [{"theta": like(target.parameter, master.theta)}]
    return [{key: like(target.parameter, x.contiguous()) for key, x in master.dense().items()}]


def check(state: Mapping[str, Any], settings: Mapping[str, Any], groups: Sequence[Group]) -> None:
    """Raise, with what is different, unless the state belongs to this model and these settings."""
    if not isinstance(state, Mapping) or state.get("format") != FORMAT or "weights" not in state:
        raise ValueError("this is not the state of a sparsifier; pass what sparsifier.state_dict() gave")
    saved, mine = state["weights"], {t.name: t for g in groups for t in g.targets}
    missing, unknown = [n for n in mine if n not in saved], [n for n in saved if n not in mine]
    if missing or unknown:
        raise ValueError(
            "the state belongs to another model: "
            + "; ".join(
                f"{what} {', '.join(names[:6])}{' …' if len(names) > 6 else ''}"
                for what, names in (("it lacks", missing), ("it has, but the model lacks,", unknown))
                if names
            )
        )
    for name, target in mine.items():
        theta = saved[name]["theta"]
        if "index" not in saved[name] and tuple(theta.shape) != target.shape:
            raise ValueError(f"the state holds {name} as {tuple(theta.shape)}; the model has {target.shape}")
        if "index" in saved[name] and theta.numel() and int(saved[name]["index"].max()) >= target.numel:
            raise ValueError(f"the state holds more of {name} than the model's {target.numel} weights")
        if theta.dtype != target.parameter.dtype:
            raise ValueError(f"the state holds {name} as {theta.dtype}; the model has {target.parameter.dtype}")
    for key, value in settings.items():
        if state["settings"].get(key) != value:
            raise ValueError(
                f"the state was saved with {key}={state['settings'].get(key)!r}; this sparsifier has {key}={value!r}"
            )
    for group, of in zip(groups, state["groups"], strict=True):
        learned = by_target(group, {name: p.detach() for name, p in group.learned.items()})
        if of["learned"].keys() != learned.keys():
            raise ValueError(f"the state has learned parameters {list(of['learned'])}, the method {list(learned)}")


def restore_weights(state: Mapping[str, Any], at: Moment, masters: Sequence[Master]) -> tuple[Moment, list[Master]]:
    """The moment and the masters of a checked state."""
    found = [_master(master, state["weights"]) for master in masters]
    return replace(at, step=int(state["step"]), seed=int(state["seed"])), found


@torch.no_grad()
def restore_groups(state: Mapping[str, Any], groups: Sequence[Group]) -> None:
    """Fill the groups with what a checked state says of them, but for duals that must be solved anew."""
    for group, of in zip(groups, state["groups"], strict=True):
        device = group.targets[0].parameter.device
        solved = None if needs_solving(of) else _dual(of["dual"], device)
        group.go_on_from(_threshold(of["threshold"]), solved)
        group.tensors = for_group(group, of["tensors"])
        learned = for_group(group, of["learned"])
        for name, parameter in group.learned.items():
            parameter.copy_(learned[name])


def needs_solving(of: Mapping[str, Any]) -> bool:
    """Whether a saved group has masks of every few weights, which shards do not save: they follow from θ."""
    return of["dual"] is not None and "anew" in of["dual"]


def _plain(solved: Threshold | Dual | RowDual | None) -> dict[str, Any] | None:
    """What was solved as numbers and tensors by name."""
    if isinstance(solved, (Threshold, Dual)) and not isinstance(solved, RowThreshold):
        solved = solved.host()
    return None if solved is None else {f.name: getattr(solved, f.name) for f in fields(solved)}


def _threshold(saved: Mapping[str, Any] | None) -> Threshold | None:
    if saved is None:
        return None
    return RowThreshold(**saved) if "m" in saved else Threshold(**saved)


def _dual(saved: Mapping[str, Any] | None, device: torch.device) -> Dual | RowDual | None:
    if saved is None:
        return None
    if "m" not in saved:
        return Dual(**saved)
    rows = {key: saved[key].to(device, copy=True) for key in ("center", "offset")}
    return RowDual(**{**saved, **rows})


def _master(master: Master, saved: Mapping[str, Mapping[str, Tensor]]) -> Master:
    """The master of the same targets, as it was saved."""
    targets, device = master.targets, master.theta.device
    states = [{k: v.to(device) for k, v in saved[t.name].items()} for t in targets]
    if is_dtensor(targets[0].parameter):
        states = [
            {k: own_part(t.parameter, v) for k, v in as_dense(s, t.shape).items()}
            for s, t in zip(states, targets, strict=True)
        ]
    if "index" in states[0]:
        return FrozenMaster.from_state(targets, states)
    if "keep" in states[0]:
        return FrozenMaster.of(targets, *(gather(targets, [s[k] for s in states]) for k in ("theta", "keep", "mask")))
    dense = master if isinstance(master, DenseMaster) else DenseMaster(targets)
    for view, s in zip(dense.views, states, strict=True):
        view.copy_(s["theta"])
    return dense


def as_dense(state: Mapping[str, Tensor], shape: tuple[int, ...]) -> Mapping[str, Tensor]:
    """Kept entries at their places in tensors of that shape, zero elsewhere; others as they are."""
    if "index" not in state:
        return state
    found = {}
    for key in ("theta", "mask", "keep"):
        values = torch.ones_like(state["index"], dtype=torch.bool) if key == "keep" else state[key]
        flat = values.new_zeros(math.prod(shape))
        flat[state["index"].long()] = values
        found[key] = flat.reshape(shape)
    return found
