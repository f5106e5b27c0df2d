"""Builds models from references: what a file says about the model whose weights it holds.

A reference is a name and plain numbers. To build a model for one never runs code that the file names, takes no memory
beyond a limit, and fetches nothing: names of torchvision, timm and this library only, arguments that are known to be
sizes and rates only, and first without memory, to compare the shapes and to add up what building it takes.
"""

import re
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from spartan.narrow import Shapes, Sizes, is_narrowed, narrow, sizes_beside, why_not_narrower
from spartan.scalars import as_plain
from spartan.wording import one_line, printable
from spartan.zoo import VIT, WRN, Shape, build_model

# Arguments that a file may set. Those that load weights, fetch or name classes are not among them.
_DEPTHS = {"depth", "num_layers", "layers"}
_SIZES = {"num_classes", "in_chans", "img_size", "image_size", "patch_size", "num_heads", "hidden_dim", "mlp_dim"}
_SIZES |= {"embed_dim", "groups", "width_per_group", "width", "heads", *_DEPTHS}
_RATES = {"drop_rate", "drop_path_rate", "attn_drop_rate", "proj_drop_rate", "dropout", "attention_dropout"}
_RATES |= {"stochastic_depth_prob", "mlp_ratio"}
_NAME = re.compile(r"(torchvision/|timm/)?[A-Za-z0-9_.-]+")


class Unbuildable(ValueError):
    """The reference does not lead to a model that fits; the text says why."""


class MemoryLimit(TorchDispatchMode):
    """Stops what runs inside it when the tensors that it has made and that still live exceed `limit` bytes.

    Tensors on the meta device count with the bytes that they would take. The state's shapes do not say what a
    constructor takes: tables that are not in the state, and what it needs for a moment to compute them, can be far
    larger.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit, self.bytes, self.exceeded = limit, 0, False
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        # A weak reference keeps the address from being used again, so that it names one storage.
        if storage._cdata not in self.storages:
            self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            self.bytes += storage.nbytes()
        if self.bytes > self.limit:  # only now is it worth looking which are gone
            self.storages = {key: item for key, item in self.storages.items() if not item[0].expired()}
            self.bytes = sum(size for _, size in self.storages.values())
            self.exceeded = self.bytes > self.limit
            if self.exceeded:
                raise Unbuildable(f"takes more memory to build than max_bytes, which is {self.limit:,}")


def reference_of(
    model: nn.Module, architecture: str | Mapping[str, Any] | None, shapes: Shapes
) -> tuple[dict[str, Any] | None, Sizes | None]:
    """The reference to store: the one given, checked; or that of a timm model, if it is enough to rebuild it.

    With it, of a model that `shrink` has made narrower, the sizes that its tensors do not tell.
    """
    if architecture is not None:
        given = as_plain({"model": architecture} if isinstance(architecture, str) else dict(architecture))
        if not isinstance(given.get("model"), str) or given.keys() - {"model", "classes", "shape", "args"}:
            raise ValueError(
                f"architecture={architecture!r}; a name, or a dict with model and any of classes, shape and args, is needed"
            )
        if not _why_unsafe(given):  # else it is a note to the reader, and load asks for a model
            try:
                return given, _sizes_of(model, given, shapes)
            except Unbuildable as error:
                raise ValueError(f"architecture={architecture!r}: {error}") from None
        return given, None
    config = getattr(model, "pretrained_cfg", None)
    if type(model).__module__.startswith("timm.") and isinstance(config, Mapping) and config.get("architecture"):
        found: dict[str, Any] = {"model": f"timm/{config['architecture']}"}
        classes = getattr(model, "num_classes", 1000)
        found |= {} if classes == 1000 else {"classes": classes}
        with suppress(Unbuildable):
            return found, _sizes_of(model, found, shapes)
    return None, None


def _sizes_of(model: nn.Module, reference: Mapping[str, Any], shapes: Shapes) -> Sizes | None:
    """The sizes beside the tensors of a narrowed model; None for one that is as its reference says."""
    if not is_narrowed(model):
        build(reference, shapes, real=False)
        return None
    return sizes_beside(model, build(reference, shapes, real=False, sizes={}))


def build(
    reference: Mapping[str, Any], shapes: Shapes, real: bool = True, max_bytes: int | None = None, sizes: Any = None
) -> nn.Module:
    """The model that a reference leads to, its state of exactly these shapes; Unbuildable with the reason otherwise.

    Args:
        reference: `model`, and any of `classes`, `shape` and `args`.
        shapes: the shapes of the tensors that are to go into it.
        real: False to build it on the meta device, without memory.
        max_bytes: the most memory that building it may take; None: any.
        sizes: of a narrowed model, whose tensors are parts of those of its name: what these do not tell. None: it is
            not narrowed.

    Example:
        >>> shapes = {"0.weight": (32, 1, 3, 3)}
        >>> build({"model": "digits-cnn", "classes": 10, "shape": [1, 8, 8]}, shapes)
        Traceback (most recent call last):
        spartan.files.architecture.Unbuildable: digits-cnn has 19 tensors that the file lacks, such as 1.weight
    """
    name, classes, shape, arguments = _parse_reference(reference, len(shapes))

    def construct(device: str) -> nn.Module:
        limit = nullcontext() if max_bytes is None else MemoryLimit(max_bytes)
        try:
            with torch.device(device), limit:
                return build_model(name, classes, shape, arguments)
        except Exception as error:
            if isinstance(limit, MemoryLimit) and limit.exceeded:  # in whatever words it came out
                raise Unbuildable(f"takes more memory to build than max_bytes, which is {max_bytes:,}") from error
            raise

    try:
        with torch.random.fork_rng(devices=[]):
            model = construct("meta")
            same = sizes is None
            difference = differences(model.state_dict(), shapes) if same else why_not_narrower(model, shapes, sizes)
            if difference:
                raise Unbuildable(difference)
            if real:
                model = construct("cpu")
                if not same:
                    narrow(model, shapes, sizes)
    except Unbuildable as error:
        raise Unbuildable(f"{name} {error}") from None
    except Exception as error:  # others' constructors raise anything at sizes that they do not expect
        raise Unbuildable(f"{name} cannot be built: {one_line(error)[:200]}") from None
    return model


def _why_unsafe(reference: Mapping[str, Any]) -> str | None:
    """Why a model is not built on a file's word; None if it may be."""
    model = reference.get("model")
    if isinstance(model, str) and ":" in model:
        return "names a function, which is not called on a file's word"
    arguments = reference.get("args", {})
    unknown = sorted(set(arguments) - _SIZES - _RATES) if isinstance(arguments, Mapping) else ["args"]
    return f"sets {printable(', '.join(unknown)[:80])}, which a file may not" if unknown else None


def _parse_reference(reference: Mapping[str, Any], tensors: int) -> tuple[str, int, Shape, dict[str, Any]]:
    """The parts of a reference, each of its type and within what a model of so many tensors can need."""
    if reason := _why_unsafe(reference):
        raise Unbuildable(f"the reference {reason}")
    name, arguments = reference.get("model"), reference.get("args", {})
    classes, shape = reference.get("classes", 1000), reference.get("shape", (3, 224, 224))
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise Unbuildable(f"{ascii(name)[:80]} is not a name of a model")
    if not isinstance(shape, list | tuple) or len(shape) != (1 if name == "gpt" else 3):
        raise Unbuildable(f"{name} has a shape that is not that of an image: channels, height and width")
    sizes = [classes, *shape, *(value for key, value in arguments.items() if key in _SIZES)]
    rates = [value for key, value in arguments.items() if key in _RATES]
    if not all(type(n) is int and 0 <= n < 1 << 24 for n in sizes):
        raise Unbuildable(f"{name} has arguments that are not sizes")
    if not all(type(rate) in (int, float) and 0 <= rate < 100 for rate in rates):
        raise Unbuildable(f"{name} has arguments that are not rates")
    # A layer has a tensor at least: more layers than tensors do not fit, and would take long to build.
    ours = WRN.fullmatch(name) or VIT.fullmatch(name)
    depths = [value for key, value in arguments.items() if key in _DEPTHS] + ([int(ours[1])] if ours else [])
    if max(depths, default=0) > tensors or (ours and len(name) > 20):
        raise Unbuildable(f"{name} has more layers than the file has tensors")
    return name, classes, tuple(shape), dict(arguments)


def differences(model: Mapping[str, Tensor], file: Shapes) -> str | None:
    """The first difference between a model's tensors and a file's shapes, in words; None if there is none."""
    if more := [key for key in model if key not in file]:
        return f"has {len(more)} tensors that the file lacks, such as {more[0]}"
    if fewer := [key for key in file if key not in model]:
        return f"lacks {len(fewer)} tensors that the file has, such as {printable(fewer[0][:80])}"
    for key, shape in file.items():
        if model[key].shape != shape:
            return f"has {key} of shape {tuple(model[key].shape)}, and the file of {shape}"
    return None
