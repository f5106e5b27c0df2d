"""Saves training state in the format of torch.distributed.checkpoint: on N processes, to be loaded on M.

Weights and what goes with them are named by parameter and laid out as the model is; every process writes and reads its
own part.
"""

import io
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spartan.distributed import is_dtensor, like, local, own_part
from spartan.problem.problem import Problem
from spartan.problem.targets import name_cleaner, unwrap
from spartan.solvers.frozen import as_dense
from spartan.state.plain import UNITS, loaded_units, saved_units

if TYPE_CHECKING:
    from spartan.sparsifier import Sparsifier


def save_sharded(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer,
    sparsifier: "Sparsifier",
    asynchronous: bool = False,
    process_group: Any = None,
) -> Any:
    """Write the model, its optimizer and its sparsifier; every process must call it.

    Args:
        folder: where to; all processes must see the same files.
        model: plain, under DDP, FSDP2 or tensor parallel.
        optimizer: the one that is attached to the sparsifier.
        sparsifier: the sparsifier of the model.
        asynchronous: copy first, write in the background, and return a future whose `result()` waits for it.
        process_group: what the processes agree over, by default the one of all. Where training goes on while files are
            written, the two must not use the same: pass `torch.distributed.new_group(backend="gloo")`, made once.

    Example:
        >>> model = torch.nn.Linear(8, 8)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> sparsifier = spartan.Sparsifier(model, sparsity=0.5, total_steps=10).attach(optimizer)
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = save_sharded(folder, model, optimizer, sparsifier)
        ...     load_sharded(folder, model, optimizer, sparsifier)
    """
    from torch.distributed.checkpoint.state_dict_saver import async_save, save

    state = _flat(model, optimizer, sparsifier)
    if asynchronous:
        return async_save(state, checkpoint_id=folder, process_group=process_group)
    with _without_single_process_warning():
        save(state, checkpoint_id=folder, process_group=process_group)
    return None


def load_sharded(folder: str | Path, model: nn.Module, optimizer: Optimizer, sparsifier: "Sparsifier") -> None:
    """Go on from what `save_sharded` wrote, on any number of processes, however the model is laid out now.

    Build the model, the sparsifier and the optimizer as for a new run, and attach them, before.
    """
    targets: dict[str, Tensor] = {t.name: t.parameter for t in sparsifier._run.problem.targets}
    parameters = _model_tensors(model)  # first: it makes FSDP2 let go of whole weights that a forward pass has left
    parameters |= {t.name: t.parameter for t in _trained(model, optimizer, sparsifier)} | targets
    state, rest = _read(folder, parameters, targets, "save_sharded")
    with torch.no_grad():
        for name, tensor in _model_tensors(model).items():
            if f"model/{name}" not in state:
                raise ValueError(f"folder={str(folder)!r} holds no {name}: it belongs to another model")
            local(tensor).copy_(local(state[f"model/{name}"]))
    sparsifier.load_state_dict(nested_sparsifier(state, rest))
    _load_optimizer(optimizer, sparsifier, model, state, rest)


def save_apart(folder: str | Path, sparsifier: "Sparsifier") -> None:
    """Write a sparsifier's state alone, where somebody else saves the model and the optimizer: each process its part."""
    from torch.distributed.checkpoint.state_dict_saver import save

    state, rest = flat_sparsifier(sparsifier)
    with _without_single_process_warning():
        save(state | {"rest": _as_bytes(rest)}, checkpoint_id=folder)


def load_apart(folder: str | Path, sparsifier: "Sparsifier") -> None:
    """Go on from what `save_apart` wrote; every process must call it."""
    sparsifier._run.guard.reshard()  # FSDP2 may have left whole weights of a forward pass
    targets: dict[str, Tensor] = {t.name: t.parameter for t in sparsifier._run.problem.targets}
    sparsifier.load_state_dict(nested_sparsifier(*_read(folder, targets, targets, "save_apart")))


def _read(
    folder: str | Path, parameters: Mapping[str, Tensor], targets: Mapping[str, Tensor], writer: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a folder holds: tensors by name, laid out as these parameters are, and plain numbers."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    found = FileSystemReader(folder).read_metadata().state_dict_metadata
    if "rest" not in found:
        raise ValueError(f"folder={str(folder)!r} holds no training state of {writer}(); it has {list(found)[:4]}")
    state: dict[str, Any] = {}
    for key, entry in found.items():
        if isinstance(entry, TensorStorageMetadata):
            state[key] = _empty_for(key, tuple(entry.size), entry.properties.dtype, parameters, targets)
        else:
            state[key] = None
    with _without_single_process_warning():
        load(state, checkpoint_id=folder)
    return state, torch.load(io.BytesIO(state["rest"].cpu().numpy().tobytes()), weights_only=True)


def load_whole(state: Mapping[str, Any], model: nn.Module, optimizer: Optimizer, sparsifier: "Sparsifier") -> None:
    """Go on from the three states of one process (or of any under DDP), however the model is laid out now.

    Args:
        state: `state_dict()` of each, under "model", "optimizer" and "sparsifier"; the same on every process.
        model: plain, under DDP, FSDP2 or tensor parallel.
        optimizer: the one that is attached to the sparsifier.
        sparsifier: the sparsifier of the model.

    Example:
        >>> model = torch.nn.Linear(8, 8)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> sparsifier = spartan.Sparsifier(model, sparsity=0.5, total_steps=10).attach(optimizer)
        >>> three = {"model": model, "optimizer": optimizer, "sparsifier": sparsifier}
        >>> load_whole({name: of.state_dict() for name, of in three.items()}, model, optimizer, sparsifier)
    """
    saved, mine = state["model"], unwrap(model).state_dict()
    odd = sorted(set(saved) ^ set(mine))
    if odd:
        raise ValueError(f"state: it belongs to another model; only one of the two has {', '.join(odd[:4])}")
    unwrap(model).load_state_dict({name: _part(mine[name], value) for name, value in saved.items()})
    sparsifier.load_state_dict(state["sparsifier"])
    found = zip(_trained(model, optimizer, sparsifier), _in_order(state["optimizer"]), strict=True)
    of = [{key: trained.part_of(value) for key, value in values.items()} for trained, values in found]
    optimizer.load_state_dict({**state["optimizer"], "state": {i: values for i, values in enumerate(of) if values}})


def _in_order(state: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What an optimizer's state holds of each of its parameters."""
    for group in state["param_groups"]:
        for i in group["params"]:
            yield state["state"].get(i, {})


def _part(mine: Any, value: Any) -> Any:
    """A whole tensor as the model holds it."""
    return like(mine, own_part(mine, value.to(mine.device))) if is_dtensor(mine) else value


@contextmanager
def _without_single_process_warning() -> Iterator[None]:
    """Without torch's warning that there are no other processes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process.*")
        yield


# ---------------------------------------------------------------------- what an optimizer trains


@dataclass(frozen=True)
class TrainedTensor:
    """A parameter of the optimizer: of the model, or one that a method has learned, with an entry per unit or target."""

    name: str
    parameter: Tensor
    problem: Problem | None = None  # of a learned one with an entry per unit

    def saved(self, key: str, value: Tensor) -> dict[str, Tensor]:
        """A tensor of its optimizer state by the names it is saved under: one per target where it has units."""
        if self.problem is None or value.shape != self.parameter.shape:
            return {f"optimizer/{self.name}/{key}": value}
        problem, found = self.problem, {}
        for i, (target, piece) in enumerate(zip(problem.targets, value.split(problem.units), strict=True)):
            found[f"moments/{self.name}/{key}/{target.name}"] = _grid(problem, i, saved_units(problem, i, piece))
        return found

    def loaded(self, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """Its optimizer state back from what `saved` gave."""
        prefix = f"optimizer/{self.name}/"
        found = {k.removeprefix(prefix): x for k, x in state.items() if k.startswith(prefix)}
        if self.problem is not None:
            prefix, names = f"moments/{self.name}/", [t.name for t in self.problem.targets]
            for key in {k.removeprefix(prefix).partition("/")[0] for k in state if k.startswith(prefix)}:
                each = [loaded_units(self.problem, i, state[f"{prefix}{key}/{name}"]) for i, name in enumerate(names)]
                found[key] = torch.cat([x.to(self.parameter.device) for x in each])
        return found

    def part_of(self, value: Any) -> Any:
        """What this process holds of a whole tensor of its optimizer state."""
        if not isinstance(value, Tensor):
            return value
        if self.problem is None:
            return _part(self.parameter, value) if value.shape == self.parameter.shape else value
        if value.numel() != sum(self.problem.all_units):
            return value
        pieces = enumerate(value.split(self.problem.all_units))
        places = self.problem.places
        return torch.cat([places[i].cut_out(piece) if places else piece for i, piece in pieces])


def _trained(model: nn.Module, optimizer: Optimizer, sparsifier: "Sparsifier") -> list[TrainedTensor]:
    """The optimizer's parameters."""
    inner = unwrap(model)
    clean = name_cleaner(inner)
    known = {id(p): TrainedTensor(clean(n), p) for n, p in inner.named_parameters()}
    for number, part in enumerate(sparsifier._run.weights.parts):
        for name, parameter in part.state.learned.items():
            known[id(parameter)] = TrainedTensor(f"learned.{name}", parameter, part.problem)
        for name, parameter in part.state.learned_per_target.items():
            known[id(parameter)] = TrainedTensor(f"learned.{name}.{number}", parameter)
    return [known[id(p)] for group in optimizer.param_groups for p in group["params"]]


def _grid(problem: Problem, i: int, saved: Tensor) -> Tensor:
    """Units as a matrix, the same for whole weights and for shards: what processes can hand on to others."""
    if is_dtensor(saved):
        return saved
    place = problem.pattern.place(problem.targets[i].parameter)
    assert place is not None
    return saved.reshape(place.whole)


# ---------------------------------------------------------------------- what is saved under which name


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    inner = unwrap(model)
    clean = name_cleaner(inner)
    return {clean(n): x.detach() for n, x in inner.state_dict().items() if isinstance(x, Tensor)}


def _problems(sparsifier: "Sparsifier") -> dict[str, tuple[Problem, int]]:
    """The part of the problem that each target belongs to, and its number there."""
    parts = sparsifier._run.weights.problems
    return {target.name: (part, i) for part in parts for i, target in enumerate(part.targets)}


def _flat(model: nn.Module, optimizer: Optimizer, sparsifier: "Sparsifier") -> dict[str, Any]:
    """Everything by one name each: tensors, and all plain numbers as one object."""
    own, rest = flat_sparsifier(sparsifier)
    state: dict[str, Any] = {f"model/{n}": x for n, x in _model_tensors(model).items()} | own
    rest["optimizer"] = {}
    for trained in _trained(model, optimizer, sparsifier):
        plain = rest["optimizer"].setdefault(trained.name, {})
        for key, value in optimizer.state.get(trained.parameter, {}).items():
            if isinstance(value, Tensor):
                state |= trained.saved(key, value)
            else:
                plain[key] = value
    rest["param_groups"] = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return state | {"rest": _as_bytes(rest)}


def flat_sparsifier(sparsifier: "Sparsifier") -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of a sparsifier by one name each, and the rest of its state."""
    state: dict[str, Any] = {}
    rest, problems = sparsifier.state_dict(), _problems(sparsifier)
    for name, saved in rest.pop("weights").items():
        problem, i = problems[name]
        state |= {f"weights/{name}/{key}": x for key, x in as_dense(saved, problem.targets[i].shape).items()}
    for kind in UNITS:
        for key, by_target in rest.pop(kind).items():
            state |= {f"units/{kind}.{key}/{name}": _grid(*problems[name], x) for name, x in by_target.items()}
    return state, rest


def _as_bytes(rest: dict[str, Any]) -> Tensor:
    """Plain numbers as a tensor, which every checkpoint takes."""
    file = io.BytesIO()
    torch.save(rest, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


# ---------------------------------------------------------------------- where it goes


def _empty_for(
    key: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    parameters: Mapping[str, Tensor],
    targets: Mapping[str, Tensor],
) -> Tensor:
    """An empty tensor for what is saved under a key: in shards where its parameter is, and shaped like it."""
    kind, _, name = key.partition("/")
    if kind in ("units", "moments"):
        parameter = targets.get(name.rpartition("/")[2])
    else:
        parameter = parameters.get(name if kind == "model" else name.rpartition("/")[0])
    if parameter is None or not is_dtensor(parameter) or (len(shape) < 2 and shape != tuple(parameter.shape)):
        device = torch.device("cpu") if parameter is None else parameter.device
        return torch.zeros(shape, dtype=dtype, device=device)
    if shape == tuple(parameter.shape):
        return like(parameter, torch.zeros_like(local(parameter), dtype=dtype))
    from torch.distributed.tensor import zeros

    return zeros(*shape, dtype=dtype, device_mesh=parameter.device_mesh, placements=parameter.placements)  # type: ignore[attr-defined]


def nested_sparsifier(state: Mapping[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    """The sparsifier's part as `load_state_dict` takes it."""
    found = {k: v for k, v in rest.items() if k not in ("optimizer", "param_groups")}
    found |= {"weights": {}} | {kind: {} for kind in UNITS}
    for key, value in state.items():
        kind, _, name = key.partition("/")
        if kind == "weights":
            target, _, what = name.rpartition("/")
            found["weights"].setdefault(target, {})[what] = value
        elif kind == "units":
            what, _, target = name.partition("/")
            section, _, own = what.partition(".")
            found[section].setdefault(own, {})[target] = value
    return found


@torch.no_grad()
def _load_optimizer(
    optimizer: Optimizer, sparsifier: "Sparsifier", model: nn.Module, state: dict[str, Any], rest: dict[str, Any]
) -> None:
    if len(rest["param_groups"]) != len(optimizer.param_groups):
        raise ValueError(
            f"the state has {len(rest['param_groups'])} parameter groups, the optimizer {len(optimizer.param_groups)}; "
            "build it as it was, and attach() it, before loading"
        )
    for mine, saved in zip(optimizer.param_groups, rest["param_groups"], strict=True):
        mine.update(saved)
    for trained in _trained(model, optimizer, sparsifier):
        found = rest["optimizer"].get(trained.name, {}) | trained.loaded(state)
        if found:
            optimizer.state[trained.parameter] = found
        else:
            optimizer.state.pop(trained.parameter, None)
