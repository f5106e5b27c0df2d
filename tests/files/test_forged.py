"""Files made to harm, their checksums good: memory, time, terminals and errors stay within what is documented."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from spartan import zoo
from spartan.files import format, inspect, load, nm, read, save
from spartan.files.architecture import MemoryLimit, Unbuildable
from spartan.zoo import digits_cnn
from tests.files.forging import forge


def pack(
    path: Path, packed: dict[str, Any] | str, pools: dict[str, tuple[str, int, bytes]] | None = None, **metadata: Any
) -> int:
    """Write a file with these packed tensors; pools: dtype, entries and bytes by name. Its size."""
    pools = pools or {"spartan:values:F32": ("F32", 0, b""), "spartan:bytes": ("U8", 0, b"")}
    header: dict[str, Any] = {
        "__metadata__": {"format": "pt", "spartan.version": "1", "spartan.tensors": as_text(packed)}
        | {f"spartan.{key}": as_text(value) for key, value in metadata.items()}
    }
    data = b""
    for name, (dtype, count, part) in pools.items():
        header[name] = {"dtype": dtype, "shape": [count], "data_offsets": [len(data), len(data) + len(part)]}
        data += part
    path.write_bytes(forge(header, data))
    return path.stat().st_size


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def zeros(shape: Any, dtype: str = "F32") -> list[Any]:
    return ["gaps 0", list(shape), dtype, 0, 0]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "forged"


def shapes_on_meta(name: str, **arguments: Any) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = zoo.timm().create_model(name, num_classes=1, **arguments)
    return {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}


def test_aliases_do_not_build_a_model_beyond_the_limit(path: Path) -> None:
    arguments = {"embed_dim": 256, "depth": 60, "num_heads": 1}
    first: dict[tuple[int, ...], str] = {}
    tensors, aliases = {}, {}
    for name, shape in shapes_on_meta("vit_tiny_patch16_224", **arguments).items():
        if first.setdefault(shape, name) == name:
            tensors[name] = zeros(shape)
        else:
            aliases[name] = first[shape]
    reference = {"model": "timm/vit_tiny_patch16_224", "classes": 1, "args": arguments}
    assert pack(path, tensors, aliases=aliases, architecture=reference) < 50_000
    with pytest.raises(
        ValueError, match="takes more memory to build than max_bytes, which is 67,108,864; build the model"
    ):
        load(path, kernels="dense")
    model = load(path, kernels="dense", max_bytes=1 << 28)
    # Not tied in the model: equal weights, each in memory of its own.
    places = {p.data_ptr() for p in model.parameters()}
    assert len(places) == len(list(model.parameters()))


def test_buffers_outside_the_state_count(path: Path) -> None:
    arguments = {"img_size": 1792, "embed_dim": 12}
    shapes = shapes_on_meta("swin_tiny_patch4_window7_224", **arguments)
    assert sum(4 * math.prod(shape) for shape in shapes.values()) < 8 << 20
    reference = {"model": "timm/swin_tiny_patch4_window7_224", "classes": 1, "args": arguments}
    pack(path, {name: zeros(shape) for name, shape in shapes.items()}, architecture=reference)
    with pytest.raises(ValueError, match="takes more memory to build than max_bytes"):
        load(path, kernels="dense")


def test_what_is_gone_does_not_count() -> None:
    with MemoryLimit(3 << 20):
        for _ in range(10):
            torch.empty(1 << 18, device="meta").add(1)
        kept = torch.empty(1 << 19, device="meta")
        kept.view(2, -1).t()  # no memory of its own
        with pytest.raises(Unbuildable, match="max_bytes, which is 3,145,728"):
            torch.empty(1 << 19, device="meta")


def test_many_kinds_of_groups_take_no_longer_than_one(path: Path) -> None:
    pairs = [(n, m) for m in (16, 15) for n in range(4, 13)]
    tensors: dict[str, Any] = {}
    count = index = 0
    for i in range(10):
        for n, m in pairs:
            tensors[f"{i}.{n}.{m}"] = [f"nm {n}:{m}", [m], "F32", n, nm.size(1, n, m)]
            count, index = count + n, index + nm.size(1, n, m)
    pools = {"spartan:values:F32": ("F32", count, bytes(4 * count)), "spartan:bytes": ("U8", index, bytes(index))}
    pack(path, tensors, pools)
    start = time.process_time()
    assert len(read(path)) == len(tensors)
    assert time.process_time() - start < 5


def test_nothing_of_a_file_steers_a_terminal(path: Path) -> None:
    evil = "w\x1b]0;evil\x07\n\u202echecksum"
    pack(path, {evil: zeros([3, 3]), "v": zeros([3, 3])}, pattern=evil, aliases={evil + "2": evil})
    pages = [inspect(path)]
    assert sum(line.startswith(("checksum", "?checksum")) for line in pages[0].splitlines()) == 0
    with pytest.raises(ValueError, match="lacks 3 tensors") as fit:
        load(path, nn.Sequential(), kernels="dense")
    pack(path, {"w": zeros([3, 3])}, architecture={"model": "digits-cnn", "args": {evil: 1}})
    with pytest.raises(ValueError, match="which a file may not") as argument:
        load(path)
    pack(path, {"w": zeros([3, 3])}, architecture={"model": evil})
    with pytest.raises(ValueError, match="is not a name of a model") as name:
        load(path)
    for text in [*pages[0].splitlines(), *(str(error.value) for error in (fit, argument, name))]:
        assert text.isprintable()


@pytest.mark.parametrize(
    ("inside", "reason"),
    [
        ('{"w":[' + ",".join(["[]"] * 3_000_000) + "]}", "has 6,000,001 values, and at most 4,000,000"),
        ('{"w":' + "[" * 20 + "]" * 20 + "}", "is nested 21 levels deep, and at most 8"),
        ('{"w":"' + "x" * (1 << 24) + '"}', "the header claims"),
        ('{"w":"' + '\\"' * 3_000_000, "is not JSON"),
        ("{" + ",".join(f'"{i}":[]' for i in range(50_001)) + "}", "names 50,001 tensors, and at most 50,000"),
    ],
    ids=["values", "levels", "bytes", "unfinished", "tensors"],
)
def test_json_is_bounded_before_it_is_parsed(path: Path, inside: str, reason: str) -> None:
    pack(path, inside)
    start = time.process_time()
    for look in (read, inspect):
        with pytest.raises(ValueError, match=reason):
            look(path)
    assert time.process_time() - start < 5


def test_what_would_not_be_read_is_not_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format, "_MOST_VALUES", 10)
    with pytest.raises(ValueError, match=f"{path}: the header has .* save the model's parts in files of their own"):
        save(digits_cnn(), path)
    monkeypatch.undo()
    monkeypatch.setattr(format, "_MOST_TENSORS", 10)
    with pytest.raises(ValueError, match=r"names \d\d tensors, and at most 10 are read"):
        save(digits_cnn(), path)
    assert not path.exists()


def test_a_file_of_holes_larger_than_memory(path: Path) -> None:
    size = 1 << 43
    shape = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    whole = forge({"__metadata__": {"spartan.version": "1"}, "w": shape}, b"")
    path.write_bytes(whole)
    try:
        os.truncate(path, len(whole) + size)
    except OSError:
        pytest.skip("this file system has no files of this size")
    with pytest.raises(ValueError, match="is larger than this machine's memory"):
        read(path)


@pytest.mark.parametrize("shape", [[0, 5], [5, 0], [0], [0, 1 << 59], [1, 0, 1 << 58]])
@pytest.mark.parametrize(
    "code", ["mask 999999999999999999x999999999999999999", "gaps 62 1x999999999999999999", "nm 8:16"]
)
def test_codes_of_empty_tensors_are_refused(path: Path, code: str, shape: list[int]) -> None:
    pack(path, {"w": [code, shape, "F32", 0, 0]})
    with pytest.raises(ValueError, match="its values do not go with its shape"):
        read(path)


@pytest.mark.parametrize("dtype", ["I64", "I8", "BOOL", "C64", "U16"])
def test_a_named_model_does_not_take_other_kinds_of_numbers(path: Path, dtype: str) -> None:
    pools = {f"spartan:values:{dtype}": (dtype, 0, b""), "spartan:bytes": ("U8", 0, b"")}
    pack(
        path,
        {name: zeros(tensor.shape, dtype) for name, tensor in digits_cnn().state_dict().items()},
        pools,
        architecture={"model": "digits-cnn", "classes": 10, "shape": [1, 8, 8]},
    )
    with pytest.raises(ValueError, match=r"does not fit the model, which has 0.weight in torch.float32"):
        load(path, kernels="dense")


@pytest.mark.parametrize("max_bytes", ["1", 1.5, -1])
def test_a_limit_is_a_number_of_bytes(path: Path, max_bytes: Any) -> None:
    save(nn.Linear(2, 2), path)
    with pytest.raises(ValueError, match="max_bytes=.*; a number of bytes, or None, is needed"):
        read(path, max_bytes=max_bytes)


@pytest.mark.parametrize(
    ("signs", "reason"),
    [
        (None, "its signs have no such map"),
        ([1, 0], "its signs have no such map"),
        ([1, 0, True], "its signs have no such map"),
        ([0, 0, 1], "its signs have no such map"),
        ([1, 63, 1], "its signs have no such map"),
        ([1, -1, 2], "is not what the packed tensors need"),
        ([2, -1, 1], "the mask keeps 1 units, and there are values for 2"),
        ([1, -1, 1], "a sign is given to a value that is not zero"),
    ],
)
def test_maps_of_signs_are_checked(path: Path, signs: Any, reason: str) -> None:
    """The first of eight entries is kept, and the map names it."""
    pools = {"spartan:values:F32": ("F32", 1, b"\0\0\x80?"), "spartan:bytes": ("U8", 2, b"\x01\x01")}
    pack(path, {"w": ["mask", [8], "F32", 1, 1, signs]}, pools)
    with pytest.raises(ValueError, match=reason):
        read(path)
    pack(path, {"w": ["mask", [8], "F32", 1, 1, [1, -1, 1]]}, pools | {"spartan:bytes": ("U8", 2, b"\x01\x02")})
    assert read(path)["w"].signbit().tolist() == [False, True, *[False] * 6]


@pytest.mark.parametrize("name", ["spartan:bytes", "spartan:values:F32", "spartan:values:", "__metadata__"])
def test_a_tensor_has_no_name_that_the_format_uses(path: Path, name: str) -> None:
    for packed, aliases in (({name: zeros([3, 3])}, {}), ({"w": zeros([3, 3])}, {name: "w"})):
        pack(path, packed, aliases=aliases)
        for look in (read, inspect):
            with pytest.raises(ValueError, match="which the format uses itself|is said to be another name"):
                look(path)


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ({"shape": True}, "digits-cnn has a shape that is not that of an image"),
        ({"shape": {"a": 1, "b": 8, "c": 8}}, "digits-cnn has a shape that is not that of an image"),
        ({"shape": "abc"}, "digits-cnn has a shape that is not that of an image"),
        ({"shape": [1, 8, "8"]}, "digits-cnn has arguments that are not sizes"),
        ({"model": {"a": 1}}, r"\{'a': 1\} is not a name of a model"),
        ({"model": "os:system"}, "names a function"),
    ],
)
def test_references_are_checked(path: Path, reference: dict[str, Any], reason: str) -> None:
    pack(path, {"w": zeros([3, 3])}, architecture={"model": "digits-cnn", **reference})
    with pytest.raises(ValueError, match=reason):
        load(path)


def test_what_takes_too_much_memory_is_said_once(path: Path) -> None:
    pack(path, {"w": zeros([3, 3])}, architecture={"model": "timm/vit_giant_patch14_224"})
    with pytest.raises(
        ValueError, match=r"forged: timm/vit_giant_patch14_224 takes more memory to build than max_bytes"
    ) as error:
        load(path)
    assert "cannot be built" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"), [("shape", {}), ("shape", ""), ("data_offsets", {"0": 0, "4": 4}), ("data_offsets", [0, True])]
)
def test_an_entry_has_one_reading(path: Path, key: str, value: Any) -> None:
    entry = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]} | {key: value}
    path.write_bytes(forge({"__metadata__": {"spartan.version": "1"}, "w": entry}, b"\1"))
    with pytest.raises(ValueError, match="the header's 'w' is malformed"):
        read(path)


@pytest.mark.parametrize("packed", [False, True])
def test_a_truth_value_is_true_or_false(path: Path, packed: bool) -> None:
    """Other bytes in a bool tensor are neither for torch, and not always the same."""
    if packed:
        pools = {"spartan:values:BOOL": ("BOOL", 1, b"\7"), "spartan:bytes": ("U8", 1, b"\1")}
        pack(path, {"w": ["mask", [8], "BOOL", 1, 1]}, pools)
    else:
        entry = {"dtype": "BOOL", "shape": [1], "data_offsets": [0, 1]}
        path.write_bytes(forge({"__metadata__": {"spartan.version": "1"}, "w": entry}, b"\7"))
    with pytest.raises(ValueError, match="'w': a value is neither true nor false"):
        read(path)


def test_a_file_is_damaged_once(path: Path) -> None:
    pack(path, "[")
    with pytest.raises(ValueError, match="^" + str(path) + ": is damaged: spartan.tensors is not JSON") as error:
        read(path)
    assert str(error.value).count("is damaged") == 1
    pack(path, "\ud800")
    with pytest.raises(ValueError, match="spartan.tensors is not JSON"):
        read(path)


def test_a_module_with_a_part_called_orig_mod_keeps_its_own_weights(path: Path) -> None:
    """Only torch.compile's wrapper is left out of names."""
    model = nn.Linear(2, 2, bias=False)
    model._orig_mod = nn.Linear(2, 2, bias=False)
    save(model, path)
    assert set(read(path)) == {"weight", "_orig_mod.weight"}
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in read(path).items())
