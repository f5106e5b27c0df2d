"""Saves a model in one file, its sparse tensors packed (`spartan.save`)."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spartan.files import codes, format, nm
from spartan.files.architecture import reference_of
from spartan.files.choose import HEADER_BYTES, Code, choose, in_order, matrix
from spartan.files.signs import Signs, split_signs
from spartan.files.values import CodedValues, encode_values
from spartan.problem.patterns import Pattern, Unstructured, check_pattern
from spartan.problem.patterns.block import Block
from spartan.problem.targets import name_cleaner, unwrap

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class PackedTensor:
    """A tensor in a code: its shape, the entries it keeps, and the bytes that say where they go."""

    shape: tuple[int, ...]
    code: Code
    values: Tensor
    index: Tensor
    coded: CodedValues | None
    signs: Signs | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of values, index and signs in the file."""
        values = self.values if self.coded is None else self.coded.data
        return values.nbytes + self.index.nbytes + (self.signs.data.nbytes if self.signs else 0)


def save(
    model: nn.Module,
    path: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    *,
    pattern: Pattern | None = None,
    architecture: str | Mapping[str, Any] | None = None,
) -> int:
    """Write a model's state to one `.safetensors` file; the size of the file in bytes.

    Each tensor is stored dense or in the code that is smallest for it. Entries that are +0.0 are left out, and −0.0 too
    where a map of their signs is smaller, so that reading it gives every bit back. The model may be
    attached to a sparsifier: it holds the sparse weights.

    Args:
        model: the model; DDP and torch.compile around it are taken off.
        path: the file; an old one stays as it is until the new one is safely on the disk.
        dtype: float32, bfloat16 or float16: what to store every floating-point tensor in. None: each in its own.
        pattern: the pattern the model was trained with, if the smallest code should not be left to be found.
        architecture: what `load` needs to build the model by itself: a name (`torchvision/resnet50`, `timm/…`,
            `digits-cnn`, …), or a dict with `model` and any of `classes`, `shape` (of an image) and `args`. None:
            timm's models are recognised; others have to be passed to `load`.

    Example:
        >>> import tempfile
        >>> model = spartan.prune(torch.nn.Linear(1000, 1000, bias=False), sparsity=0.95)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     size = save(model, f"{folder}/model.safetensors")
        >>> round(size / 4_000_000, 3)
        0.049
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {type(model).__name__}, not a torch.nn.Module")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}; {', '.join(map(str, DTYPES))} or None is needed")
    if pattern is not None:
        check_pattern(pattern)
    model = unwrap(model)
    # A copy made for inference has merged layers, which hold their weights in the kernels' own form.
    if any(type(module).__module__.startswith("spartan.inference.") for module in model.modules()):
        raise ValueError("the model runs sparse kernels: it is a copy made by load; save the model it was made from")
    state, aliases = state_of(model)
    reference, sizes = reference_of(model, architecture, {name: tuple(t.shape) for name, t in state.items()})
    tensors: dict[str, Tensor] = {}
    packed: dict[str, PackedTensor] = {}
    zeros = weights = 0
    for name, tensor in state.items():
        if name in aliases:
            continue
        x = _as_stored(name, tensor, dtype)
        with torch.device("cpu"):  # whatever the default is
            found = pack(x, pattern)
        if found is None:
            tensors[name] = x
        else:
            packed[name] = found
        if x.ndim > 1 and x.is_floating_point():
            weights += x.numel()
            zeros += x.numel() - int(torch.count_nonzero(format.as_bits(x if found is None else found.values)))
    metadata = {
        "format": "pt",
        "spartan.version": str(format.VERSION),
        "spartan.sparsity": f"{zeros / max(1, weights):.6g}",
        "spartan.pattern": repr(pattern) if pattern is not None else _common_pattern(packed),
        "spartan.tensors": _json({name: _header_item(x) for name, x in packed.items()}),
    }
    metadata |= {"spartan.aliases": _json(aliases)} if aliases else {}
    metadata |= {"spartan.architecture": _json(reference)} if reference else {}
    metadata |= {"spartan.narrowed": _json(sizes)} if sizes is not None else {}
    with torch.device("cpu"):
        return format.write(Path(path), tensors | _pools(packed), metadata)


def state_of(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The model's tensors by name, and which names stand for the same tensor as an earlier one."""
    state: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    clean = name_cleaner(model)
    for full_name, tensor in model.state_dict().items():
        name = clean(full_name)
        _check_storable(name, tensor)
        if name in state:
            raise ValueError(f"two tensors have the name {name} once wrappers' names are left out; rename one of them")
        if tensor.numel():
            # A conjugated or negated view has the memory of the tensor it was made of, and other values.
            view = (tensor.is_conj(), tensor.is_neg())
            place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), view)
            if first.setdefault(place, name) != name:
                aliases[name] = first[place]
        state[name] = tensor
    return state, aliases


def pack(x: Tensor, pattern: Pattern | None = None) -> PackedTensor | None:
    """A contiguous CPU tensor in its smallest code; None if that is to leave it dense.

    Example:
        >>> x = torch.zeros(64, 64)
        >>> x[::8] = 1.0
        >>> packed = pack(x)
        >>> str(packed.code), packed.values.numel(), packed.index.numel()
        ('gaps 2 1x64', 512, 4)
    """
    options = [_pack_bits(x, pattern)]
    if split := split_signs(x):
        plain, signs = split
        found = _pack_bits(plain, pattern)
        options += [replace(found, signs=signs)] if found else []
    best = min((option for option in options if option), key=lambda option: option.nbytes, default=None)
    return best if best and best.nbytes + HEADER_BYTES < x.nbytes else None


def _pack_bits(x: Tensor, pattern: Pattern | None) -> PackedTensor | None:
    """The tensor in the code that is smallest if all but +0.0 is kept; None if that is to leave it dense."""
    bits = format.as_bits(x)
    chosen = choose(bits != 0, _bytes_each(bits.reshape(-1), x.dtype), x.nbytes, pattern)
    if chosen is None:
        return None
    code, kept = chosen
    if code.name == "nm":
        index, kept = nm.encode(kept, code.n, code.m)
    elif code.name == "mask":
        index = codes.encode_mask(kept, x.numel() // (code.h * code.w))
    else:
        index = codes.encode_gaps(codes.gaps_of(kept), code.k)
    rows, columns = matrix(x.shape, code.stacked)
    ordered = in_order(bits, code.order)
    blocks = ordered.reshape(rows // code.h, code.h, columns // code.w, code.w).transpose(1, 2)
    values = blocks.reshape(-1, code.h * code.w).index_select(0, kept).reshape(-1).view(x.dtype)
    return PackedTensor(tuple(x.shape), code, values, index, encode_values(values))


def _bytes_each(bits: Tensor, dtype: torch.dtype) -> float:
    """About what a kept value takes in the file, from a sample of them."""
    sample = bits[:: max(1, bits.numel() // 65_536)]
    values = sample[sample != 0].view(dtype)
    coded = encode_values(values)
    return float(dtype.itemsize) if coded is None else coded.data.numel() / values.numel()


def _header_item(packed: PackedTensor) -> list[Any]:
    """What the header says about a packed tensor."""
    dtype = format.NAMES[packed.values.dtype]
    spec = [str(packed.code), list(packed.shape), dtype, packed.values.numel(), packed.index.numel()]
    if (coded := packed.coded) is not None:
        spec += [coded.data.numel(), coded.k, list(coded.exponents)]
    if (signs := packed.signs) is not None:
        spec.append([signs.count, signs.k, signs.data.numel()])
    return spec


def _pools(packed: Mapping[str, PackedTensor]) -> dict[str, Tensor]:
    """What all packed tensors need: their plain values, by dtype, and their bytes, as one tensor each."""
    pools: dict[str, list[Tensor]] = {}
    for x in packed.values():
        values = x.values if x.coded is None else x.coded.data
        name = format.BYTES if x.coded is not None else f"{format.VALUES}{format.NAMES[x.values.dtype]}"
        pools.setdefault(format.BYTES, []).append(x.index)
        pools.setdefault(name, []).append(values)
        if x.signs is not None:
            pools[format.BYTES].append(x.signs.data)
    # As integers: torch does not join tensors of every type.
    return {name: torch.cat([*map(format.as_bits, x)]).view(x[0].dtype) for name, x in pools.items()}


def _common_pattern(packed: Mapping[str, PackedTensor]) -> str:
    """The pattern of the packed weights, if it is one and the same."""
    kinds = set()
    for code in (x.code for x in packed.values() if len(x.shape) > 1 and x.values.numel()):
        if code.name == "nm":
            kinds.add(f"NM(n={code.n}, m={code.m})")
        else:
            kinds.add(repr(Unstructured() if code.h == code.w == 1 else Block(code.h, code.w)))
    return kinds.pop() if len(kinds) == 1 else "mixed" if kinds else "dense"


def _json(what: object) -> str:
    return json.dumps(what, separators=(",", ":"), ensure_ascii=False)


def _check_storable(name: str, tensor: object) -> None:
    """Refuse what cannot be stored, with the remedy."""
    if not isinstance(tensor, Tensor):
        raise ValueError(
            f"{name} is {type(tensor).__name__}, not a tensor; a file without pickle holds tensors only: "
            "keep it apart from the model's state"
        )
    if format.is_reserved(name):
        raise ValueError(f"a tensor cannot have the name {name}, which the file format uses itself; rename it")
    if tensor.is_meta:
        raise ValueError(f"{name} is on the meta device and has no values to save")
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or tensor.layout is not torch.strided:
        kind = type(tensor).__name__ if tensor.layout is torch.strided else str(tensor.layout)
        raise ValueError(f"{name} is a {kind}; a plain dense tensor is needed (full_tensor() or to_dense() gives one)")
    if tensor.is_quantized or tensor.dtype not in format.NAMES:
        raise ValueError(f"{name} has dtype {tensor.dtype}, for which safetensors has no word; convert it first")


def _as_stored(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The tensor in row-major order on the CPU, in the dtype asked for."""
    x = tensor.detach().to("cpu")
    # Conjugated and negated views are resolved, or their memory would be stored.
    x = x.resolve_conj().resolve_neg().contiguous()
    if dtype is None or dtype == x.dtype or not x.is_floating_point() or x.dtype.itemsize < 2:
        return x
    cast = x.to(dtype)
    if bool((cast.isinf() & ~x.isinf()).any()):
        largest = "65,504" if dtype == torch.float16 else f"{torch.finfo(dtype).max:.4g}"
        remedy = "use torch.bfloat16" if dtype == torch.float16 else "use None, which keeps its own dtype"
        raise ValueError(f"dtype={dtype}: {name} has values beyond ±{largest}; {remedy}")
    return cast
