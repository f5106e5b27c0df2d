"""Forges packed files, each from its seed: valid files of every kind, changed, with the checksum made good again."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spartan import NM, Block, prune, zoo
from spartan.files import format, save
from spartan.zoo import digits_cnn
from tests.files.forging import forge, header_of
from tests.inference.models import Everything, sparse

EVIL = "w\x1b]0;evil\x07\n\u202e\x9b2J"
NUMBERS: list[Any] = [0, 1, -1, 2, 3, 7, 8, 16, 63, 64, 255, 1000, 1 << 20, 2**31, 2**40, 2**60, 2**63, 2**64, 10**30]
CODES = [
    "gaps 0",
    "gaps 3",
    "gaps 61",
    "gaps 999999999999999999",
    "mask",
    "mask 8x8",
    "mask 0x1",
    "gaps 2 1x64",
    "mask 1x1",
]
CODES += [
    "nm 2:4",
    "nm 1:16",
    "nm 8:16",
    "nm 2:4 inputs last",
    "nm 2:4 inputs first",
    "mask 2x1 stacked",
    "nm 0:4",
    "nm 4:4",
    "nm 1:17",
    "gaps 01",
    "dense",
    EVIL,
]
ODD: list[Any] = [
    *NUMBERS,
    *CODES,
    1.5,
    1e308,
    math.nan,
    True,
    None,
    "",
    "x",
    [],
    {},
    [[]],
    EVIL,
    "F32",
    "BOOL",
    {"a": 1},
]
NAMES = ["w", "spartan:bytes", "spartan:values:F32", "__metadata__", EVIL, "", "\ud800", "x" * 300, "0.weight"]
MODELS = [
    "digits-cnn",
    "wrn-22-2",
    "wrn-10-900000",
    "wrn-99999999999-1",
    "torchvision/resnet18",
    "torchvision/vit_h_14",
]
MODELS += ["timm/vit_tiny_patch16_224", "timm/vit_giant_patch14_224", "timm/hf-hub:x/y", "os:getcwd", "a/b", EVIL]
ARGUMENTS = ["depth", "num_classes", "img_size", "patch_size", "embed_dim", "num_heads", "drop_rate", "mlp_ratio"]
ARGUMENTS += ["checkpoint_path", "num_layers", "in_chans", "hidden_dim", EVIL]


class Dtypes(nn.Module):
    """A packed and a dense tensor of every dtype."""

    def __init__(self) -> None:
        super().__init__()
        for name, dtype in format.DTYPES.items():
            rng = torch.Generator().manual_seed(len(name))
            raw = torch.randint(0, 2 if name == "BOOL" else 256, (40, 40 * dtype.itemsize), generator=rng)
            x = raw.to(torch.uint8).view(dtype)
            keep = torch.rand(40, 40, generator=rng) < 0.1
            zero = torch.zeros(40, 40 * dtype.itemsize, dtype=torch.uint8).view(dtype)
            bits = torch.where(keep, format.as_bits(x), format.as_bits(zero)).view(dtype)
            self.register_buffer(f"packed_{name}", bits)
            self.register_buffer(f"dense_{name}", x[:4, :4].clone())


class Signed(nn.Module):
    """Weights times masks, which are full of −0.0, in every dtype that has it, and few of them."""

    def __init__(self) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(0)
        for i, dtype in enumerate((torch.float64, torch.float32, torch.bfloat16, torch.float16)):
            x = torch.randn(24, 32, generator=rng).to(dtype)
            self.register_buffer(f"half_{i}", x * (torch.rand(24, 32, generator=rng) < 0.1))
            few = sparse(24, 32, dtype=dtype)
            few[3, 3:9] = -0.0
            self.register_buffer(f"few_{i}", few)


class Groups(nn.Module):
    """N:M of several kinds, blocks and whole rows, with convolutions among them."""

    def __init__(self) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(0)

        def grouped(n: int, m: int, *shape: int) -> Tensor:
            x = torch.randn(math.prod(shape) // m, m, generator=rng)
            return x.masked_fill_(torch.rand(x.shape, generator=rng).argsort(1) >= n, 0.0).reshape(shape)

        self.two_four = nn.Parameter(grouped(2, 4, 16, 32))
        self.one_eight = nn.Parameter(grouped(1, 8, 16, 32))
        self.five_sixteen = nn.Parameter(grouped(5, 16, 8, 32))
        self.conv = nn.Parameter(grouped(1, 4, 8, 3, 3, 8).permute(0, 3, 1, 2).contiguous())
        rows = torch.randn(32, 24, generator=rng)
        self.rows = nn.Parameter(rows * (torch.arange(32) % 8 == 0)[:, None] + 0.0)
        self.columns = nn.Parameter(grouped(2, 4, 24, 32).T.contiguous())
        self.experts = nn.Parameter(sparse(4, 12, 20))
        stacked = torch.rand(4, 3, 1, 20, generator=rng).lt(0.2).expand(4, 3, 8, 20).reshape(4, 24, 20)
        self.stacked = nn.Parameter(torch.where(stacked, torch.randn(4, 24, 20, generator=rng), 0.0))


@dataclass
class Base:
    """A valid file, and how to make the model that it holds."""

    file: bytes
    model: Callable[[], nn.Module]


def digits() -> nn.Module:
    torch.manual_seed(0)
    return digits_cnn()


def timm_model(name: str, **arguments: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return zoo.timm().create_model(name, num_classes=3, **arguments).eval()

    return build


def bases(folder: Path) -> list[Base]:
    """Every code and dtype, ties, named models and models with buffers outside their state."""
    images = {"model": "digits-cnn", "classes": 10, "shape": [1, 8, 8]}
    vit = {"embed_dim": 24, "depth": 1, "num_heads": 1}
    swin = {"img_size": 56, "embed_dim": 12}
    found = []

    def add(model: Callable[[], nn.Module], make: Callable[[nn.Module], object] | None = None, **how: Any) -> None:
        whole = model()
        if make is not None:
            make(whole)
        save(whole, folder / "base", **how)
        found.append(Base((folder / "base").read_bytes(), model))

    add(Everything)
    add(Dtypes)
    add(Signed)
    add(Groups)
    add(digits, lambda m: prune(m, 0.9), architecture=images)
    add(
        digits,
        lambda m: prune(m, 0.5, pattern=NM(2, 4), exclude=["0.weight"]),
        architecture=images,
        dtype=torch.bfloat16,
    )
    add(digits, lambda m: prune(m, 0.8, pattern=Block(2, 2), exclude=["0.weight"]), architecture=images)
    add(
        timm_model("vit_tiny_patch16_224", **vit), lambda m: prune(m, 0.9),
        architecture={"model": "timm/vit_tiny_patch16_224", "classes": 3, "args": vit},
    )  # fmt: skip
    add(
        timm_model("swin_tiny_patch4_window7_224", **swin), lambda m: prune(m, 0.9),
        architecture={"model": "timm/swin_tiny_patch4_window7_224", "classes": 3, "args": swin},
    )  # fmt: skip
    return found


# Of ten files, so many are of each base; those that are slow to build are few.
SHARES = [3, 2, 2, 2, 3, 2, 2, 1, 1]


class Forger:
    """Changes a file; `header` is its JSON, `inside` the JSON of the strings in it."""

    def __init__(self, file: bytes, dice: random.Random) -> None:
        self.dice = dice
        self.header, self.data = header_of(file)
        metadata = self.header["__metadata__"]
        self.inside = {
            key: json.loads(metadata.get(f"spartan.{key}", "{}")) for key in ("tensors", "aliases", "architecture")
        }
        self.raw: Callable[[str], str] = lambda text: text
        self.fixed: dict[str, str] = {}  # strings that are no longer what is inside

    def forge(self) -> bytes:
        """One to three changes, and the file that they give."""
        changes = [getattr(self, name) for name in sorted(dir(self)) if name.startswith("change_")]
        # What leaves the header good goes deeper.
        changes += 2 * [self.change_data, self.change_stretch, self.change_bytes_of_codes, self.change_order]
        for _ in range(self.dice.choice([1, 1, 1, 2, 3])):
            self.dice.choice(changes)()
        metadata = self.header.get("__metadata__")
        if isinstance(metadata, dict):
            for key, value in self.inside.items():
                if value or f"spartan.{key}" in metadata:
                    metadata[f"spartan.{key}"] = self.raw(json.dumps(value, separators=(",", ":")))
            metadata |= self.fixed
        return forge(self.header, self.data)

    # ------------------------------------------------------------------ anywhere

    def change_header(self) -> None:
        change_somewhere(self.header, self.dice)

    def change_inside(self) -> None:
        change_somewhere(
            self.inside[self.dice.choice(["tensors", "tensors", "tensors", "aliases", "architecture"])], self.dice
        )

    def change_metadata(self) -> None:
        keys = ["version", "sparsity", "pattern", "format", "tensors", "aliases", "architecture"]
        value = self.dice.choice(
            ["", "1", "2", "01", "-1", "nan", "1e999", "9" * 5000, EVIL, "\ud800", "[]", "{", "null", "{}"]
        )
        key = f"spartan.{self.dice.choice(keys)}"
        if key.removeprefix("spartan.") in self.inside:
            self.fixed[key] = value
        if isinstance(self.header.get("__metadata__"), dict):
            self.header["__metadata__"][key] = value

    def change_text(self) -> None:
        """A name twice, other spellings of the same JSON, and JSON that is none."""
        old, new = self.dice.choice(
            [
                ("{", '{"w":[],"w":[],'),
                (",", ", "),
                ("[", "[ "),
                ("1", "1.0"),
                ("1", "1e0"),
                ("0", "-0"),
                ('"', "'"),
                ("}", ""),
            ]
        )
        self.raw = lambda text: text.replace(old, new, 1)

    # ------------------------------------------------------------------ packed tensors

    def item(self) -> list[Any]:
        """One of the packed tensors."""
        items = [x for x in self.inside["tensors"].values() if isinstance(x, list) and len(x) > 4]
        return self.dice.choice(items) if items else [None] * 9

    def change_code(self) -> None:
        self.item()[0] = self.dice.choice(CODES)

    def change_shape(self) -> None:
        item, dice = self.item(), self.dice
        shape = item[1] if isinstance(item[1], list) and all(type(n) is int for n in item[1]) else [2, 3]
        how = dice.randrange(7)
        if how == 0:
            item[1] = shape[::-1]
        elif how == 1:
            item[1] = [*shape, dice.choice(NUMBERS)]
        elif how == 2:
            item[1] = [dice.choice(NUMBERS), *shape]
        elif how == 3:
            item[1] = [n * dice.choice([1, 2, 1000, 1 << 20]) for n in shape]
        elif how == 4:
            item[1] = [math.prod(shape)]
        elif how == 5:
            item[1] = [1] * dice.choice([1, 60, 70]) + shape
        else:
            item[1] = [*shape[:-1], shape[-1] // 2, 2] if shape else [1]

    def change_dtype(self) -> None:
        self.item()[2] = self.dice.choice([*format.DTYPES, "F32", "BF16", "F16", "f32", 1, None, EVIL])

    def change_count(self) -> None:
        item = self.item()
        place = self.dice.randrange(3, len(item))
        number = item[place]
        near = [number + step for step in (-8, -1, 1, 8)] if type(number) is int else []
        item[place] = self.dice.choice([*near, *near, *NUMBERS])

    def change_values_code(self) -> None:
        """The exponents, or what goes with them."""
        item = self.item()
        if len(item) in (8, 9) and isinstance(item[7], list) and item[7]:
            exponents, at = item[7], self.dice.randrange(len(item[7]))
            exponents[at] = self.dice.choice([0, 1, 31, 255, 256, -1, exponents[0], True, 1.0])
            item[6] = self.dice.choice([item[6], item[6], 0, 1, 2, 3, 4])

    def change_signs(self) -> None:
        item = self.item()
        signs = [
            self.dice.choice([1, 2, 3, 100]),
            self.dice.choice([-2, -1, 0, 3, 62, 63]),
            self.dice.choice([1, 2, 96, 128]),
        ]
        if len(item) in (6, 9):
            item[-1] = self.dice.choice([signs, None, [], item[-1][:2] if isinstance(item[-1], list) else 0])
        else:
            item.append(signs)

    def change_order(self) -> None:
        """The order is what tells where in the pools a tensor's bytes are."""
        names = list(self.inside["tensors"])
        self.dice.shuffle(names)
        self.inside["tensors"] = {name: self.inside["tensors"][name] for name in names}

    def change_names(self) -> None:
        items = self.inside["tensors"]
        if items:
            items[self.dice.choice(NAMES)] = items.pop(self.dice.choice(list(items)))

    def change_number_of_tensors(self) -> None:
        """One away, one twice, or many of zeros."""
        items, dice = self.inside["tensors"], self.dice
        if items and dice.random() < 0.5:
            name = dice.choice(list(items))
            if dice.random() < 0.5:
                del items[name]
            else:
                items[name + "2"] = items[name]
            return
        shape = dice.choice([[1], [10], [1000, 1000], [1 << 14, 1 << 14], [1 << 24], [1 << 59], [0], [0, 1 << 40]])
        dtype = dice.choice(["F32", "F64", "I8", "BF16", "BOOL"])
        for i in range(dice.choice([1, 1, 10, 300])):
            items[f"more{i}"] = [dice.choice(["gaps 0", "gaps 0", "gaps 40", "mask", "nm 1:2"]), shape, dtype, 0, 0]
        self.pool(f"spartan:values:{dtype}", dtype)

    def change_groups(self) -> None:
        """N:M of every kind, of a single group each."""
        for m in self.dice.sample(range(2, 17), 4):
            for n in range(1, m):
                bits = (math.comb(m, n) - 1).bit_length()
                self.inside["tensors"][f"{n}:{m}"] = [f"nm {n}:{m}", [m], "F32", n, self.dice.choice([bits, 1, 62])]

    # ------------------------------------------------------------------ the container

    def entry(self) -> dict[str, Any]:
        entries = [x for name, x in self.header.items() if name != "__metadata__" and isinstance(x, dict)]
        return self.dice.choice(entries) if entries else {}

    def pool(self, name: str, dtype: str) -> None:
        """A pool, if it is not there."""
        end = len(self.data)
        self.header.setdefault(name, {"dtype": dtype, "shape": [0], "data_offsets": [end, end]})

    def change_offsets(self) -> None:
        offsets = self.entry().get("data_offsets")
        if isinstance(offsets, list) and offsets:
            at = self.dice.randrange(len(offsets))
            near = [offsets[at] + step for step in (-4, -1, 1, 4)] if type(offsets[at]) is int else []
            offsets[at] = self.dice.choice([*near, *NUMBERS])

    def change_places(self) -> None:
        """Two tensors take each other's bytes, if they have as many."""
        entries = [x for x in self.header.values() if isinstance(x, dict) and isinstance(x.get("data_offsets"), list)]
        if len(entries) > 1:
            a, b = self.dice.sample(entries, 2)
            a["data_offsets"], b["data_offsets"] = b["data_offsets"], a["data_offsets"]

    def change_entry(self) -> None:
        entry = self.entry()
        what = self.dice.randrange(4)
        if what == 0:
            entry["shape"] = self.dice.choice(
                [{}, [], "", [[]], entry.get("shape", [])[::-1], [0], [1 << 60], [1.0], None]
            )
        elif what == 1:
            entry["dtype"] = self.dice.choice([*format.DTYPES, EVIL, 3, None])
        elif what == 2:
            entry.pop(self.dice.choice(["dtype", "shape", "data_offsets"]), None)
        else:
            entry[EVIL] = EVIL

    def change_entry_names(self) -> None:
        name = self.dice.choice(list(self.header))
        if name != "__metadata__":
            self.header[self.dice.choice(NAMES[:3] + NAMES[4:])] = self.header.pop(name)

    def change_pool_size(self) -> None:
        """More or fewer bytes in a pool, with everything behind it moved; its shape says so, or does not."""
        entries = [(name, x) for name, x in self.header.items() if name.startswith("spartan:") and isinstance(x, dict)]
        good = [(name, x) for name, x in entries if is_pair(x.get("data_offsets")) and isinstance(x.get("shape"), list)]
        if not good:
            return
        _, entry = self.dice.choice(good)
        begin, end = entry["data_offsets"]
        size = format.DTYPES[entry["dtype"]].itemsize if entry.get("dtype") in format.DTYPES else 1
        units = self.dice.choice([-1, 1, 8, 100])
        more = units * size
        if end + more < begin or not 0 <= end <= len(self.data):
            return
        tail = self.data[end:]
        self.data = self.data[: min(end, end + more)] + self.dice.randbytes(max(0, more)) + tail
        for x in self.header.values():
            if (
                isinstance(x, dict)
                and is_pair(x.get("data_offsets"))
                and x["data_offsets"][0] >= end
                and x is not entry
            ):
                x["data_offsets"] = [x["data_offsets"][0] + more, x["data_offsets"][1] + more]
        entry["data_offsets"] = [begin, end + more]
        if self.dice.random() < 0.8 and entry["shape"] and type(entry["shape"][0]) is int:
            entry["shape"][0] += units
            if self.dice.random() < 0.7:  # and a tensor takes them
                item = self.item()
                if type(item[4]) is int:
                    item[4] += units

    # ------------------------------------------------------------------ data

    def change_data(self) -> None:
        data, dice = bytearray(self.data), self.dice
        for _ in range(dice.choice([1, 1, 2, 30])):
            if data:
                data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        self.data = bytes(data)

    def change_stretch(self) -> None:
        if self.data:
            at, size = self.dice.randrange(len(self.data)), self.dice.choice([1, 16, 500])
            fill = self.dice.choice([bytes(size), b"\xff" * size, self.dice.randbytes(size)])
            self.data = self.data[:at] + fill[: len(self.data) - at] + self.data[at + size :]

    def change_bytes_of_codes(self) -> None:
        """Where the maps and the coded values are."""
        entry = self.header.get("spartan:bytes")
        if isinstance(entry, dict) and is_pair(entry.get("data_offsets")):
            begin, end = entry["data_offsets"]
            if 0 <= begin < end <= len(self.data):
                data = bytearray(self.data)
                data[self.dice.randrange(begin, end)] ^= 1 << self.dice.randrange(8)
                self.data = bytes(data)

    def change_length(self) -> None:
        self.data = self.dice.choice([self.data[:-1], self.data + b"\0", self.data[: len(self.data) // 2], b""])

    # ------------------------------------------------------------------ names and models

    def change_aliases(self) -> None:
        names, dice = [*self.inside["tensors"], *self.header], self.dice
        for i in range(dice.choice([1, 1, 2, 3000])):
            alias = dice.choice([f"alias{i}", f"alias{i}", *NAMES, *names])
            self.inside["aliases"][alias] = dice.choice([*names, *names, alias, 1, None, EVIL])

    def change_architecture(self) -> None:
        reference, dice = self.inside["architecture"], self.dice
        what = dice.choice(["model", "classes", "shape", "args", "args", "args"])
        if what == "model":
            reference["model"] = dice.choice([*MODELS, *ODD])
        elif what == "classes":
            reference["classes"] = dice.choice(ODD)
        elif what == "shape":
            reference["shape"] = dice.choice([[1, 8, 8], [1 << 20, 1 << 20, 1], [1, 8], [1, 8, 8, 8], *ODD])
        else:
            arguments = reference.setdefault("args", {}) if isinstance(reference.get("args", {}), dict) else {}
            arguments[dice.choice(ARGUMENTS)] = dice.choice(
                [
                    1,
                    2,
                    16,
                    64,
                    224,
                    448,
                    1792,
                    7168,
                    1 << 14,
                    1 << 20,
                    (1 << 24) - 1,
                    0,
                    -1,
                    0.5,
                    True,
                    None,
                    "x",
                    [7, 7],
                    EVIL,
                ]
            )


def is_pair(offsets: Any) -> bool:
    return isinstance(offsets, list) and len(offsets) == 2 and all(type(x) is int for x in offsets)


def change_somewhere(value: Any, dice: random.Random) -> None:
    """Change something at a random depth, in place."""
    while isinstance(value, dict | list) and value:
        key: Any = dice.choice(list(value)) if isinstance(value, dict) else dice.randrange(len(value))
        if isinstance(value[key], dict | list) and value[key] and dice.random() < 0.85:
            value = value[key]
            continue
        action = dice.randrange(5)
        if action == 0:
            del value[key]
        elif action == 1 and isinstance(value, dict):
            value[dice.choice(NAMES)] = value.pop(key)
        elif action == 2 and type(value[key]) is int:
            value[key] += dice.choice([-1, 1, 8, -8])
        else:
            value[key] = dice.choice(ODD)
        return


def forgery(found: list[Base], seed: int) -> tuple[Base, bytes]:
    """The base and the file of a seed."""
    dice = random.Random(seed)
    base = dice.choices(found, SHARES)[0]
    return base, named(dice) if dice.random() < 0.04 else Forger(base.file, dice).forge()


def named(dice: random.Random) -> bytes:
    """A few KB that name a model of any size, with zeros, or other names of one tensor, for all of its tensors."""
    name, arguments = dice.choice(
        [
            (
                "timm/vit_tiny_patch16_224",
                {"embed_dim": [4, 24, 256, 1024], "depth": [1, 12, 60], "img_size": [224, 1792]},
            ),
            ("timm/swin_tiny_patch4_window7_224", {"embed_dim": [12, 96], "img_size": [56, 448, 1792, 7168]}),
            ("timm/mixer_s32_224", {"img_size": [224, 1792]}),
            ("torchvision/resnet18", {"width_per_group": [64]}),
            ("torchvision/vit_b_16", {"num_layers": [1, 12], "hidden_dim": [24, 768], "image_size": [224, 2240]}),
            ("wrn-10-1", {}),
            ("wrn-16-40", {}),
        ]
    )
    chosen = {key: dice.choice(values) for key, values in arguments.items() if dice.random() < 0.7}
    classes = dice.choice([1, 10, 100_000, 500_000])
    reference = {"model": name, "classes": classes, "args": chosen}
    try:
        with torch.device("meta"):
            model = zoo.build_model(name, classes, (3, 224, 224), chosen)
    except Exception:  # these arguments do not go together
        return forge({"__metadata__": {"spartan.version": "1", "spartan.architecture": json.dumps(reference)}}, b"")
    first: dict[tuple[int, ...], str] = {}
    tensors, aliases, tied = {}, {}, dice.random() < 0.5
    for key, tensor in model.state_dict().items():
        dtype = format.NAMES[tensor.dtype]
        if not tensor.ndim or first.setdefault(tuple(tensor.shape), key) == key or not tied:
            tensors[key] = ["gaps 0", list(tensor.shape), dtype, 0, 0]
        else:
            aliases[key] = first[tuple(tensor.shape)]
    empty = {"shape": [0], "data_offsets": [0, 0]}
    pools = {f"spartan:values:{dtype}": {"dtype": dtype, **empty} for dtype in ("F32", "I64")}
    metadata = {"tensors": tensors, "aliases": aliases, "architecture": reference}
    strings = {f"spartan.{key}": json.dumps(value) for key, value in metadata.items()}
    header = {"__metadata__": {"spartan.version": "1", **strings}, "spartan:bytes": {"dtype": "U8", **empty}, **pools}
    return forge(header, b"")
