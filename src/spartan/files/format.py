"""Reads and writes the container: a safetensors file whose header says how its tensors are packed, and its checksum.

A safetensors file is the header's length (8 bytes, little-endian), the header (JSON: for every tensor its dtype, shape
and place; under `__metadata__` strings), and the data. Ours has these strings besides `format`:

    spartan.version        the version of this format
    spartan.sha256         of the header, with 64 zeros in this place, and the data
    spartan.tensors        JSON: for every packed tensor [code, shape, dtype, entries kept, bytes of index], and if its
                           values are coded as well [..., bytes of values, k, exponents]; either may end with a list
                           [number of −0.0, k of their gaps or −1 for a mask, bytes of their map]
    spartan.aliases        JSON: names that stand for the same tensor as another
    spartan.architecture   JSON: the model's name and arguments
    spartan.pattern, spartan.sparsity

Dense tensors have their own names. What packed ones need lies one after the other, in the order of `spartan.tensors`:
the bytes that say where entries go, coded values, and maps of −0.0, in `spartan:bytes`, values that are not coded in
`spartan:values:F32` and so on, for each dtype. (Header entries for each would take a tenth of what a ResNet-50 at 99%
does.) Everything here is checked against the size of the file before memory is taken for it. The header and each JSON
string in it are bounded before they are parsed: 16 MiB, 4,000,000 values, 8 levels. What they name is counted then: at
most 50,000 tensors.
"""

import ctypes
import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from spartan.disk import replace_file

VERSION = 1
VALUES, BYTES = "spartan:values:", "spartan:bytes"
# A header far beyond these takes more time and memory to parse than the models that it could describe.
_LARGEST_HEADER, _MOST_TENSORS, _MOST_VALUES, _DEEPEST = 1 << 24, 50_000, 4_000_000, 8
_JSON_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_BLANK = "0" * 64
_SHA256 = '"spartan.sha256":"'

DTYPES: dict[str, torch.dtype] = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu},
    **{"F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz},
    **{"BOOL": torch.bool, "C64": torch.complex64},
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of the container: its dtype, its shape, and where among the data its bytes are."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Container:
    """A file that was read: its tensors' places, its metadata, and its data as bytes."""

    path: Path
    size: int
    entries: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]
    data: Tensor

    def flat(self, name: str, first: int, count: int) -> Tensor:
        """Some of a tensor's entries in row-major order, in memory of their own."""
        entry = self.entries[name]
        begin, size = entry.begin + first * entry.dtype.itemsize, count * entry.dtype.itemsize
        return self.data[begin : begin + size].clone().view(entry.dtype)


def as_bits(tensor: Tensor) -> Tensor:
    """The entries as integers of the same size, so that −0.0 and every NaN stay what they are."""
    return tensor.view(_BITS[tensor.dtype.itemsize])


def is_reserved(name: str) -> bool:
    """Whether no tensor can have this name, since the format uses it itself."""
    return name == "__metadata__" or name == BYTES or name.startswith(VALUES)


def count_of(shape: Sequence[int]) -> int:
    """Entries of a tensor of that shape; ValueError if it cannot be one."""
    if not isinstance(shape, list | tuple) or not all(type(n) is int and n >= 0 for n in shape) or len(shape) > 64:
        raise ValueError(f"the shape {_short(shape)} is none")
    if math.prod(max(1, n) for n in shape) >= 1 << 60:
        raise ValueError(f"the shape {_short(shape)} is larger than any memory")
    return math.prod(shape)


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> int:
    """Write contiguous tensors on the CPU, and strings to go with them, whole or not at all; the file's size in bytes."""
    _check_machine()
    # Largest entries first: then each tensor begins at a multiple of its entries' size.
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))
    header: dict[str, Any] = {"__metadata__": {**metadata, "spartan.sha256": _BLANK}}
    end = 0
    for name, x in ordered.items():
        begin, end = end, end + x.nbytes
        header[name] = {"dtype": NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    try:
        _check_size(text, "the header")
        for value in metadata.values():
            _check_size(value.encode(), "a string of the header")
        names = max(len(header), len(json.loads(metadata.get("spartan.tensors", "{}"))))
        if names > _MOST_TENSORS:
            raise ValueError(f"it names {names:,} tensors, and at most {_MOST_TENSORS:,} are read")
    except ValueError as error:
        raise ValueError(f"{path}: {error}; save the model's parts in files of their own") from None
    # Their bytes, in place.
    data = [(ctypes.c_char * x.nbytes).from_address(x.data_ptr()) if x.nbytes else b"" for x in ordered.values()]
    digest = hashlib.sha256(text)
    for part in data:
        digest.update(part)
    text = text.replace((_SHA256 + _BLANK).encode(), (_SHA256 + digest.hexdigest()).encode(), 1)
    try:
        replace_file(path, len(text).to_bytes(8, "little"), text, *data)
    except OSError as error:
        kept = "; the file that was there is unchanged" if path.is_file() else ""
        raise RuntimeError(f"{path} could not be written: {error.strerror or error}{kept}") from error
    return 8 + len(text) + end


def read(path: Path | str, plain_too: bool = False) -> Container:
    """Read and check a container; ValueError that names the file and what is wrong with it.

    With `plain_too` any safetensors file, which has neither strings of ours nor a checksum.
    """
    _check_machine()
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is a folder" if path.is_dir() else f"there is no file {path}")
    try:
        with path.open("rb") as file:
            return _read(path, file, plain_too)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _read(path: Path, file: BinaryIO, plain_too: bool) -> Container:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 10 or not 2 <= length <= min(size - 8, _LARGEST_HEADER):
        raise ValueError(
            f"is no safetensors file, or is cut off: {size:,} bytes, of which the header claims {length:,}"
        )
    text = file.read(length)
    try:
        header = _parse(text, "the header")
    except ValueError as error:
        raise ValueError(f"is damaged, or no safetensors file: {error}") from None
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("is damaged: the header's metadata are not strings")
    plain = plain_too and "spartan.version" not in metadata
    if not plain:
        _check_version(metadata.get("spartan.version"))
    entries = _entries(header, size - 8 - length)
    digest = metadata.get("spartan.sha256", "")
    if not plain and (len(digest) != 64 or text.count((_SHA256 + digest).encode(errors="replace")) != 1):
        raise ValueError("is damaged: it has no checksum")
    try:
        # A file with holes can be larger than the disk; taking the memory might succeed, and filling it end the process.
        if size > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
            raise MemoryError
        data = bytearray(size - 8 - length)
    except MemoryError:
        raise ValueError(f"is larger than this machine's memory: {size:,} bytes") from None
    if file.readinto(data) != len(data):  # type: ignore[attr-defined]
        raise ValueError("is cut off")
    if not plain:
        found = hashlib.sha256(text.replace((_SHA256 + digest).encode(), (_SHA256 + _BLANK).encode()))
        found.update(data)
        if found.hexdigest() != digest:
            raise ValueError("is damaged: its contents do not have the checksum that it names")
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return Container(path, size, entries, metadata, flat)


def _check_version(version: str | None) -> None:
    # A plain file of another library is no mistake of its writer's: say so before looking for damage.
    if version is None:
        raise ValueError(
            "was not written by spartan.save: it has no spartan metadata (a plain safetensors file is read by "
            "safetensors.torch.load_file)"
        )
    if not (version.isascii() and version.isdigit() and len(version) < 9) or int(version) < 1:
        raise ValueError(f"is damaged: the format version {_short(version)} is no number")
    if int(version) > VERSION:
        raise ValueError(f"has format version {version}, and this library reads up to {VERSION}: install a newer one")


def parse_metadata(container: Container, key: str) -> dict[str, Any]:
    """A metadata string that is a JSON object; empty if it is not there."""
    # A half of a character that is written in two can be in JSON, and is no text.
    return _parse(container.metadata.get(key, "{}").encode(errors="surrogatepass"), key)


def _parse(text: bytes, what: str) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a name stands twice")
        return dict(pairs)

    _check_size(text, what)
    try:
        parsed = json.loads(text.decode(), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is not JSON ({_short(error)})") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"{what} is not a JSON object")
    if len(parsed) > _MOST_TENSORS:
        raise ValueError(f"{what} names {len(parsed):,} tensors, and at most {_MOST_TENSORS:,} are read")
    return parsed


def _check_size(text: bytes, what: str) -> None:
    """Refuse JSON that would take much time or memory to parse."""
    if len(text) > _LARGEST_HEADER:
        raise ValueError(f"{what} takes {len(text):,} bytes, and at most {_LARGEST_HEADER:,} are read")
    bare = _JSON_STRING.sub(b"", text)
    values = bare.count(b",") + bare.count(b"[") + bare.count(b"{")
    if values > _MOST_VALUES:
        raise ValueError(f"{what} has {values:,} values, and at most {_MOST_VALUES:,} are read")
    brackets = bare.translate(None, _NOT_BRACKETS)
    depth = max(accumulate(1 if bracket in b"[{" else -1 for bracket in brackets), default=0)
    if depth > _DEEPEST:
        raise ValueError(f"{what} is nested {depth:,} levels deep, and at most {_DEEPEST} are read")


def _entries(header: Mapping[str, Any], size: int) -> dict[str, StoredTensor]:
    """Every tensor's place; together they fill the data without holes or overlaps."""
    entries = {}
    for name, item in header.items():
        try:
            dtype, total, shape, offsets = (
                DTYPES[item["dtype"]],
                count_of(item["shape"]),
                tuple(item["shape"]),
                item["data_offsets"],
            )
            if not isinstance(offsets, list) or [type(place) for place in offsets] != [int, int]:
                raise ValueError("it does not say where its bytes are")
            begin, end = offsets
            if end - begin != total * dtype.itemsize:
                raise ValueError("its size is not that of its shape")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"is damaged: the header's {_short(name)} is malformed ({_short(error)})") from None
        entries[name] = StoredTensor(dtype, shape, begin, end)
    place = 0
    for name, entry in sorted(entries.items(), key=lambda pair: (pair[1].begin, pair[1].end)):
        if entry.begin != place:
            raise ValueError(f"is damaged: {_short(name)} begins at byte {entry.begin:,} of the data, not at {place:,}")
        place = entry.end
    if place != size:
        what = "cut off" if place > size else "damaged"
        raise ValueError(f"is {what}: the header claims {place:,} bytes of data, and the file has {size:,}")
    return entries


def _check_machine() -> None:
    if sys.byteorder != "little":
        raise RuntimeError("packed files are little-endian, and this machine is not; unpack them on another one")


def _short(what: object) -> str:
    """Text of a file's, fit for an error message."""
    text = ascii(what) if not isinstance(what, Exception) else str(what)
    return text if len(text) <= 80 else text[:77] + "..."
