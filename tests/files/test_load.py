"""Models come back from files; files that are not what they should be are refused, by name, before harm is done."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import spartan
from spartan.files import load, read, save
from spartan.zoo import WideResNet, digits_cnn
from tests.files.forging import forge, header_of
from tests.inference.models import Everything, same_bits

DIGITS = {"model": "digits-cnn", "classes": 10, "shape": [1, 8, 8]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def same_model(a: nn.Module, b: nn.Module) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return x.keys() == y.keys() and all(same_bits(x[name], y[name]) for name in x)


# ---------------------------------------------------------------------- models


def test_into_a_given_model(path: Path) -> None:
    model, twin = spartan.prune(digits_cnn(), 0.9), digits_cnn()
    twin.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    save(model, path)
    given = [id(p) for p in twin.parameters()]
    loaded = load(path, twin, kernels="dense")
    assert loaded is twin
    assert [id(p) for p in twin.parameters()] == given
    convolution = twin.get_parameter("3.weight")
    assert convolution.is_contiguous(memory_format=torch.channels_last)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True))
    x = torch.randn(2, 1, 8, 8)
    assert torch.allclose(model.eval()(x), twin.eval()(x), atol=1e-5)


def test_into_a_model_of_another_precision(path: Path) -> None:
    model = spartan.prune(nn.Linear(64, 64), 0.9)
    save(model, path, torch.bfloat16)
    twin = load(path, nn.Linear(64, 64), device="cpu", kernels="dense")
    assert twin.weight.dtype == torch.float32
    assert torch.equal(twin.get_parameter("weight"), model.weight.bfloat16().float())


def test_into_a_compiled_model_and_tied_weights(path: Path) -> None:
    save(Everything(), path)
    twin = Everything()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    loaded = load(path, torch.compile(twin, backend="eager"), kernels="dense")  # type: ignore[arg-type]
    assert hasattr(loaded, "_orig_mod")
    assert same_model(twin, Everything())
    assert twin.tied is twin.gaps


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_model_that_the_file_names(path: Path, dtype: torch.dtype | None) -> None:
    model = spartan.prune(digits_cnn(), 0.9)
    save(model, path, dtype, architecture=DIGITS)
    before = torch.get_rng_state()
    twin = load(path, kernels="dense")
    assert torch.equal(torch.get_rng_state(), before)
    assert not twin.training
    assert same_model(twin, model if dtype is None else model.to(dtype))


def test_models_of_torchvision_and_timm(path: Path) -> None:
    from spartan import zoo

    squeezed = zoo.torchvision().models.squeezenet1_1()
    save(squeezed, path, architecture="torchvision/squeezenet1_1")
    assert same_model(load(path, kernels="dense"), squeezed)
    tiny = zoo.timm().create_model("vit_tiny_patch16_224", num_classes=7)
    save(tiny, path)  # a timm model knows its name
    assert same_model(load(path, kernels="dense"), tiny)
    other = zoo.timm().create_model("vit_tiny_patch16_224", img_size=32, patch_size=4)
    save(other, path)  # and is left unnamed where the name is not enough
    with pytest.raises(ValueError, match="does not say which model"):
        load(path, kernels="dense")


def test_sparse_kernels_give_the_same_function(path: Path) -> None:
    model = spartan.prune(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)), 0.9)
    save(model, path)
    x = torch.randn(5, 64)
    for kernels in ("sparse", "auto"):
        fast = load(path, copy.deepcopy(model), kernels=kernels)
        assert torch.allclose(fast(x), model(x), atol=1e-5)
    with pytest.raises(ValueError, match="the model runs sparse kernels"):
        save(load(path, model, kernels="sparse"), path)


def test_a_wrong_architecture_is_refused_when_saving(path: Path) -> None:
    model = digits_cnn(classes=7)
    for architecture, reason in (
        (DIGITS, r"digits-cnn has 11.weight of shape \(10, 64\), and the file of \(7, 64\)"),
        ("wrn-10-1", "has .* tensors that the file lacks"),
        ("torchvision/resnet51", "torchvision has no model 'resnet51'"),
        ({"name": "digits-cnn"}, "a dict with model"),
        ({"model": "wrn-9994-1"}, "more layers than the file has tensors"),
        ({"model": "digits-cnn", "classes": 10.5}, "not sizes"),
        ({"model": "../x"}, "not a name"),
    ):
        with pytest.raises(ValueError, match=reason):
            save(model, path, architecture=architecture)
    assert not path.exists()


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ({"model": "os:getcwd"}, "names a function, which is not called on a file's word"),
        (
            {"model": "timm/resnet18", "args": {"checkpoint_path": "evil.pt"}},
            "sets checkpoint_path, which a file may not",
        ),
        ({"model": "timm/resnet18", "args": {"pretrained": True}}, "sets pretrained, which a file may not"),
        ({"model": "torchvision/resnet18", "args": {"weights": "DEFAULT"}}, "sets weights, which a file may not"),
    ],
)
def test_what_a_file_may_not_do(path: Path, reference: dict[str, Any], reason: str) -> None:
    """Such a reference may be stored; it tells a reader which model to pass."""
    save(digits_cnn(), path, architecture=reference)
    with pytest.raises(ValueError, match=reason):
        load(path, kernels="dense")
    assert same_model(load(path, digits_cnn(), kernels="dense"), load(path, digits_cnn(), kernels="dense"))


def test_what_does_not_fit_changes_nothing(path: Path) -> None:
    save(WideResNet(10, 3, 10), path)
    twin = WideResNet(10, 2, 10)
    before = copy.deepcopy(twin)
    for model, reason in (
        (twin, r"has blocks.0.\w+.\w+ of shape"),
        (digits_cnn(), "has .* tensors that the file lacks, such as 0.weight"),
        (nn.Sequential(), "lacks .* tensors that the file has"),
    ):
        with pytest.raises(ValueError, match=f"{path} does not fit the model, which {reason}"):
            load(path, model, kernels="dense")
    assert same_model(twin, before)
    save(nn.BatchNorm1d(3), path)
    other = nn.BatchNorm1d(3)
    other.num_batches_tracked = torch.tensor(0.0)
    with pytest.raises(ValueError, match=r"num_batches_tracked in torch.float32, and the file in torch.int64"):
        load(path, other, kernels="dense")


def test_bad_arguments_are_named(path: Path) -> None:
    with pytest.raises(ValueError, match="kernels='fast'; one of 'auto', 'dense', 'sparse'"):
        load(path, kernels="fast")
    with pytest.raises(ValueError, match="model is str"):
        load(path, "resnet50")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="there is no file"):
        load(path)
    with pytest.raises(ValueError, match="is a folder"):
        read(path.parent)


# ---------------------------------------------------------------------- files


def test_foreign_newer_and_cut_off_files_are_told_apart(path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match="was not written by spartan.save"):
        read(path)
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ValueError, match="is no safetensors file, or is cut off"):
        read(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=f"{path}: is no safetensors file, or is cut off"):
        read(path)
    save(Everything(), path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="is cut off: the header claims .* bytes of data"):
        read(path)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match="is damaged: its contents do not have the checksum"):
        read(path)
    header, data = header_of(whole)
    header["__metadata__"]["spartan.version"] = "2"
    path.write_bytes(forge(header, data))
    with pytest.raises(ValueError, match="has format version 2, and this library reads up to 1"):
        read(path)
    header["__metadata__"]["spartan.version"] = "one"
    path.write_bytes(forge(header, data))
    with pytest.raises(ValueError, match="is no number"):
        read(path)


def test_a_small_file_cannot_claim_much_memory(path: Path) -> None:
    class Zeros(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w", torch.zeros(1000, 1000))

    save(Zeros(), path)
    assert read(path)["w"].shape == (1000, 1000)
    with pytest.raises(ValueError, match="claim to be 4,000,000 when unpacked, and max_bytes is 1,000,000"):
        read(path, max_bytes=1_000_000)
    header, data = header_of(path.read_bytes())
    for shape, reason in (
        ([1_000_000, 1_000_000], "claim to be 4,000,000,000,000 when unpacked"),
        ([1 << 40, 1 << 40], "larger than any memory"),
        ([0, 1 << 61], "larger than any memory"),
        ([-1, -1], "is none"),
        ([1.5], "is none"),
    ):
        header["__metadata__"]["spartan.tensors"] = json.dumps({"w": ["gaps 0", shape, "F32", 0, 0]})
        path.write_bytes(forge(header, data))
        assert path.stat().st_size < 1024
        with pytest.raises(ValueError, match=reason):
            read(path)
        with pytest.raises(ValueError, match=f"{path}.*({reason}|does not fit the model)"):
            load(path, Zeros(), kernels="dense")


def test_big_endian_machines_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(nn.Linear(2, 2), path)
    monkeypatch.setattr("sys.byteorder", "big")
    with pytest.raises(RuntimeError, match="little-endian"):
        read(path)
