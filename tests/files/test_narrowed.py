"""Files of narrowed models: they come back by name or into a whole model, and forged sizes are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spartan
from spartan import Channel, Heads
from spartan.files import inspect, load, save
from spartan.narrow import ATTRIBUTES, NarrowAttention, is_narrowed, narrow, why_not_narrower
from spartan.zoo import build_model
from tests.files.forging import forge, header_of

# Name, classes, shape, arguments; the attention's weight and its heads; the weight of which channels go.
MODELS: dict[str, tuple[dict[str, Any], tuple[str, int] | None, str | None]] = {
    "ours": ({"model": "digits-cnn", "classes": 10, "shape": [1, 8, 8]}, None, None),
    "gpt": (
        {"model": "gpt", "classes": 30, "shape": [12], "args": {"layers": 2, "width": 32, "heads": 4}},
        ("*.qkv.weight", 4), "*.up.weight",
    ),
    "timm": (
        {"model": "timm/vit_tiny_patch16_224", "classes": 5, "shape": [3, 32, 32], "args": {"depth": 2, "img_size": 32}},
        ("*.qkv.weight", 3), "*.fc1.weight",
    ),
    "torchvision": (
        {
            "model": "torchvision/vit_b_16", "classes": 5, "shape": [3, 32, 32],
            "args": {"num_layers": 2, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 64},
        },
        ("*.in_proj_weight", 4), "*.mlp.0.weight",
    ),
    "groups": ({"model": "torchvision/mobilenet_v3_small", "classes": 5, "shape": [3, 32, 32]}, None, None),
}  # fmt: skip


def shrunk(kind: str) -> tuple[Any, Any, dict[str, Any], Tensor]:
    """The whole model and the narrowed one, the reference and an input."""
    reference, heads, columns = MODELS[kind]
    torch.manual_seed(0)
    model = build_model(
        reference["model"], reference["classes"], tuple(reference["shape"]), reference.get("args")
    ).eval()
    shape = reference["shape"]
    x = torch.randn(2, *shape) if len(shape) == 3 else torch.randint(0, 30, (2, *shape))
    if heads is not None:
        spartan.prune(model, 0.5, pattern=Heads(heads[1]), include=heads[0])
    if kind == "groups":  # of 72 groups of one channel, which this layer reads
        model.get_parameter("features.2.block.2.0.weight").data[:, :20] = 0.0
    else:
        spartan.prune(model, 0.5, pattern=Channel(), include=columns, exclude="11.weight" if columns is None else None)
    return model, spartan.shrink(model, x), reference, x


@pytest.mark.parametrize("kind", MODELS)
def test_narrowed_models_come_back(kind: str, tmp_path: Path) -> None:
    model, smaller, reference, x = shrunk(kind)
    path = tmp_path / "model.safetensors"
    save(smaller, path, architecture=reference)
    again: Any = load(path, kernels="dense", max_bytes=10**9)  # torchvision's ViT is built whole on the way
    assert is_narrowed(again)
    assert [type(m) for m in again.modules()] == [type(m) for m in smaller.modules()]
    assert repr(again) == repr(smaller)
    assert {k: v.shape for k, v in again.state_dict().items()} == {k: v.shape for k, v in smaller.state_dict().items()}
    with torch.no_grad():
        assert torch.equal(again(x), smaller(x))
        whole = build_model(reference["model"], reference["classes"], tuple(reference["shape"]), reference.get("args"))
        assert load(path, whole, kernels="dense") is whole
        assert torch.equal(whole.eval()(x), smaller(x))
        assert torch.equal(load(path, whole, kernels="dense")(x), smaller(x))  # which is narrow now
        fast = load(path, max_bytes=10**9)
        assert torch.allclose(fast(x), smaller(x), atol=1e-4)
    size = path.stat().st_size
    assert save(again, path, architecture=reference) == size
    assert "narrowed" in inspect(path)
    assert not is_narrowed(model)
    if kind == "torchvision":
        assert any(isinstance(m, NarrowAttention) for m in again.modules())
    if kind == "groups":
        assert again.features[2].block[1][0].groups == 52


def test_timm_s_models_are_recognised(tmp_path: Path) -> None:
    from spartan.zoo import timm

    torch.manual_seed(0)
    model = spartan.prune(timm().create_model("resnet18", num_classes=5).eval(), 0.7, pattern=Channel(), exclude="fc*")
    smaller = spartan.shrink(model, torch.randn(1, 3, 64, 64))
    save(smaller, tmp_path / "model.safetensors")
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "model.safetensors", kernels="dense")(x), smaller(x))


def test_only_what_shrink_made_narrower_is_saved_as_a_part_of_its_name(tmp_path: Path) -> None:
    other = build_model("digits-cnn", 7, (1, 8, 8))
    with pytest.raises(ValueError, match=r"digits-cnn has 11\.weight of shape \(10, 64\), and the file of \(7, 64\)"):
        save(other, tmp_path / "x", architecture={"model": "digits-cnn", "classes": 10, "shape": [1, 8, 8]})


def change(path: Path, sizes: Any = None, **shapes: list[int]) -> None:
    """Another word about sizes, or other shapes of dense tensors, in a file with a good checksum."""
    header, data = header_of(path.read_bytes())
    if sizes is not None:
        header["__metadata__"]["spartan.narrowed"] = json.dumps(sizes)
    for name, shape in shapes.items():
        header[name.replace("__", ".")]["shape"] = shape
    path.write_bytes(forge(header, data))


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"nowhere": {"num_heads": 1}}, "has no module 'nowhere' to have other sizes"),
        ({"blocks.0.attn": {"num_heads": 4}}, "has num_heads 3 in blocks.0.attn, of which 4 is no part"),
        ({"blocks.0.attn": {"num_heads": 0}}, "of which 0 is no part"),
        ({"blocks.0.attn": {"num_heads": True}}, "of which True is no part"),
        ({"blocks.0.attn": {"num_heads": 1.0}}, "of which 1.0 is no part"),
        ({"blocks.0.attn": {"num_heads": "1"}}, "of which '1' is no part"),
        ({"blocks.0.attn": {"scale": 1}}, "has no size 'scale' in blocks.0.attn"),
        ({"blocks.0.attn": {"forward": 1}}, "has no size 'forward' in blocks.0.attn"),
        ({"blocks.0.attn": {"groups": 1}}, "has no size 'groups' in blocks.0.attn"),
        ({"blocks.0.attn": 3}, "has no module 'blocks.0.attn' to have other sizes"),
    ],
)  # fmt: skip
def test_forged_sizes_are_refused(sizes: Any, told: str, tmp_path: Path) -> None:
    _, smaller, reference, _ = shrunk("timm")
    path = tmp_path / "model.safetensors"
    save(smaller, path, architecture=reference)
    change(path, sizes)
    whole = build_model(reference["model"], reference["classes"], tuple(reference["shape"]), reference.get("args"))
    before = {name: t.clone() for name, t in whole.state_dict().items()}
    heads = whole.blocks[0].attn.num_heads  # type: ignore[union-attr, index]
    for model in (None, whole):
        with pytest.raises(ValueError, match="model") as caught:
            load(path, model, kernels="dense")
        assert told in str(caught.value)
    assert all(torch.equal(t, before[name]) for name, t in whole.state_dict().items())
    assert whole.blocks[0].attn.num_heads == heads  # type: ignore[union-attr, index]


def test_forged_shapes_are_refused(tmp_path: Path) -> None:
    _, smaller, reference, _ = shrunk("ours")
    path = tmp_path / "model.safetensors"
    save(smaller, path, architecture=reference)
    header, data = header_of(path.read_bytes())
    rows, columns = header["11.weight"]["shape"]
    assert rows * columns == 10 * columns
    for shape in ([columns, rows], [rows * columns], [1, rows, columns]):  # larger one way; of other dimensions
        change(path, **{"11__weight": shape})
        for model in (None, build_model("digits-cnn", 10, (1, 8, 8))):
            with pytest.raises(ValueError, match=r"has 11\.weight of shape \(10, 64\), of which .* is no part"):
                load(path, model, kernels="dense")
        path.write_bytes(forge(header, data))
    sizes: Any
    for sizes in ([], 3, "x"):
        change(path, sizes)
        with pytest.raises(ValueError, match=r"spartan\.narrowed is not a JSON object"):
            load(path, kernels="dense")


def test_attention_is_not_narrowed_to_broken_heads() -> None:
    whole = nn.MultiheadAttention(24, 6)
    shapes = {name: tuple(t.shape) for name, t in whole.state_dict().items()}
    shapes |= {"in_proj_weight": (30, 24), "in_proj_bias": (30,), "out_proj.weight": (24, 10)}
    told = why_not_narrower(whole, shapes, {})
    assert told is not None
    assert "cannot have 10 channels in heads of 4" in told


def test_narrow_gives_up_gradients_and_keeps_ties() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(4, 6))
    model[1].weight = model[0].weight
    model[0](torch.randn(2, 4)).sum().backward()
    shapes = {"0.weight": (3, 4), "0.bias": (3,), "1.weight": (3, 4), "1.bias": (3,)}
    narrow(model, shapes, {})
    assert model[0].weight is model[1].weight
    assert model[0].weight.grad is None
    assert repr(model[0]) == "Linear(in_features=4, out_features=3, bias=True)"


def test_sizes_are_a_short_list_of_words() -> None:
    """What a file may set is a number of heads, groups or channels; nothing that names code or a path."""
    assert all(name.islower() and not name.startswith("_") for name in ATTRIBUTES)
    assert not ATTRIBUTES & set(dir(nn.Module()))
