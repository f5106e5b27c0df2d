"""Damaged files: no crash, no hang, no unbounded memory, and nothing that loads as if it were whole.

Damage of every kind must be a ValueError. A forged file, one whose header or data were changed and whose checksum was made
good again, may be a valid other file; if it is not, it must be a ValueError too, and it must never take more memory than
allowed.
"""

from __future__ import annotations

import json
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spartan.files import read, save
from spartan.files.architecture import Unbuildable, build
from spartan.zoo import digits_cnn
from tests.files.forging import forge, header_of
from tests.inference.models import Everything

MEMORY = 1 << 24
# Numbers and things that are none, to be put where others stand.
ODD: list[Any] = [0, 1, -1, 7, 2**31, 2**40, 2**62, 2**63, 2**64, 10**30, 1.5, 1e308, True, None, "", "x", [], {}, [[]]]
ODD += [
    "gaps 3",
    "gaps 61",
    "mask",
    "mask 8x8",
    "mask 0x1",
    "nm 2:4",
    "nm 1:16",
    "nm 2:4 inputs last",
    "F64",
    "U8",
    "BOOL",
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("fuzz") / "whole"
    save(Everything(), path)
    return path.read_bytes()


# ---------------------------------------------------------------------- damage


def flip(file: bytearray, dice: random.Random) -> bytes:
    for _ in range(dice.choice([1, 1, 1, 2, 8])):
        file[dice.randrange(len(file))] ^= 1 << dice.randrange(8)
    return bytes(file)


def flip_in_header(file: bytearray, dice: random.Random) -> bytes:
    end = 8 + int.from_bytes(file[:8], "little")
    file[dice.randrange(end)] = dice.choice(b'0123456789[]{}":,x \x00\xff')
    return bytes(file)


def cut(file: bytearray, dice: random.Random) -> bytes:
    return bytes(file[: dice.choice([dice.randrange(len(file)), len(file) - dice.randrange(1, 9), dice.randrange(16)])])


def lengthen(file: bytearray, dice: random.Random) -> bytes:
    return bytes(file) + dice.randbytes(dice.choice([1, 8, 1000]))


def blank(file: bytearray, dice: random.Random) -> bytes:
    at, size = dice.randrange(len(file)), dice.choice([1, 16, 512, 4096])
    file[at : at + size] = bytes(len(file[at : at + size]))
    return bytes(file)


def swap(file: bytearray, dice: random.Random) -> bytes:
    size = dice.choice([1, 8, 64, 512])
    a, b = sorted(dice.sample(range(0, len(file) - size, size), 2))
    file[a : a + size], file[b : b + size] = file[b : b + size], file[a : a + size]
    return bytes(file)


def drop_a_piece(file: bytearray, dice: random.Random) -> bytes:
    at = dice.randrange(len(file))
    del file[at : at + dice.choice([1, 4, 256])]
    return bytes(file)


def other_length(file: bytearray, dice: random.Random) -> bytes:
    file[:8] = dice.choice([dice.randrange(2**64), dice.randrange(len(file)), 0, 2**63, 10**8]).to_bytes(8, "little")
    return bytes(file)


def random_json(file: bytearray, dice: random.Random) -> bytes:
    header = _random_value(dice, 4)
    text = json.dumps(header).encode() if dice.random() < 0.9 else b"[" * dice.choice([10, 100_000])
    return len(text).to_bytes(8, "little") + text + dice.randbytes(dice.choice([0, 8, 1000]))


def noise(file: bytearray, dice: random.Random) -> bytes:
    return dice.randbytes(dice.choice([0, 7, 8, 9, 100, 2000]))


DAMAGE: list[Callable[[bytearray, random.Random], bytes]] = [
    *(flip, flip_in_header, cut, lengthen, blank, swap, drop_a_piece, other_length, random_json, noise)
]


def _random_value(dice: random.Random, depth: int) -> Any:
    kind = dice.randrange(4 if depth else 2)
    if kind < 2:
        return dice.choice(ODD)
    keys = ["__metadata__", "dtype", "shape", "data_offsets", "spartan.version", "spartan.sha256", "w"]
    if kind == 2:
        return {dice.choice(keys): _random_value(dice, depth - 1) for _ in range(dice.randrange(5))}
    return [_random_value(dice, depth - 1) for _ in range(dice.randrange(4))]


# ---------------------------------------------------------------------- forgery


def forgery(whole: bytes, dice: random.Random) -> bytes:
    """One or two changes to the header, to what is inside its strings, or to the data; the checksum is good."""
    header, data = header_of(whole)
    for _ in range(dice.choice([1, 1, 2])):
        what = dice.randrange(5)
        if what == 0:
            _change(header, dice)
        elif what == 1 and data:
            data = flip(bytearray(data), dice)
        else:
            metadata = header.get("__metadata__")
            if isinstance(metadata, dict):
                key = dice.choice(["spartan.tensors"] * 4 + ["spartan.aliases", "spartan.architecture"])
                try:
                    inside = json.loads(metadata.get(key, "{}"))
                except (TypeError, ValueError):
                    continue
                _change(inside, dice)
                metadata[key] = json.dumps(inside)
    return forge(header, data)


def _change(value: Any, dice: random.Random) -> None:
    """Change something at a random depth, in place."""
    while isinstance(value, dict | list) and value:
        key = dice.choice(list(value)) if isinstance(value, dict) else dice.randrange(len(value))
        if isinstance(value[key], dict | list) and value[key] and dice.random() < 0.85:
            value = value[key]
            continue
        action = dice.randrange(5)
        if action == 0:
            del value[key]
        elif action == 1 and isinstance(value, dict):
            value[dice.choice(["w", "gaps", "spartan:bytes", "spartan:values:F32", "\ud800"])] = value.pop(key)
        elif action == 2 and type(value[key]) is int:
            value[key] += dice.choice([-1, 1, 8, -8])
        else:
            value[key] = dice.choice(ODD)
        return


# ---------------------------------------------------------------------- the tests


def check(path: Path, content: bytes, whole: bytes, forged: bool) -> bool:
    """Whether the file was refused; that it was, where it must be."""
    path.write_bytes(content)
    start = time.process_time()
    try:
        tensors = read(path, max_bytes=MEMORY)
    except ValueError as error:
        refused, message = True, str(error)
    else:
        refused, message = False, str(path)
        assert forged or content == whole, "damaged, and loaded as if it were whole"
        assert sum(t.nbytes for t in {id(t): t for t in tensors.values()}.values()) <= MEMORY
    assert str(path) in message
    assert time.process_time() - start < 5
    return refused


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize(
    "seeds", [range(2000), pytest.param(range(2000, 22_000), marks=pytest.mark.slow)], ids=["2000", "20000"]
)
def test_fuzzed_files(seeds: range, whole: bytes, tmp_path: Path) -> None:
    path, before, refused = tmp_path / "fuzzed", peak(), 0
    for seed in seeds:
        dice = random.Random(seed)
        forged = seed % 4 == 0
        content = forgery(whole, dice) if forged else DAMAGE[seed % len(DAMAGE)](bytearray(whole), dice)
        refused += check(path, content, whole, forged)
    assert refused > 0.75 * len(seeds)
    assert peak() - before < 10 * MEMORY


def test_fuzzed_references() -> None:
    """No reference in a file makes a large or slow model, or any error but the one that says so."""
    shapes = {name: tuple(t.shape) for name, t in digits_cnn().state_dict().items()}
    names = ["digits-cnn", "wrn-22-2", "wrn-16-900000", "wrn-99999999999-1", "torchvision/vit_h_14", "timm/resnet18"]
    names += ["timm/vit_giant_patch14_224", "torchvision/x", "timm/hf-hub:x/y", "os:getcwd", "", "a/b"]
    arguments = [
        "num_classes",
        "depth",
        "img_size",
        "patch_size",
        "embed_dim",
        "drop_rate",
        "checkpoint_path",
        "num_layers",
    ]
    before, built = peak(), 0
    for seed in range(150):
        dice = random.Random(seed)
        reference: dict[str, Any] = {"model": dice.choice(names[:1] * 5 + names), "classes": 10, "shape": [1, 8, 8]}
        for _ in range(dice.randrange(3)):
            key = dice.choice(["model", "classes", "shape", "args"])
            value = dice.choice(ODD) if key != "args" else {dice.choice(arguments): dice.choice(ODD)}
            reference[key] = value
        start = time.process_time()
        try:
            model = build(reference, shapes)
        except Unbuildable:
            pass
        else:
            built += 1
            assert {name: tuple(t.shape) for name, t in model.state_dict().items()} == shapes
        assert time.process_time() - start < 20  # the first import of timm included
    assert built > 10
    assert peak() - before < 1 << 30


def test_the_whole_file_loads(whole: bytes, tmp_path: Path) -> None:
    """The tests above would pass if nothing ever loaded."""
    assert not check(tmp_path / "whole", whole, whole, forged=False)
    header, data = header_of(whole)
    assert not check(tmp_path / "again", forge(header, data), whole, forged=True)
    state = Everything().state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in read(tmp_path / "again").items())


def test_every_bit_of_a_small_file_counts(tmp_path: Path) -> None:
    path = tmp_path / "small"
    model = torch.nn.Linear(4, 4)
    save(model, path)
    file = path.read_bytes()
    for at in range(0, len(file) * 8, 7):
        damaged = bytearray(file)
        damaged[at // 8] ^= 1 << at % 8
        assert check(path, bytes(damaged), file, forged=False), f"bit {at}"


def test_deep_and_doubled_json_is_refused(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "deep"
    for text in (
        b"[" * 200_000,
        b'{"a":' * 50_000,
        b'{"__metadata__":{},"__metadata__":{}}',
        b"\xff\xfe{}",
        b"1" * 9000,
    ):
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        with pytest.raises(ValueError, match="is damaged, or no safetensors file: the header"):
            read(path)
