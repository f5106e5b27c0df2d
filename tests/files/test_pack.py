"""What is saved comes back bit for bit, and takes little more than the information bound."""

from __future__ import annotations

import math
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import prune

import spartan
from spartan import Block
from spartan.files import codes, read, save
from spartan.files.format import DTYPES, as_bits
from spartan.files.load import unpack
from spartan.files.pack import pack
from tests.inference.models import Everything, blocks, same_bits, sparse, two_of_four


class Holder(nn.Module):
    """A model of nothing but the given tensors."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def there_and_back(folder: Path, *args: object, **tensors: Tensor) -> dict[str, Tensor]:
    save(Holder(**tensors), folder / "x.safetensors", *args)  # type: ignore[arg-type]
    return read(folder / "x.safetensors")


# ---------------------------------------------------------------------- bit for bit


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from(sorted(DTYPES, key=str)),
    st.lists(st.sampled_from([1, 2, 3, 4, 8, 12, 16, 30]), max_size=4),
    st.sampled_from(["random", "blocks", "groups", "zero", "full"]),
    st.sampled_from([0.01, 0.1, 0.3, 0.6]),
    st.integers(0, 2**32 - 1),
)
def test_any_bits_of_any_dtype_come_back(dtype: str, shape: list[int], kind: str, density: float, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    size = math.prod(shape)
    raw = torch.randint(0, 256, (size * DTYPES[dtype].itemsize,), generator=g, dtype=torch.uint8)
    raw = raw & 1 if dtype == "BOOL" else raw
    x = raw.view(DTYPES[dtype]).reshape(shape)
    if kind != "full":
        flat = torch.rand(size, generator=g) < (0.0 if kind == "zero" else density)
        if kind == "blocks":
            flat = flat[: size // 8 + 1].repeat_interleave(8)[:size]
        elif kind == "groups" and size % 4 == 0:
            flat = (torch.rand(size // 4, 4, generator=g).argsort(1) < 2).reshape(-1)
        as_bits(x).masked_fill_(~flat.reshape(shape), 0)
    packed = pack(x)
    if packed is not None:
        assert packed.nbytes < x.nbytes
        assert same_bits(unpack(packed.shape, packed.code, packed.values, packed.index), x)


def test_every_kind_of_tensor_comes_back(tmp_path: Path) -> None:
    model = Everything()
    save(model, tmp_path / "m.safetensors")
    tensors, state = read(tmp_path / "m.safetensors"), model.state_dict()
    assert tensors.keys() == state.keys()
    assert all(same_bits(tensors[name], state[name]) for name in state)
    assert tensors["tied"] is tensors["gaps"]


def test_the_default_device_does_not_matter(tmp_path: Path) -> None:
    model = Everything()
    with torch.device("meta"):
        save(model, tmp_path / "m.safetensors")
        tensors = read(tmp_path / "m.safetensors")
    assert all(same_bits(tensors[name], tensor) for name, tensor in model.state_dict().items())


def test_torch_is_all_it_needs(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules |= dict.fromkeys(['safetensors', 'numpy', 'yaml', 'typer', 'torchvision', 'timm'])\n"
        "import torch; from spartan.files import inspect, load, save\n"
        "model = torch.nn.Linear(64, 64); model.weight.data[:, 8:] = 0\n"
        "save(model, 'm'); load('m', torch.nn.Linear(64, 64), kernels='dense'); print(inspect('m'))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert "checksum good" in done.stdout, done.stderr


def test_special_values_come_back_and_only_plus_zero_is_dropped(tmp_path: Path) -> None:
    x = sparse(100, 100, density=0.05)
    payload = torch.tensor([0x7FC12345, -0x3FEDCC, 1, -2147483648, 0x7F800000], dtype=torch.int32).view(torch.float32)
    x.view(-1)[:5] = payload  # two NaNs with payloads, the smallest denormal, −0.0 and ∞
    x[50] = -0.0
    assert same_bits(there_and_back(tmp_path, x=x)["x"], x)
    packed = pack(x)
    assert packed is not None
    assert packed.values.numel() == int((x.view(torch.int32) != 0).sum())
    assert int((packed.values.view(torch.int32) == -2147483648).sum()) >= 100


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["single", "blocks", "2:4", "all negative", "nothing kept"])
def test_negative_zeros_cost_a_bit(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    """As `weight * mask` leaves them."""
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    masks = {"blocks": blocks(256, 256, 16, 16), "2:4": two_of_four(256, 256), "nothing kept": torch.zeros(256, 256)}
    x = x * (masks.get(kind, sparse(256, 256, density=0.1)) != 0)
    x = -x.abs() if kind == "all negative" else x
    assert int(((x == 0) & x.signbit()).sum()) > 10_000
    assert same_bits(there_and_back(tmp_path, x=x)["x"], x)
    signed, plain = pack(x), pack(x + 0.0)
    assert signed is not None
    assert plain is not None
    assert signed.nbytes <= plain.nbytes + x.numel() // 8
    assert torch.equal(signed.values, plain.values)


def test_a_model_pruned_by_torch_is_near_its_bound(tmp_path: Path) -> None:
    layer = nn.Linear(512, 512)
    prune.l1_unstructured(layer, "weight", 0.95)
    prune.remove(layer, "weight")
    size = save(layer, tmp_path / "x")
    bits = codes.bound(512 * 512, 512 * 512 // 20, 32) + 512 * 512  # a sign for every zero
    assert size < bits / 8 + layer.bias.nbytes + 1024


def test_strides_do_not_matter(tmp_path: Path) -> None:
    x = sparse(32, 16, 3, 3)
    given = {
        "channels_last": x.to(memory_format=torch.channels_last),
        "transposed": x.transpose(0, 1),
        "sliced": x[::2, 1:],
        "expanded": x[:1, :1].expand(5, 40, 3, 3),
        "conjugate": torch.complex(x[0], x[1]).conj(),
    }
    back = there_and_back(tmp_path, **given)
    assert all(torch.equal(back[name], tensor) for name, tensor in given.items())


def test_views_of_one_storage_are_stored_apart(tmp_path: Path) -> None:
    x = torch.randn(10, 10)
    back = there_and_back(tmp_path, x=x, row=x[0], turned=x.T, again=x.view(10, 10))
    assert torch.equal(back["row"], x[0])
    assert torch.equal(back["turned"], x.T)
    assert back["again"] is back["x"]
    assert back["row"].data_ptr() != back["x"].data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_casts_floating_tensors_only(tmp_path: Path, dtype: torch.dtype) -> None:
    given = {"w": sparse(64, 64), "b": torch.randn(64), "n": torch.tensor(3), "d": torch.randn(4, dtype=torch.float64)}
    back = there_and_back(tmp_path, dtype, **given)
    assert all(same_bits(back[name], given[name].to(dtype)) for name in ("w", "b", "d"))
    assert same_bits(back["n"], given["n"])


def test_a_cast_that_overflows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="x has values beyond ±65,504; use torch.bfloat16"):
        there_and_back(tmp_path, torch.float16, x=torch.tensor([1e6, 1.0]))
    inf = torch.tensor([math.inf, 1.0])
    assert torch.equal(there_and_back(tmp_path, torch.float16, x=inf)["x"], inf.half())


@pytest.mark.parametrize(
    ("own", "asked", "value"),
    [
        (torch.float64, torch.float32, 1e300),
        (torch.float64, torch.bfloat16, -1e300),
        (torch.float32, torch.bfloat16, 3.4e38),
        (torch.float32, torch.float16, -1e5),
    ],
)
def test_no_cast_makes_a_finite_value_infinite(
    tmp_path: Path, own: torch.dtype, asked: torch.dtype, value: float
) -> None:
    x = torch.tensor([1.0, value], dtype=own)
    with pytest.raises(ValueError, match=f"dtype={asked}: x has values beyond ±.*; use "):
        there_and_back(tmp_path, asked, x=x)
    assert torch.equal(there_and_back(tmp_path, x=x)["x"], x)


def test_conjugate_and_negative_views_are_no_other_names(tmp_path: Path) -> None:
    z = torch.randn(8, 8, dtype=torch.complex64)
    given = {"z": z, "conjugate": z.conj(), "imaginary": z.imag, "negative": z.conj().imag, "again": z.conj()}
    assert given["negative"].is_neg()
    back = there_and_back(tmp_path, **given)
    assert all(torch.equal(back[name], tensor.resolve_conj().resolve_neg()) for name, tensor in given.items())
    assert back["again"] is back["conjugate"]


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    inner: Any = torch.compile(Holder(weight=torch.ones(2)))
    inner._buffers["weight"] = torch.zeros(2)  # beside the module that is compiled
    with pytest.raises(ValueError, match="two tensors have the name 0.weight"):
        save(nn.Sequential(inner), tmp_path / "x")


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
def test_only_the_layers_of_wrappers_lose_their_names(tmp_path: Path) -> None:
    """Modules of one's own may be called as those inside torch.compile and DistributedDataParallel are."""
    own: Any = Holder(weight=torch.ones(2))
    own._orig_mod = Holder(weight=torch.zeros(2))
    own.module = torch.compile(Holder(weight=torch.full((2,), 2.0)))
    save(own, tmp_path / "x")
    assert {name: float(x[0]) for name, x in read(tmp_path / "x").items()} == {
        "weight": 1.0, "_orig_mod.weight": 0.0, "module.weight": 2.0,
    }  # fmt: skip
    own.weight.fill_(5.0)
    spartan.load(tmp_path / "x", own, kernels="dense")
    assert float(own.weight[0]) == 1.0


# ---------------------------------------------------------------------- size


def over(x: Tensor) -> float:
    """How far the packed tensor is over nnz·bits + n·H(density)."""
    packed = pack(x)
    assert packed is not None
    bound = codes.bound(x.numel(), int(torch.count_nonzero(as_bits(x))), 8 * x.dtype.itemsize)
    return 8 * packed.nbytes / bound - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("side", "sparsity"), [(320, 0.8), (320, 0.9), (320, 0.95), (320, 0.99), (1000, 0.999)])
def test_within_five_percent_of_the_bound(side: int, sparsity: float, dtype: torch.dtype) -> None:
    x = sparse(side, side, density=1 - sparsity, dtype=dtype)
    noise = torch.randint(1, 256, (x.nbytes,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    assert (
        over(torch.where(x != 0, noise.view(dtype).reshape(x.shape), 0.0)) < 0.01
    )  # values that no code makes smaller
    assert over(x) < (0.0 if dtype == torch.float16 else -0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sparsity", [0.8, 0.9, 0.95, 0.99])
def test_within_five_percent_however_zeros_lie(sparsity: float, dtype: torch.dtype) -> None:
    """Rows and columns of very different density, as training leaves them; and evenly spaced, the worst case."""
    g = torch.Generator().manual_seed(0)
    scale = torch.randn(400, 1, generator=g).exp() * torch.randn(1, 400, generator=g).exp()
    x = torch.randn(400, 400, generator=g) * scale
    kept = round((1 - sparsity) * x.numel())
    x[x.abs() < x.abs().reshape(-1).topk(kept).values[-1]] = 0.0
    assert over(x.to(dtype)) < 0.025
    even = torch.zeros(160_000, dtype=dtype)
    even[:: round(1 / (1 - sparsity))] = 1.5
    assert over(even.reshape(8, 20_000)[:, torch.randperm(20_000, generator=g)]) < 0.025


@pytest.mark.parametrize(("h", "w"), [(16, 16), (1, 16), (8, 1), (64, 64), (3, 5), (12, 15), (1, 960), (960, 1)])
def test_blocks_of_any_size_are_found(h: int, w: int) -> None:
    x = blocks(960, 960, h, w, density=0.1)
    packed = pack(x)
    assert packed is not None
    assert (packed.code.h, packed.code.w) == (h, w)
    units = x.numel() // (h * w)
    assert 8 * packed.nbytes <= 1.01 * codes.bound(units, packed.values.numel() // (h * w), 32 * h * w) + 64


def test_zeros_inside_blocks_do_not_hide_them() -> None:
    x = blocks(512, 512, 16, 16, density=0.1)
    x[torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) < 0.02] = 0.0
    packed, odd = pack(x), blocks(480, 480, 12, 20, density=0.1)
    assert packed is not None
    assert (packed.code.h, packed.code.w) == (16, 16)
    odd[0, :5] = 0.0
    named = pack(odd, Block(12, 20))  # no usual size: the pattern says it
    assert named is not None
    assert (named.code.h, named.code.w) == (12, 20)


def test_two_of_four_takes_less_than_a_mask() -> None:
    x = two_of_four(512, 512)
    packed = pack(x)
    assert packed is not None
    assert str(packed.code) == "nm 2:4"
    assert 8 * packed.nbytes / (16 * x.numel()) < 1 + 0.65 / 16 + 0.001
    turned = pack(x.reshape(512, 2, 4, 64).movedim(1, -1).movedim(-1, 1).contiguous())
    assert turned is not None
    conv = two_of_four(64 * 9, 64).reshape(64, 3, 3, 64).movedim(-1, 1).contiguous()
    along_inputs = pack(conv)
    assert along_inputs is not None
    assert str(along_inputs.code) == "nm 2:4 inputs last"
    assert same_bits(unpack(along_inputs.shape, along_inputs.code, along_inputs.values, along_inputs.index), conv)


def test_dense_and_small_tensors_stay_as_they_are() -> None:
    assert pack(torch.randn(100, 100)) is None
    assert pack(torch.zeros(8)) is None
    assert pack(torch.ones(1000, 10)) is None
    assert pack(sparse(100, 100, density=0.99).to(torch.float64)) is None  # a mask would take more than it saves
    packed = pack(torch.zeros(1000, 1000))
    assert packed is not None
    assert packed.nbytes == 0


# ---------------------------------------------------------------------- the file


def test_other_readers_open_it(tmp_path: Path) -> None:
    model, path = Everything(), tmp_path / "m.safetensors"
    size = save(model, path)
    assert size == path.stat().st_size
    tensors = load_file(path)
    assert same_bits(tensors["dense"], model.dense)
    counts = model.get_buffer("counts")
    assert torch.equal(tensors["spartan:values:I64"], counts[counts != 0])
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt"
    assert metadata["spartan.version"] == "1"
    assert metadata["spartan.pattern"] == "mixed"
    assert len(metadata["spartan.sha256"]) == 64


def test_metadata_say_pattern_and_sparsity(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    for pattern, name in ((None, "Unstructured()"), (Block(4, 4), "Block(h=4, w=4)")):
        model = spartan.prune(nn.Linear(64, 64), 0.75, pattern=pattern)
        for told in (pattern, None):
            save(model, path, pattern=told)
            with safetensors.safe_open(path, "pt") as file:
                assert file.metadata()["spartan.pattern"] == name
                assert file.metadata()["spartan.sparsity"] == "0.75"


def test_the_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in "ab":
        save(Everything(), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_model_in_training_saves_its_sparse_weights(tmp_path: Path) -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier = spartan.Sparsifier(model, sparsity=0.9, total_steps=4, warmup=0).attach(optimizer)
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    save(torch.compile(model, backend="eager"), tmp_path / "m")  # type: ignore[arg-type]
    back = read(tmp_path / "m")
    assert torch.equal(back["weight"], model.weight)
    assert int(torch.count_nonzero(back["weight"])) == 409
    assert sparsifier.stats.step == 1


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.empty(3, device="meta"), "x is on the meta device"),
        (torch.eye(3).to_sparse(), "x is a torch.sparse_coo; a plain dense tensor is needed"),
        (torch.zeros(3, dtype=torch.complex128), "x has dtype torch.complex128"),
    ],
)
def test_what_cannot_be_stored_is_refused(tmp_path: Path, tensor: Tensor, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        there_and_back(tmp_path, x=tensor)


class Extra(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"step": 1}


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with pytest.raises(ValueError, match="_extra_state is dict, not a tensor"):
        save(Extra(2, 2), path)
    with pytest.raises(ValueError, match="model is dict"):
        save({}, path)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dtype=torch.int8; torch.float32, torch.bfloat16, torch.float16 or None"):
        save(nn.Linear(2, 2), path, torch.int8)
    with pytest.raises(ValueError, match="pattern=3 is not a pattern"):
        save(nn.Linear(2, 2), path, pattern=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="name spartan:bytes"):
        there_and_back(tmp_path, **{"spartan:bytes": torch.zeros(3)})
    assert not path.exists()


# ---------------------------------------------------------------------- writing


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: the same path through the code, with another errno."""
    path = tmp_path / "m.safetensors"
    save(nn.Linear(4, 4), path)
    before = path.read_bytes()
    program = (
        "import resource, signal, torch; from spartan.files import save\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        f"save(torch.nn.Linear(1000, 1000), {str(path)!r})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "RuntimeError" in done.stderr
    assert "could not be written: File too large; the file that was there is unchanged" in done.stderr
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["m.safetensors"]


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, reason in (
        (tmp_path / "no" / "m", "No such file or directory"),
        (tmp_path / "file" / "m", "Not a directory"),
        (tmp_path, "is a folder"),
    ):
        with pytest.raises(RuntimeError, match=f"could not be written: .*{reason}"):
            save(nn.Linear(2, 2), path)
    assert os.listdir(tmp_path) == ["file"]


def test_links_and_permissions_are_kept(tmp_path: Path) -> None:
    path, link = tmp_path / "m", tmp_path / "link"
    save(nn.Linear(2, 2), path)
    usual = os.umask(0)
    os.umask(usual)
    assert path.stat().st_mode & 0o777 == 0o666 & ~usual
    path.chmod(0o640)
    link.symlink_to(path)
    save(nn.Linear(3, 3), link)
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    assert read(path)["weight"].shape == (3, 3)


# ---------------------------------------------------------------------- ResNet-50


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sparsity", [0.8, 0.99])
def test_resnet50_is_quick_and_near_the_bound(tmp_path: Path, sparsity: float, dtype: torch.dtype) -> None:
    from spartan import zoo

    model = spartan.prune(zoo.torchvision().models.resnet50(), sparsity).to(dtype)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():  # random bits for values, norms too: what no code makes smaller
            noise = torch.randint(1, 256, (tensor.nbytes,), dtype=torch.uint8).view(dtype).reshape(tensor.shape)
            tensor.copy_(torch.where(tensor != 0, noise, 0.0) if tensor.ndim > 1 else noise)
    cast = model.state_dict()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    size = save(model, tmp_path / "m", dtype)
    between = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    back = read(tmp_path / "m")
    after = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    assert between - before < 2
    assert after - between < 2
    assert all(same_bits(back[name], tensor) for name, tensor in cast.items())
    kept = {name: int(torch.count_nonzero(as_bits(t))) for name, t in cast.items()}
    bound = sum(codes.bound(t.numel(), kept[name], 8 * t.dtype.itemsize) for name, t in cast.items()) / 8
    print(f"{sparsity:.0%} {dtype}: {size / bound - 1:+.2%} over the bound")
    assert size < 1.05 * bound
