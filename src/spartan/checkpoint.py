"""A sparsifier's state as plain tensors, numbers and dicts: `torch.load(..., weights_only=True)` reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from spartan.groups import Group
from spartan.masters import DenseMaster, FrozenMaster, Master
from spartan.ops.select import Threshold
from spartan.ops.soft_topk import Dual
from spartan.schedules import Moment

FORMAT = 1


def pack(settings: Mapping[str, Any], at: Moment, groups: Sequence[Group], masters: Sequence[Master]) -> dict[str, Any]:
    """Everything the future of the run depends on, by parameter name."""
    return {
        "format": FORMAT,
        "settings": dict(settings),
        "step": at.step,
        "seed": at.seed,
        "weights": {t.name: state for m in masters for t, state in zip(m.targets, m.state(), strict=True)},
        "groups": [
            {
                "threshold": None if g.threshold is None else asdict(g.threshold),
                "dual": None if g.dual is None else asdict(g.dual),
                "tensors": dict(g.tensors),
                "learned": {name: p.detach() for name, p in g.learned.items()},
            }
            for g in groups
        ],
    }


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
        if of["learned"].keys() != group.learned.keys():
            raise ValueError(
                f"the state has learned parameters {list(of['learned'])}, the method {list(group.learned)}"
            )


def unpack(
    state: Mapping[str, Any], at: Moment, groups: Sequence[Group], masters: Sequence[Master]
) -> tuple[Moment, list[Master]]:
    """The moment and the masters of a checked state; the groups are filled in place."""
    found = [_master(master, state["weights"]) for master in masters]
    with torch.no_grad():
        for group, of in zip(groups, state["groups"], strict=True):
            device = group.targets[0].parameter.device
            group.threshold = None if of["threshold"] is None else Threshold(**of["threshold"])
            group.dual = None if of["dual"] is None else Dual(**of["dual"])
            group.tensors = {name: t.to(device, copy=True) for name, t in of["tensors"].items()}
            for name, parameter in group.learned.items():
                parameter.copy_(of["learned"][name])
    return replace(at, step=int(state["step"]), seed=int(state["seed"])), found


def _master(master: Master, saved: Mapping[str, Mapping[str, Tensor]]) -> Master:
    """The master of the same targets, as it was saved."""
    targets, device = master.targets, master.theta.device
    states = [{k: v.to(device) for k, v in saved[t.name].items()} for t in targets]
    if "index" in states[0]:
        return FrozenMaster.from_state(targets, states)
    dense = master if isinstance(master, DenseMaster) else DenseMaster(targets)
    for view, s in zip(dense.views, states, strict=True):
        view.copy_(s["theta"])
    return dense
