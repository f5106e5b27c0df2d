"""Training state in the format of torch.distributed.checkpoint: saved on N processes, loaded on M.

Weights and what goes with them are named by parameter and laid out as the model is; every process writes and reads its
own part.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spartan.checkpoint import as_dense
from spartan.groups import Group
from spartan.portable import off_grid, on_grid, unit_tensor
from spartan.sharding import is_dtensor, like, local, own_part
from spartan.sparsifier import Sparsifier
from spartan.targets import clean_name, unwrap


def save_sharded(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer,
    sparsifier: Sparsifier,
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
    with _alone_is_fine():
        save(state, checkpoint_id=folder, process_group=process_group)
    return None


def load_sharded(folder: str | Path, model: nn.Module, optimizer: Optimizer, sparsifier: Sparsifier) -> None:
    """Go on from what `save_sharded` wrote, on any number of processes, however the model is laid out now.

    Build the model, the sparsifier and the optimizer as for a new run, and attach them, before.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    found = FileSystemReader(folder).read_metadata().state_dict_metadata
    if "rest" not in found:
        raise ValueError(f"folder={str(folder)!r} holds no training state of save_sharded(); it has {list(found)[:4]}")
    places = dict(_places(model, optimizer, sparsifier))
    state: dict[str, Any] = {}
    for key, entry in found.items():
        if isinstance(entry, TensorStorageMetadata):
            state[key] = _room(places, key, tuple(entry.size), entry.properties.dtype)
        else:
            state[key] = None
    with _alone_is_fine():
        load(state, checkpoint_id=folder)
    rest = torch.load(io.BytesIO(state["rest"].cpu().numpy().tobytes()), weights_only=True)
    with torch.no_grad():
        for name, tensor in _model_tensors(model).items():
            if f"model/{name}" not in state:
                raise ValueError(f"folder={str(folder)!r} holds no {name}: it belongs to another model")
            local(tensor).copy_(local(state[f"model/{name}"]))
    sparsifier.load_state_dict(_nested(state, rest))
    _load_optimizer(optimizer, sparsifier, model, state, rest)


def load_whole(state: Mapping[str, Any], model: nn.Module, optimizer: Optimizer, sparsifier: Sparsifier) -> None:
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
    sparsifier.load_state_dict(_without_rows(state["sparsifier"], sparsifier))
    trained = list(_trained(model, optimizer, sparsifier))
    of = {}
    for i, values in state["optimizer"]["state"].items():
        name, parameter = trained[i]
        of[i] = {key: _own(sparsifier, name, parameter, value) for key, value in values.items()}
    optimizer.load_state_dict({**state["optimizer"], "state": of})


def _part(mine: Any, value: Any) -> Any:
    """A whole tensor as the model holds it."""
    return like(mine, own_part(mine, value.to(mine.device))) if is_dtensor(mine) else value


def _own(sparsifier: Sparsifier, name: str, parameter: Tensor, value: Any) -> Any:
    """What this process holds of a whole tensor of the optimizer's."""
    if not isinstance(value, Tensor):
        return value
    of = _learned(sparsifier, name)
    if of is not None and of[0].places and value.numel() == of[0].places[of[1]].units:
        return off_grid(*of, value)
    return _part(parameter, value) if value.shape == parameter.shape else value


def _without_rows(state: Mapping[str, Any], sparsifier: Sparsifier) -> Mapping[str, Any]:
    """A sparsifier's state in which shards solve anew what another layout has one of per few weights."""
    groups = []
    for group, saved in zip(_groups(sparsifier), state["groups"], strict=True):
        rows = group.places and isinstance(saved["dual"], Mapping) and "m" in saved["dual"]
        groups.append({**saved, "dual": {"anew": True}} if rows else saved)
    return {**state, "groups": groups}


@contextmanager
def _alone_is_fine() -> Iterator[None]:
    """Without torch's warning that there are no other processes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process.*")
        yield


# ---------------------------------------------------------------------- what is saved under which name


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return {clean_name(n): x.detach() for n, x in unwrap(model).state_dict().items() if isinstance(x, Tensor)}


def _groups(sparsifier: Sparsifier) -> list[Group]:
    return sparsifier._run.plan.groups


def _trained(model: nn.Module, optimizer: Optimizer, sparsifier: Sparsifier) -> Iterator[tuple[str, Tensor]]:
    """The optimizer's parameters with their names; those that a method learns have none in the model."""
    names = {id(p): clean_name(n) for n, p in unwrap(model).named_parameters()}
    for group in _groups(sparsifier):
        names |= {id(p): f"learned.{group.index}.{n}" for n, p in group.learned.items()}
    for one in optimizer.param_groups:
        for parameter in one["params"]:
            yield names[id(parameter)], parameter


def _flat(model: nn.Module, optimizer: Optimizer, sparsifier: Sparsifier) -> dict[str, Any]:
    """Everything by one name each: tensors, and all plain numbers as one object."""
    state: dict[str, Any] = {f"model/{n}": x for n, x in _model_tensors(model).items()}
    whole = sparsifier.state_dict()
    shapes = {t.name: t.shape for g in _groups(sparsifier) for t in g.targets}
    for name, saved in whole.pop("weights").items():
        state |= {f"weights/{name}/{key}": x for key, x in as_dense(saved, shapes[name]).items()}
    groups = []
    for group, saved in zip(_groups(sparsifier), whole.pop("groups"), strict=True):
        for kind in ("tensors", "learned"):
            for name, tensor in saved[kind].items():
                i = unit_tensor(group, name)
                if i is not None and not is_dtensor(tensor):
                    tensor = on_grid(group, i, tensor)
                state[f"{kind}/{group.index}/{name}"] = tensor
        groups.append({key: saved[key] for key in ("threshold", "dual")})
        if isinstance(groups[-1]["dual"], dict) and "m" in groups[-1]["dual"]:
            groups[-1]["dual"] = {"anew": True}  # one per few weights: they follow from θ
    rest = {**whole, "groups": groups, "optimizer": {}}
    for name, parameter in _trained(model, optimizer, sparsifier):
        rest["optimizer"][name] = {}
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                state[f"optimizer/{name}/{key}"] = _laid_out(sparsifier, name, parameter, value)
            else:
                rest["optimizer"][name][key] = value
    rest["param_groups"] = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    file = io.BytesIO()
    torch.save(rest, file)
    state["rest"] = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    return state


def _learned(sparsifier: Sparsifier, name: str) -> tuple[Group, int] | None:
    """The group and the number of the tensor whose units a learned parameter has an entry for."""
    if not name.startswith("learned."):
        return None
    _, index, own = name.split(".", 2)
    group = _groups(sparsifier)[int(index)]
    i = None if group.fused else unit_tensor(group, own)  # a fused group's is one over all targets
    return None if i is None else (group, i)


def _laid_out(sparsifier: Sparsifier, name: str, parameter: Tensor, value: Tensor) -> Tensor:
    """An optimizer's tensor as it is saved."""
    of = _learned(sparsifier, name)
    return on_grid(*of, value) if of is not None and value.shape == parameter.shape else value


# ---------------------------------------------------------------------- where it goes


def _places(model: nn.Module, optimizer: Optimizer, sparsifier: Sparsifier) -> Iterator[tuple[str, Tensor]]:
    """The parameter that what is saved under a name lies like."""
    for name, tensor in _model_tensors(model).items():
        yield f"model/{name}", tensor
    for group in _groups(sparsifier):
        for i, target in enumerate(group.targets):
            yield f"weights/{target.name}", target.parameter
            yield f"units/{group.index}/{i}", target.parameter
    for name, parameter in _trained(model, optimizer, sparsifier):
        of = _learned(sparsifier, name)
        yield f"optimizer/{name}", parameter if of is None else of[0].targets[of[1]].parameter


def _room(places: dict[str, Tensor], key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An empty tensor for what is saved under a key: in shards where its parameter is, and shaped like it."""
    kind, _, name = key.partition("/")
    if kind in ("tensors", "learned"):
        index, _, own = name.partition("/")
        digits = own[len(own.rstrip("0123456789")) :]
        parameter = places.get(f"units/{index}/{digits}")
    else:
        parameter = places.get(key if kind == "model" else f"{kind}/{name.rpartition('/')[0]}")
    if parameter is None or not is_dtensor(parameter) or (len(shape) < 2 and shape != tuple(parameter.shape)):
        device = torch.device("cpu") if parameter is None else parameter.device
        return torch.zeros(shape, dtype=dtype, device=device)
    if shape == tuple(parameter.shape):
        return like(parameter, torch.zeros_like(local(parameter), dtype=dtype))
    from torch.distributed.tensor import zeros

    return zeros(*shape, dtype=dtype, device_mesh=parameter.device_mesh, placements=parameter.placements)  # type: ignore[attr-defined]


def _nested(state: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    """The sparsifier's part as `load_state_dict` takes it."""
    weights: dict[str, dict[str, Tensor]] = {}
    groups: list[dict[str, Any]] = [{**g, "tensors": {}, "learned": {}} for g in rest["groups"]]
    for key, value in state.items():
        kind, _, name = key.partition("/")
        if kind == "weights":
            target, _, what = name.rpartition("/")
            weights.setdefault(target, {})[what] = value
        elif kind in ("tensors", "learned"):
            index, _, own = name.partition("/")
            groups[int(index)][kind][own] = value
    plain = {k: v for k, v in rest.items() if k not in ("optimizer", "param_groups")}
    return {**plain, "weights": weights, "groups": groups}


@torch.no_grad()
def _load_optimizer(
    optimizer: Optimizer, sparsifier: Sparsifier, model: nn.Module, state: dict[str, Any], rest: dict[str, Any]
) -> None:
    if len(rest["param_groups"]) != len(optimizer.param_groups):
        raise ValueError(
            f"the state has {len(rest['param_groups'])} parameter groups, the optimizer {len(optimizer.param_groups)}; "
            "build it as it was, and attach() it, before loading"
        )
    for mine, saved in zip(optimizer.param_groups, rest["param_groups"], strict=True):
        mine.update(saved)
    for name, parameter in _trained(model, optimizer, sparsifier):
        found = dict(rest["optimizer"].get(name, {}))
        prefix = f"optimizer/{name}/"
        for key, value in state.items():
            if key.startswith(prefix) and "/" not in key[len(prefix) :]:
                found[key[len(prefix) :]] = _taken(sparsifier, name, parameter, value)
        if found:
            optimizer.state[parameter] = found
        else:
            optimizer.state.pop(parameter, None)


def _taken(sparsifier: Sparsifier, name: str, parameter: Tensor, value: Tensor) -> Tensor:
    """An optimizer's tensor as it is used."""
    of = _learned(sparsifier, name)
    return local(value).reshape(-1) if of is not None and value.ndim == 2 else value
