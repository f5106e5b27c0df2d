"""Reads packed files slowly, in plain Python, from what the format says: what `read` gives must be the same to the bit.

It shares no code with the library. A tensor is its dtype's name, its shape, and the entries that are not all zero bits.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from dataclasses import dataclass
from typing import Any

ITEMSIZE = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
}
ITEMSIZE |= {"U8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "BOOL": 1, "C64": 8}
FIELDS = {"F32": (23, 8), "BF16": (7, 8), "F16": (10, 5)}  # bits of mantissa and exponent
SIGNED = {"F64", "F32", "BF16", "F16"}
NUMBER = "([0-9]{1,18})"
CODE = re.compile(
    f"(mask|gaps {NUMBER})(?: {NUMBER}x{NUMBER}(?P<stacked> stacked)?)?|nm (?P<n>[0-9]{{1,18}}):(?P<m>[0-9]{{1,18}})"
    "(?: inputs (?P<inputs>first|last))?"
)


class Refused(Exception):
    """The file is not one of the format."""


@dataclass
class Tensor:
    """`entries` are the bits of what is not zero, by place in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    entries: dict[int, int]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


def demand(condition: object, why: str = "") -> None:
    if not condition:
        raise Refused(why)


class File:
    """A file whose header has been read; `tensors` decodes what it says."""

    def __init__(self, file: bytes) -> None:
        self.size = len(file)
        demand(len(file) >= 10)
        length = int.from_bytes(file[:8], "little")
        demand(2 <= length <= min(len(file) - 8, 1 << 24))
        text, self.data = file[8 : 8 + length], file[8 + length :]
        header = parse(text)
        metadata = header.pop("__metadata__", {})
        demand(isinstance(metadata, dict) and all(isinstance(x, str) for x in metadata.values()))
        version = metadata.get("spartan.version", "")
        demand(re.fullmatch("0*1", version) and len(version) < 9)
        digest = metadata.get("spartan.sha256", "")
        place = ('"spartan.sha256":"' + digest).encode(errors="replace")
        demand(len(digest) == 64 and text.count(place) == 1)
        blank = text.replace(place, b'"spartan.sha256":"' + b"0" * 64)
        demand(hashlib.sha256(blank + self.data).hexdigest() == digest)
        self.entries = {name: self._entry(item) for name, item in header.items()}
        end = 0
        for _, _, begin, stop in sorted(self.entries.values(), key=lambda entry: entry[2:]):
            demand(begin == end)
            end = stop
        demand(end == len(self.data))
        self.packed, self.aliases, self.architecture = (
            parse(metadata.get(f"spartan.{key}", "{}").encode(errors="surrogatepass"))
            for key in ("tensors", "aliases", "architecture")
        )
        self._used = {name: 0 for name in self.entries if reserved(name)}
        self.specs: dict[str, Any] = {name: self._item(name, item) for name, item in self.packed.items()}
        for name, (dtype, shape, _, _) in self.entries.items():
            if name in self._used:
                demand(shape == (self._used[name],))
                demand(dtype == ("U8" if name == "spartan:bytes" else name.removeprefix("spartan:values:")))
            else:
                demand(name not in self.specs)
                self.specs[name] = None
        for alias, name in self.aliases.items():
            demand(alias not in self.specs and not reserved(alias) and isinstance(name, str) and name in self.specs)

    @staticmethod
    def _entry(item: Any) -> tuple[str, tuple[int, ...], int, int]:
        demand(isinstance(item, dict))
        dtype, shape, offsets = item.get("dtype"), item.get("shape"), item.get("data_offsets")
        demand(isinstance(dtype, str) and dtype in ITEMSIZE)
        total = count(shape)
        demand(isinstance(offsets, list) and len(offsets) == 2 and all(type(x) is int for x in offsets))
        begin, end = offsets
        demand(end - begin == total * ITEMSIZE[dtype])
        return dtype, tuple(shape), begin, end

    def _item(self, name: str, item: Any) -> tuple[Any, ...]:
        demand(not reserved(name))
        demand(isinstance(item, list) and len(item) in (5, 6, 8, 9))
        signs: Any = item[-1] if len(item) in (6, 9) else None
        text, shape, dtype, kept, index, *coded = item[:-1] if len(item) in (6, 9) else item
        demand(isinstance(text, str) and CODE.fullmatch(text) and isinstance(dtype, str) and dtype in ITEMSIZE)
        total, found = count(shape), CODE.fullmatch(text)
        assert found is not None
        demand("spartan:bytes" in self._used and (coded or f"spartan:values:{dtype}" in self._used))
        demand(all(type(x) is int and x >= 0 for x in (kept, index)))
        if len(item) in (6, 9):
            demand(isinstance(signs, list) and len(signs) == 3 and all(type(x) is int for x in signs))
            demand(dtype in SIGNED and signs[0] >= 1 and -1 <= signs[1] < 63 and signs[2] >= 1)
        if coded:
            size, k, exponents = coded
            demand(dtype in FIELDS and type(size) is int and size >= 0 and type(k) is int and 0 <= k < 4)
            most = 1 << FIELDS[dtype][1]
            demand(
                isinstance(exponents, list) and exponents and all(type(e) is int and 0 <= e < most for e in exponents)
            )
            demand(len(set(exponents)) == len(exponents))
        if found["n"]:
            n, m = int(found["n"]), int(found["m"])
            demand(1 <= n < m <= 16 and total % m == 0 and kept == total // m * n)
            demand(len(shape) > 1 or found["inputs"] is None)
            demand(len(shape) == 2 or found["inputs"] != "first")
        else:
            demand(len(shape) == 3 or not found["stacked"])
            rows = rows_of(shape, found["stacked"])
            h, w = int(found[3] or 1), int(found[4] or 1)
            demand(h > 0 and w > 0 and total and rows % h == 0 and total // rows % w == 0)
            demand(kept % (h * w) == 0 and kept <= total)
        demand(total > 0)
        where: list[Any] = [self._take("spartan:bytes", index)]
        where.append(self._take("spartan:bytes", coded[0]) if coded else self._take(f"spartan:values:{dtype}", kept))
        where.append(self._take("spartan:bytes", signs[2]) if signs else None)
        return found, tuple(shape), dtype, kept, coded, signs, where

    def _take(self, pool: str, number: int) -> tuple[str, int, int]:
        self._used[pool] += number
        return pool, self._used[pool] - number, number

    def _bytes(self, place: tuple[str, int, int]) -> bytes:
        pool, first, number = place
        dtype, _, begin, _ = self.entries[pool]
        size = ITEMSIZE[dtype]
        return self.data[begin + first * size : begin + (first + number) * size]

    @property
    def nbytes(self) -> int:
        """What its tensors take, aliases not counted."""
        found = 0
        for name, spec in self.specs.items():
            dtype, shape = self.entries[name][:2] if spec is None else (spec[2], spec[1])
            found += math.prod(shape) * ITEMSIZE[dtype]
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor, by all of its names."""
        found = {name: self._dense(name) if spec is None else self._unpack(*spec) for name, spec in self.specs.items()}
        return found | {alias: found[name] for alias, name in self.aliases.items()}

    def _dense(self, name: str) -> Tensor:
        dtype, shape, begin, end = self.entries[name]
        values = numbers(self.data[begin:end], ITEMSIZE[dtype])
        check_truth(dtype, values)
        return Tensor(dtype, shape, {i: x for i, x in enumerate(values) if x})

    def _unpack(
        self, code: Any, shape: tuple[int, ...], dtype: str, kept: int, coded: Any, signs: Any, where: Any
    ) -> Tensor:
        total, data = math.prod(shape), self._bytes(where[1])
        values = decoded(data, dtype, kept, coded[1], coded[2]) if coded else numbers(data, ITEMSIZE[dtype])
        check_truth(dtype, values)
        index = self._bytes(where[0])
        if code["n"]:
            places = choices(index, total, int(code["n"]), int(code["m"]))
            if code["inputs"] == "last":  # over the tensor with its second dimension last
                places = [moved(place, shape) for place in places]
            elif code["inputs"] == "first":  # column by column
                places = [place % shape[0] * shape[1] + place // shape[0] for place in places]
        else:
            h, w = int(code[3] or 1), int(code[4] or 1)
            columns = total // rows_of(shape, code["stacked"])
            units = total // (h * w)
            chosen = (
                mask(index, units, kept // (h * w))
                if code[2] is None
                else gaps(index, units, kept // (h * w), int(code[2]))
            )
            places = []
            for unit in chosen:
                down, across = divmod(unit, columns // w)
                places += [(down * h + i) * columns + across * w + j for i in range(h) for j in range(w)]
        entries = {place: x for place, x in zip(places, values, strict=True) if x}
        if signs:
            number, k, _ = signs
            data = self._bytes(where[2])
            for place in mask(data, total, number) if k == -1 else gaps(data, total, number, k):
                demand(place not in entries, "a sign of what is not zero")
                entries[place] = 1 << (8 * ITEMSIZE[dtype] - 1)
        return Tensor(dtype, shape, entries)


def parse(text: bytes) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        demand(len({key for key, _ in pairs}) == len(pairs), "a name stands twice")
        return dict(pairs)

    demand(len(text) <= 1 << 24)
    depth = deepest = values = 0
    in_string = escaped = False
    for byte in text:
        if in_string:
            in_string = escaped or byte != ord('"')
            escaped = not escaped and byte == ord("\\")
        elif byte == ord('"'):
            in_string = True
        else:
            values += byte in b",[{"
            depth += (byte in b"[{") - (byte in b"]}")
            deepest = max(deepest, depth)
    demand(values <= 4_000_000 and deepest <= 8)
    try:
        found = json.loads(text.decode(), object_pairs_hook=once)
    except (ValueError, RecursionError):
        raise Refused("no JSON") from None
    demand(isinstance(found, dict) and len(found) <= 50_000)
    return found


def reserved(name: str) -> bool:
    return name in ("__metadata__", "spartan:bytes") or name.startswith("spartan:values:")


def count(shape: Any) -> int:
    demand(isinstance(shape, list) and len(shape) <= 64 and all(type(n) is int and n >= 0 for n in shape))
    demand(math.prod(max(1, n) for n in shape) < 1 << 60)
    return math.prod(shape)


def rows_of(shape: Any, stacked: Any) -> int:
    """Rows of a tensor seen as a matrix."""
    return int(shape[0] * shape[1] if stacked else shape[0] if len(shape) > 1 else 1)


def numbers(data: bytes, size: int) -> list[int]:
    return [int.from_bytes(data[i : i + size], "little") for i in range(0, len(data), size)]


def check_truth(dtype: str, values: list[int]) -> None:
    demand(dtype != "BOOL" or all(x < 2 for x in values), "neither true nor false")


def bits_of(data: bytes) -> list[int]:
    return [byte >> i & 1 for byte in data for i in range(8)]


def row_of_bits(data: bytes, number: int) -> list[int]:
    """Bits of bytes, the first in the lowest place; what is behind the last is zero."""
    found = bits_of(data)
    demand(len(data) == -(-number // 8) and not any(found[number:]))
    return found[:number]


def rows_of_bits(data: bytes, number: int, width: int) -> list[int]:
    """Numbers of so many bits: a row for each place, the lowest first."""
    size = -(-number // 8)
    demand(len(data) == width * size)
    rows = [row_of_bits(data[j * size : (j + 1) * size], number) for j in range(width)]
    return [sum(row[i] << j for j, row in enumerate(rows)) for i in range(number)]


def mask(data: bytes, units: int, number: int) -> list[int]:
    demand(len(data) == -(-units // 8))
    found = [i for i, bit in enumerate(row_of_bits(data, units)) if bit]
    demand(len(found) == number)
    return found


def golomb(data: bytes, number: int, k: int) -> list[int]:
    """The low bits of all numbers in rows, then their quotients in unary: zeros and a one."""
    demand(0 <= k < 63 and number << k < 1 << 62)
    low = k * -(-number // 8)
    demand(len(data) >= low)
    unary, quotients, zeros, last = bits_of(data[low:]), [], 0, 0
    for i, bit in enumerate(unary):
        if bit:
            quotients.append(zeros)
            zeros, last = 0, i + 1
        else:
            zeros += 1
    demand(len(quotients) == number and len(data) - low == -(-last // 8))
    return [(q << k) + rest for q, rest in zip(quotients, rows_of_bits(data[:low], number, k), strict=True)]


def gaps(data: bytes, units: int, number: int, k: int) -> list[int]:
    found, place = [], -1
    for gap in golomb(data, number, k):
        place += gap + 1
        demand(place < units)
        found.append(place)
    return found


def decoded(data: bytes, dtype: str, number: int, k: int, exponents: list[int]) -> list[int]:
    """Exponents in a Golomb–Rice code of their numbers; then, of signs and mantissas, whole bytes, and rows of bits."""
    mantissa, width = FIELDS[dtype]
    whole, rest = divmod(mantissa + 1, 8)
    split = len(data) - number * whole - rest * -(-number // 8)
    demand(split >= 0)
    order = golomb(data[:split], number, k)
    demand(all(i < len(exponents) for i in order))
    low = numbers(data[split : split + number * whole], whole)
    high = rows_of_bits(data[split + number * whole :], number, rest)
    found = []
    for i, a, b in zip(order, low, high, strict=True):
        both = a | b << 8 * whole
        sign, fraction = both >> mantissa, both & ((1 << mantissa) - 1)
        found.append(sign << (mantissa + width) | exponents[i] << mantissa | fraction)
    return found


def choices(data: bytes, total: int, n: int, m: int) -> list[int]:
    """Which n of every m: numbers of choices, several in a word whose bits are the fewest for each number."""
    all_choices = math.comb(m, n)
    fits = [(t, (all_choices**t - 1).bit_length()) for t in range(1, 63)]
    t, width = min(((t, b) for t, b in fits if b <= 62), key=lambda pair: (pair[1] / pair[0], pair[0]))
    groups = total // m
    words = rows_of_bits(data, -(-groups // t), width)
    found = []
    for word in words:
        for _ in range(t):
            word, number = divmod(word, all_choices)
            found.append(number)
        demand(word == 0)
    demand(not any(found[groups:]))
    wanted = set(found[:groups])
    named = {i: c for i, c in enumerate(itertools.combinations(range(m), n)) if i in wanted}
    return [group * m + place for group, number in enumerate(found[:groups]) for place in named[number]]


def moved(place: int, shape: tuple[int, ...]) -> int:
    """The place in row-major order of what is there once the second dimension is last."""
    outputs, inputs, rest = shape[0], shape[1], math.prod(shape[2:])
    assert place < outputs * inputs * rest
    place, column = divmod(place, inputs)
    output, kernel = divmod(place, rest)
    return (output * inputs + column) * rest + kernel
