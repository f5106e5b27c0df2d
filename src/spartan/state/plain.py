"""Writes the state of a run as plain tensors, numbers and dicts, by parameter name, and reads it back.

`torch.load(..., weights_only=True)` reads it. Units stand in row-major order of their weight, whatever its memory, so
that a run may go on on another kind of machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from spartan.distributed import as_dtensor, is_dtensor, like, local, own_part, same_placement
from spartan.problem.problem import Problem
from spartan.problem.targets import Target
from spartan.solvers.frozen import FrozenSolver, as_dense, kept_entries
from spartan.solvers.torch import TorchSolver
from spartan.step.run import Run

FORMAT = 2
# What a method keeps: one entry per unit, or one per target.
UNITS, TARGETS = ("per_unit", "learned"), ("per_target", "learned_per_target")


def pack(settings: Mapping[str, Any], run: Run) -> dict[str, Any]:
    """Everything the future of the run depends on."""
    state: dict[str, Any] = {"format": FORMAT, "settings": dict(settings), "step": run.at.step, "seed": run.at.seed}
    state |= {"begun": run.begun, "weights": {}, "segments": [], "apart": [], "scales": {}, "numbers": {}}
    state |= {kind: {} for kind in (*UNITS, *TARGETS)}
    for part in run.weights.parts:
        problem = part.problem
        state["weights"] |= _weights(part)
        state["scales"] |= {t.name: scale for t, scale in zip(problem.targets, problem.scales, strict=True)}
        state["apart"] += [problem.targets[i].name for i in problem.apart]
        solution = part.chosen if isinstance(part, FrozenSolver) else part.solution()
        for s, segment in enumerate(problem.segments):
            rows = {name: None if found is None else found[s] for name, found in solution.items()}
            state["segments"].append({"index": segment.index, **rows})
        state["numbers"] |= part.state.numbers
        for kind in UNITS:
            for key, x in getattr(part.state, kind).items():
                by_target = state[kind].setdefault(key, {})
                for i, piece in enumerate(x.detach().split(problem.units)):
                    by_target[problem.targets[i].name] = saved_units(problem, i, piece)
        for kind in TARGETS:
            for key, x in getattr(part.state, kind).items():
                found = dict(zip((t.name for t in problem.targets), x.detach().tolist(), strict=True))
                state[kind].setdefault(key, {}).update(found)
    return state


def _weights(part: TorchSolver | FrozenSolver) -> dict[str, dict[str, Tensor]]:
    """What to save of each target; of one in shards as DTensors, which any number of processes can read."""
    if isinstance(part, FrozenSolver):
        return part.saved()
    pairs = zip(part.problem.targets, part.theta.views, strict=True)
    return {target.name: {"theta": like(target.parameter, theta)} for target, theta in pairs}


def saved_units(problem: Problem, i: int, units: Tensor) -> Tensor:
    """One entry per unit of target i, in row-major order; in shards as a matrix of units, sharded as the target is."""
    parameter = problem.targets[i].parameter
    if problem.places and is_dtensor(parameter):
        place = problem.places[i]
        # A copy: torch's asynchronous saving takes no DTensor that begins inside another tensor's memory.
        matrix = units.reshape(place.rows.numel(), place.columns.numel()).clone()
        return as_dtensor(parameter, matrix, place.whole)
    if problem.by_memory:
        return problem.pattern.reduce(problem.expand(i, units)).clone()
    return units.clone()


def loaded_units(problem: Problem, i: int, saved: Tensor) -> Tensor:
    """What this process holds of them, in the order that it has them in; also of a whole vector."""
    parameter = problem.targets[i].parameter
    if is_dtensor(saved):
        return local(same_placement(parameter, saved)).reshape(-1)
    if problem.places:
        return problem.places[i].cut_out(saved.reshape(-1))
    if problem.by_memory:
        return problem.reduce(i, saved.reshape(problem.targets[i].shape))
    return saved.reshape(-1)


def check(state: Mapping[str, Any], settings: Mapping[str, Any], run: Run) -> None:
    """Raise, with what is different, unless the state belongs to this model and these settings."""
    if not isinstance(state, Mapping) or state.get("format") != FORMAT or "weights" not in state:
        raise ValueError("this is not the state of a sparsifier; pass what sparsifier.state_dict() gave")
    saved, mine = state["weights"], {t.name: t for t in run.problem.targets}
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
    for kind in ("learned", "learned_per_target"):
        wanted = sorted({name for part in run.weights.parts for name in getattr(part.state, kind)})
        if sorted(state[kind]) != wanted:
            raise ValueError(f"the state has learned parameters {sorted(state[kind])}, the method {wanted}")


@torch.no_grad()
def restore(state: Mapping[str, Any], run: Run) -> None:
    """Go on from a checked state."""
    run.at = replace(run.at, step=int(state["step"]), seed=int(state["seed"]))
    run.begun = float(state["begun"])
    weights = run.weights
    known = [part.state for part in weights.parts]
    if any([weights.frozen, _set_scales(state, weights.problems), _set_apart(state, weights.problems)]):
        weights.begin()
    rows = {row["index"]: row for row in state["segments"]}
    kept = []
    for solver, method_state in zip(weights.solving, known, strict=True):
        problem = solver.problem
        # What is learned stays the same parameters, which the optimizer holds.
        solver.state = method_state
        _restore_state(state, solver)
        saved = [_own(state["weights"][t.name], t, solver.device) for t in problem.targets]
        if "mask" in saved[0]:
            kept.append([kept_entries(problem, i, of["theta"], of["keep"], of["mask"]) for i, of in enumerate(saved)])
        else:
            for theta, of in zip(solver.theta.views, saved, strict=True):
                theta.copy_(of["theta"])
        mine = [rows[segment.index] for segment in problem.segments]
        solution = {name: [row[name] for row in mine] for name in ("a", "b", "dual")}
        solver.go_on_from({name: None if found[0] is None else found for name, found in solution.items()})
    run.set_budgets()
    if kept:
        weights.freeze_at(kept)


def _set_scales(state: Mapping[str, Any], problems: Sequence[Problem]) -> bool:
    """Measure magnitudes as they were when the run began, not by the weights that it has come to; whether that differs."""
    changed = False
    for problem in problems:
        scales = [state["scales"][t.name] for t in problem.targets]
        if scales != problem.scales:
            problem.set_scales(scales)
            changed = True
    return changed


def _set_apart(state: Mapping[str, Any], problems: Sequence[Problem]) -> bool:
    """Divide the problem as it was when it was saved; whether that is another division."""
    changed = False
    for problem in problems:
        which = [i for i, t in enumerate(problem.targets) if t.name in state["apart"]]
        if which != problem.apart:
            problem.set_apart(which)
            changed = True
    return changed


def _own(saved: Mapping[str, Tensor], target: Target, device: torch.device) -> dict[str, Tensor]:
    """What this process holds of a saved target, on its device."""
    here = as_dense({key: x.to(device) for key, x in saved.items()}, target.shape)
    return {key: own_part(target.parameter, x) if is_dtensor(target.parameter) else x for key, x in here.items()}


def _restore_state(state: Mapping[str, Any], solver: TorchSolver) -> None:
    """What the method keeps, of the targets of this part."""
    problem, mine, names = solver.problem, solver.state, [t.name for t in solver.problem.targets]
    mine.numbers = dict(state["numbers"])
    each = {key: [loaded_units(problem, i, by[name].to(solver.device)) for i, name in enumerate(names)]
            for key, by in (state["per_unit"] | state["learned"]).items()}  # fmt: skip
    mine.per_unit = {key: torch.cat(each[key]) for key in state["per_unit"]}
    for key, parameter in mine.learned.items():
        parameter.copy_(torch.cat(each[key]))
    numbers = {kind: {key: [by[name] for name in names] for key, by in state[kind].items()} for kind in TARGETS}
    on_targets = numbers["per_target"].items()
    mine.per_target = {key: torch.tensor(x, dtype=torch.float64).to(solver.device) for key, x in on_targets}
    for key, parameter in mine.learned_per_target.items():
        parameter.copy_(torch.tensor(numbers["learned_per_target"][key], dtype=torch.float64))
