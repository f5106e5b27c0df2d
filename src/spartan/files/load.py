"""Loads packed files: the model (`spartan.load`), or its tensors (`read`)."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spartan.files import codes, format, nm
from spartan.files.architecture import Unbuildable, build, differences
from spartan.files.choose import AS_THEY_ARE, INPUTS_LAST, Code, matrix, places_in_order
from spartan.files.signs import Signs, join_signs
from spartan.files.signs import check as check_signs
from spartan.files.values import CodedValues, decode_values
from spartan.files.values import check as check_code
from spartan.narrow import narrow, why_not_narrower
from spartan.problem.targets import name_cleaner, unwrap
from spartan.scalars import as_plain

KERNELS = ("auto", "dense", "sparse")
# Zeros take next to no space, so that a file may be far smaller than its tensors; an honest one at 99.9% is 740 times.
RATIO, ALWAYS = 1000, 64 << 20


# A part of a tensor of the container: its name, the first entry and their number.
Place = tuple[str, int, int]


@dataclass(frozen=True)
class Spec:
    """A tensor of the file: how it is stored, and what it is when unpacked. `code` is None for a dense one."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    kept: int
    values: Place
    code: Code | None = None
    index: Place = (format.BYTES, 0, 0)
    # of values that are coded, and then bytes
    exponents: tuple[int, ...] | None = None
    k: int = 0
    # of zeros that are −0.0: their number, the parameter of their map and where it is
    signs: tuple[int, int, Place] | None = None

    @property
    def count(self) -> int:
        """Entries when unpacked."""
        return format.count_of(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes when unpacked."""
        return self.count * self.dtype.itemsize

    @property
    def stored_bytes(self) -> int:
        """Bytes in the file."""
        signs = self.signs[2][2] if self.signs else 0
        return self.values[2] * (self.dtype.itemsize if self.exponents is None else 1) + self.index[2] + signs


@dataclass(frozen=True)
class Contents:
    """A packed file, read and checked, its tensors not unpacked yet."""

    container: format.Container
    specs: Mapping[str, Spec]
    aliases: Mapping[str, str]
    architecture: Mapping[str, Any] | None
    # of a model that was made narrower than the architecture: the sizes that its tensors do not tell
    narrowed: Mapping[str, Any] | None = None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor by name, other names of the same tensor included."""
        own = {name: spec.shape for name, spec in self.specs.items()}
        return own | {alias: own[name] for alias, name in self.aliases.items()}


def load(
    path: str | os.PathLike[str],
    model: nn.Module | None = None,
    device: torch.device | str | None = None,
    kernels: str = "auto",
    *,
    max_bytes: int | None = None,
) -> nn.Module:
    """The model of a file that `spartan.save` wrote.

    Args:
        path: the file. A damaged or foreign one is a ValueError, and `model` is then as it was.
        model: the model to load the weights into, in place; it keeps its own dtypes and memory format, and is made
            narrower for the file of one that `spartan.shrink` has made so. None: a new one, in the file's dtypes and in
            eval mode, if the file says which.
        device: where the model goes; None: where it is (a new one: the CPU).
        kernels: `"auto"`: layers run sparse kernels where they are measured to be faster on this machine; `"sparse"`:
            wherever there is one; the result is then a copy of the model for inference. `"dense"`: nowhere, and the
            result is the model itself.
        max_bytes: the most memory that the unpacked tensors may take, and the model while it is built; None: 1,000
            times the file's size, or 64 MiB if that is more. With a model no limit is needed: the shapes must be its
            own.

    Example:
        >>> import tempfile
        >>> from spartan.files import save
        >>> model = spartan.prune(torch.nn.Linear(100, 100), sparsity=0.9)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     size = save(model, f"{folder}/model.safetensors")
        ...     twin = load(f"{folder}/model.safetensors", torch.nn.Linear(100, 100), kernels="dense")
        >>> torch.equal(twin.weight, model.weight)
        True
    """
    if kernels not in KERNELS:
        raise ValueError(f"kernels={kernels!r}; one of {', '.join(map(repr, KERNELS))} is needed")
    if model is not None and not isinstance(model, nn.Module):
        raise ValueError(f"model is {type(model).__name__}, not a torch.nn.Module")
    contents = open_file(path)
    if model is None:
        model = load_named(contents, f"build the model and pass it: load({str(path)!r}, model)", max_bytes)
    else:
        fill(contents, unwrap(model))
    if device is not None:
        model.to(device)
    if kernels == "dense":
        return model
    from spartan.inference.convert import accelerate

    return accelerate(model, kernels=kernels, device=device)


def fill(contents: Contents, model: nn.Module) -> None:
    """Put a file's tensors into a model that they fit, which is made narrower if they are of a narrowed one."""
    _check_fit(contents, model)
    tensors = unpack_all(contents)
    clean = name_cleaner(model)
    if contents.narrowed is not None and _differences(contents, model):
        narrow(model, contents.shapes, contents.narrowed)
    model.load_state_dict({name: tensors[clean(name)] for name in model.state_dict()})


def read(path: str | os.PathLike[str], *, max_bytes: int | None = None) -> dict[str, Tensor]:
    """The tensors of a file that `spartan.save` wrote, by name, dense, on the CPU; ValueError if it is damaged.

    `max_bytes` is as for `load`.
    """
    contents = open_file(path)
    check_memory(contents, max_bytes)
    return unpack_all(contents)


def read_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The same of any safetensors file, and of a folder of such files, as `save_pretrained` writes it."""
    path = Path(path)
    if not path.is_dir():
        return unpack_all(open_file(path, plain_too=True))
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{path} is a folder without .safetensors files")
    return {name: x for file in files for name, x in read_weights(file).items()}


def open_file(path: str | os.PathLike[str], plain_too: bool = False) -> Contents:
    """Read and check a file: its checksum, and everything that its header says, before any tensor is unpacked."""
    with torch.device("cpu"):  # whatever the default is
        container = format.read(Path(path), plain_too)
    try:
        return _parse_contents(container)
    except ValueError as error:
        raise ValueError(f"{path}: is damaged: {error}") from None


def _parse_contents(container: format.Container) -> Contents:
    specs: dict[str, Spec] = {}
    # How much of each pool the tensors so far take: their places are nowhere but in their order.
    used = {name: 0 for name in container.entries if name == format.BYTES or name.startswith(format.VALUES)}
    for name, item in format.parse_metadata(container, "spartan.tensors").items():
        if format.is_reserved(name):
            raise ValueError(f"a tensor has the name {ascii(name)[:80]}, which the format uses itself")
        try:
            specs[name] = _parse_item(item, used)
        except ValueError as error:
            raise ValueError(f"{ascii(name)[:80]} is malformed ({str(error)[:120]})") from None
    for name, entry in container.entries.items():
        if name in used:
            own = torch.uint8 if name == format.BYTES else format.DTYPES.get(name.removeprefix(format.VALUES))
            if entry.shape != (used[name],) or entry.dtype != own:
                raise ValueError(f"{ascii(name)[:80]} is not what the packed tensors need")
        elif name in specs:
            raise ValueError(f"{ascii(name)[:80]} is there twice, packed and dense")
        else:
            count = format.count_of(entry.shape)
            specs[name] = Spec(entry.shape, entry.dtype, count, (name, 0, count))
    aliases = format.parse_metadata(container, "spartan.aliases")
    for alias, name in aliases.items():
        if alias in specs or format.is_reserved(alias) or not isinstance(name, str) or name not in specs:
            raise ValueError(f"{ascii(alias)[:80]} is said to be another name of a tensor that is not there")
    architecture = format.parse_metadata(container, "spartan.architecture") or None
    narrowed = format.parse_metadata(container, key) if (key := "spartan.narrowed") in container.metadata else None
    return Contents(container, specs, aliases, architecture, narrowed)


def _parse_item(item: Any, used: dict[str, int]) -> Spec:
    """How a packed tensor is stored, every number within what its shape allows; `used` goes on by what it takes."""
    if not isinstance(item, list) or len(item) not in (5, 6, 8, 9):
        raise ValueError("it has no code, shape, dtype and counts")
    signed = len(item) in (6, 9)
    item, signs = (item[:-1], item[-1]) if signed else (item, None)
    text, shape, dtype_name, kept, index_bytes, value_bytes, k, exponents = [*item, 0, 0, None][:8]
    code, total = Code.parse(text), format.count_of(shape)
    dtype = format.DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    pool = f"{format.VALUES}{dtype_name}"
    if dtype is None or format.BYTES not in used or (pool not in used and len(item) == 5):
        raise ValueError("its values are not there")
    if len(item) == 8:
        exponents, k = check_code(exponents, k, dtype)
    sign_map = check_signs(signs, dtype) if signed else None
    if not all(type(number) is int and number >= 0 for number in (kept, index_bytes, value_bytes)):
        raise ValueError("its counts are no numbers")
    if code.name == "nm":
        nm.check(code.n, code.m)
        ordered = len(shape) > 1 if code.order == INPUTS_LAST else code.order == AS_THEY_ARE or len(shape) == 2
        fits = ordered and total % code.m == 0 and kept == total // code.m * code.n
    else:
        rows, columns = matrix(shape, code.stacked and len(shape) == 3)
        h, w = code.h, code.w
        fits = min(h, w) > 0 and rows % h == columns % w == kept % (h * w) == 0 and kept <= total
        fits = fits and (not code.stacked or len(shape) == 3)
    # Blocks of any size would divide an empty tensor, which is never packed.
    if not fits or not total:
        raise ValueError("its values do not go with its shape")

    def take(name: str, count: int) -> Place:
        used[name] += count
        return name, used[name] - count, count

    index = take(format.BYTES, index_bytes)
    values = take(pool, kept) if exponents is None else take(format.BYTES, value_bytes)
    placed = None if sign_map is None else (*sign_map[:2], take(format.BYTES, sign_map[2]))
    return Spec(tuple(shape), dtype, kept, values, code, index, exponents, k, placed)


def check_memory(contents: Contents, max_bytes: int | None) -> int:
    """Refuse to unpack what no file of this size should hold; the limit in bytes."""
    max_bytes = as_plain(max_bytes)
    if max_bytes is not None and (not hasattr(max_bytes, "__index__") or max_bytes < 0):
        raise ValueError(f"max_bytes={max_bytes!r}; a number of bytes, or None, is needed")
    needed = sum(spec.nbytes for spec in contents.specs.values())
    size = contents.container.size
    limit = max(RATIO * size, ALWAYS) if max_bytes is None else int(max_bytes)
    if needed > limit:
        raise ValueError(
            f"{contents.container.path}: {size:,} bytes claim to be {needed:,} when unpacked, and max_bytes is {limit:,}; "
            "if you trust the file, pass a larger max_bytes, or the model"
        )
    return limit


def _check_fit(contents: Contents, model: nn.Module) -> None:
    """Refuse a file whose tensors are not the model's, nor those of a narrower one."""
    path, difference = contents.container.path, _differences(contents, model)
    if difference and contents.narrowed is not None:
        difference = why_not_narrower(model, contents.shapes, contents.narrowed)
    if difference:
        raise ValueError(f"{path} does not fit the model, which {difference}")
    clean = name_cleaner(model)
    for name, tensor in ((clean(name), tensor) for name, tensor in model.state_dict().items()):
        dtype = contents.specs[contents.aliases.get(name, name)].dtype
        if dtype != tensor.dtype and not (dtype.is_floating_point and tensor.dtype.is_floating_point):
            raise ValueError(
                f"{path} does not fit the model, which has {name} in {tensor.dtype}, and the file in {dtype}"
            )


def _differences(contents: Contents, model: nn.Module) -> str | None:
    clean = name_cleaner(model)
    return differences({clean(name): tensor for name, tensor in model.state_dict().items()}, contents.shapes)


def load_named(contents: Contents, remedy: str, max_bytes: int | None = None) -> nn.Module:
    """The model that a file names, in the file's dtypes and in eval mode; ValueError with the remedy if it names none."""
    path, reference = contents.container.path, contents.architecture
    limit = check_memory(contents, max_bytes)
    if reference is None:
        raise ValueError(f"{path} does not say which model its weights belong to; {remedy}")
    try:
        model = build(reference, contents.shapes, max_bytes=limit, sizes=contents.narrowed)
    except Unbuildable as error:
        raise ValueError(f"{path}: {error}; {remedy}") from None
    _check_fit(contents, model)
    state, clean = model.state_dict(keep_vars=True), name_cleaner(model)
    for tensor in state.values():  # before the file's are unpacked, so that never both take memory
        tensor.data = torch.empty(0, dtype=tensor.dtype)
    tensors, owners = unpack_all(contents), dict[int, Tensor]()
    for name, tensor in state.items():
        own = tensors[clean(name)]
        # One tensor of the file for two of the model: they are equal, not the same.
        tensor.data = own if owners.setdefault(id(own), tensor) is tensor else own.clone()
    return model.eval()


def unpack_all(contents: Contents) -> dict[str, Tensor]:
    """Every tensor of the file; other names of a tensor give the same one."""
    container, tensors = contents.container, {}
    for name, spec in contents.specs.items():
        try:
            with torch.device("cpu"):
                values = container.flat(*spec.values)
                if spec.exponents is not None:
                    values = decode_values(CodedValues(spec.exponents, spec.k, values), spec.dtype, spec.kept)
                if spec.dtype == torch.bool and bool((values.view(torch.uint8) > 1).any()):
                    raise ValueError("a value is neither true nor false")
                if spec.code is None:
                    tensors[name] = values.reshape(spec.shape)
                else:
                    tensors[name] = unpack(spec.shape, spec.code, values, container.flat(*spec.index))
                if spec.signs is not None:
                    count, k, place = spec.signs
                    join_signs(tensors[name], Signs(count, k, container.flat(*place)))
        except ValueError as error:
            raise ValueError(f"{container.path}: is damaged: {ascii(name)[:80]}: {error}") from None
    return tensors | {alias: tensors[name] for alias, name in contents.aliases.items()}


def unpack(shape: tuple[int, ...], code: Code, values: Tensor, index: Tensor) -> Tensor:
    """The dense tensor of a code: the inverse of `pack`. ValueError where the index does not go with the rest.

    Example:
        >>> from spartan.files.pack import pack
        >>> x = torch.randn(100, 100) * (torch.rand(100, 100) < 0.1)
        >>> packed = pack(x)
        >>> torch.equal(unpack(packed.shape, packed.code, packed.values, packed.index), x)
        True
    """
    bits, unit = format.as_bits(values), code.h * code.w
    total, count = format.count_of(shape) // unit, bits.numel() // unit
    if code.name == "nm":
        kept = places_in_order(nm.decode(index, total, code.n, code.m), shape, code.order)
    elif code.name == "mask":
        kept = codes.decode_mask(index, total, count)
    else:
        kept = codes.decode_gaps(index, total, count, code.k)
    flat = torch.zeros(total * unit, dtype=bits.dtype)
    if unit == 1:
        flat.index_copy_(0, kept, bits)
    else:
        rows, columns = matrix(shape, code.stacked)
        across = columns // code.w
        blocks = flat.view(rows // code.h, code.h, across, code.w)
        blocks[kept // across, :, kept % across] = bits.reshape(count, code.h, code.w)
    return flat.view(values.dtype).reshape(shape)
